// flash_attention_2_rope.cu: attention with rotary position embedding, forward, in one pass: O = softmax(rope(Q) rope(K)^T * scale) V.
//
// FlashAttention-2 (Dao, arXiv 2307.08691, Algorithm 1) as in flash_attention_2.cu, with two actions changed: `load_q` and `load_k` rotate
// what they load (Su and others, arXiv 2104.09864). Both elements of a pair and its cosine and sine pass through the registers of one
// thread on their way to shared memory, so rotated Q and K are never in HBM, and no slot and no barrier is added. The price: a row block's
// angles of K are read again, and K is rotated again, for every row block. Rotate-half form: element p meets element p + Pairs.
//
// Layout   float32, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq]
// Angles   cosines and sines of the queries' positions, cq, sq [Nq, Pairs], and of the keys', ck, sk [Nk, Pairs], the same for all heads
// Partial  the first 2 * Pairs elements of a row are rotated, those after them loaded as they are
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Launch   one block per row block, query head and batch; any number of threads, with dynamic shared memory for the parts below
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernel, what to compile, what to check.
// @kernel    flash_attention_2_rope
// @paper     arXiv 2307.08691, Algorithm 1; arXiv 2104.09864, section 3.4.2
// @grid      ceil(Nq / Br), Hq, B
// @block     min(512, max(32, Br * Bc))
// @arch      75
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     cq [Nq, Pairs]
// @array     sq [Nq, Pairs]
// @array     ck [Nk, Pairs]
// @array     sk [Nk, Pairs]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @require   Hq % Hkv == 0
// @require   2 * Pairs <= D
// @instance  Br=4 Bc=4 D=8 Pairs=4
// @instance  Br=4 Bc=8 D=8 Pairs=2
// @instance  Br=16 Bc=16 D=32 Pairs=16
// @instance  Br=32 Bc=32 D=64 Pairs=32
// @instance  Br=32 Bc=32 D=128 Pairs=64
// @instance  Br=64 Bc=64 D=128 Pairs=64
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33 causal=0
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70 causal=1
// @shape     B=1 Hq=2 Hkv=2 Nq=70 Nk=5 causal=1
#include "include/numbers.cuh"
#include "include/rope.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

template <int Br, int Bc, int D, int Pairs>
__global__ void flash_attention_2_rope(const float* Q, const float* K, const float* V, const float* cq, const float* sq,
                                       const float* ck, const float* sk, float* O, float* L, int Nq, int Nk, float scale,
                                       int causal, int Hq, int Hkv) {
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

    SharedCarver carve;
    const auto Qi = carve.tile<Br, D>("Qi");       // rotated
    const auto Kj = carve.tile<D, Bc>("Kj");       // rotated and transposed: neighbouring threads score neighbouring keys and read
                                                   // neighbouring words
    const auto Vj = carve.tile<Bc, D>("Vj");
    const auto Oi = carve.tile<Br, D>("Oi");       // unnormalised
    const auto Sij = carve.tile<Br, Bc>("Sij");    // scores, then probabilities before their division by li
    const auto mi = carve.vector<Br>("mi");
    const auto li = carve.vector<Br>("li");

    // How many keys the block's last row sees; with a causal mask the tiles past them are never loaded.
    const int last_row = min((i + 1) * Br, Nq) - 1;
    const int visible = causal ? max(0, min(Nk, last_row + 1 + (Nk - Nq))) : Nk;
    const int tiles = (visible + Bc - 1) / Bc;

    TRACE(load_q, i);
    for (int e = threadIdx.x; e < Br * Pairs; e += blockDim.x) {
        const int r = e / Pairs, p = e % Pairs;    // row of the tile, 0 .. Br-1; pair, 0 .. Pairs-1
        const int q = i * Br + r;                  // row of Q, may be past Nq in the last block
        float a = 0.f, b = 0.f;
        if (q < Nq) {
            a = Q[(long long)q * D + p];
            b = Q[(long long)q * D + p + Pairs];
            rotate_pair(a, b, cq[(long long)q * Pairs + p], sq[(long long)q * Pairs + p]);
        }
        Qi[r][p] = a;
        Qi[r][p + Pairs] = b;
    }
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row of the tile, 0 .. Br-1; column, 0 .. D-1
        const int q = i * Br + r;
        if (x >= 2 * Pairs) Qi[r][x] = q < Nq ? Q[(long long)q * D + x] : 0.f;   // not rotated
        Oi[r][x] = 0.f;
    }
    for (int r = threadIdx.x; r < Br; r += blockDim.x) {
        mi[r] = -INFINITY;
        li[r] = 0.f;
    }
    __syncthreads();  // Qi, Oi, mi and li are complete before others use them: a block that sees no key goes straight to its store

    for (int j = 0; j < tiles; ++j) {
        TRACE(load_k, j);
        for (int e = threadIdx.x; e < Bc * Pairs; e += blockDim.x) {
            const int c = e / Pairs, p = e % Pairs;    // key of the tile, 0 .. Bc-1; pair, 0 .. Pairs-1
            const int k = j * Bc + c;                  // row of K, may be past Nk in the last tile
            float a = 0.f, b = 0.f;
            if (k < Nk) {
                a = K[(long long)k * D + p];
                b = K[(long long)k * D + p + Pairs];
                rotate_pair(a, b, ck[(long long)k * Pairs + p], sk[(long long)k * Pairs + p]);
            }
            Kj[p][c] = a;
            Kj[p + Pairs][c] = b;
        }
        for (int e = threadIdx.x; e < Bc * D; e += blockDim.x) {
            const int c = e / D, x = e % D;            // key of the tile, 0 .. Bc-1; column, 0 .. D-1
            const int k = j * Bc + c;
            if (x >= 2 * Pairs) Kj[x][c] = k < Nk ? K[(long long)k * D + x] : 0.f;   // not rotated
        }

        TRACE(load_v, j);
        for (int e = threadIdx.x; e < Bc * D; e += blockDim.x) {
            const int c = e / D, x = e % D;        // key of the tile, 0 .. Bc-1; column, 0 .. D-1
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
            const bool seen = k < Nk && (!causal || k - Nk <= q - Nq);
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
