// half.hpp: the types of include/half.cuh, for the emulation of Hopper's instructions.
#pragma once
#include "words.hpp"
#include <floats.hpp>

struct half {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};
template <typename T>
float from_bits(unsigned short bits);
template <>
inline float from_bits<half>(unsigned short bits) { return fv::from_half(bits); }
template <>
inline float from_bits<bfloat16>(unsigned short bits) { return fv::from_bfloat16(bits); }
template <typename T>
unsigned pack(float low, float high);
template <>
inline unsigned pack<half>(float low, float high) { return fv::to_half(low) | (unsigned)fv::to_half(high) << 16; }
template <>
inline unsigned pack<bfloat16>(float low, float high) { return fv::to_bfloat16(low) | (unsigned)fv::to_bfloat16(high) << 16; }
template <typename T>
void unpack(float& low, float& high, unsigned both) { low = from_bits<T>(both & 0xffff), high = from_bits<T>(both >> 16); }
