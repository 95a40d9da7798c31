// flash_decoding.cu: attention of a few queries over many keys: the keys are cut into splits that run side by side, and their answers merged.
//
// Flash decoding (Dao, Haziza, Massa and Sizov, 2023), as one would first write it. While a text is generated there is one query at a time,
// so FlashAttention-2 would launch one block a head and leave most of the GPU idle. Here `flash_decoding_split` gives each block a *split*:
// some of the K, V tiles. It runs the same online softmax over them and writes what attention over these keys alone would give, Os, and
// their logsumexp Ls. `flash_decoding_combine` then merges the partial answers of a row with the weights of the online softmax itself,
// e^(Ls - m). Query heads that share a head of K and V are rows of one block, so that a tile is loaded once for all of them.
//
// Layout   float32, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq]   Os [splits, B, Hq, Nq, D]   Ls [splits, B, Hq, Nq]
// Heads    query head h reads K, V head h / (Hq / Hkv); a block owns the Hq / Hkv heads of one K, V head: rows = Hq / Hkv * Nq, at most Br
// Splits   each takes the same number of whole tiles, ceil(ceil(Nk / Bc) / splits); the last ones may get fewer, or none
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Window   with causal, of these keys only the last `window`; 0 for all
// kv_len   how many rows of K and V are used: it stands for Nk in what a query sees, and what lies behind is never touched
// Launch   split: one block per split, K, V head and batch. combine: one block per K, V head and batch. Any number of threads
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernels, what to compile, what to check.
// @paper     Flash-Decoding for long-context inference, https://crfm.stanford.edu/2023/10/12/flashdecoding.html
// @block     256
// @arch      75
// @shape     B=1 Hq=1 Hkv=1 Nq=1 Nk=257 causal=0 splits=2
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70 causal=1 splits=4
// @shape     B=1 Hq=2 Hkv=2 Nq=5 Nk=3 causal=1 splits=5
// @shape     B=1 Hq=2 Hkv=2 Nq=1 Nk=70 causal=1 splits=2 kv_len=61 window=9
//
// @kernel    flash_decoding_split
// @grid      splits, Hkv, B
// @blocks    Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     Os [splits, B, Hq, Nq, D]
// @array     Ls [splits, B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @default   kv_len = Nk
// @default   window = 0
// @require   Hq % Hkv == 0
// @require   Hq / Hkv * Nq <= Br
// @require   kv_len <= Nk
// @instance  Br=1 Bc=4 D=8
// @instance  Br=1 Bc=64 D=64
// @instance  Br=1 Bc=64 D=128
// @instance  Br=8 Bc=32 D=128
// @instance  Br=15 Bc=32 D=64
//
// @kernel    flash_decoding_combine
// @grid      1, Hkv, B
// @array     Os [Splits, B, Hq, Nq, D]
// @array     Ls [Splits, B, Hq, Nq]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @require   Hq % Hkv == 0
// @require   Hq / Hkv * Nq <= Br
// @instance  Splits=4 Br=1 D=8
// @instance  Splits=1 Br=1 D=64
// @instance  Splits=128 Br=1 D=128
// @instance  Splits=32 Br=8 D=128
// @instance  Splits=5 Br=15 D=64
#include "include/numbers.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

template <int Br, int Bc, int D>
__global__ void flash_decoding_split(const float* Q, const float* K, const float* V, float* Os, float* Ls,
                                     int Nq, int Nk, float scale, int causal, int Hq, int Hkv, int splits, int kv_len, int window) {
    const int s = blockIdx.x;              // split,           0 .. splits - 1
    const int h = blockIdx.y;              // head of K and V, 0 .. Hkv - 1
    const int b = blockIdx.z;              // batch,           0 .. B - 1
    const int rows = Hq / Hkv * Nq;        // queries that read this head, 1 .. Br; they lie side by side: row r is query r % Nq of its head
    TRACE_BLOCK(b, h, s);

    // From here all arrays are those of this head alone, and Os and Ls those of this split. 64-bit: B * H * N * D passes 2^31 long
    // before the memory is full.
    const long long head = (long long)b * Hkv + h;
    const long long part = (long long)s * gridDim.z * Hkv + head;
    Q += head * rows * D;                  // [rows, D]
    K += head * Nk * D;                    // [Nk, D]
    V += head * Nk * D;                    // [Nk, D]
    Nk = kv_len;                           // and from here the keys behind the used ones do not exist
    Os += part * rows * D;                 // [rows, D]
    Ls += part * rows;                     // [rows]

    SharedCarver carve;
    const auto q = carve.tile<Br, D>("q");
    const auto Kj = carve.tile<Bc, D + 1>("Kj");   // one column to spare: threads that score neighbouring keys read words of different banks
    const auto Vj = carve.tile<Bc, D>("Vj");
    const auto o = carve.tile<Br, D>("o");         // unnormalised
    const auto Sj = carve.tile<Br, Bc>("Sj");      // scores, then probabilities before their division by l
    const auto m = carve.vector<Br>("m");
    const auto l = carve.vector<Br>("l");

    // The tiles of this split: first .. last - 1, none where the splits before it took all. With a window the tiles before the first key
    // that query 0 sees are not there to be split.
    const int tiles = (Nk + Bc - 1) / Bc;
    const int begin = causal && window ? max(0, 1 + (Nk - Nq) - window) / Bc : 0;
    const int each = (tiles - begin + splits - 1) / splits;
    const int first = min(begin + s * each, tiles), last = min(first + each, tiles);

    TRACE(load_q, s);
    for (int e = threadIdx.x; e < rows * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row, 0 .. rows-1; column, 0 .. D-1
        q[r][x] = Q[e];
        o[r][x] = 0.f;
    }
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        m[r] = -INFINITY;
        l[r] = 0.f;
    }
    __syncthreads();  // q, o, m and l are complete before others use them: a split that has no tile goes straight to its store

    for (int j = first; j < last; ++j) {
        TRACE(load_k, j);
        for (int e = threadIdx.x; e < Bc * D; e += blockDim.x) {
            const int c = e / D, x = e % D;        // key of the tile, 0 .. Bc-1; column, 0 .. D-1
            const int k = j * Bc + c;              // row of K, may be past Nk in the last tile
            Kj[c][x] = k < Nk ? K[(long long)k * D + x] : 0.f;
        }

        TRACE(load_v, j);
        for (int e = threadIdx.x; e < Bc * D; e += blockDim.x) {
            const int c = e / D, x = e % D;        // as for K
            const int k = j * Bc + c;
            Vj[c][x] = k < Nk ? V[(long long)k * D + x] : 0.f;  // 0, for what lies there could be NaN, and 0 * NaN is no 0
        }
        __syncthreads();  // Kj and Vj are complete before any thread reads them

        TRACE(scores, j);
        for (int e = threadIdx.x; e < rows * Bc; e += blockDim.x) {
            const int r = e / Bc, c = e % Bc;      // row, 0 .. rows-1; key of the tile, 0 .. Bc-1
            float dot = 0.f;
            for (int x = 0; x < D; ++x) dot += q[r][x] * Kj[c][x];
            const int k = j * Bc + c;
            const int ago = (r % Nq - Nq) - (k - Nk);      // how far the key lies back from the query's own; negative ahead
            const bool near = ago >= 0 && (!window || ago < window);
            const bool seen = k < Nk && (!causal || near);
            Sj[r][c] = seen ? dot * scale : -INFINITY;
        }
        __syncthreads();  // each row of Sj is complete before one thread reads all of it

        TRACE(softmax, j);
        for (int r = threadIdx.x; r < rows; r += blockDim.x) {   // one thread a row
            float m_new = m[r];
            for (int c = 0; c < Bc; ++c) m_new = fmaxf(m_new, Sj[r][c]);
            const float base = m_new == -INFINITY ? 0.f : m_new;   // no key seen so far: e^(-inf - 0) = 0 where -inf - -inf is NaN

            float sum = 0.f;
            for (int c = 0; c < Bc; ++c) {
                const float p = expf(Sj[r][c] - base);
                Sj[r][c] = p;
                sum += p;
            }
            const float corr = expf(m[r] - base);      // what the earlier tiles' terms shrink by, 0 .. 1
            l[r] = l[r] * corr + sum;
            m[r] = m_new;
            for (int x = 0; x < D; ++x) o[r][x] *= corr;
        }
        __syncthreads();  // Sj holds probabilities and o is rescaled before all threads use them

        TRACE(accumulate, j);
        for (int e = threadIdx.x; e < rows * D; e += blockDim.x) {
            const int r = e / D, x = e % D;        // row, 0 .. rows-1; column, 0 .. D-1
            float sum = o[r][x];
            for (int c = 0; c < Bc; ++c) sum += Sj[r][c] * Vj[c][x];
            o[r][x] = sum;
        }
        __syncthreads();  // Kj, Vj and Sj are no longer read: the next tile may overwrite them
    }

    TRACE(store_partial, s);
    for (int e = threadIdx.x; e < rows * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row, 0 .. rows-1; column, 0 .. D-1
        Os[e] = l[r] == 0.f ? 0.f : o[r][x] / l[r];
    }
    for (int r = threadIdx.x; r < rows; r += blockDim.x) Ls[r] = m[r] + logf(l[r]);    // -inf where no key was seen
}

template <int Splits, int Br, int D>
__global__ void flash_decoding_combine(const float* Os, const float* Ls, float* O, float* L, int Nq, int Hq, int Hkv) {
    const int h = blockIdx.y;              // head of K and V, 0 .. Hkv - 1
    const int b = blockIdx.z;              // batch,           0 .. B - 1
    const int rows = Hq / Hkv * Nq;        // queries that read this head, 1 .. Br
    TRACE_BLOCK(b, h, 0);

    const long long head = (long long)b * Hkv + h;
    const long long next = (long long)gridDim.z * Hkv * rows;  // rows of Os and Ls from one split to the next
    Os += head * rows * D;                 // [Splits, rows, D], a split every next * D
    Ls += head * rows;                     // [Splits, rows], a split every next
    O += head * rows * D;                  // [rows, D]
    L += head * rows;                      // [rows]

    SharedCarver carve;
    const auto ls = carve.tile<Splits, Br>("ls");
    const auto w = carve.tile<Br, Splits>("w");
    const auto os = carve.tile<Br, D>("os");
    const auto o = carve.tile<Br, D>("o");         // unnormalised
    const auto m = carve.vector<Br>("m");
    const auto l = carve.vector<Br>("l");

    TRACE(load_l, 0);
    for (int e = threadIdx.x; e < Splits * rows; e += blockDim.x) {
        const int s = e / rows, r = e % rows;      // split, 0 .. Splits-1; row, 0 .. rows-1
        ls[s][r] = Ls[s * next + r];
    }
    for (int e = threadIdx.x; e < rows * D; e += blockDim.x) o[e / D][e % D] = 0.f;
    __syncthreads();  // the logsumexps of all splits are there before one thread reads those of a row

    TRACE(weights, 0);
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {   // one thread a row
        float most = -INFINITY;
        for (int s = 0; s < Splits; ++s) most = fmaxf(most, ls[s][r]);
        const float base = most == -INFINITY ? 0.f : most;   // no key anywhere: e^(-inf - 0) = 0
        float sum = 0.f;
        for (int s = 0; s < Splits; ++s) {
            w[r][s] = expf(ls[s][r] - base);       // 0 for a split that saw no key, 1 for the largest
            sum += w[r][s];
        }
        m[r] = most;
        l[r] = sum;
    }
    __syncthreads();  // the weights and their sum are complete before all threads use them

    for (int s = 0; s < Splits; ++s) {
        TRACE(load_o, s);
        for (int e = threadIdx.x; e < rows * D; e += blockDim.x) os[e / D][e % D] = Os[s * next * D + e];

        // No barrier: a thread uses the elements that it loaded, and no others.
        TRACE(combine, s);
        for (int e = threadIdx.x; e < rows * D; e += blockDim.x) {
            const int r = e / D, x = e % D;        // row, 0 .. rows-1; column, 0 .. D-1
            o[r][x] += w[r][s] * os[r][x];
        }
    }

    TRACE(store_o, 0);
    for (int e = threadIdx.x; e < rows * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row, 0 .. rows-1; column, 0 .. D-1
        O[e] = l[r] == 0.f ? 0.f : o[r][x] / l[r];
    }
    for (int r = threadIdx.x; r < rows; r += blockDim.x) L[r] = m[r] + logf(l[r]);     // -inf where no key was seen
}
