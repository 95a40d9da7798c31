// decoding.cuh: what the decoding rungs share: two answers over different keys become one, and the block that is the last of its head.
#pragma once
#include "numbers.cuh"
#include "ptx.cuh"

// A maximum that no score is below, and finite: what saw no key then weighs 2^(Lowest - m) = 0, and never -inf - -inf = NaN.
constexpr float Lowest = -3.4e38f;
constexpr float Log2e = 1.44269504f, Ln2 = 0.693147181f;

// The step of the online softmax for two states (m, l, o) that saw different keys: m the maximum in units of 2, l the sum of 2^(s - m),
// o [N] the sum of 2^(s - m) v. The first becomes that of both.
template <int N>
__device__ __forceinline__ void merge(float& m, float& l, float (&o)[N], float m2, float l2, const float (&o2)[N]) {
    const float top = fmaxf(m, m2), w = exp2_approx(m - top), w2 = exp2_approx(m2 - top);
    m = top;
    l = l * w + l2 * w2;
#pragma unroll
    for (int x = 0; x < N; ++x) o[x] = o[x] * w + o2[x] * w2;
}

// Divides o by l, and gives the natural logarithm of the sum of e^s: 0 and -inf for what saw no key.
template <int N>
__device__ __forceinline__ float finish(float m, float l, float (&o)[N]) {
    const float inverse = l == 0.f ? 0.f : 1.f / l;
#pragma unroll
    for (int x = 0; x < N; ++x) o[x] *= inverse;
    return l == 0.f ? -INFINITY : m * Ln2 + logf(l);
}

// How many of a head's blocks have stored their part. They start as zeros when the kernel is loaded and are zeros again after every launch,
// so nobody has to set them; but two launches that run at the same time, on two streams, would count into each other.
constexpr int MostHeads = 1 << 16;
__device__ unsigned blocks_done[MostHeads];

// Whether this block is the last of `blocks` to come here with the same head, 0 .. MostHeads - 1. If so, all that the others wrote before
// they came is there to be read, past the L1 that may hold older lines (`__ldcg`). All threads of the block call it.
__device__ __forceinline__ bool is_last_block(int head, int blocks) {
    bool last = false;
    __syncthreads();  // all threads of the block have written their part, before one of them counts
    if (threadIdx.x == 0) {
        __threadfence();  // what the block wrote is in L2 before its count
        last = atomicInc(&blocks_done[head], blocks - 1) == blocks - 1;    // the last one sets the count back to 0
        __threadfence();  // and nothing of the others is read before theirs
    }
    return __syncthreads_or(last);  // no thread reads before that, and all know
}
