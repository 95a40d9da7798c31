// standard_attention.cu: attention in three kernels that keep S and P in HBM: S = Q K^T * scale, P = softmax(S), O = P V.
//
// What attention costs when each step is a kernel of its own (arXiv 2205.14135, Algorithm 0): every score is written to HBM, read, written
// again as a probability and read again. It is here to be counted and timed beside flash_attention_1.cu and flash_attention_2.cu, and
// works as they do: a block owns Br rows, tiles are in shared memory, and each action ends with a barrier where other threads need its result.
//
// Layout   float32, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   S, P [B, Hq, Nq, Nk]
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq; the other scores are -inf. A row that sees no key gets P = 0, O = 0
// Launch   one block per row block, query head and batch; any number of threads, but whole warps for the softmax, with dynamic shared
//          memory for the parts below. The softmax holds whole rows: Nk must not pass Keys
//
// The lines that start with @ are read by the launcher and the tests: how to launch each kernel, what to compile, what to check.
// @paper     arXiv 2205.14135, Algorithm 0
// @grid      ceil(Nq / Br), Hq, B
// @arch      75
//
// @kernel    standard_scores
// @block     min(512, max(32, Br * Bc))
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     S [B, Hq, Nq, Nk]
// @default   scale = 1 / sqrt(D)
// @require   Hq % Hkv == 0
// @instance  Br=4 Bc=4 D=8
// @instance  Br=32 Bc=32 D=64
// @instance  Br=32 Bc=32 D=128
// @instance  Br=64 Bc=64 D=64
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33 causal=0
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70 causal=1
// @shape     B=1 Hq=2 Hkv=2 Nq=70 Nk=5 causal=1
//
// @kernel    standard_softmax
// @block     128
// @blocks    Br
// @array     S [B, Hq, Nq, Nk]
// @array     P [B, Hq, Nq, Nk]
// @require   Nk <= Keys
// @instance  Br=4 Keys=64
// @instance  Br=4 Keys=1024
// @instance  Br=4 Keys=4096
// @shape     B=1 Hq=1 Nq=33 Nk=33
// @shape     B=2 Hq=3 Nq=5 Nk=64
//
// @kernel    standard_values
// @block     min(512, max(32, Br * Bc))
// @blocks    Br, Bc
// @array     P [B, Hq, Nq, Nk]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @require   Hq % Hkv == 0
// @instance  Br=4 Bc=4 D=8
// @instance  Br=32 Bc=32 D=64
// @instance  Br=32 Bc=32 D=128
// @instance  Br=64 Bc=64 D=64
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70
#include "include/numbers.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

template <int Br, int Bc, int D>
__global__ void standard_scores(const float* Q, const float* K, float* S, int Nq, int Nk, float scale, int causal, int Hq, int Hkv) {
    const int i = blockIdx.x;              // row block,  0 .. ceil(Nq / Br) - 1
    const int h = blockIdx.y;              // query head, 0 .. Hq - 1
    const int b = blockIdx.z;              // batch,      0 .. B - 1
    const int h_kv = h / (Hq / Hkv);       // the head of K that this query head reads, 0 .. Hkv - 1
    TRACE_BLOCK(b, h, i);

    Q += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]: from here those of this head alone
    K += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    S += ((long long)b * Hq + h) * Nq * Nk;        // [Nq, Nk]

    SharedCarver carve;
    const auto Qi = carve.tile<Br, D>("Qi");
    const auto Kj = carve.tile<D, Bc>("Kj");       // transposed: neighbouring threads score neighbouring keys and read neighbouring words
    const auto Sij = carve.tile<Br, Bc>("Sij");

    TRACE(load_q, i);
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row of the tile, 0 .. Br-1; column, 0 .. D-1
        const int q = i * Br + r;                  // row of Q, may be past Nq in the last block
        Qi[r][x] = q < Nq ? Q[(long long)q * D + x] : 0.f;
    }

    for (int j = 0; j < (Nk + Bc - 1) / Bc; ++j) {
        TRACE(load_k, j);
        for (int e = threadIdx.x; e < Bc * D; e += blockDim.x) {
            const int c = e / D, x = e % D;        // key of the tile, 0 .. Bc-1; column, 0 .. D-1
            const int k = j * Bc + c;              // row of K, may be past Nk in the last tile
            Kj[x][c] = k < Nk ? K[(long long)k * D + x] : 0.f;
        }
        __syncthreads();  // Qi and Kj are complete before any thread reads them

        TRACE(scores, j);
        for (int e = threadIdx.x; e < Br * Bc; e += blockDim.x) {
            const int r = e / Bc, c = e % Bc;      // row, 0 .. Br-1; key of the tile, 0 .. Bc-1
            float s = 0.f;
            for (int x = 0; x < D; ++x) s += Qi[r][x] * Kj[x][c];
            const int q = i * Br + r, k = j * Bc + c;
            Sij[r][c] = !causal || k - Nk <= q - Nq ? s * scale : -INFINITY;
        }
        __syncthreads();  // Kj is no longer read: the next tile may overwrite it

        TRACE(store_s, j);                         // each thread writes the scores that it computed: no barrier
        for (int e = threadIdx.x; e < Br * Bc; e += blockDim.x) {
            const int r = e / Bc, c = e % Bc;      // as for the scores
            const int q = i * Br + r, k = j * Bc + c;
            if (q < Nq && k < Nk) S[(long long)q * Nk + k] = Sij[r][c];
        }
    }
}

// One warp a row. Each lane loads, changes and stores its own keys, so no barrier is needed; the row's maximum and sum go by shuffles.
template <int Br, int Keys>
__global__ void standard_softmax(const float* S, float* P, int Nq, int Nk, int Hq) {
    const int i = blockIdx.x;                      // row block,  0 .. ceil(Nq / Br) - 1
    const int h = blockIdx.y;                      // query head, 0 .. Hq - 1
    const int b = blockIdx.z;                      // batch,      0 .. B - 1
    const int lane = threadIdx.x % 32;
    TRACE_BLOCK(b, h, i);

    S += ((long long)b * Hq + h) * Nq * Nk;        // [Nq, Nk]
    P += ((long long)b * Hq + h) * Nq * Nk;        // [Nq, Nk]

    SharedCarver carve;
    const auto Si = carve.tile<Br, Keys>("Si");    // whole rows: scores, then probabilities

    TRACE(load_s, i);
    for (int r = threadIdx.x / 32; r < Br; r += blockDim.x / 32) {
        const int q = i * Br + r;                  // row of S, may be past Nq in the last block
        for (int k = lane; k < Nk && q < Nq; k += 32) Si[r][k] = S[(long long)q * Nk + k];
    }

    TRACE(softmax, i);
    for (int r = threadIdx.x / 32; r < Br && i * Br + r < Nq; r += blockDim.x / 32) {   // the same for all lanes of a warp
        float m = -INFINITY;
        for (int k = lane; k < Nk; k += 32) m = fmaxf(m, Si[r][k]);
        for (int far = 16; far; far /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, far));   // now every lane has the row's
        const float base = m == -INFINITY ? 0.f : m;               // no key seen: e^(-inf - 0) = 0 where -inf - -inf is NaN
        float l = 0.f;
        for (int k = lane; k < Nk; k += 32) {
            Si[r][k] = expf(Si[r][k] - base);
            l += Si[r][k];
        }
        for (int far = 16; far; far /= 2) l += __shfl_xor_sync(0xffffffffu, l, far);
        for (int k = lane; k < Nk; k += 32) Si[r][k] = l == 0.f ? 0.f : Si[r][k] / l;
    }

    TRACE(store_p, i);
    for (int r = threadIdx.x / 32; r < Br; r += blockDim.x / 32) {
        const int q = i * Br + r;
        for (int k = lane; k < Nk && q < Nq; k += 32) P[(long long)q * Nk + k] = Si[r][k];
    }
}

template <int Br, int Bc, int D>
__global__ void standard_values(const float* P, const float* V, float* O, int Nq, int Nk, int Hq, int Hkv) {
    const int i = blockIdx.x;                      // as in standard_scores
    const int h = blockIdx.y;
    const int b = blockIdx.z;
    const int h_kv = h / (Hq / Hkv);
    TRACE_BLOCK(b, h, i);

    P += ((long long)b * Hq + h) * Nq * Nk;        // [Nq, Nk]
    V += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    O += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]

    SharedCarver carve;
    const auto Pij = carve.tile<Br, Bc>("Pij");
    const auto Vj = carve.tile<Bc, D>("Vj");
    const auto Oi = carve.tile<Br, D>("Oi");

    TRACE(init_o, i);                              // each thread sets, updates and stores its own elements of Oi: no barrier
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) Oi[e / D][e % D] = 0.f;

    for (int j = 0; j < (Nk + Bc - 1) / Bc; ++j) {
        TRACE(load_p, j);
        for (int e = threadIdx.x; e < Br * Bc; e += blockDim.x) {
            const int r = e / Bc, c = e % Bc;      // row, 0 .. Br-1; key of the tile, 0 .. Bc-1
            const int q = i * Br + r, k = j * Bc + c;
            Pij[r][c] = q < Nq && k < Nk ? P[(long long)q * Nk + k] : 0.f;
        }

        TRACE(load_v, j);
        for (int e = threadIdx.x; e < Bc * D; e += blockDim.x) {
            const int c = e / D, x = e % D;        // key of the tile, 0 .. Bc-1; column, 0 .. D-1
            const int k = j * Bc + c;              // row of V, may be past Nk in the last tile
            Vj[c][x] = k < Nk ? V[(long long)k * D + x] : 0.f;  // 0, for what lies there could be NaN, and 0 * NaN is no 0
        }
        __syncthreads();  // Pij and Vj are complete before any thread reads them

        TRACE(accumulate, j);
        for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
            const int r = e / D, x = e % D;        // row, 0 .. Br-1; column, 0 .. D-1
            float o = Oi[r][x];
            for (int c = 0; c < Bc; ++c) o += Pij[r][c] * Vj[c][x];
            Oi[r][x] = o;
        }
        __syncthreads();  // Pij and Vj are no longer read: the next tiles may overwrite them
    }

    TRACE(store_o, i);
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row, 0 .. Br-1; column, 0 .. D-1
        const int q = i * Br + r;
        if (q < Nq) O[(long long)q * D + x] = Oi[r][x];
    }
}
