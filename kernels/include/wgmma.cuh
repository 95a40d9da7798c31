// wgmma.cuh: the products of a warpgroup, D += A B with D 64 x n in registers, A 64 x 16, B 16 x n, started now and done after a wait.
// Inputs half or bfloat16, sums float. sm_90a.
//
// Who holds what. Thread t of the warpgroup, lane = t % 32, holds of D (64 x n) n / 2 floats: d[i] is row 16 (t / 32) + lane / 4, 8 more if
// i / 2 is odd, and column 8 (i / 4) + 2 (lane % 4) + i % 2. So a thread has two rows, and four neighbouring lanes share them. The layout
// of mma_m16n8k16 in ptx.cuh, for four warps one below the other; A in registers is that of its a, with the same rows.
//     d[0..7] packed by twos   =   A's four registers for these 16 columns: a result is the next product's left side without any exchange
//
// A tile in shared memory, swizzled as the copy engine leaves it (hopper.cuh), is named by a *descriptor* of 64 bits:
//     bits  0-13   address / 16
//     bits 16-29   where B's columns are contiguous: bytes / 16 from one panel of 64 columns to the next; else ignored
//     bits 32-45   bytes / 16 from eight rows to the next eight: 1024 / 16
//     bits 62-63   1: the 128-byte swizzle
// The next 16 of the inner dimension are some bytes further; only the low word changes.
#pragma once
#include "hopper.cuh"
#include "numbers.cuh"

__device__ inline unsigned wgmma_tile(SharedAddress tile, unsigned panel_bytes = 0) { return tile >> 4 | panel_bytes >> 4 << 16; }
__device__ inline unsigned long long wgmma_at(unsigned tile, unsigned bytes) {
    return 1ull << 62 | 1024ull / 16 << 32 | (tile + (bytes >> 4));
}

// ---- what there is -----------------------------------------------------------------------------------------------------------------

// Before the first product of a series: registers written so far are seen by it.
__device__ void wgmma_fence();
// The products started since the last commit become one group.
__device__ void wgmma_commit();
// Waits until at most `Pending` groups are unfinished: until then nobody may touch their registers or their tiles.
template <int Pending>
__device__ __forceinline__ void wgmma_wait();
// The compiler knows nothing of products under way. After a wait it must not have moved uses of their registers before it.
template <int N>
__device__ __forceinline__ void wgmma_keep(float (&d)[N]);

// d = A B, or d += A B if `add`. For each width n, 32, 64, 128 or 256, with n / 2 floats, and each T:
//     wgmma<T>(d, a, b, add)            A and B in shared memory, the inner dimension contiguous in both (Q and K for Q K^T)
//     wgmma<T>(d, registers, b, add)    A in registers, B with its columns contiguous (V for P V)
template <typename T, int N>
__device__ void wgmma(float (&d)[N], unsigned long long a, unsigned long long b, bool add);
template <typename T, int N>
__device__ void wgmma(float (&d)[N], const unsigned (&a)[4], unsigned long long b, bool add);

// Two products of whole tiles, started as one group each; tiles swizzled, panel after panel of 64 columns.
//
// S = Q K^T, 64 x Bc. 16 columns of a row are 32 bytes; after four times that the next panel begins.
template <typename T, int Bc, int D>
__device__ __forceinline__ void wgmma_scores(float (&s)[Bc / 2], SharedAddress Q, SharedAddress K) {
    const unsigned q = wgmma_tile(Q), k = wgmma_tile(K);
#pragma unroll
    for (int x = 0; x < D; x += 16) {
        const int panel = x / 64, inside = x % 64 * 2;
        wgmma<T>(s, wgmma_at(q, panel * 64 * 128 + inside), wgmma_at(k, panel * Bc * 128 + inside), x > 0);
    }
    wgmma_commit();
}
// O += P V, 64 x D. 16 keys are 16 rows of 128 bytes; the columns go on in the next panel.
template <typename T, int Bc, int D>
__device__ __forceinline__ void wgmma_values(float (&o)[D / 2], const unsigned (&p)[Bc / 16][4], SharedAddress V) {
    const unsigned v = wgmma_tile(V, Bc * 128);
#pragma unroll
    for (int c = 0; c < Bc; c += 16) wgmma<T>(o, p[c / 16], wgmma_at(v, c * 128), true);
    wgmma_commit();
}

// ---- and how it is said in PTX -------------------------------------------------------------------------------------------------------
#ifndef HOPPER_EMULATED

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int Pending>
__device__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(Pending) : "memory"); }
template <int N>
__device__ void wgmma_keep(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
}

// The instruction names each of its up to 128 registers. WGMMA_TEN spells ten of them for the assembler, WGMMA_FLOATS_n ties n of them to d.
#define WGMMA_TEN(tens) "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9"
#define WGMMA_FLOATS_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_FLOATS_16(i) WGMMA_FLOATS_8(i), WGMMA_FLOATS_8(i + 8)
#define WGMMA_FLOATS_32(i) WGMMA_FLOATS_16(i), WGMMA_FLOATS_16(i + 16)
#define WGMMA_FLOATS_64(i) WGMMA_FLOATS_32(i), WGMMA_FLOATS_32(i + 32)
#define WGMMA_FLOATS_128(i) WGMMA_FLOATS_64(i), WGMMA_FLOATS_64(i + 64)

// After d's registers the operands go on counting: with A in shared memory A, B, add are r0, r1, r2; else A is r0 to r3, B r4, add r5.
// The ones and zeros: factors of A and B, then whether A and B lie the other way round.
#define WGMMA_OF(T, type, n, registers, floats, r0, r1, r2, r3, r4, r5) \
    template <> \
    __device__ __forceinline__ void wgmma<T, n / 2>(float (&d)[n / 2], unsigned long long a, unsigned long long b, bool add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #r2 ", 0;" \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, %" #r0 ", %" #r1 ", p, 1, 1, 0, 0; }" \
                     : floats(0) : "l"(a), "l"(b), "r"((int)add)); \
    } \
    template <> \
    __device__ __forceinline__ void wgmma<T, n / 2>(float (&d)[n / 2], const unsigned (&a)[4], unsigned long long b, bool add) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #r5 ", 0;" \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, " \
                     "{%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", p, 1, 1, 1; }" \
                     : floats(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add)); \
    }
#define WGMMA(...) WGMMA_OF(half, "f16", __VA_ARGS__) WGMMA_OF(bfloat16, "bf16", __VA_ARGS__)
#define WGMMA_0_TO_59 WGMMA_TEN() ", " WGMMA_TEN(1) ", " WGMMA_TEN(2) ", " WGMMA_TEN(3) ", " WGMMA_TEN(4) ", " WGMMA_TEN(5)
#define WGMMA_60_TO_119 WGMMA_TEN(6) ", " WGMMA_TEN(7) ", " WGMMA_TEN(8) ", " WGMMA_TEN(9) ", " WGMMA_TEN(10) ", " WGMMA_TEN(11)

WGMMA(32, WGMMA_TEN() ", %10, %11, %12, %13, %14, %15", WGMMA_FLOATS_16, 16, 17, 18, 19, 20, 21)
WGMMA(64, WGMMA_TEN() ", " WGMMA_TEN(1) ", " WGMMA_TEN(2) ", %30, %31", WGMMA_FLOATS_32, 32, 33, 34, 35, 36, 37)
WGMMA(128, WGMMA_0_TO_59 ", %60, %61, %62, %63", WGMMA_FLOATS_64, 64, 65, 66, 67, 68, 69)
WGMMA(256, WGMMA_0_TO_59 ", " WGMMA_60_TO_119 ", %120, %121, %122, %123, %124, %125, %126, %127",
      WGMMA_FLOATS_128, 128, 129, 130, 131, 132, 133)

#endif
