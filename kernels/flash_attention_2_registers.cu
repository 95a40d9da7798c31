// flash_attention_2_registers.cu: rung 2 of the ladder, float32. FlashAttention-2 with both products tiled in registers: every number read from
// shared memory serves 4 or 8 products.
//
// Rung 1 multiplies a tile as one row of lanes: for 16 products (8 rows, 2 keys) a lane reads 10 words, one at a time. A multiprocessor's
// shared memory gives 32 words a cycle and its float32 units take 128 products, so they wait. Here the lanes of a warp stand in 4 rows of
// 8. With r = 0 .. 3 and c = 0 .. 7 a lane has
//
//     of the scores S   `Rows` rows, four neighbours of each 16 from 4 r on       times  the keys c, c + 8, c + 16 ... of the tile
//     of the output O   the same rows                                            times  four neighbouring columns of each 32, from 4 c on
//
// and reads for 64 products 16 numbers, four at a time (a float4, one instruction). Three choices make these reads cheap:
//   - Rows of K have four floats more than D, so that the eight keys of one read lie in eight different banks.
//   - r is bits 0 and 4 of the lane's number and c the others: four neighbouring lanes ask for only two different places, which takes a
//     multiprocessor two cycles and not four.
//   - Q and P lie transposed, so that four rows are one read. This also spares cycles that the source does not show: a multiply-add reads three
//     registers, and two with even numbers (or two with odd ones) cost a cycle more, unless one is still at hand from the instruction before.
//     Four columns of a row are four neighbouring registers, even, odd, even, odd, so sums along d run into it half of the time. Here q[y] meets
//     the same s[y][n] at every d, and the compiler can give the two numbers of different kinds.
//
// Layout   float32, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq]; all start at a multiple of 16 bytes
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Launch   one block per row block, query head and batch; a warp for each 4 `Rows` of its rows, with dynamic shared memory for the parts below
//
// @kernel    flash_attention_2_registers
// @paper     arXiv 2307.08691, Algorithm 1
// @grid      ceil(Nq / Br), Hq, B
// @block     8 * Br / Rows
// @arch      80
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @require   Hq % Hkv == 0
// @instance  Br=16 Bc=8 D=32 Rows=4
// @instance  Br=32 Bc=16 D=32 Rows=4
// @instance  Br=128 Bc=64 D=64 Rows=8
// @instance  Br=128 Bc=32 D=128 Rows=8
// @instance  Br=256 Bc=32 D=128 Rows=8
// @tune      Br=64,128,256 Bc=32,64 Rows=4,8
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33 causal=0
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70 causal=1
// @shape     B=1 Hq=2 Hkv=2 Nq=70 Nk=5 causal=1
#include "include/numbers.cuh"
#include "include/ptx.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

// Four neighbouring floats in one instruction; p is a multiple of 16 bytes.
__device__ __forceinline__ void read4(float* to, const float* p) {
    const float4 x = *reinterpret_cast<const float4*>(p);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
__device__ __forceinline__ void write4(float* p, float a, float b, float c, float d) { *reinterpret_cast<float4*>(p) = make_float4(a, b, c, d); }

// A tile of `Rows` rows of D floats, from HBM to shared memory where a row takes `Stride`; of them only `exist` exist, 0 for the others: what
// lies there could be NaN, and 0 * NaN is no 0. Each thread moves the same number of pieces of 16 bytes, all asked for before the first is there.
template <int Rows, int D, int Stride, int Threads>
__device__ __forceinline__ void load_tile(float* to, const float* from, int exist) {
    static_assert(Rows * D / 4 % Threads == 0, "every thread moves as many pieces");
#pragma unroll
    for (int n = 0; n < Rows * D / 4 / Threads; ++n) {
        const int e = threadIdx.x + n * Threads;
        const int row = e / (D / 4), x = e % (D / 4) * 4;
        float v[4] = {};
        if (row < exist) read4(v, from + (long long)row * D + x);
        write4(to + row * Stride + x, v[0], v[1], v[2], v[3]);
    }
}

template <int Br, int Bc, int D, int Rows>
__global__ void __launch_bounds__(8 * Br / Rows, 32 * Rows / Br)  // eight warps on a multiprocessor, so that a lane may have 255 registers
flash_attention_2_registers(const float* Q, const float* K, const float* V, float* O, float* L,
                            int Nq, int Nk, float scale, int causal, int Hq, int Hkv) {
    static_assert(Rows % 4 == 0 && Br % (4 * Rows) == 0 && Bc % 8 == 0 && D % 32 == 0, "lanes share rows, keys and columns evenly");
    constexpr int Threads = 8 * Br / Rows;
    constexpr int Keys = Bc / 8;                   // keys of a tile that a lane has
    constexpr int Columns = D / 32;                // times four columns of the output
    const int i = gridDim.x - 1 - blockIdx.x;      // row block, the last first: with a causal mask it sees the most keys
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
    const auto Qi = carve.tile<D, Br + 4>("Qi");   // transposed, as is Pij
    const auto Kj = carve.tile<Bc, D + 4>("Kj");
    const auto Vj = carve.tile<Bc, D>("Vj");
    const auto Pij = carve.tile<Bc, Br + 8>("Pij");  // probabilities before their division by l: the one thing that lanes tell each other

    const int lane = threadIdx.x % 32;
    const int c = lane / 2 % 8, r = lane % 2 + lane / 16 * 2;
    const int row = threadIdx.x / 32 * 4 * Rows + 4 * r;           // the lane's rows are row + 16 (y / 4) + y % 4, y = 0 .. Rows - 1
    const float scale_log2 = scale * 1.44269504f;  // e^x is 2^(x log2 e), and 2^x is one instruction: S and m count in powers of 2

    float m[Rows], l[Rows] = {};                   // m is the same in the eight lanes of a row; l is the sum over this lane's keys
    float o[Rows][Columns][4] = {};                // o[y][x][e]: the lane's row y, column 32 x + 4 c + e; unnormalised
#pragma unroll
    for (int y = 0; y < Rows; ++y) m[y] = -INFINITY;

    const int last_row = min((i + 1) * Br, Nq) - 1;
    const int visible = causal ? max(0, min(Nk, last_row + 1 + (Nk - Nq))) : Nk;
    const int tiles = (visible + Bc - 1) / Bc;

    TRACE(load_q, i);
    for (int e = threadIdx.x; e < Br * D; e += Threads) {
        const int q = i * Br + e / D;              // row of Q, may be past Nq in the last block
        Qi[e % D][e / D] = q < Nq ? Q[(long long)q * D + e % D] : 0.f;
    }

    for (int j = 0; j < tiles; ++j) {
        TRACE(load_k, j);
        load_tile<Bc, D, D + 4, Threads>(Kj[0], K + (long long)j * Bc * D, Nk - j * Bc);

        TRACE(load_v, j);
        load_tile<Bc, D, D, Threads>(Vj[0], V + (long long)j * Bc * D, Nk - j * Bc);
        __syncthreads();  // Kj and Vj (and before the first tile Qi) are complete before any warp reads them

        TRACE(scores, j);
        float s[Rows][Keys] = {};                  // s[y][n]: the lane's row y, key c + 8 n of the tile
#pragma unroll 2
        for (int d = 0; d < D; d += 4) {
            float k[Keys][4];
#pragma unroll
            for (int n = 0; n < Keys; ++n) read4(k[n], Kj[c + 8 * n] + d);
#pragma unroll
            for (int e = 0; e < 4; ++e) {          // column d + e: `Rows` numbers of Q times `Keys` of K
                float q[Rows];
#pragma unroll
                for (int y = 0; y < Rows; y += 4) read4(q + y, Qi[d + e] + row + 4 * y);
#pragma unroll
                for (int n = 0; n < Keys; ++n)
#pragma unroll
                    for (int y = 0; y < Rows; ++y) s[y][n] += q[y] * k[n][e];
            }
        }

        TRACE(softmax, j);
        // Only the last tile, and with a causal mask those at the diagonal, have scores that do not count.
        const bool edge = (j + 1) * Bc > Nk || (causal && (j + 1) * Bc - 1 > i * Br + (Nk - Nq));
#pragma unroll
        for (int y = 0; y < Rows; ++y) {
            const int q = i * Br + row + 4 * (y - y % 4) + y % 4;
            float m_new = m[y];
#pragma unroll
            for (int n = 0; n < Keys; ++n) {
                const int k = j * Bc + c + 8 * n;
                const bool seen = !edge || (k < Nk && (!causal || k <= q + (Nk - Nq)));
                s[y][n] = seen ? s[y][n] * scale_log2 : -INFINITY;
                m_new = fmaxf(m_new, s[y][n]);
            }
#pragma unroll
            for (int bit = 2; bit <= 8; bit *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(ALL_LANES, m_new, bit));  // over c: bits 1, 2, 3
            const float base = m_new == -INFINITY ? 0.f : m_new;   // no key seen so far: 2^(-inf - 0) = 0 where -inf - -inf is NaN
            const float corr = exp2_approx(m[y] - base);           // what the earlier tiles' terms shrink by, 0 .. 1
            m[y] = m_new;
            l[y] *= corr;
#pragma unroll
            for (int n = 0; n < Keys; ++n) {
                s[y][n] = exp2_approx(s[y][n] - base);             // from here s holds probabilities
                l[y] += s[y][n];
            }
#pragma unroll
            for (int x = 0; x < Columns; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[y][x][e] *= corr;
        }
#pragma unroll
        for (int n = 0; n < Keys; ++n)
#pragma unroll
            for (int y = 0; y < Rows; y += 4) write4(Pij[c + 8 * n] + row + 4 * y, s[y][n], s[y + 1][n], s[y + 2][n], s[y + 3][n]);
        __syncwarp();  // the warp's rows of Pij are complete before its lanes read them; no other warp does

        TRACE(accumulate, j);
#pragma unroll 8
        for (int k = 0; k < Bc; ++k) {             // key k: `Rows` numbers of P times 4 `Columns` of V
            float p[Rows], v[Columns][4];
#pragma unroll
            for (int y = 0; y < Rows; y += 4) read4(p + y, Pij[k] + row + 4 * y);
#pragma unroll
            for (int x = 0; x < Columns; ++x) read4(v[x], Vj[k] + 32 * x + 4 * c);
#pragma unroll
            for (int x = 0; x < Columns; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e)
#pragma unroll
                    for (int y = 0; y < Rows; ++y) o[y][x][e] += p[y] * v[x][e];
        }
        __syncthreads();  // Kj, Vj and Pij are no longer read: the next tile may overwrite them
    }

    TRACE(store_o, i);
#pragma unroll
    for (int y = 0; y < Rows; ++y) {
#pragma unroll
        for (int bit = 2; bit <= 8; bit *= 2) l[y] += __shfl_xor_sync(ALL_LANES, l[y], bit);
        const int q = i * Br + row + 4 * (y - y % 4) + y % 4;
        if (q >= Nq) continue;
        const float share = l[y] == 0.f ? 0.f : 1.f / l[y];        // the one division; no key seen gives 0
        if (c == 0) L[q] = (m[y] + log2f(l[y])) * 0.693147181f;    // back to the natural logarithm; -inf where no key was seen
#pragma unroll
        for (int x = 0; x < Columns; ++x)
            write4(O + (long long)q * D + 32 * x + 4 * c, o[y][x][0] * share, o[y][x][1] * share, o[y][x][2] * share, o[y][x][3] * share);
    }
}
