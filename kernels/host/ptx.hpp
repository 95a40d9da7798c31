// ptx.hpp: the functions of include/ptx.cuh on the processor, each doing what the PTX manual says of its instruction.
//
// A shared address is a byte offset, 32 bits as on a GPU, so that + and ^ on it do the same. Its lowest ten bits are those of the
// place that the part has on a GPU, so that a swizzle which needs an alignment that the part has not goes wrong here as there.
//
// An asynchronous copy reads its source when it is issued; what it writes is there, for this thread, after the wait that covers its
// group. Until then its 16 bytes are NaN, and whoever touches them is reported.
//
// Products: exact, of the two numbers as the tensor core sees them (tf32: the 13 lowest bits are ignored); their sums are taken in
// double and rounded to float once. A tensor core keeps fewer bits and rounds towards zero: the last bits differ.
//
// The places of warp operations come as defaults: __builtin_FILE() and __builtin_LINE() are those of the caller.
#pragma once
#include "floats.hpp"

#define FV_CALLER __builtin_return_address(0)
#define FV_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

using SharedAddress = unsigned;
inline FV_RAW SharedAddress shared_address(const void* p) { return fv::shared_offset(p, FV_CALLER); }

inline FV_RAW void cp_async_16(SharedAddress to, const void* from) { fv::copy_issue(to, from, true, FV_CALLER); }
inline FV_RAW void cp_async_16(SharedAddress to, const void* from, bool exists) { fv::copy_issue(to, from, exists, FV_CALLER); }
inline FV_RAW void cp_async_commit() { fv::copy_commit(); }
template <int Pending>
FV_RAW void cp_async_wait() {
    static_assert(Pending >= 0, "a number of groups");
    fv::copy_wait(Pending);
}

inline FV_RAW void ldmatrix_x4(unsigned (&r)[4], SharedAddress row, FV_PLACE) {
    fv::load_matrices(r, row, false, "ldmatrix_x4", FV_CALLER, file, line);
}
inline FV_RAW void ldmatrix_x4_trans(unsigned (&r)[4], SharedAddress row, FV_PLACE) {
    fv::load_matrices(r, row, true, "ldmatrix_x4_trans", FV_CALLER, file, line);
}

template <typename T>
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, FV_PLACE);
template <>
inline FV_RAW void mma_m16n8k16<half>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const char* file, int line) {
    fv::multiply(d, a, b0, b1, fv::F16, "mma_m16n8k16", file, line);
}
template <>
inline FV_RAW void mma_m16n8k16<bfloat16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const char* file, int line) {
    fv::multiply(d, a, b0, b1, fv::BF16, "mma_m16n8k16", file, line);
}
inline FV_RAW unsigned to_tf32(float x) { return fv::to_tf32(x); }
inline FV_RAW void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, FV_PLACE) {
    fv::multiply(d, a, b0, b1, fv::TF32, "mma_m16n8k8_tf32", file, line);
}
inline FV_RAW unsigned transpose_8x8(unsigned a, FV_PLACE) { return fv::transpose(a, "transpose_8x8", file, line); }

inline FV_RAW float exp2_approx(float x) {
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.f : y;  // .ftz: no subnormal results; and 0 of NaN it is not, for NaN compares false
}
inline FV_RAW uint4 load_once(const void* from) {
    uint4 v;
    fv::load_global(&v, from, sizeof v, FV_CALLER);
    return v;
}
inline FV_RAW uint4 load_piece(const void* from) {
    uint4 v;
    fv::load_global(&v, from, sizeof v, FV_CALLER);
    return v;
}
