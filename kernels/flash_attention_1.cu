// flash_attention_1.cu: attention, forward, with K and V in the outer loop: O = softmax(Q K^T * scale) V, and each row's max m and sum l.
//
// FlashAttention (Dao et al., arXiv 2205.14135, Algorithm 1), as one would first write it. A block owns one head and runs both loops.
// A tile of Bc keys is loaded once and meets every row block of Q. Between two tiles the rows' carries, the running maximum mi, the running
// denominator li and the output Oi, wait in HBM, so all three are read and written at every tile, and Oi is *normalised* every time.
// Every tile and vector is in shared memory and any thread may touch any element of them, so actions end with a barrier. O, m and l
// in HBM need none: each element is always set, loaded and stored by one and the same thread.
//
// Layout   float32, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   m, l [B, Hq, Nq]
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0, m = -inf and l = 0
// Window   with causal, of these keys only the last `window`; 0 for all
// kv_len   how many rows of K and V are used: it stands for Nk in what a query sees, and what lies behind is never touched
// L        logsumexp(Q K^T * scale) = m + ln l
// Launch   one block per query head and batch; any number of threads, with dynamic shared memory for the parts below
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernel, what to compile, what to check.
// @kernel    flash_attention_1
// @paper     arXiv 2205.14135, Algorithm 1
// @grid      Hq, B
// @block     min(512, max(32, Br * Bc))
// @arch      75
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     m [B, Hq, Nq]
// @array     l [B, Hq, Nq]
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
__global__ void flash_attention_1(const float* Q, const float* K, const float* V, float* O, float* m, float* l,
                                  int Nq, int Nk, float scale, int causal, int Hq, int Hkv, int kv_len, int window) {
    const int h = blockIdx.x;              // query head, 0 .. Hq - 1
    const int b = blockIdx.y;              // batch,      0 .. B - 1
    const int h_kv = h / (Hq / Hkv);       // the head of K and V that this query head reads, 0 .. Hkv - 1
    const int Tr = (Nq + Br - 1) / Br;     // row blocks
    TRACE_BLOCK(b, h, 0);

    // From here Q, O, m, l and K, V are those of this head alone. 64-bit: B * H * N * D passes 2^31 long before the memory is full.
    Q += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    O += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    m += ((long long)b * Hq + h) * Nq;             // [Nq]
    l += ((long long)b * Hq + h) * Nq;             // [Nq]
    K += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    V += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    Nk = kv_len;                                   // and from here the keys behind the used ones do not exist

    SharedCarver carve;
    const auto Qi = carve.tile<Br, D>("Qi");
    const auto Kj = carve.tile<D, Bc>("Kj");       // transposed: neighbouring threads score neighbouring keys and read neighbouring words
    const auto Vj = carve.tile<Bc, D>("Vj");
    const auto Oi = carve.tile<Br, D>("Oi");       // normalised: attention over the keys seen so far
    const auto Sij = carve.tile<Br, Bc>("Sij");    // scores, then probabilities before their division by li
    const auto mi = carve.vector<Br>("mi");
    const auto li = carve.vector<Br>("li");

    TRACE(init_o, 0);
    for (int i = 0; i < Tr; ++i) {                 // tile by tile, as they are loaded later: by the thread that will load them
        for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
            const int q = i * Br + e / D;          // row of O, may be past Nq in the last block
            if (q < Nq) O[(long long)q * D + e % D] = 0.f;
        }
        for (int r = threadIdx.x; r < Br; r += blockDim.x) {
            const int q = i * Br + r;
            if (q < Nq) m[q] = -INFINITY;
            if (q < Nq) l[q] = 0.f;
        }
    }

    // With a window the first key that some row sees is the first one of row 0: tiles before it are never loaded.
    const int Tc = (Nk + Bc - 1) / Bc;             // key tiles
    const int reach = causal && window ? window : Nq + Nk;     // how many keys back a query sees
    const int j0 = max(0, 1 + (Nk - Nq) - reach) / Bc;
    for (int j = j0; j < Tc; ++j) {
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

        // With a causal mask the first row that sees a key of this tile is j * Bc - (Nk - Nq), and with a window the last one is window - 1
        // after the one that stands at the tile's last key. Other row blocks are left as they are.
        const int first = causal ? max(0, j * Bc - (Nk - Nq)) / Br : 0;
        const int last = min(Nq - 1, min((j + 1) * Bc, Nk) - 1 - (Nk - Nq) + reach - 1) / Br;
        for (int i = first; i <= last; ++i) {
            TRACE(load_q, j, i);
            for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
                const int r = e / D, x = e % D;    // row of the tile, 0 .. Br-1; column, 0 .. D-1
                const int q = i * Br + r;          // row of Q, may be past Nq in the last block
                Qi[r][x] = q < Nq ? Q[(long long)q * D + x] : 0.f;
            }

            TRACE(load_o, j, i);
            for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
                const int r = e / D, x = e % D;    // as for Q
                const int q = i * Br + r;
                Oi[r][x] = q < Nq ? O[(long long)q * D + x] : 0.f;
            }
            for (int r = threadIdx.x; r < Br; r += blockDim.x) {
                const int q = i * Br + r;
                mi[r] = q < Nq ? m[q] : -INFINITY;
                li[r] = q < Nq ? l[q] : 0.f;
            }
            __syncthreads();  // Kj, Vj, Qi and Oi are complete before any thread reads what others have loaded

            TRACE(scores, j, i);
            for (int e = threadIdx.x; e < Br * Bc; e += blockDim.x) {
                const int r = e / Bc, c = e % Bc;  // row, 0 .. Br-1; key of the tile, 0 .. Bc-1
                float s = 0.f;
                for (int x = 0; x < D; ++x) s += Qi[r][x] * Kj[x][c];
                const int q = i * Br + r, k = j * Bc + c;
                const int ago = (q - Nq) - (k - Nk);       // how far the key lies back from the query's own; negative ahead
                const bool near = ago >= 0 && ago < reach;
                const bool seen = k < Nk && (!causal || near);
                Sij[r][c] = seen ? s * scale : -INFINITY;
            }
            __syncthreads();  // each row of Sij is complete before one thread reads all of it

            TRACE(softmax, j, i);
            for (int r = threadIdx.x; r < Br; r += blockDim.x) {   // one thread a row
                float m_new = mi[r];
                for (int c = 0; c < Bc; ++c) m_new = fmaxf(m_new, Sij[r][c]);
                const float base = m_new == -INFINITY ? 0.f : m_new;   // no key seen so far: e^(-inf - 0) = 0 where -inf - -inf is NaN

                // The paper takes these relative to the tile's own maximum and multiplies by e^(that - m_new) later: the same numbers.
                float sum = 0.f;
                for (int c = 0; c < Bc; ++c) {
                    const float p = expf(Sij[r][c] - base);
                    Sij[r][c] = p;
                    sum += p;
                }
                const float l_old = li[r] * expf(mi[r] - base);    // the earlier tiles' terms, relative to the new maximum
                const float l_new = l_old + sum;
                const float kept = l_new == 0.f ? 0.f : l_old / l_new;   // their share of the new output, 0 .. 1
                for (int x = 0; x < D; ++x) Oi[r][x] *= kept;
                li[r] = l_new;
                mi[r] = m_new;
            }
            __syncthreads();  // Sij holds probabilities, li is new and Oi is rescaled before all threads use them

            TRACE(accumulate, j, i);
            for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
                const int r = e / D, x = e % D;    // row, 0 .. Br-1; column, 0 .. D-1
                float o = 0.f;
                for (int c = 0; c < Bc; ++c) o += Sij[r][c] * Vj[c][x];
                Oi[r][x] += li[r] == 0.f ? 0.f : o / li[r];        // a division for every element at every tile
            }
            __syncthreads();  // Sij, li and Vj are no longer read: the next row block or key tile may overwrite them

            TRACE(store_o, j, i);                  // each thread writes what it will load again itself: no barrier
            for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
                const int r = e / D, x = e % D;    // row, 0 .. Br-1; column, 0 .. D-1
                const int q = i * Br + r;
                if (q < Nq) O[(long long)q * D + x] = Oi[r][x];
            }
            for (int r = threadIdx.x; r < Br; r += blockDim.x) {
                const int q = i * Br + r;
                if (q < Nq) m[q] = mi[r];
                if (q < Nq) l[q] = li[r];
            }
        }
    }
}
