// flash_attention_2_mma.cu: rung 3 of the ladder, float16 or bfloat16. FlashAttention-2 on tensor cores: a warp multiplies tiles, not numbers.
//
// The rungs before issue one instruction for 32 products of two floats. mma.sync issues one for 2048: a warp takes a 16 x 16 tile a and a
// 16 x 8 tile b of 16-bit floats, spread over the registers of its lanes, and adds a b to a 16 x 8 tile of float, spread alike. With
// g = lane / 4 and t = lane % 4, a lane holds of each 8 x 8 part of a tile row g, columns 2t and 2t + 1, two elements to a register:
//
//     of an accumulator   x[0], x[1]   row g, columns 2t and 2t + 1        x[2], x[3]   row g + 8, the same columns
//     of an operand a     a[0], a[1]   rows g and g + 8, columns 2t, +1    a[2], a[3]   the same rows, columns 2t + 8, +1
//
// So two accumulators side by side, rounded and packed, *are* an operand a: the scores S become the probabilities P and meet V without
// leaving their lane. Four lanes share a row, and the softmax of a row takes two shuffles. A warp owns 16 rows of Q.
//
// ldmatrix loads four 8 x 8 parts at once, 8 rows of 16 bytes each. Rows are padded by 16 bytes: with rows of D numbers alone, the eight
// would begin in the same bank, and come one after the other.
//
// Layout   T, row-major, contiguous, 16-byte aligned:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq], float
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Rounding sums, softmax, O and L are float. P is rounded to T before it meets V, by up to 2^-11 of it (bfloat16: 2^-8), and O at the end
// Launch   one block per row block, query head and batch; a warp for each 16 of its rows, with dynamic shared memory for the parts below
//
// @kernel    flash_attention_2_mma
// @paper     arXiv 2307.08691, Algorithm 1
// @grid      ceil(Nq / Br), Hq, B
// @block     2 * Br
// @arch      80
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @require   Hq % Hkv == 0
// @instance  T=half Br=16 Bc=16 D=16
// @instance  T=bfloat16 Br=32 Bc=16 D=32
// @instance  T=half Br=64 Bc=64 D=64
// @instance  T=half Br=64 Bc=64 D=128
// @instance  T=bfloat16 Br=64 Bc=64 D=64
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33 causal=0
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70 causal=1
// @shape     B=1 Hq=2 Hkv=2 Nq=70 Nk=5 causal=1
#include "include/numbers.cuh"
#include "include/ptx.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

// tile [Rows, D] from rows first .. first + Rows - 1 of X [end, D] in HBM, 8 numbers at a time; 0 from row `end` on, for what lies there
// could be NaN, and 0 * NaN is no 0.
template <typename T, int Rows, int D>
__device__ __forceinline__ void load_rows(SharedTile<D + 8, T> tile, const T* X, int first, int end) {
    for (int e = threadIdx.x; e < Rows * D / 8; e += blockDim.x) {
        const int r = e / (D / 8), x = e % (D / 8) * 8;        // row of the tile, 0 .. Rows-1; its column, 0, 8 .. D-8
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (first + r < end) eight = *reinterpret_cast<const uint4*>(X + (long long)(first + r) * D + x);
        *reinterpret_cast<uint4*>(&tile[r][x]) = eight;
    }
}

template <typename T, int Br, int Bc, int D>
__global__ void __launch_bounds__(2 * Br)
flash_attention_2_mma(const T* Q, const T* K, const T* V, T* O, float* L,
                      int Nq, int Nk, float scale, int causal, int Hq, int Hkv) {
    static_assert(Br % 16 == 0 && Bc % 16 == 0 && D % 16 == 0, "tiles are made of 16 x 16 operands");
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
    const auto Qi = carve.tile<T, Br, D + 8>("Qi");
    const auto Kj = carve.tile<T, Bc, D + 8>("Kj");    // as it is: mma.sync wants b's columns, the keys, one after the other
    const auto Vj = carve.tile<T, Bc, D + 8>("Vj");    // here b's columns are V's; ldmatrix turns each 8 x 8 part on the way

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = threadIdx.x / 32 * 16;         // the warp's first row of the tile; it owns row .. row + 15, this lane row + g and row + g + 8

    float o[D / 8][4] = {};                        // o[y]: the warp's rows, columns 8y .. 8y + 7; unnormalised
    float m[2] = {-INFINITY, -INFINITY};           // of rows g and g + 8, the same in the four lanes of a row
    float l[2] = {};                               // of these rows, this lane's share: the keys whose scores it holds

    // How many keys the block's last row sees: tiles behind them are never loaded.
    const int last_row = min((i + 1) * Br, Nq) - 1;
    const int visible = causal ? max(0, min(Nk, last_row + 1 + (Nk - Nq))) : Nk;
    const int tiles = (visible + Bc - 1) / Bc;

    TRACE(load_q, i);
    load_rows<T, Br, D>(Qi, Q, i * Br, Nq);

    for (int j = 0; j < tiles; ++j) {
        TRACE(load_k, j);
        load_rows<T, Bc, D>(Kj, K, j * Bc, Nk);

        TRACE(load_v, j);
        load_rows<T, Bc, D>(Vj, V, j * Bc, Nk);
        __syncthreads();  // Kj and Vj (and before the first tile Qi) are complete before any warp reads them

        TRACE(scores, j);
        float s[Bc / 8][4] = {};                   // s[n]: the warp's rows, keys 8n .. 8n + 7 of the tile
#pragma unroll
        for (int x = 0; x < D; x += 16) {
            unsigned q[4];                         // 16 rows, columns x .. x + 15
            ldmatrix_x4(q, shared_address(&Qi[row + lane % 16][x + lane / 16 * 8]));
#pragma unroll
            for (int n = 0; n < Bc / 8; n += 2) {
                unsigned k[4];                     // 16 keys, the same columns: k[0], k[1] of the first eight, k[2], k[3] of the others
                ldmatrix_x4(k, shared_address(&Kj[8 * n + lane / 16 * 8 + lane % 8][x + lane / 8 % 2 * 8]));
                mma_m16n8k16<T>(s[n], q, k[0], k[1]);
                mma_m16n8k16<T>(s[n + 1], q, k[2], k[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int q = i * Br + row + g + e / 2 * 8, k = j * Bc + 8 * n + 2 * t + e % 2;
                const bool seen = k < Nk && (!causal || k <= q + (Nk - Nq));
                s[n][e] = seen ? s[n][e] * scale : -INFINITY;
            }
        }

        TRACE(softmax, j);
#pragma unroll
        for (int u = 0; u < 2; ++u) {              // row g, then row g + 8: elements 2u and 2u + 1 of each accumulator
            float m_new = m[u];
#pragma unroll
            for (int n = 0; n < Bc / 8; ++n) m_new = fmaxf(m_new, fmaxf(s[n][2 * u], s[n][2 * u + 1]));
            m_new = fmaxf(m_new, __shfl_xor_sync(ALL_LANES, m_new, 1));    // the four lanes of a row differ in two bits
            m_new = fmaxf(m_new, __shfl_xor_sync(ALL_LANES, m_new, 2));
            const float base = m_new == -INFINITY ? 0.f : m_new;           // no key seen so far: e^(-inf - 0) = 0 where -inf - -inf is NaN

            const float corr = expf(m[u] - base);  // what the earlier tiles' terms shrink by, 0 .. 1
            m[u] = m_new;
            l[u] *= corr;
#pragma unroll
            for (int y = 0; y < D / 8; ++y) {
                o[y][2 * u] *= corr;
                o[y][2 * u + 1] *= corr;
            }
#pragma unroll
            for (int n = 0; n < Bc / 8; ++n) {
                s[n][2 * u] = expf(s[n][2 * u] - base);                    // from here s holds probabilities before their division by l
                s[n][2 * u + 1] = expf(s[n][2 * u + 1] - base);
                l[u] += s[n][2 * u] + s[n][2 * u + 1];
            }
        }

        TRACE(accumulate, j);
#pragma unroll
        for (int n = 0; n < Bc / 8; n += 2) {      // 16 keys: two accumulators of S are one operand
            const unsigned p[4] = {pack<T>(s[n][0], s[n][1]), pack<T>(s[n][2], s[n][3]),
                                   pack<T>(s[n + 1][0], s[n + 1][1]), pack<T>(s[n + 1][2], s[n + 1][3])};
#pragma unroll
            for (int y = 0; y < D / 8; y += 2) {
                unsigned v[4];                     // these keys, 16 columns: v[0], v[1] of the first eight, v[2], v[3] of the others
                ldmatrix_x4_trans(v, shared_address(&Vj[8 * n + lane % 16][8 * y + lane / 16 * 8]));
                mma_m16n8k16<T>(o[y], p, v[0], v[1]);
                mma_m16n8k16<T>(o[y + 1], p, v[2], v[3]);
            }
        }
        __syncthreads();  // Kj and Vj are no longer read: the next tile may overwrite them
    }

    TRACE(store_o, i);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        l[u] += __shfl_xor_sync(ALL_LANES, l[u], 1);           // the shares of the four lanes of a row
        l[u] += __shfl_xor_sync(ALL_LANES, l[u], 2);
        const int q = i * Br + row + g + 8 * u;
        if (q >= Nq) continue;                     // the shuffles are done: lanes may part
        const float inverse = l[u] == 0.f ? 0.f : 1.f / l[u];  // the one division; 0 for a row that saw no key
#pragma unroll
        for (int y = 0; y < D / 8; ++y)            // two numbers at a time: what a lane has side by side
            *reinterpret_cast<unsigned*>(&O[(long long)q * D + 8 * y + 2 * t]) = pack<T>(o[y][2 * u] * inverse, o[y][2 * u + 1] * inverse);
        if (t == 0) L[q] = m[u] + logf(l[u]);      // -inf where no key was seen
    }
}
