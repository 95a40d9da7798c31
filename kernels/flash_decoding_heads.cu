// flash_decoding_heads.cu: flash decoding for grouped heads: the queries that share a head of K and V are one product on the tensor cores.
//
// With grouped heads (Hq > Hkv) `flash_decoding_vectors.cu` reads each K, V head once for every query head of the group, and multiplies one
// number at a time. Here a block has all the queries of a group, up to 8, and each number of K and V that arrives is used for all of
// them at once, by `mma_m16n8k16`, in about as many instructions as one query took. So eight queries cost what one costs: the bytes.
//
// An mma has 16 rows and 8 columns. Queries are few and keys are many, so everything is transposed: S^T = K Q^T and O^T = V^T P^T,
// with 16 keys (or 16 columns of V) as the rows and the queries as the columns. K and V go from HBM straight into the registers that the
// product takes its operands from:
//
//   order    a sum over columns does not care for their order. A lane loads neighbouring columns of K, 16 bytes at a time, and hands them
//            to the product as if they were the columns that its place in the warp calls for; Q is loaded the same way, so the pairs are right
//   pairs    P^T and V^T meet over keys, and an operand register holds two keys of one column, where V has two columns of one key: two
//            byte permutations turn two registers of two rows into what is needed. P^T comes out of S^T by `transpose_8x8`
//   ahead    the registers of K are free once the scores are there, so the next tile's K is asked for before V is used
//
// Layout   T is half or bfloat16, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D], their rows at multiples of 16 bytes
//          float:  L [B, Hq, Nq]   Os [splits, B, Hq, Nq, D] and Ls [splits, B, Hq, Nq], scratch, which with one split nobody touches
// Heads    query head h reads K, V head h / (Hq / Hkv); a block owns the Hq / Hkv heads of one K, V head: rows = Hq / Hkv * Nq, at most 8
// Splits   each takes the same number of whole tiles of Bc keys, ceil(ceil(kv_len / Bc) / splits); the last ones may get fewer, or none
// Causal   aligned bottom-right: query q sees the keys k <= q + kv_len - Nq. A row that sees no key gets O = 0 and L = -inf
// kv_len   how many rows of K and V are used; what lies behind is never touched
// Launch   one block per split, K, V head and batch, 32 * Warps threads; not twice at the same time (see include/decoding.cuh)
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernel, what to compile, what to check.
// @kernel    flash_decoding_heads
// @paper     Flash-Decoding for long-context inference, https://crfm.stanford.edu/2023/10/12/flashdecoding.html
// @grid      splits, Hkv, B
// @block     32 * Warps
// @arch      80
// @blocks    Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @array     Os [splits, B, Hq, Nq, D]
// @array     Ls [splits, B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @default   kv_len = Nk
// @require   Hq % Hkv == 0
// @require   Hq / Hkv * Nq <= 8
// @require   kv_len <= Nk
// @require   B * Hkv <= 65536
// @instance  T=half Bc=16 D=64 Warps=1
// @instance  T=half Bc=128 D=64 Warps=8
// @instance  T=half Bc=128 D=128 Warps=8
// @instance  T=bfloat16 Bc=128 D=64 Warps=8
// @instance  T=bfloat16 Bc=128 D=128 Warps=8
// @instance  T=half Bc=64 D=128 Warps=4
// @tune      Bc=64 Warps=4
// @tune      Bc=128 Warps=8
// @tune      Bc=192 Warps=12
// @shape     B=1 Hq=8 Hkv=1 Nq=1 Nk=257 causal=0 splits=2
// @shape     B=2 Hq=3 Hkv=1 Nq=2 Nk=70 causal=1 splits=3
// @shape     B=1 Hq=2 Hkv=2 Nq=5 Nk=3 causal=1 splits=2
// @shape     B=1 Hq=4 Hkv=2 Nq=1 Nk=70 causal=1 splits=2 kv_len=61
#include "include/decoding.cuh"
#include "include/numbers.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

__device__ __forceinline__ void take(unsigned (&r)[4], uint4 v) {
    r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
}

template <typename T, int Bc, int D, int Warps>
__global__ void __launch_bounds__(32 * Warps, 1)
    flash_decoding_heads(const T* Q, const T* K, const T* V, T* O, float* L, float* Os, float* Ls, int Nq, int Nk, float scale, int causal,
                         int Hq, int Hkv, int splits, int kv_len) {
    constexpr int Rows = 8;                        // queries that an mma takes
    static_assert(Bc == 16 * Warps && D % 64 == 0, "each warp has 16 keys of a tile, and D is 64, 128, ...");

    const int s = blockIdx.x;              // split,           0 .. splits - 1
    const int h = blockIdx.y;              // head of K and V, 0 .. Hkv - 1
    const int b = blockIdx.z;              // batch,           0 .. B - 1
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;  // place in an operand: row (or column) g, and columns (or rows) 2t, 2t + 1, ...
    const int rows = Hq / Hkv * Nq;        // queries that read this head, 1 .. Rows; row r is query r % Nq of its head
    TRACE_BLOCK(b, h, s);

    // From here all arrays are those of this head alone. 64-bit: B * H * N * D passes 2^31 long before the memory is full.
    const long long head = (long long)b * Hkv + h;
    const long long queries = (long long)gridDim.z * Hkv * rows;   // rows of Os and Ls from one split to the next
    Q += head * rows * D;
    K += head * Nk * D + t * 16;           // this lane's columns of K: 64 c + 16 t .. + 15
    V += head * Nk * D + g * 8;            // and of V:                64 c + 8 g .. + 7
    O += head * rows * D;
    L += head * rows;
    Os += head * rows * D;
    Ls += head * rows;

    SharedCarver carve;                    // for the warps' states, once their keys are done
    const auto warp_o = carve.tile<Warps * 8, D>("warp_o");
    const auto warp_m = carve.tile<Warps, 8>("warp_m");
    const auto warp_l = carve.tile<Warps, 8>("warp_l");

    int end[2];                            // the keys before it are seen by row 2t, and by 2t + 1
#pragma unroll
    for (int i = 0; i < 2; ++i) end[i] = causal ? kv_len - Nq + (2 * t + i) % Nq + 1 : kv_len;
    const int tiles = (kv_len + Bc - 1) / Bc;
    const int each = (tiles + splits - 1) / splits;
    const int first = min(s * each, tiles), last = min(first + each, tiles);

    TRACE(load_q, s);
    unsigned q[D / 32][4] = {};                    // of row g; 0 for the rows that there are not
    if (g < rows) {
#pragma unroll
        for (int c = 0; c < D / 32; ++c) take(q[c], load_once(Q + g * D + c / 2 * 64 + c % 2 * 8 + t * 16));
    }
    scale *= Log2e;                                // scores in units of 2, so that e^s is one instruction
    float o[D / 64][4][4] = {};                    // o[c][i] of rows 2t (0, 2) and 2t + 1 (1, 3): columns 64c + 8g + 2i (0, 1) and + 1 (2, 3)
    float m[2] = {Lowest, Lowest}, l[2] = {};      // of rows 2t and 2t + 1; m is that of the warp, l of this lane's keys

    unsigned k[2][D / 32][4], v[4][D / 64][4];     // k: rows g and g + 8 of the warp's 16 keys; v: rows 2t, 2t + 1, 2t + 8 and 2t + 9
    const auto load_k = [&](int key) {             // past the end of the keys the last row once more
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int c = 0; c < D / 32; ++c) {     // of a line the lane asks for two pieces, one after the other
                const T* row = K + (long long)min(key + i * 8 + g, kv_len - 1) * D;
                take(k[i][c], load_piece(row + c / 2 * 64 + c % 2 * 8));
            }
    };
    if (first < last) {
        TRACE(load_k, first);
        load_k(first * Bc + warp * 16);
    }
    for (int j = first; j < last; ++j) {
        const int key = j * Bc + warp * 16;        // this warp's keys of tile j are key .. key + 15

        TRACE(load_v, j);                          // past the end as well, for V there could be NaN, and 0 * NaN is no 0
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < D / 64; ++c) {
                const T* row = V + (long long)min(key + t * 2 + i % 2 + i / 2 * 8, kv_len - 1) * D;
                take(v[i][c], load_once(row + c * 64));
            }

        TRACE(scores, j);
        float p[4] = {}, m_new[2] = {m[0], m[1]};  // p: key g (0, 1) and g + 8 (2, 3) for rows 2t (0, 2) and 2t + 1 (1, 3)
#pragma unroll
        for (int c = 0; c < D / 32; ++c)
#pragma unroll
            for (int x = 0; x < 4; x += 2) {       // 16 columns: 4 from each of the lanes t
                const unsigned a[4] = {k[0][c][x], k[1][c][x], k[0][c][x + 1], k[1][c][x + 1]};
                mma_m16n8k16<T>(p, a, q[c][x], q[c][x + 1]);
            }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i] = key + i / 2 * 8 + g < end[i % 2] ? p[i] * scale : -INFINITY;
            m_new[i % 2] = fmaxf(m_new[i % 2], p[i]);
        }

        if (j + 1 < last) {                                // K's registers are free: the next tile is under way while V is waited for
            TRACE(load_k, j + 1);
            load_k(key + Bc);
        }

        TRACE(softmax, j);
        float corr[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) m_new[i] = fmaxf(m_new[i], __shfl_xor_sync(0xffffffffu, m_new[i], step));
            corr[i] = exp2_approx(m[i] - m_new[i]);
            m[i] = m_new[i];
            l[i] *= corr[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i] = exp2_approx(p[i] - m[i % 2]);
            l[i % 2] += p[i];
        }

        TRACE(accumulate, j);
        const unsigned p0 = transpose_8x8(pack<T>(p[0], p[1]));        // row g, keys 2t and 2t + 1
        const unsigned p1 = transpose_8x8(pack<T>(p[2], p[3]));        // and 2t + 8 and 2t + 9
#pragma unroll
        for (int c = 0; c < D / 64; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {          // columns 64c + 8g + 2i, from the low halves, and + 1, from the high ones
#pragma unroll
                for (int x = 0; x < 4; ++x) o[c][i][x] *= corr[x % 2];
                const unsigned a[4] = {__byte_perm(v[0][c][i], v[1][c][i], 0x5410), __byte_perm(v[0][c][i], v[1][c][i], 0x7632),
                                       __byte_perm(v[2][c][i], v[3][c][i], 0x5410), __byte_perm(v[2][c][i], v[3][c][i], 0x7632)};
                mma_m16n8k16<T>(o[c][i], a, p0, p1);
            }
    }

    // The states of the warps become one through shared memory. There a row's columns stand crossed with the row, column x of row r at
    // x ^ (r / 2 * 2), so that the lanes t, which store two rows apart, meet other banks.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int r = 2 * t + i;
#pragma unroll
        for (int step = 4; step < 32; step *= 2) l[i] += __shfl_xor_sync(0xffffffffu, l[i], step);
        if (g == 0) {
            warp_m[warp][r] = m[i];
            warp_l[warp][r] = l[i];
        }
#pragma unroll
        for (int c = 0; c < D / 64; ++c)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                float* const place = &warp_o[warp * Rows + r][(c * 64 + g * 8 + x * 2) ^ (t * 2)];
                *reinterpret_cast<float2*>(place) = float2{o[c][x][i], o[c][x][2 + i]};
            }
    }
    __syncthreads();  // the states of all warps are there before threads read rows of them

    // From here a thread has four neighbouring columns of a row, x .. x + 3 of row r: elements e .. e + 3 of [rows, D].
    const auto answer = [&](int r, int x, float (&sum)[4]) {   // what the block's keys give, normalised, and its logsumexp
        float top = Lowest, total = 0.f;
#pragma unroll
        for (int w = 0; w < Warps; ++w) top = fmaxf(top, warp_m[w][r]);
#pragma unroll
        for (int w = 0; w < Warps; ++w) {
            const float weight = exp2_approx(warp_m[w][r] - top);
            total += weight * warp_l[w][r];
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const float2 two = *reinterpret_cast<const float2*>(&warp_o[w * Rows + r][(x + i) ^ (r / 2 * 2)]);
                sum[i] += weight * two.x;
                sum[i + 1] += weight * two.y;
            }
        }
        return finish(top, total, sum);
    };
    const auto store = [&](int e, const float (&sum)[4], float logsumexp) {
        *reinterpret_cast<uint2*>(O + e) = uint2{pack<T>(sum[0], sum[1]), pack<T>(sum[2], sum[3])};
        if (e % D == 0) L[e / D] = logsumexp;
    };

    if (splits == 1) {
        TRACE(store_o, 0);
        for (int e = 4 * threadIdx.x; e < rows * D; e += 128 * Warps) {
            float sum[4] = {};
            const float logsumexp = answer(e / D, e % D, sum);
            store(e, sum, logsumexp);
        }
        return;
    }
    TRACE(store_partial, s);
    for (int e = 4 * threadIdx.x; e < rows * D; e += 128 * Warps) {
        float sum[4] = {};
        const float logsumexp = answer(e / D, e % D, sum);
        *reinterpret_cast<float4*>(Os + s * queries * D + e) = float4{sum[0], sum[1], sum[2], sum[3]};
        if (e % D == 0) Ls[s * queries + e / D] = logsumexp;
    }
    if (!is_last_block(head, splits)) return;

    // The last block of the head merges the splits: the same columns of all of them.
    TRACE(load_partials, 0);
    constexpr int Turns = (Rows * D + 128 * Warps - 1) / (128 * Warps);
    float top[Turns], total[Turns], sum[Turns][4];
#pragma unroll
    for (int n = 0; n < Turns; ++n) {
        const int e = 4 * (n * 32 * Warps + threadIdx.x);
        top[n] = Lowest;
        total[n] = sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.f;
        if (e >= rows * D) continue;
#pragma unroll 8
        for (int i = 0; i < splits; ++i) {         // unrolled, so that several are under way
            const float4 part = __ldcg(reinterpret_cast<const float4*>(Os + i * queries * D + e));
            const float m2 = fmaxf(Lowest, __ldcg(Ls + i * queries + e / D) * Log2e);
            const float o2[4] = {part.x, part.y, part.z, part.w};
            merge(top[n], total[n], sum[n], m2, m2 == Lowest ? 0.f : 1.f, o2);     // normalised: its l is 1, or 0 if it saw no key
        }
    }
    TRACE(store_o, 0);
#pragma unroll
    for (int n = 0; n < Turns; ++n) {
        const int e = 4 * (n * 32 * Warps + threadIdx.x);
        if (e < rows * D) store(e, sum[n], finish(top[n], total[n], sum[n]));
    }
}
