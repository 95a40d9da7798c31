// flash_decoding_vectors.cu: flash decoding at the speed of the memory: every thread asks for K and V 16 bytes at a time, many times ahead.
//
// A decoded token reads all of K and V once and computes next to nothing, so the one thing that counts is how many bytes are under way.
// `flash_decoding.cu` has few: it asks for 4 bytes a thread, puts them in shared memory, waits at a barrier for all of them, and asks
// for nothing while it computes. Here K and V are 16-bit and never see shared memory:
//
//   lanes    D / 8 lanes hold one key's row, 16 bytes each, so a warp reads 32 / (D / 8) whole rows with one instruction
//   loads    each lane issues `Loads` of them for K and as many for V before it uses the first: with eight, two blocks have 128 KB under way
//   warps    every warp has keys, a maximum, a sum and an accumulator of its own, in registers, and waits for nobody until its keys are done
//   splits   one launch instead of two: the last block of a head to finish merges what the others left
//
// A dot product is a sum over lanes, by shuffles; so is nothing else inside the loop, for each group of D / 8 lanes keeps the online softmax
// of its own keys. Afterwards the groups of a warp merge, then the warps of the block, then the splits: each time by the online softmax.
//
// Layout   T is half or bfloat16, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D], their rows at multiples of 16 bytes
//          float:  L [B, Hq, Nq]   Os [splits, B, Hq, Nq, D] and Ls [splits, B, Hq, Nq], scratch, which with one split nobody touches
// Heads    query head h reads K, V head h / (Hq / Hkv); a block has one query of one head, so a shared K, V head is read once for each
// Splits   each takes the same number of whole tiles of Bc keys, ceil(ceil(kv_len / Bc) / splits); the last ones may get fewer, or none
// Causal   aligned bottom-right: query q sees the keys k <= q + kv_len - Nq. A row that sees no key gets O = 0 and L = -inf
// kv_len   how many rows of K and V are used; what lies behind is never touched
// Launch   one block per split, query and batch, 32 * Warps threads; not twice at the same time (see include/decoding.cuh)
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernel, what to compile, what to check.
// @kernel    flash_decoding_vectors
// @paper     Flash-Decoding for long-context inference, https://crfm.stanford.edu/2023/10/12/flashdecoding.html
// @grid      splits, Hq * Nq, B
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
// @require   kv_len <= Nk
// @require   B * Hq * Nq <= 65536
// @instance  T=half Bc=4 D=64 Warps=1
// @instance  T=half Bc=256 D=64 Warps=8
// @instance  T=half Bc=128 D=128 Warps=8
// @instance  T=bfloat16 Bc=256 D=64 Warps=8
// @instance  T=bfloat16 Bc=128 D=128 Warps=8
// @tune      Bc=64,128 Warps=4
// @tune      Bc=64,128,256 Warps=8
// @tune      Bc=128,256 Warps=16
// @shape     B=1 Hq=1 Hkv=1 Nq=1 Nk=257 causal=0 splits=2
// @shape     B=2 Hq=3 Hkv=1 Nq=2 Nk=70 causal=1 splits=3
// @shape     B=1 Hq=2 Hkv=2 Nq=5 Nk=3 causal=1 splits=2
// @shape     B=1 Hq=2 Hkv=2 Nq=1 Nk=70 causal=1 splits=2 kv_len=61
#include "include/decoding.cuh"
#include "include/numbers.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

// 16 bytes as the 8 numbers they hold.
template <typename T>
__device__ __forceinline__ void unpack8(float (&x)[8], uint4 v) {
    unpack<T>(x[0], x[1], v.x);
    unpack<T>(x[2], x[3], v.y);
    unpack<T>(x[4], x[5], v.z);
    unpack<T>(x[6], x[7], v.w);
}

template <typename T, int Bc, int D, int Warps>
__global__ void __launch_bounds__(32 * Warps, 1)
    flash_decoding_vectors(const T* Q, const T* K, const T* V, T* O, float* L, float* Os, float* Ls, int Nq, int Nk, float scale,
                           int causal, int Hq, int Hkv, int splits, int kv_len) {
    constexpr int Lanes = D / 8;                   // lanes to a key
    constexpr int Groups = 32 / Lanes;             // groups of that many lanes in a warp: keys that it reads with one instruction
    constexpr int Loads = Bc / (Warps * Groups);   // keys of a tile for each group
    static_assert(Lanes * Groups == 32 && Loads * Groups * Warps == Bc, "D / 8 is a power of 2, and every group has as many keys of a tile");

    const int s = blockIdx.x;              // split,                     0 .. splits - 1
    const int row = blockIdx.y;            // query row % Nq of head row / Nq, 0 .. Hq * Nq - 1
    const int b = blockIdx.z;              // batch,                     0 .. B - 1
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = lane / Lanes;        // of its warp,               0 .. Groups - 1
    const int x0 = lane % Lanes * 8;       // this lane's columns are x0 .. x0 + 7
    TRACE_BLOCK(b, row, s);

    // From here all arrays are those of this query alone. 64-bit: B * H * N * D passes 2^31 long before the memory is full.
    const long long head = (long long)b * Hkv + row / Nq / (Hq / Hkv);
    const long long query = (long long)b * Hq * Nq + row;
    const long long queries = (long long)gridDim.z * Hq * Nq;   // rows of Os and Ls from one split to the next
    K += head * Nk * D + x0;
    V += head * Nk * D + x0;
    O += query * D;
    L += query;
    Os += query * D;
    Ls += query;

    SharedCarver carve;                    // for the warps' states, once their keys are done
    const auto warp_o = carve.tile<Warps, D>("warp_o");
    const auto warp_m = carve.vector<Warps>("warp_m");
    const auto warp_l = carve.vector<Warps>("warp_l");

    const int end = causal ? kv_len - Nq + row % Nq + 1 : kv_len;   // the keys before it are seen
    const int tiles = (kv_len + Bc - 1) / Bc;
    const int each = (tiles + splits - 1) / splits;
    const int first = min(s * each, tiles), last = min(first + each, tiles);

    TRACE(load_q, s);
    float q[8], o[8] = {}, m = Lowest, l = 0.f;    // o is unnormalised
    unpack8<T>(q, load_once(Q + query * D + x0));
#pragma unroll
    for (int x = 0; x < 8; ++x) q[x] *= scale * Log2e;  // scores in units of 2, so that e^s is one instruction

    for (int j = first; j < last; ++j) {
        const int key = (j * Warps + warp) * Loads * Groups + group;   // this group's first of the tile; its next ones follow Groups apart

        TRACE(load_k, j);
        uint4 k[Loads], v[Loads];
#pragma unroll
        for (int n = 0; n < Loads; ++n) k[n] = load_once(K + (long long)min(key + n * Groups, kv_len - 1) * D);

        TRACE(load_v, j);                          // past the end the last row once more: V there could be NaN, and 0 * NaN is no 0
#pragma unroll
        for (int n = 0; n < Loads; ++n) v[n] = load_once(V + (long long)min(key + n * Groups, kv_len - 1) * D);

        TRACE(scores, j);
        float p[Loads], m_new = m, row8[8];
#pragma unroll
        for (int n = 0; n < Loads; ++n) {
            unpack8<T>(row8, k[n]);
            p[n] = 0.f;
#pragma unroll
            for (int x = 0; x < 8; ++x) p[n] += q[x] * row8[x];
#pragma unroll
            for (int step = 1; step < Lanes; step *= 2) p[n] += __shfl_xor_sync(0xffffffffu, p[n], step);
            if (key + n * Groups >= end) p[n] = -INFINITY;
            m_new = fmaxf(m_new, p[n]);
        }

        TRACE(softmax, j);
        const float corr = exp2_approx(m - m_new);
        m = m_new;
        l *= corr;
#pragma unroll
        for (int n = 0; n < Loads; ++n) {
            p[n] = exp2_approx(p[n] - m);
            l += p[n];
        }

        TRACE(accumulate, j);
#pragma unroll
        for (int x = 0; x < 8; ++x) o[x] *= corr;
#pragma unroll
        for (int n = 0; n < Loads; ++n) {
            unpack8<T>(row8, v[n]);
#pragma unroll
            for (int x = 0; x < 8; ++x) o[x] += p[n] * row8[x];
        }
    }

    // The states of all groups of the block become one: those of a warp by shuffles, then those of the warps through shared memory.
    const auto gather = [&] {
#pragma unroll
        for (int step = Lanes; step < 32; step *= 2) {
            float o2[8];
#pragma unroll
            for (int x = 0; x < 8; ++x) o2[x] = __shfl_xor_sync(0xffffffffu, o[x], step);
            const float m2 = __shfl_xor_sync(0xffffffffu, m, step), l2 = __shfl_xor_sync(0xffffffffu, l, step);
            merge(m, l, o, m2, l2, o2);
        }
        if (group == 0) {
#pragma unroll
            for (int x = 0; x < 8; ++x) warp_o[warp][x0 + x] = o[x];
        }
        if (lane == 0) {
            warp_m[warp] = m;
            warp_l[warp] = l;
        }
        __syncthreads();  // the states of all warps are there before threads read columns of them
    };
    // Columns x and x + 1 of the block's answer, normalised, and its logsumexp.
    const auto answer = [&](int x, float (&both)[2]) {
        float top = Lowest, sum = 0.f;
#pragma unroll
        for (int w = 0; w < Warps; ++w) top = fmaxf(top, warp_m[w]);
#pragma unroll
        for (int w = 0; w < Warps; ++w) {
            const float weight = exp2_approx(warp_m[w] - top);
            sum += weight * warp_l[w];
            both[0] += weight * warp_o[w][x];
            both[1] += weight * warp_o[w][x + 1];
        }
        return finish(top, sum, both);
    };
    const auto store = [&] {
        for (int x = 2 * threadIdx.x; x < D; x += 64 * Warps) {
            float both[2] = {};
            const float logsumexp = answer(x, both);
            *reinterpret_cast<unsigned*>(O + x) = pack<T>(both[0], both[1]);
            if (x == 0) *L = logsumexp;
        }
    };

    if (splits == 1) {
        TRACE(store_o, 0);
        gather();
        store();
        return;
    }
    TRACE(store_partial, s);
    gather();
    for (int x = 2 * threadIdx.x; x < D; x += 64 * Warps) {
        float both[2] = {};
        const float logsumexp = answer(x, both);
        *reinterpret_cast<float2*>(Os + s * queries * D + x) = float2{both[0], both[1]};
        if (x == 0) Ls[s * queries] = logsumexp;
    }
    if (!is_last_block(query, splits)) return;     // has barriers: after it warp_o, warp_m and warp_l may be written again

    // The last block of the query: each group of lanes takes splits as it took keys.
    TRACE(load_partials, 0);
    m = Lowest;
    l = 0.f;
#pragma unroll
    for (int x = 0; x < 8; ++x) o[x] = 0.f;
    for (int n = warp * Groups + group; n < splits; n += Warps * Groups) {
        const float4* part = reinterpret_cast<const float4*>(Os + n * queries * D + x0);
        const float4 low = __ldcg(part), high = __ldcg(part + 1);
        const float m2 = fmaxf(Lowest, __ldcg(Ls + n * queries) * Log2e);
        const float o2[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        merge(m, l, o, m2, m2 == Lowest ? 0.f : 1.f, o2);      // normalised: its l is 1, or 0 if it saw no key
    }
    gather();
    TRACE(store_o, 0);
    store();
}
