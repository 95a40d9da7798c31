// ptx.cuh: the instructions that C++ has no words for, one function each: asynchronous copies, tensor-core products and the loads
// that feed them. sm_80 and later.
//
// On the processor each is a function of the same name that does what the PTX manual says (kernels/host/ptx.hpp): lanes exchange
// their registers, and an asynchronous copy is not there until it was waited for.
#pragma once
#include "half.cuh"

#ifdef FLASHVIZ_HOST
#include <ptx.hpp>
#else

// ---- shared memory by address ----------------------------------------------------------------------------------------------------
// A byte address inside shared memory, 32 bits on a GPU. Arithmetic on it is cheaper than on a pointer.
using SharedAddress = unsigned;
__device__ __forceinline__ SharedAddress shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// ---- asynchronous copies, HBM to shared memory -----------------------------------------------------------------------------------
// Issued now, there after a wait; both ends aligned to 16 bytes.
__device__ __forceinline__ void cp_async_16(SharedAddress to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from) : "memory");
}
// The same, and where nothing exists 16 bytes of zeros, and `from` is not touched.
__device__ __forceinline__ void cp_async_16(SharedAddress to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
// The copies that this thread issued since the last commit become one group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
// Waits until at most `Pending` of this thread's groups are under way. Other threads' copies need a barrier after it.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(Pending) : "memory");
}

// ---- tensor cores ----------------------------------------------------------------------------------------------------------------
// Four 8 x 8 matrices of 16-bit elements from shared memory: lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned);
// of each matrix lane l gets columns 2 * (l % 4) and + 1 of row l / 4, in one register.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
// The same, each matrix transposed on the way.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// d += a b for one warp: a is 16 x 16, b 16 x 8, d 16 x 8 in float. With g = lane / 4 and t = lane % 4 a lane holds
//   a[0], a[1]   rows g and g + 8, columns 2t and 2t + 1;   a[2], a[3]   the same rows, columns 2t + 8 and 2t + 9
//   b0, b1       column g, rows 2t and 2t + 1; and 2t + 8 and 2t + 9
//   d[0], d[1]   row g, columns 2t and 2t + 1;   d[2], d[3]   row g + 8, the same columns
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<half>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<bfloat16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += a b in TF32, a float of which 10 fraction bits count: a is 16 x 8, b 8 x 8. A lane holds a[0], a[1]: rows g and g + 8, column t;
// a[2], a[3]: column t + 4; b0, b1: column g, rows t and t + 4; d as above. `to_tf32` rounds a float to what the product sees of it.
__device__ __forceinline__ unsigned to_tf32(float x) {
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// An 8 x 8 matrix of 16-bit elements, held as above, transposed across the warp (sm_75 and later).
__device__ __forceinline__ unsigned transpose_8x8(unsigned a) {
    unsigned d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// ---- one instruction of arithmetic, one load -------------------------------------------------------------------------------------
// 2^x in one instruction, to 2^-22 of the result; 2^-inf is 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 16 bytes that the kernel reads once: they are not kept in L1, and bring the rest of their 128 bytes to L2, which is asked for next.
__device__ __forceinline__ uint4 load_once(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}
// The same for a piece of a line whose other pieces are asked for by the very next loads: those find it in L1, and it is the first to go.
__device__ __forceinline__ uint4 load_piece(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::evict_first.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

#endif
