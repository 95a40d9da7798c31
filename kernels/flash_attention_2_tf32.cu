// flash_attention_2_tf32.cu: the tensor cores' way to float32. FlashAttention-2 with every product made of three TF32 products.
//
// A tensor core multiplies and adds some ten times as much as the float32 units do in the same time, but it takes 16-bit floats, or TF32: a
// float of which it sees ten fraction bits and not 23. One such product would be off by 2^-11. So each number is split in two,
//
//     x = big + small,   big: x rounded to ten fraction bits,   small: the rest, exactly, of which the product sees ten bits again
//     x y = small_x big_y + big_x small_y + big_x big_y         small_x small_y, some 2^-22 of x y, is left out
//
// and three TF32 products give what float32 gives, at a third of the tensor cores' speed. (PyTorch's memory-efficient kernel does it too.)
//
// Beside rung 2 the loops over tiles, the loads and the softmax stay. What changes is who holds what: the layout of mma.m16n8k8, which
// include/ptx.cuh gives. A warp has `Rows` rows, one or two tiles of 16; with g = lane / 4 and t = lane % 4 a lane has, of each tile,
//
//     of S   rows g and g + 8, keys 8n + 2t and 8n + 2t + 1     of O   the same rows, and of each 16 columns the four from 4t on
//
// Two freedoms make the layouts meet without moving a number between lanes. A sum over k may be taken in any order: what the
// product calls columns t and t + 4 of its left side may be any two, if the rows of its right side are the same two. So Q and K are read in
// pieces of four neighbouring columns, and P goes into P V from the registers in which S was computed, its keys 2t and 2t + 1 named t
// and t + 4. And the columns of V may be dealt to products in any order: lane g's are 2g and 2g + 1, so two products share one read.
//
// Layout   float32, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq]; all start at a multiple of 16 bytes
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Launch   one block per row block, query head and batch; a warp for each `Rows` of its rows, with dynamic shared memory for the parts below
//
// @kernel    flash_attention_2_tf32
// @paper     arXiv 2307.08691, Algorithm 1
// @grid      ceil(Nq / Br), Hq, B
// @block     32 * Br / Rows
// @arch      80
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @require   Hq % Hkv == 0
// @instance  Br=16 Bc=16 D=16 Rows=16
// @instance  Br=64 Bc=16 D=32 Rows=32
// @instance  Br=32 Bc=32 D=64 Rows=16
// @instance  Br=128 Bc=32 D=64 Rows=32
// @instance  Br=128 Bc=48 D=128 Rows=16
// @tune      Br=64,128 Bc=32,48,64 Rows=16,32
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33 causal=0
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70 causal=1
// @shape     B=1 Hq=2 Hkv=2 Nq=70 Nk=5 causal=1
#include "include/numbers.cuh"
#include "include/ptx.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

__device__ __forceinline__ float4 read4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ float2 read2(const float* p) { return *reinterpret_cast<const float2*>(p); }

// `Count` numbers of one side of a product, each as big + small. Rounding is half of the last bit that stays, added, and what is behind
// it cut off; `to_tf32` does the same in one instruction, which takes longer than these two.
template <int Count>
struct Split {
    unsigned big[Count], small[Count];
    __device__ __forceinline__ void set(int n, float x) {
        big[n] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
        small[n] = __float_as_uint(x - __uint_as_float(big[n]));
    }
};

// d[a][first + n] += A[a] B[n] for `Tiles` tiles of rows and `Count` tiles of columns. One of the three products goes through all of
// them before the next begins: a sum that has just been started takes some thirty cycles, and the others go on meanwhile.
template <int Tiles, int Count, int All>
__device__ __forceinline__ void multiply(float (&d)[Tiles][All][4], int first, const Split<4> (&A)[Tiles], const Split<2> (&B)[Count]) {
#pragma unroll
    for (int n = 0; n < Count; ++n)
#pragma unroll
        for (int a = 0; a < Tiles; ++a) mma_m16n8k8_tf32(d[a][first + n], A[a].small, B[n].big[0], B[n].big[1]);
#pragma unroll
    for (int n = 0; n < Count; ++n)
#pragma unroll
        for (int a = 0; a < Tiles; ++a) mma_m16n8k8_tf32(d[a][first + n], A[a].big, B[n].small[0], B[n].small[1]);
#pragma unroll
    for (int n = 0; n < Count; ++n)
#pragma unroll
        for (int a = 0; a < Tiles; ++a) mma_m16n8k8_tf32(d[a][first + n], A[a].big, B[n].big[0], B[n].big[1]);
}

// A tile of `Rows` rows of D floats, as in rung 2.
template <int Rows, int D, int Stride, int Threads>
__device__ __forceinline__ void load_tile(float* to, const float* from, int exist) {
    static_assert(Rows * D / 4 % Threads == 0, "every thread moves as many pieces");
#pragma unroll
    for (int n = 0; n < Rows * D / 4 / Threads; ++n) {
        const int e = threadIdx.x + n * Threads;
        const int row = e / (D / 4), x = e % (D / 4) * 4;
        float4 v = {0.f, 0.f, 0.f, 0.f};           // 0 where no row exists: what lies there could be NaN, and 0 * NaN is no 0
        if (row < exist) v = read4(from + (long long)row * D + x);
        *reinterpret_cast<float4*>(to + row * Stride + x) = v;
    }
}

template <int Br, int Bc, int D, int Rows>
__global__ void __launch_bounds__(32 * Br / Rows, 8 * Rows / Br)  // eight warps on a multiprocessor, so that a lane may have 255 registers
flash_attention_2_tf32(const float* Q, const float* K, const float* V, float* O, float* L,
                       int Nq, int Nk, float scale, int causal, int Hq, int Hkv) {
    static_assert(Rows % 16 == 0 && Br % Rows == 0 && Bc % 16 == 0 && D % 16 == 0, "a warp has whole tiles of a product");
    constexpr int Threads = 32 * Br / Rows;
    constexpr int Tiles = Rows / 16;               // of 16 rows; each fragment of K or V that is read and split serves all of them
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
    const auto Qi = carve.tile<Br, D + 16>("Qi");  // with 16 more, the 16-byte reads of rows g and g + 1 lie in different banks;
    const auto Kj = carve.tile<Bc, D + 16>("Kj");
    const auto Vj = carve.tile<Bc, D + 4>("Vj");   // with 4 more, so do the 8-byte reads of four rows t

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = threadIdx.x / 32 * Rows;       // the warp's first row of the tile
    const float scale_log2 = scale * 1.44269504f;  // e^x is 2^(x log2 e), and 2^x is one instruction: S and m count in powers of 2

    // Row y of a lane, y = 0 .. 2 Tiles - 1, is row + 8 y + g: of tile y / 2 the upper or the lower, elements 0 and 1 or 2 and 3.
    float m[2 * Tiles], l[2 * Tiles] = {};         // m is the same in the four lanes of a row; l is the sum over this lane's keys
    float o[Tiles][D / 8][4] = {};                 // unnormalised
#pragma unroll
    for (int y = 0; y < 2 * Tiles; ++y) m[y] = -INFINITY;

    const int last_row = min((i + 1) * Br, Nq) - 1;
    const int visible = causal ? max(0, min(Nk, last_row + 1 + (Nk - Nq))) : Nk;
    const int tiles = (visible + Bc - 1) / Bc;

    TRACE(load_q, i);
    load_tile<Br, D, D + 16, Threads>(Qi[0], Q + (long long)i * Br * D, Nq - i * Br);

    for (int j = 0; j < tiles; ++j) {
        TRACE(load_k, j);
        load_tile<Bc, D, D + 16, Threads>(Kj[0], K + (long long)j * Bc * D, Nk - j * Bc);

        TRACE(load_v, j);
        load_tile<Bc, D, D + 4, Threads>(Vj[0], V + (long long)j * Bc * D, Nk - j * Bc);
        __syncthreads();  // Kj and Vj (and before the first tile Qi) are complete before any warp reads them

        TRACE(scores, j);
        float s[Tiles][Bc / 8][4] = {};            // s[a][n]: rows 16 a .. + 15 of the warp, keys 8 n .. + 7 of the tile
#pragma unroll 1
        for (int x = 0; x < D; x += 16) {          // two products of eight columns: this lane's are x + 4t .. + 1, and x + 4t + 2 .. + 3
            Split<4> q[2][Tiles];
#pragma unroll
            for (int y = 0; y < 2 * Tiles; ++y) {
                const float4 v = read4(Qi[row + 8 * y + g] + x + 4 * t);
                q[0][y / 2].set(y % 2, v.x * scale_log2), q[0][y / 2].set(y % 2 + 2, v.y * scale_log2);
                q[1][y / 2].set(y % 2, v.z * scale_log2), q[1][y / 2].set(y % 2 + 2, v.w * scale_log2);
            }
#pragma unroll
            for (int n = 0; n < Bc / 8; n += 2) {
                Split<2> k[2][2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float4 v = read4(Kj[8 * (n + e) + g] + x + 4 * t);
                    k[0][e].set(0, v.x), k[0][e].set(1, v.y);
                    k[1][e].set(0, v.z), k[1][e].set(1, v.w);
                }
                multiply(s, n, q[0], k[0]);
                multiply(s, n, q[1], k[1]);
            }
        }

        TRACE(softmax, j);
        // Only the last tile, and with a causal mask those at the diagonal, have scores that do not count.
        const bool edge = (j + 1) * Bc > Nk || (causal && (j + 1) * Bc - 1 > i * Br + (Nk - Nq));
        float corr[2 * Tiles];                     // what the earlier tiles' terms shrink by, 0 .. 1
#pragma unroll
        for (int y = 0; y < 2 * Tiles; ++y) {
            const int a = y / 2, up = y % 2 * 2, q = i * Br + row + 8 * y + g;
            float m_new = m[y];
#pragma unroll
            for (int n = 0; n < Bc / 8; ++n)
#pragma unroll
                for (int e = up; e < up + 2; ++e) {
                    const int k = j * Bc + 8 * n + 2 * t + e % 2;
                    if (edge && (k >= Nk || (causal && k > q + (Nk - Nq)))) s[a][n][e] = -INFINITY;
                    m_new = fmaxf(m_new, s[a][n][e]);
                }
#pragma unroll
            for (int bit = 1; bit <= 2; bit *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, bit));  // over the lanes t
            const float base = m_new == -INFINITY ? 0.f : m_new;   // no key seen so far: 2^(-inf - 0) = 0 where -inf - -inf is NaN
            corr[y] = exp2_approx(m[y] - base);
            m[y] = m_new;
            l[y] *= corr[y];
#pragma unroll
            for (int n = 0; n < Bc / 8; ++n)
#pragma unroll
                for (int e = up; e < up + 2; ++e) {
                    s[a][n][e] = exp2_approx(s[a][n][e] - base);   // from here s holds probabilities before their division by l
                    l[y] += s[a][n][e];
                }
        }

        TRACE(accumulate, j);
        // A tensor core cuts its sums off where float32 rounds them. Over all keys that would add up, so a tile's sum begins at 0.
        float sum[Tiles][D / 8][4] = {};
#pragma unroll
        for (int k = 0; k < Bc; k += 8) {
            Split<4> p[Tiles];                     // keys k + 2t and k + 2t + 1 are columns t and t + 4 of this product's left side
#pragma unroll
            for (int a = 0; a < Tiles; ++a)
#pragma unroll
                for (int e = 0; e < 4; ++e) p[a].set(e / 2 + e % 2 * 2, s[a][k / 8][e]);
#pragma unroll
            for (int x = 0; x < D; x += 16) {      // columns x + 2g and x + 2g + 1 of V, one for each of two products
                Split<2> v[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float2 at = read2(Vj[k + 2 * t + e] + x + 2 * g);
                    v[0].set(e, at.x), v[1].set(e, at.y);
                }
                multiply(sum, x / 8, p, v);
            }
        }
#pragma unroll
        for (int a = 0; a < Tiles; ++a)
#pragma unroll
            for (int n = 0; n < D / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[a][n][e] = o[a][n][e] * corr[2 * a + e / 2] + sum[a][n][e];
        __syncthreads();  // Kj and Vj are no longer read: the next tile may overwrite them
    }

    TRACE(store_o, i);
#pragma unroll
    for (int y = 0; y < 2 * Tiles; ++y) {
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2) l[y] += __shfl_xor_sync(0xffffffffu, l[y], bit);
        const int q = i * Br + row + 8 * y + g;
        if (q >= Nq) continue;
        const float share = l[y] == 0.f ? 0.f : 1.f / l[y];        // the one division; no key seen gives 0
        if (t == 0) L[q] = (m[y] + log2f(l[y])) * 0.693147181f;    // back to the natural logarithm; -inf where no key was seen
#pragma unroll
        for (int x = 0; x < D; x += 16) {          // columns x + 4t .. + 3: of the two products the columns 2t, which are 4t and 4t + 1, and 2t + 1
            const float *even = o[y / 2][x / 8] + y % 2 * 2, *odd = o[y / 2][x / 8 + 1] + y % 2 * 2;
            *reinterpret_cast<float4*>(O + (long long)q * D + x + 4 * t) = make_float4(even[0] * share, odd[0] * share, even[1] * share, odd[1] * share);
        }
    }
}
