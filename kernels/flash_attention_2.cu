// flash_attention_2.cu: attention, forward, in one pass over the keys: O = softmax(Q K^T * scale) V and L = logsumexp(Q K^T * scale).
//
// FlashAttention-2 (Dao, arXiv 2307.08691, Algorithm 1), as one would first write it. A block owns Br rows of Q and walks over K
// and V in tiles of Bc keys. Three carries go from tile to tile: the running row maximum mi, the running denominator li and the
// output Oi, which stays *unnormalised* until the end. Every tile and vector is in shared memory and any thread may touch any element,
// so each action ends with a barrier. K and V cross from HBM once per row block, Q, O and L once.
//
// Layout   float32, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq]
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Window   with causal, of these keys only the last `window`; 0 for all
// kv_len   how many rows of K and V are used: it stands for Nk in what a query sees, and what lies behind is never touched
// Launch   one block per row block, query head and batch; any number of threads, with dynamic shared memory for the parts below
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernel, what to compile, what to check.
// @kernel    flash_attention_2
// @paper     arXiv 2307.08691, Algorithm 1
// @grid      ceil(Nq / Br), Hq, B
// @block     min(512, max(32, Br * Bc))
// @arch      75
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @default   kv_len = Nk
// @default   window = 0
// @require   Hq % Hkv == 0
// @require   kv_len <= Nk
// @instance  Br=4 Bc=4 D=8
// @instance  Br=16 Bc=16 D=32
// @instance  Br=32 Bc=32 D=64
// @instance  Br=64 Bc=64 D=64
// @instance  Br=32 Bc=32 D=128
// @instance  Br=64 Bc=64 D=128
// @instance  Br=64 Bc=32 D=64
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33 causal=0
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70 causal=1
// @shape     B=1 Hq=2 Hkv=2 Nq=70 Nk=5 causal=1
// @shape     B=1 Hq=2 Hkv=1 Nq=40 Nk=70 causal=1 kv_len=61 window=9
#include "include/numbers.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

template <int Br, int Bc, int D>
__global__ void flash_attention_2(const float* Q, const float* K, const float* V, float* O, float* L,
                                  int Nq, int Nk, float scale, int causal, int Hq, int Hkv, int kv_len, int window) {
    const int i = blockIdx.x;              // row block,  0 .. ceil(Nq / Br) - 1
    const int h = blockIdx.y;              // query head, 0 .. Hq - 1
    const int b = blockIdx.z;              // batch,      0 .. B - 1
    const int h_kv = h / (Hq / Hkv);       // the head of K and V that this query head reads, 0 .. Hkv - 1
    TRACE_BLOCK(b, h, i);

    // From here Q, O, L and K, V are those of this head alone. 64-bit: B * H * N * D passes 2^31 long before the memory is full.
    Q += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    O += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    L += ((long long)b * Hq + h) * Nq;             // [Nq]
    K += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    V += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    Nk = kv_len;                                   // and from here the keys behind the used ones do not exist

    SharedCarver carve;
    const auto Qi = carve.tile<Br, D>("Qi");
    const auto Kj = carve.tile<D, Bc>("Kj");       // transposed: neighbouring threads score neighbouring keys and read neighbouring words
    const auto Vj = carve.tile<Bc, D>("Vj");
    const auto Oi = carve.tile<Br, D>("Oi");       // unnormalised
    const auto Sij = carve.tile<Br, Bc>("Sij");    // scores, then probabilities before their division by li
    const auto mi = carve.vector<Br>("mi");
    const auto li = carve.vector<Br>("li");

    // How many keys the block's last row sees, and with a window the first that its first row sees: other tiles are never loaded.
    const int last_row = min((i + 1) * Br, Nq) - 1;
    const int visible = causal ? max(0, min(Nk, last_row + 1 + (Nk - Nq))) : Nk;
    const int tiles = (visible + Bc - 1) / Bc;
    const int first = causal && window ? max(0, i * Br + 1 + (Nk - Nq) - window) / Bc : 0;

    TRACE(load_q, i);
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row of the tile, 0 .. Br-1; column, 0 .. D-1
        const int q = i * Br + r;                  // row of Q, may be past Nq in the last block
        Qi[r][x] = q < Nq ? Q[(long long)q * D + x] : 0.f;
        Oi[r][x] = 0.f;
    }
    for (int r = threadIdx.x; r < Br; r += blockDim.x) {
        mi[r] = -INFINITY;
        li[r] = 0.f;
    }
    __syncthreads();  // Qi, Oi, mi and li are complete before others use them: a block that sees no key goes straight to its store

    for (int j = first; j < tiles; ++j) {
        TRACE(load_k, j);
        for (int e = threadIdx.x; e < Bc * D; e += blockDim.x) {
            const int c = e / D, x = e % D;        // key of the tile, 0 .. Bc-1; column, 0 .. D-1
            const int k = j * Bc + c;              // row of K, may be past Nk in the last tile
            Kj[x][c] = k < Nk ? K[(long long)k * D + x] : 0.f;
        }

        TRACE(load_v, j);
        for (int e = threadIdx.x; e < Bc * D; e += blockDim.x) {
            const int c = e / D, x = e % D;        // as for K
            const int k = j * Bc + c;
            Vj[c][x] = k < Nk ? V[(long long)k * D + x] : 0.f;  // 0, for what lies there could be NaN, and 0 * NaN is no 0
        }
        __syncthreads();  // Kj and Vj are complete before any thread reads them

        TRACE(scores, j);
        for (int e = threadIdx.x; e < Br * Bc; e += blockDim.x) {
            const int r = e / Bc, c = e % Bc;      // row, 0 .. Br-1; key of the tile, 0 .. Bc-1
            float s = 0.f;
            for (int x = 0; x < D; ++x) s += Qi[r][x] * Kj[x][c];
            const int q = i * Br + r, k = j * Bc + c;
            const int ago = (q - Nq) - (k - Nk);   // how far the key lies back from the query's own; negative ahead
            const bool near = ago >= 0 && (!window || ago < window);
            const bool seen = k < Nk && (!causal || near);
            Sij[r][c] = seen ? s * scale : -INFINITY;
        }
        __syncthreads();  // each row of Sij is complete before one thread reads all of it

        TRACE(softmax, j);
        for (int r = threadIdx.x; r < Br; r += blockDim.x) {   // one thread a row
            float m_new = mi[r];
            for (int c = 0; c < Bc; ++c) m_new = fmaxf(m_new, Sij[r][c]);
            const float base = m_new == -INFINITY ? 0.f : m_new;   // no key seen so far: e^(-inf - 0) = 0 where -inf - -inf is NaN

            float sum = 0.f;
            for (int c = 0; c < Bc; ++c) {
                const float p = expf(Sij[r][c] - base);
                Sij[r][c] = p;
                sum += p;
            }
            const float corr = expf(mi[r] - base);     // what the earlier tiles' terms shrink by, 0 .. 1
            li[r] = li[r] * corr + sum;
            mi[r] = m_new;
            for (int x = 0; x < D; ++x) Oi[r][x] *= corr;
        }
        __syncthreads();  // Sij holds probabilities and Oi is rescaled before all threads use them

        TRACE(accumulate, j);
        for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
            const int r = e / D, x = e % D;        // row, 0 .. Br-1; column, 0 .. D-1
            float o = Oi[r][x];
            for (int c = 0; c < Bc; ++c) o += Sij[r][c] * Vj[c][x];
            Oi[r][x] = o;
        }
        __syncthreads();  // Sij and Vj are no longer read: the next tile may overwrite them
    }

    TRACE(store_o, i);
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row, 0 .. Br-1; column, 0 .. D-1
        const int q = i * Br + r;
        if (q < Nq) O[(long long)q * D + x] = li[r] == 0.f ? 0.f : Oi[r][x] / li[r];   // the one division
    }
    for (int r = threadIdx.x; r < Br; r += blockDim.x) {
        const int q = i * Br + r;
        if (q < Nq) L[q] = mi[r] + logf(li[r]);    // -inf where no key was seen
    }
}
