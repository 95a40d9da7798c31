// hopper.cuh: what Hopper GPUs alone can do, one function an instruction: a copy engine that moves whole tiles (TMA), barriers that count
// bytes (mbarrier), and registers that go from one warpgroup to another. The products of a warpgroup are in wgmma.cuh.
//
// Compiled for sm_90a: the "a" means this architecture and no other, older or newer. A kernel that includes this says `@arch 90a`.
//
// Three words. A *warpgroup* is 128 threads, four warps, that begin at a multiple of 128. The *copy engine* is a unit of its own: one
// thread asks it for a tile and goes on; neither registers nor other threads take part. The *async proxy* is the way by which copy engine
// and tensor cores reach shared memory, beside the one of ordinary loads and stores: what went one way is seen by the other after a fence.
#pragma once

#if defined(FLASHVIZ_HOST) && !defined(HOPPER_EMULATED)
#error "TMA and wgmma cannot be run on the processor: they are instructions of Hopper GPUs that nothing here emulates"
#endif
#include "ptx.cuh"

// ---- what there is -----------------------------------------------------------------------------------------------------------------

// A barrier in shared memory waits for a number of arrivals and for a number of bytes. When both are there its phase ends and the next
// begins at once, waiting for as many arrivals again. Phases have parity 0, 1, 0, 1, ... and wait(p) returns once the *last phase of
// parity p* is over: on a fresh barrier, in its phase of parity 0, wait(1) returns at once.
struct Barrier {
    unsigned long long state;

    __device__ SharedAddress address() const { return shared_address(&state); }
    __device__ void init(int arrivals);                // by one thread, which then says barriers_ready(); then __syncthreads()
    __device__ void arrive();
    __device__ void arrive_expecting(unsigned bytes);  // this phase waits for so many bytes of the copy engine's as well
    __device__ void wait(unsigned parity) const;
};
static_assert(sizeof(Barrier) == 8, "the launcher counts shared memory with this size");
__device__ void barriers_ready();                      // barriers just initialised are seen by the copy engine too

// A place in a ring of slots, and the parity of the phase that its barriers are in. Who waits for data waits for `parity`; who waits for
// room waits for `parity ^ 1`, which in the first round is there at once.
struct RingPlace {
    int slot = 0;
    unsigned parity = 0;
    __device__ void next(int slots) {
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
    __device__ RingPlace after(int slots) const {
        RingPlace one = *this;
        one.next(slots);
        return one;
    }
};

// Sixteen barriers a block need no memory: threads of whole warps wait for each other by number; 0 is that of __syncthreads. `threads`
// is how many take part, those that wait and those that only say they are there.
__device__ void named_barrier_wait(int number, int threads);
__device__ void named_barrier_arrive(int number, int threads);

// A tensor map describes an array in HBM and the box that one copy takes: CUtensorMap, made by the driver on the host from the kernel's
// `@map` line and passed by value. Ours see an array [.., rows, columns] as heads x panels x rows x 128 bytes: a box is some rows of
// one head, and lies in shared memory panel after panel, each row of a panel 128 bytes.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};
// Both are issued now, by one thread. A load is there when `full`, which was told to expect its bytes, says so; rows outside of the array
// arrive as zeros, and count as bytes. A store does not write rows outside of the array.
__device__ void tma_load(SharedAddress to, const TensorMap& from, const Barrier& full, int row, int head);
__device__ void tma_store(const TensorMap& to, SharedAddress from, int row, int head);
// Until the copy engine has read all that this thread told it to store: the shared memory may be written again. (That HBM has it, the end
// of the kernel says.)
__device__ void tma_store_wait();
// Ordinary stores of this thread to shared memory are seen by copy engine and tensor cores after it (and after a barrier, for other
// threads' stores).
__device__ void fence_async_proxy();

// With the 128-byte *swizzle*, row r of a panel has its 16-byte chunk c at place c ^ (r % 8): eight rows of one column then lie in eight
// different groups of four banks. The copy engine writes and reads it so, wgmma understands it, and this says it to the rest: where
// element (row, column) of a tile of `Rows` rows lies, 2-byte elements, 64 to a panel's row. The pattern repeats every 1024 bytes, counted
// from address 0: so tiles start at multiples of 1024.
template <int Rows>
__device__ SharedAddress swizzled(SharedAddress tile, int row, int column) {
    const int panel = column / 64, chunk = column / 8 % 8;
    return tile + panel * (Rows * 128) + row * 128 + (chunk ^ row % 8) * 16 + column % 8 * 2;
}
__device__ void store_shared(SharedAddress to, unsigned value);
__device__ unsigned load_shared(SharedAddress from);

// All warps start with the same number of registers. Who needs few gives the rest back, who needs many takes them, and waits until they
// are there. By all warps of a warpgroup; a multiple of 8, 24 to 256.
template <int Registers>
__device__ __forceinline__ void give_registers();
template <int Registers>
__device__ __forceinline__ void take_registers();

// ---- and how it is said in PTX -------------------------------------------------------------------------------------------------------
#ifndef HOPPER_EMULATED  // tests play these functions on the processor, to see who waits for whom

__device__ __forceinline__ void Barrier::init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(address()), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void Barrier::arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(address()) : "memory");
}
__device__ __forceinline__ void Barrier::arrive_expecting(unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(address()), "r"(bytes) : "memory");
}
__device__ __forceinline__ void Barrier::wait(unsigned parity) const {
    unsigned over;
    do {  // try_wait itself sleeps for a while
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(over) : "r"(address()), "r"(parity) : "memory");
    } while (!over);
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }

__device__ __forceinline__ void named_barrier_wait(int number, int threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" : : "r"(number), "r"(threads) : "memory");
}

// Four coordinates: column and row of the box's first element, panel, head; all panels are in the box.
__device__ __forceinline__ void tma_load(SharedAddress to, const TensorMap& from, const Barrier& full, int row, int head) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2, %4}], [%5];"
                 : : "r"(to), "l"(&from), "r"(0), "r"(row), "r"(head), "r"(full.address()) : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& to, SharedAddress from, int row, int head) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %1, %3}], [%4];"
                 : : "l"(&to), "r"(0), "r"(row), "r"(head), "r"(from) : "memory");
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory"); }
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

__device__ __forceinline__ void store_shared(SharedAddress to, unsigned value) {
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(to), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned load_shared(SharedAddress from) {
    unsigned value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

template <int Registers>
__device__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(Registers)); }
template <int Registers>
__device__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(Registers)); }

#endif
