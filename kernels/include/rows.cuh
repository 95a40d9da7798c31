// rows.cuh: what a thread does with the two rows that it has of a warpgroup's accumulator (wgmma.cuh), called 0 and 1 (8 further down).
//
// Of its registers 4 g + 2 r + e is row r, column 8 g + 2 (lane % 4) + e: four neighbouring lanes share two rows.
#pragma once
#include "ptx.cuh"

// Row 0 sees the keys before keys_0, row 1 those before keys_1; `column` is that of register 0.
template <int N>
__device__ __forceinline__ void mask(float (&s)[N], int column, int keys_0, int keys_1) {
    static_assert(N <= 64, "a bit for each of a row's registers");
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // the bits become predicates seven at a time: half the instructions of as many comparisons
        const int seen = max((r ? keys_1 : keys_0) - column, 0), registers = seen / 8 * 2 + min(seen % 8, 2);
        const unsigned bits = registers < 32 ? (1u << registers) - 1 : ~0u;
#pragma unroll
        for (int n = 0; n < N / 2; ++n)
            if (!(bits >> n & 1)) s[n / 2 * 4 + 2 * r + n % 2] = -INFINITY;
    }
}
template <int N>
__device__ __forceinline__ void multiply(float (&o)[N], const float (&by)[2]) {
#pragma unroll
    for (int n = 0; n < N; ++n) o[n] *= by[n / 2 % 2];
}
__device__ __forceinline__ float row_max(float x) {             // over the four lanes that share a row
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// s becomes p = 2^(log2_scale (s - m)), l this thread's part of the running denominator. m is the maximum *as far as needed*: it is
// raised only when some p would exceed 2^8; until then p fits in 16 bits, and neither l nor O need a correction. Returns whether O must
// be multiplied by corr, the same answer in the whole warp.
template <int N>
__device__ __forceinline__ bool softmax(float (&s)[N], float (&m)[2], float (&l)[2], float (&corr)[2], float log2_scale) {
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float even = s[2 * r], odd = s[2 * r + 1];              // two chains of maxima: half as long a wait
#pragma unroll
        for (int n = 4 + 2 * r; n < N; n += 4) even = fmaxf(even, s[n]), odd = fmaxf(odd, s[n + 1]);
        top[r] = fmaxf(even, odd);
    }
    const bool raise = __any_sync(~0u, fmaxf(top[0] - m[0], top[1] - m[1]) * log2_scale > 8.f);   // -inf - -inf is NaN: not more
    if (raise) {
        for (int r = 0; r < 2; ++r) {
            const float m_new = fmaxf(m[r], row_max(top[r]));
            corr[r] = exp2_approx((m[r] - (m_new == -INFINITY ? 0.f : m_new)) * log2_scale);
            l[r] *= corr[r];
            m[r] = m_new;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float base = m[r] == -INFINITY ? 0.f : m[r] * log2_scale;  // no key seen so far: 2^(-inf - 0) = 0 where -inf - -inf is NaN
        float even = 0.f, odd = 0.f;
#pragma unroll
        for (int n = 2 * r; n < N; n += 4) {
            even += s[n] = exp2_approx(fmaf(s[n], log2_scale, -base));
            odd += s[n + 1] = exp2_approx(fmaf(s[n + 1], log2_scale, -base));
        }
        l[r] += even + odd;
    }
    return raise;
}
