// flash_attention_2_tuned.cu: rung 5 of the ladder, float16 or bfloat16. FlashAttention-2 as far as mma.sync goes.
//
// Algorithm, copies and swizzle are those of flash_attention_2_async.cu, rung 4. What is left to gain lies between the products: of a
// warp's instructions in rung 4 at D = 64 one in 17 is a product (D = 128: one in 12). Here one in 4 is (one in 3):
//
//   32 rows a warp  an operand of K or V, loaded once, serves two products (with Br / Warps = 16, one, as before)
//   addresses       one a lane and array; other operands lie at ^ and + of constants. Copy loops have a constant trip count
//   no maximum      a product adds to what its accumulator holds, so it may start from -(m + slack) instead of 0: then a score's sign tells
//                   whether it is so far above m that m must move, and looking costs one instruction for two scores. m need not be the
//                   maximum: e^(s - m) must only not overflow T. So it moves when a score is 2^8 above it, and O and l shrink only then
//   2^x             is all the power that the GPU has: log2 e and the scale are one factor, multiplied and added to in one instruction
//   masks           only in tiles on the diagonal or at the end of K. A warp skips tiles right of its diagonal, the block those of all its
//                   warps; the longest row blocks come first
//   flags           Causal and Aligned (Nq is a multiple of Br and Nk of Bc) are known to the compiler: no code for the other case
//   stores          O goes through the block's Qi, so that a warp writes 512 bytes in a row
//   order           blocks of one head follow each other, or where causal the heads of one row block: what they share stays in L2
//
// With 32 rows of 128 columns a lane holds 192 sums, of 255 registers that it can have. The last few that are missing (sm_80, causal and
// aligned: 8 bytes) are kept in local memory; which, changes with the compiler's version.
//
// Layout   T, row-major, contiguous, 16-byte aligned:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq], float
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Rounding sums, softmax, O and L are float. P is rounded to T before it meets V, by up to 2^-11 of it (bfloat16: 2^-8), and O at the end
// Launch   one block per row block, query head and batch, all in one dimension; dynamic shared memory for the parts below
//
// @kernel    flash_attention_2_tuned
// @paper     arXiv 2307.08691, Algorithm 1
// @grid      Causal * Hq + (1 - Causal) * ceil(Nq / Br), Causal * ceil(Nq / Br) + (1 - Causal) * Hq, B
// @block     32 * Warps
// @arch      80
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @require   Hq % Hkv == 0
// @require   Aligned * (Nq % Br + Nk % Bc) == 0
// @instance  T=half Br=16 Bc=16 D=16 Warps=1 Stages=2 Causal=1 Aligned=0
// @instance  T=half Br=32 Bc=16 D=32 Warps=2 Stages=2 Causal=1 Aligned=0
// @instance  T=bfloat16 Br=32 Bc=32 D=32 Warps=1 Stages=3 Causal=0 Aligned=0
// @instance  T=half Br=128 Bc=64 D=64 Warps=4 Stages=2 Causal=0 Aligned=0
// @instance  T=half Br=128 Bc=64 D=64 Warps=4 Stages=2 Causal=0 Aligned=1
// @instance  T=half Br=128 Bc=64 D=64 Warps=4 Stages=2 Causal=1 Aligned=0
// @instance  T=half Br=128 Bc=64 D=64 Warps=4 Stages=2 Causal=1 Aligned=1
// @instance  T=half Br=128 Bc=64 D=128 Warps=4 Stages=2 Causal=0 Aligned=0
// @instance  T=half Br=128 Bc=64 D=128 Warps=4 Stages=2 Causal=0 Aligned=1
// @instance  T=half Br=128 Bc=64 D=128 Warps=4 Stages=2 Causal=1 Aligned=0
// @instance  T=half Br=128 Bc=64 D=128 Warps=4 Stages=2 Causal=1 Aligned=1
// @instance  T=bfloat16 Br=128 Bc=64 D=64 Warps=4 Stages=2 Causal=1 Aligned=0
// @tune      Br=64,128 Bc=32,64 Warps=4 Stages=2,3
// @tune      Br=64 Bc=32,64 Warps=2 Stages=2
// @tune      Br=256 Bc=64 Warps=8 Stages=2
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70
// @shape     B=1 Hq=2 Hkv=2 Nq=70 Nk=5
// @shape     B=1 Hq=2 Hkv=1 Nq=20 Nk=33 scale=-1
#include "include/numbers.cuh"
#include "include/ptx.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

// Where chunk c of row r begins, in bytes from the tile's first: rung 4's swizzle. Going on by 8 rows is + of a constant, and from chunk 0 or
// 1 by an even number of chunks is ^ of one.
template <int D>
__device__ __forceinline__ SharedAddress place(int r, int c) {
    constexpr int Chunks = D / 8, Alike = Chunks < 8 ? 8 / Chunks : 1;
    return r * D * 2 + (c ^ (r / Alike % (Chunks < 8 ? Chunks : 8))) * 16;
}

// Starts to copy a tile from X, of whose rows `rows` exist; zeros for the others. Each thread has the same chunk of every Step-th row.
template <typename T, int Rows, int D, int Threads, bool Aligned>
__device__ __forceinline__ void copy_rows(SharedAddress tile, const T* X, int rows) {
    constexpr int Chunks = D / 8, Step = Threads / Chunks;
    static_assert(Step % 8 == 0 && Rows % Step == 0, "each thread copies as much as the others, and finds its places by addition");
    const int r = threadIdx.x / Chunks, c = threadIdx.x % Chunks;
    X += r * D + c * 8;
    tile += place<D>(r, c);
    if (Aligned || rows >= Rows) {
#pragma unroll
        for (int n = 0; n < Rows; n += Step) cp_async_16(tile + n * D * 2, X + n * D);
    } else {
#pragma unroll
        for (int n = 0; n < Rows; n += Step) cp_async_16(tile + n * D * 2, X + n * D, r + n < rows);
    }
}

// f(x[w][n][e], w, n, e) for all elements that this lane holds of M x N accumulators.
template <int M, int N, class F>
__device__ __forceinline__ void each(float (&x)[M][N][4], F f) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int w = 0; w < M; ++w)
#pragma unroll
            for (int e = 0; e < 4; ++e) f(x[w][n][e], w, n, e);
}

template <typename T, int Br, int Bc, int D, int Warps, int Stages, bool Causal, bool Aligned>
__global__ void __launch_bounds__(32 * Warps, 256 / Br)        // registers for 256 rows a multiprocessor
flash_attention_2_tuned(const T* Q, const T* K, const T* V, T* O, float* L, int Nq, int Nk, float scale, int Hq, int Hkv) {
    constexpr int Rows = Br / Warps, M = Rows / 16, Threads = 32 * Warps, Tile = Bc * D * 2;   // Tile: bytes
    static_assert(Rows == 16 * M && Bc % 16 == 0 && D % 16 == 0 && Stages >= 2, "tiles are made of 16 x 16 operands");

    const int i = Causal ? gridDim.y - 1 - blockIdx.y : blockIdx.x;     // row block,  0 .. ceil(Nq / Br) - 1
    const int h = Causal ? blockIdx.x : blockIdx.y;                     // query head, 0 .. Hq - 1
    const int b = blockIdx.z;                                           // batch,      0 .. B - 1
    const int h_kv = h / (Hq / Hkv);                                    // the head of K and V that this query head reads, 0 .. Hkv - 1
    TRACE_BLOCK(b, h, i);

    const long long first_row = ((long long)b * Hq + h) * Nq + i * Br;     // the block's, among all rows of Q, O and L
    K += ((long long)b * Hkv + h_kv) * Nk * D;     // from here those of this head alone, [Nk, D]
    V += ((long long)b * Hkv + h_kv) * Nk * D;

    SharedCarver carve;
    const auto Qi = carve.tile<T, Br, D>("Qi");
    const auto Kj = carve.tile<T, Stages * Bc, D>("Kj");       // tile j in stage j % Stages
    const auto Vj = carve.tile<T, Stages * Bc, D>("Vj");
    const SharedAddress q_tile = shared_address(Qi[0]), k_tiles = shared_address(Kj[0]), v_tiles = shared_address(Vj[0]);

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = threadIdx.x / 32 * Rows;       // the warp's first row of the tile; it owns row .. row + Rows - 1
    const SharedAddress q_at = q_tile + place<D>(row + lane % 16, lane / 16);      // where this lane's part of the first operand begins
    const SharedAddress k_at = k_tiles + place<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const SharedAddress v_at = v_tiles + place<D>(lane % 16, lane / 16);

    const int visible = Causal ? max(0, min(Nk, min((i + 1) * Br, Nq) + Nk - Nq)) : Nk;
    const int tiles = (visible + Bc - 1) / Bc;
    const int sees = i * Br + row + Nk - Nq;       // causal, the last key that the warp's first row sees

    TRACE(load_q, i);
    copy_rows<T, Br, D, Threads, Aligned>(q_tile, Q + first_row * D, Nq - i * Br);
    cp_async_commit();
    if (scale < 0.f) {                             // a negative scale is a positive one and the opposite of Q
        cp_async_wait<0>();
        __syncthreads();  // Qi is there: each warp turns the signs of its own rows, two numbers at a time
        for (int e = lane; e < Rows * D / 2; e += 32) reinterpret_cast<unsigned*>(Qi[row])[e] ^= 0x80008000u;
    }
    for (int j = 0; j < Stages - 1; ++j) {
        if (j < tiles) {
            TRACE(load_k, j);
            copy_rows<T, Bc, D, Threads, Aligned>(k_tiles + j * Tile, K + (long long)j * Bc * D, Nk - j * Bc);

            TRACE(load_v, j);
            copy_rows<T, Bc, D, Threads, Aligned>(v_tiles + j * Tile, V + (long long)j * Bc * D, Nk - j * Bc);
        }
        cp_async_commit();                         // one group a tile, empty where there is none
    }

    // What a score is multiplied by. Of a scale of 0 as much is left as keeps a masked score, -inf, apart.
    const float factor = fmaxf(fabsf(scale) * LOG2_E, 1e-30f);
    const float slack = 8.f / factor;              // m moves when a score is 2^8 above it
    constexpr bool Keep = D <= 64;                 // Q's operands stay in registers, where there is room beside O
    unsigned q[M][Keep ? D / 16 : 1][4];
    float o[M][D / 8][4] = {};                     // o[w]: rows 16w .. 16w + 15 of the warp; element e is of row g + e / 2 * 8 of these
    float start[M][4] = {};                        // -(m + slack), of row g twice and of row g + 8 twice; the same in a row's four lanes
    float l[M][2] = {};                            // this lane's share

    for (int j = 0; j < tiles; ++j) {
        cp_async_wait<Stages - 2>();               // this thread's copies of tile j are there
        __syncthreads();  // everybody's copies of tile j (and of Qi) are there, and all are done with tile j - 1
        if (const int n = j + Stages - 1; n < tiles) {
            TRACE(load_k, n);
            copy_rows<T, Bc, D, Threads, Aligned>(k_tiles + n % Stages * Tile, K + (long long)n * Bc * D, Nk - n * Bc);

            TRACE(load_v, n);
            copy_rows<T, Bc, D, Threads, Aligned>(v_tiles + n % Stages * Tile, V + (long long)n * Bc * D, Nk - n * Bc);
        }
        cp_async_commit();
        const SharedAddress k_now = k_at + j % Stages * Tile, v_now = v_at + j % Stages * Tile;
        const bool seen = !Causal || j * Bc < sees + Rows;     // by any row of this warp; the block goes on for the others

        TRACE(scores, j);
        float s[M][Bc / 8][4];                     // s[w]: as o[w], keys 8n .. 8n + 7 of the tile
        if (seen) {
            if (Keep && j == 0) {
#pragma unroll
                for (int x = 0; x < D; x += 16)
#pragma unroll
                    for (int w = 0; w < M; ++w) ldmatrix_x4(q[w][Keep ? x / 16 : 0], (q_at ^ (x * 2)) + 16 * w * D * 2);
            }
            each(s, [&](float& score, int w, int, int e) { score = start[w][e]; });
#pragma unroll
            for (int x = 0; x < D; x += 16) {
#pragma unroll
                for (int w = 0; w < M && !Keep; ++w) ldmatrix_x4(q[w][0], (q_at ^ (x * 2)) + 16 * w * D * 2);
#pragma unroll
                for (int n = 0; n < Bc / 8; n += 2) {
                    unsigned k[4];
                    ldmatrix_x4(k, (k_now ^ (x * 2)) + 8 * n * D * 2);
#pragma unroll
                    for (int w = 0; w < M; ++w) {
                        mma_m16n8k16<T>(s[w][n], q[w][Keep ? x / 16 : 0], k[0], k[1]);
                        mma_m16n8k16<T>(s[w][n + 1], q[w][Keep ? x / 16 : 0], k[2], k[3]);
                    }
                }
            }
            if ((!Aligned && (j + 1) * Bc > Nk) || (Causal && (j + 1) * Bc - 1 > sees)) {
                const int left = Nk - j * Bc - 2 * t, reach = sees + g - j * Bc - 2 * t;
                each(s, [&](float& score, int w, int n, int e) {
                    const int key = 8 * n + e % 2, r = 16 * w + e / 2 * 8;
                    if ((!Aligned && key >= left) || (Causal && key > reach + r)) score = -INFINITY;
                });
            }
        }

        TRACE(softmax, j);
        if (seen) {
            int signs = -1;                        // negative as long as every score is
            each(s, [&](float& score, int, int, int) { signs &= __float_as_int(score); });
            if (__any_sync(ALL_LANES, j == 0 || signs >= 0)) {     // in the first tile m is set; then this is rare
#pragma unroll
                for (int w = 0; w < M; ++w)
#pragma unroll
                    for (int u = 0; u < 2; ++u) {  // row g, then row g + 8
                        float up = -INFINITY;      // how far the row's maximum lies above its m
#pragma unroll
                        for (int n = 0; n < Bc / 8; ++n) up = fmaxf(up, fmaxf(s[w][n][2 * u], s[w][n][2 * u + 1]));
                        up = fmaxf(up, __shfl_xor_sync(ALL_LANES, up, 1));
                        up = fmaxf(up, __shfl_xor_sync(ALL_LANES, up, 2)) + slack;
                        if (j > 0) up = fmaxf(up, 0.f);        // from then on m only rises
                        if (up == -INFINITY) up = 0.f;         // no key seen: all its terms are 0, whatever m is
                        const float corr = j > 0 ? exp2_approx(-up * factor) : 0.f;    // what the earlier tiles' terms shrink by
                        start[w][2 * u] -= up, start[w][2 * u + 1] -= up;
                        l[w][u] *= corr;
#pragma unroll
                        for (int n = 0; n < Bc / 8; ++n) s[w][n][2 * u] -= up, s[w][n][2 * u + 1] -= up;
#pragma unroll
                        for (int y = 0; y < D / 8; ++y) o[w][y][2 * u] *= corr, o[w][y][2 * u + 1] *= corr;
                    }
            }
            each(s, [&](float& score, int w, int, int e) {
                score = exp2_approx(fmaf(score, factor, 8.f));     // from here a probability, e^(score - m), before its division by l
                l[w][e / 2] += score;
            });
        }

        TRACE(accumulate, j);
        if (seen) {
#pragma unroll
            for (int n = 0; n < Bc / 8; n += 2) {
                unsigned p[M][4], v[4];
#pragma unroll
                for (int w = 0; w < M; ++w)
#pragma unroll
                    for (int e = 0; e < 4; ++e) p[w][e] = pack<T>(s[w][n + e / 2][e % 2 * 2], s[w][n + e / 2][e % 2 * 2 + 1]);
#pragma unroll
                for (int y = 0; y < D / 8; y += 2) {
                    ldmatrix_x4_trans(v, (v_now ^ (y * 16)) + 8 * n * D * 2);
#pragma unroll
                    for (int w = 0; w < M; ++w) {
                        mma_m16n8k16<T>(o[w][y], p[w], v[0], v[1]);
                        mma_m16n8k16<T>(o[w][y + 1], p[w], v[2], v[3]);
                    }
                }
            }
        }
    }

    cp_async_wait<0>();                            // a block that sees no key has not waited for Qi yet
    TRACE(store_o, i);
    if (tiles == 0) __syncthreads();  // nor for the others' copies of it, which O is laid over now
    const auto Oi = reinterpret_cast<char*>(Qi[0]);            // each warp takes its own rows of Qi, which nobody else reads
#pragma unroll
    for (int w = 0; w < M; ++w)
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            l[w][u] += __shfl_xor_sync(ALL_LANES, l[w][u], 1);     // the shares of the four lanes of a row
            l[w][u] += __shfl_xor_sync(ALL_LANES, l[w][u], 2);
            const float inverse = l[w][u] == 0.f ? 0.f : 1.f / l[w][u];
            const int r = row + 16 * w + g + 8 * u;
#pragma unroll
            for (int y = 0; y < D / 8; ++y)
                *reinterpret_cast<unsigned*>(Oi + place<D>(r, y) + 4 * t) = pack<T>(o[w][y][2 * u] * inverse, o[w][y][2 * u + 1] * inverse);
            if (t == 0 && (Aligned || i * Br + r < Nq))        // m + ln l, -inf where no key was seen
                L[first_row + r] = (-start[w][2 * u] * factor - 8.f) * LN_2 + logf(l[w][u]);
        }
    __syncwarp();  // the warp's rows of O are complete before its lanes read what others wrote
#pragma unroll
    for (int e = lane; e < Rows * D / 8; e += 32) {
        const int r = row + e / (D / 8), c = e % (D / 8);
        if (Aligned || i * Br + r < Nq)
            *reinterpret_cast<uint4*>(&O[(first_row + r) * D + c * 8]) = *reinterpret_cast<const uint4*>(Oi + place<D>(r, c));
    }
}
