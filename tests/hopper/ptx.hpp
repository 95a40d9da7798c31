// ptx.hpp: of include/ptx.cuh what the Hopper kernels use.
#pragma once
#include "half.hpp"

using SharedAddress = unsigned;
inline SharedAddress shared_address(const void* p) { return (SharedAddress)((const char*)p - (const char*)dynamic_shared); }
inline float exp2_approx(float x) { return exp2f(x); }
