// half.hpp: the types and functions of include/half.cuh on the processor.
#pragma once
#include "floats.hpp"

struct half {
    unsigned short bits;
    FV_ASSIGNED(half)
};
struct bfloat16 {
    unsigned short bits;
    FV_ASSIGNED(bfloat16)
};

template <typename T>
unsigned pack(float low, float high);
template <>
inline FV_RAW unsigned pack<half>(float low, float high) { return fv::to_half(low) | (unsigned)fv::to_half(high) << 16; }
template <>
inline FV_RAW unsigned pack<bfloat16>(float low, float high) { return fv::to_bfloat16(low) | (unsigned)fv::to_bfloat16(high) << 16; }

template <typename T>
void unpack(float& low, float& high, unsigned both);
template <>
inline FV_RAW void unpack<half>(float& low, float& high, unsigned both) {
    low = fv::from_half((unsigned short)both);
    high = fv::from_half((unsigned short)(both >> 16));
}
template <>
inline FV_RAW void unpack<bfloat16>(float& low, float& high, unsigned both) {
    low = fv::from_bfloat16((unsigned short)both);
    high = fv::from_bfloat16((unsigned short)(both >> 16));
}
