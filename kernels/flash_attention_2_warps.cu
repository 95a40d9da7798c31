// flash_attention_2_warps.cu: rung 1 of the ladder, float32. FlashAttention-2 where a warp owns rows, and what belongs to a row stays in
// the registers of its warp.
//
// In flash_attention_2.cu, rung 0, any thread touches any element, so everything lies in shared memory, every action ends with a barrier,
// and in the softmax one thread walks along a row while most of the block waits. Here a warp takes `Rows` rows for good. Of each row,
//
//     lane 0 has the scores of keys 0, 32, 64 ... of the tile, lane 1 those of keys 1, 33, 65 ..., and so on up to lane 31;
//     lane 0 has the columns 0, 32, 64 ... of the output, lane 1 the columns 1, 33, 65 ...
//
// Then the largest score of a row is a reduction over the lanes (five shuffles), all lanes work in the softmax, and the carries m, l and O
// and the scores S never leave the registers. A lane that needs another's probability for the product asks for it by a shuffle.
// Other warps have a say in K and V only: of rung 0's five barriers two are left, both about Kj and Vj.
//
// Layout   float32, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq]
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Launch   one block per row block, query head and batch; a warp for each `Rows` of its rows, with dynamic shared memory for the parts below
//
// @kernel    flash_attention_2_warps
// @paper     arXiv 2307.08691, Algorithm 1
// @grid      ceil(Nq / Br), Hq, B
// @block     32 * Br / Rows
// @arch      75
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @require   Hq % Hkv == 0
// @instance  Br=4 Bc=4 D=8 Rows=1
// @instance  Br=16 Bc=16 D=32 Rows=4
// @instance  Br=32 Bc=32 D=64 Rows=8
// @instance  Br=64 Bc=64 D=64 Rows=8
// @instance  Br=64 Bc=64 D=128 Rows=8
// @tune      Br=32,64,128 Bc=32,64 Rows=4,8
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33 causal=0
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70 causal=1
// @shape     B=1 Hq=2 Hkv=2 Nq=70 Nk=5 causal=1
#include "include/numbers.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

// The largest, and the sum, of what the 32 lanes hold; each lane gets it. Five exchanges with the lane whose number differs in one bit.
__device__ inline float warp_max(float x) {
    for (int bit = 16; bit > 0; bit /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, bit));
    return x;
}
__device__ inline float warp_sum(float x) {
    for (int bit = 16; bit > 0; bit /= 2) x += __shfl_xor_sync(ALL_LANES, x, bit);
    return x;
}

template <int Br, int Bc, int D, int Rows>
__global__ void __launch_bounds__(32 * Br / Rows)
flash_attention_2_warps(const float* Q, const float* K, const float* V, float* O, float* L,
                        int Nq, int Nk, float scale, int causal, int Hq, int Hkv) {
    static_assert(Br % Rows == 0 && (Bc < 32 || Bc % 32 == 0) && (D < 32 || D % 32 == 0), "lanes share keys and columns evenly");
    constexpr int Threads = 32 * Br / Rows;
    constexpr int Keys = (Bc + 31) / 32;           // keys of a tile that a lane has; where Bc < 32 only the first Bc lanes have one
    constexpr int Columns = (D + 31) / 32;         // columns of the output that a lane has; alike
    const int i = blockIdx.x;                      // row block,  0 .. ceil(Nq / Br) - 1
    const int h = blockIdx.y;                      // query head, 0 .. Hq - 1
    const int b = blockIdx.z;                      // batch,      0 .. B - 1
    const int h_kv = h / (Hq / Hkv);               // the head of K and V that this query head reads, 0 .. Hkv - 1
    TRACE_BLOCK(b, h, i);

    // From here Q, O, L and K, V are those of this head alone.
    Q += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    O += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    L += ((long long)b * Hq + h) * Nq;             // [Nq]
    K += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    V += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]

    SharedCarver carve;
    const auto Qi = carve.tile<Br, D>("Qi");
    const auto Kj = carve.tile<D, Bc>("Kj");       // transposed: neighbouring lanes score neighbouring keys and read neighbouring words
    const auto Vj = carve.tile<Bc, D>("Vj");

    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 * Rows;       // the warp's first row of the tile; it owns row .. row + Rows - 1
    const int first_key = lane < Bc ? lane : 0;    // a lane without a key of its own computes key 0 once more, and masks it
    const int first_column = lane < D ? lane : 0;  // likewise for the columns; it does not store them

    float m[Rows], l[Rows];                        // the same in all lanes of the warp
    float o[Rows][Columns] = {};                   // o[r][y]: row r of the warp, column lane + 32 y; unnormalised
    for (int r = 0; r < Rows; ++r) {
        m[r] = -INFINITY;
        l[r] = 0.f;
    }

    // How many keys the block's last row sees: tiles behind them are never loaded.
    const int last_row = min((i + 1) * Br, Nq) - 1;
    const int visible = causal ? max(0, min(Nk, last_row + 1 + (Nk - Nq))) : Nk;
    const int tiles = (visible + Bc - 1) / Bc;

    TRACE(load_q, i);
    for (int e = threadIdx.x; e < Br * D; e += Threads) {
        const int q = i * Br + e / D;              // row of Q, may be past Nq in the last block
        Qi[e / D][e % D] = q < Nq ? Q[(long long)q * D + e % D] : 0.f;
    }

    for (int j = 0; j < tiles; ++j) {
        TRACE(load_k, j);
        for (int e = threadIdx.x; e < Bc * D; e += Threads) {
            const int c = e / D, x = e % D;        // key of the tile, 0 .. Bc-1; column, 0 .. D-1
            const int k = j * Bc + c;              // row of K, may be past Nk in the last tile
            Kj[x][c] = k < Nk ? K[(long long)k * D + x] : 0.f;
        }

        TRACE(load_v, j);
        for (int e = threadIdx.x; e < Bc * D; e += Threads) {
            const int k = j * Bc + e / D;
            Vj[e / D][e % D] = k < Nk ? V[(long long)k * D + e % D] : 0.f;  // 0, for what lies there could be NaN, and 0 * NaN is no 0
        }
        __syncthreads();  // Kj and Vj (and before the first tile Qi) are complete before any warp reads them

        TRACE(scores, j);
        float s[Rows][Keys] = {};                  // s[r][n]: row r of the warp, key lane + 32 n of the tile
        for (int x = 0; x < D; ++x) {
            float k[Keys];
            for (int n = 0; n < Keys; ++n) k[n] = Kj[x][first_key + 32 * n];
            for (int r = 0; r < Rows; ++r) {
                const float q = Qi[row + r][x];    // one word for all lanes
                for (int n = 0; n < Keys; ++n) s[r][n] += q * k[n];
            }
        }
        for (int r = 0; r < Rows; ++r) {
            for (int n = 0; n < Keys; ++n) {
                const int q = i * Br + row + r, k = j * Bc + lane + 32 * n;
                const bool seen = lane < Bc && k < Nk && (!causal || k <= q + (Nk - Nq));
                s[r][n] = seen ? s[r][n] * scale : -INFINITY;
            }
        }

        TRACE(softmax, j);
        for (int r = 0; r < Rows; ++r) {           // rung 0's lines, a row at a time, each lane on its own keys
            float m_new = m[r];
            for (int n = 0; n < Keys; ++n) m_new = fmaxf(m_new, s[r][n]);
            m_new = warp_max(m_new);
            const float base = m_new == -INFINITY ? 0.f : m_new;   // no key seen so far: e^(-inf - 0) = 0 where -inf - -inf is NaN

            float sum = 0.f;
            for (int n = 0; n < Keys; ++n) {
                s[r][n] = expf(s[r][n] - base);    // from here s holds probabilities before their division by l
                sum += s[r][n];
            }
            const float corr = expf(m[r] - base);  // what the earlier tiles' terms shrink by, 0 .. 1
            l[r] = l[r] * corr + warp_sum(sum);
            m[r] = m_new;
            for (int y = 0; y < Columns; ++y) o[r][y] *= corr;
        }

        TRACE(accumulate, j);
#pragma unroll
        for (int n = 0; n < Keys; ++n) {           // unrolled, so that s[r][n] names a register
            for (int from = 0; from < min(Bc, 32); ++from) {       // the lane that has key from + 32 n
                float v[Columns];
                for (int y = 0; y < Columns; ++y) v[y] = Vj[from + 32 * n][first_column + 32 * y];
                for (int r = 0; r < Rows; ++r) {
                    const float p = __shfl_sync(ALL_LANES, s[r][n], from);
                    for (int y = 0; y < Columns; ++y) o[r][y] += p * v[y];
                }
            }
        }
        __syncthreads();  // Kj and Vj are no longer read: the next tile may overwrite them
    }

    TRACE(store_o, i);
    for (int r = 0; r < Rows; ++r) {
        const int q = i * Br + row + r;
        if (q >= Nq) continue;
        for (int y = 0; y < Columns; ++y)
            if (lane < D) O[(long long)q * D + lane + 32 * y] = l[r] == 0.f ? 0.f : o[r][y] / l[r];  // the one division
        if (lane == 0) L[q] = m[r] + logf(l[r]);   // -inf where no key was seen
    }
}
