// half.cuh: the two 16-bit floats of the tensor cores. The toolkit's headers are not needed for what kernels do with them: hold the
// bits, convert, and hand two at a time to an instruction.
//
// half        1 sign, 5 exponent, 10 fraction bits: 11 digits of precision, largest value 65,504
// bfloat16    1 sign, 8 exponent, 7 fraction bits: 8 digits of precision, float's range
//
// A register holds two: the first in the low half. `pack<T>(a, b)` rounds two floats to nearest even into one register.
#pragma once

#ifdef FLASHVIZ_HOST
#include <half.hpp>  // on the processor the same types and functions are in kernels/host/
#else

struct half {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

template <typename T>
__device__ __forceinline__ unsigned pack(float low, float high);
template <>
__device__ __forceinline__ unsigned pack<half>(float low, float high) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
template <>
__device__ __forceinline__ unsigned pack<bfloat16>(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

template <typename T>
__device__ __forceinline__ void unpack(float& low, float& high, unsigned both);
template <>
__device__ __forceinline__ void unpack<half>(float& low, float& high, unsigned both) {
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(low), "=f"(high) : "r"(both));
}
template <>
__device__ __forceinline__ void unpack<bfloat16>(float& low, float& high, unsigned both) {
    low = __int_as_float(both << 16);          // a bfloat16 is the upper half of a float
    high = __int_as_float(both & 0xffff0000u);
}

#endif
