// floats.hpp: the short floats of the tensor cores, bit by bit: what cvt.rn.f16.f32 and its like do, without the processor's help.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace fv {

inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// To nearest, in the middle to even; beyond the largest to infinity; every NaN becomes 0x7fff.
inline uint16_t to_half(float x) {
    const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x47800000) return (uint16_t)(sign | 0x7c00);                // 65,536 and more
    if (magnitude < 0x38800000)                                                   // below 2^-14: whole multiples of 2^-24
        return (uint16_t)(sign | (uint32_t)nearbyintf(bits_float(magnitude) * 16777216.f));
    return (uint16_t)(sign | (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13);
}
inline float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 31) return bits_float(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return bits_float(sign | float_bits((float)fraction * (1.f / 16777216.f)));
    return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
}
inline uint16_t to_bfloat16(float x) {
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bfloat16(uint16_t bits) { return bits_float((uint32_t)bits << 16); }

// To nearest, in the middle away from zero (cvt.rna); the 13 bits that a product does not look at are 0 here.
inline uint32_t to_tf32(float x) {
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bits | 0x400000) & 0xffffe000;
    return (bits + 0x1000) & 0xffffe000;
}

}  // namespace fv
