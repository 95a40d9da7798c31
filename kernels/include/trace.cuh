// trace.cuh: the names of a kernel's actions, written where they happen.
//
//     TRACE_BLOCK(b, h, i);    once, first: which block the actions belong to (batch, head, row block)
//     TRACE(load_k, j);        right before the lines that perform load_k on tile j
//     TRACE(scores, j, i);     the variables of two loops, outermost first
//
//     TRACE_BLOCK_AND_CALLS(b, h, i);    instead of TRACE_BLOCK where functions that the kernel calls have TRACE lines too
//     TRACE_ROLE(r, first, b, h, i);     instead of TRACE_BLOCK where the warps of a block do different things: r counts the names in the
//                                        header's line `@roles producer, consumer 1` from 0, `first` is true in the one thread that writes
//
// All compile to nothing, unless FLASHVIZ_TRACE is defined: then thread 0 of each block, or one thread of each role, appends what it is about to do, on which tile
// and when, to the block's own region of a buffer; the host sets three device globals before the launch and reads the buffer after it.
// The actions' names are numbered in their order of appearance when the source is assembled, so a name is written in
// the kernel and nowhere else; an action's lines, and its time, run from its TRACE to the next.
//
// An action costs the warp of thread 0 a look at the clock and one store that nothing waits for: how much room is left, and so where the
// next record goes, stays in one register. A function that the kernel calls does not see it, so TRACE_BLOCK_AND_CALLS keeps the
// count in memory instead, and each action waits for it.
#pragma once

#ifndef FLASHVIZ_TRACE

#define TRACE_BLOCK(batch, head, tile) ((void)0)
#define TRACE_BLOCK_AND_CALLS(batch, head, tile) ((void)0)
#define TRACE_ROLE(role, first, batch, head, tile) ((void)0)
#define TRACE(action, ...) ((void)0)

#else

#if defined(FLASHVIZ_HOST) && defined(_WIN32)
#define TRACE_SYMBOL __declspec(dllexport)
#define TRACE_QUIET inline __attribute__((noinline, no_sanitize("thread")))
#elif defined(FLASHVIZ_HOST)
#define TRACE_SYMBOL __attribute__((visibility("default")))
#define TRACE_QUIET inline __attribute__((noinline, no_sanitize("thread")))  // a trace's own accesses are not the kernel's
#else
#define TRACE_SYMBOL
#define TRACE_QUIET __forceinline__
#endif

// One action as it begins, 16 bytes: one store. flashviz/cuda/trace.py says the same.
struct __align__(16) TraceRecord {
    unsigned what;                     // TRACE_ID_... in 16 bits; 8 bits of role + 1, 0 for the block as a whole; 8 of how many coordinates, 1 or 2
    int first, second;
    unsigned nanoseconds;              // the lower half of the GPU's global timer; the host sees where it wraps, every 4.29 s
};

// One block, in the order of blockIdx (x fastest), or one of its roles, one after the other.
struct TraceRegion {
    unsigned count;                    // actions performed, which may be more than there was room for
    int batch, head, tile;
    unsigned multiprocessor;           // where the block runs from its first instruction to its last
    unsigned called;                   // actions that found no TRACE_BLOCK in sight; 0 when the kernel ends, else an error
    unsigned long long begin, end;     // when thread 0 came to TRACE_BLOCK, and when it left the kernel
};

extern "C" {  // constant: a launch never changes them, and reading one costs nothing
TRACE_SYMBOL __constant__ TraceRecord* flashviz_trace_records;           // [blocks * roles, capacity]
TRACE_SYMBOL __constant__ TraceRegion* flashviz_trace_regions;           // [blocks * roles]
TRACE_SYMBOL __constant__ unsigned long long flashviz_trace_capacity;    // records a block, or a role of it
TRACE_SYMBOL __constant__ unsigned long long flashviz_trace_roles;       // 1 where a block has none
}

__device__ inline unsigned long long trace_number() {
    return ((unsigned long long)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
}

__device__ inline bool trace_is_first() { return (threadIdx.x | threadIdx.y | threadIdx.z) == 0; }

#ifdef FLASHVIZ_HOST
__device__ inline unsigned long long trace_time() { return fv_host_globaltimer(); }
__device__ inline unsigned trace_tick() { return (unsigned)fv_host_globaltimer(); }
__device__ inline unsigned trace_multiprocessor() { return fv_host_smid(); }
#define TRACE_HOST(action, tiles, first, second) fv_host_action(action, tiles, first, second)  // each thread: whose accesses are the action's
#else
__device__ inline unsigned long long trace_time() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
    return now;
}
__device__ inline unsigned trace_tick() {
    unsigned now;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now) : : "memory");  // memory: no access of another action moves past it
    return now;
}
__device__ inline unsigned trace_multiprocessor() {
    unsigned number;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
    return number;
}
#define TRACE_HOST(action, tiles, first, second) ((void)0)
#endif

// No atomics: a region belongs to one block, or one role of it, and one thread writes it.
TRACE_QUIET __device__ void trace_begin(int batch, int head, int tile, unsigned long long number) {
    TraceRegion& region = flashviz_trace_regions[number];
    region.count = region.called = 0;
    region.batch = batch;
    region.head = head;
    region.tile = tile;
    region.multiprocessor = trace_multiprocessor();
    region.begin = trace_time();
}

TRACE_QUIET __device__ void trace_end(unsigned count, unsigned long long number) {
    TraceRegion& region = flashviz_trace_regions[number];
    region.count = count;
    region.end = trace_time();
}

// Record number n of a region; `action` with the role above it.
TRACE_QUIET __device__ void trace_write(unsigned long long n, unsigned action, unsigned tiles, int first, int second,
                                        unsigned long long number) {
    TraceRecord record;
    record.what = action | tiles << 24;
    record.first = first;
    record.second = second;
    record.nanoseconds = trace_tick();
    flashviz_trace_records[number * flashviz_trace_capacity + n] = record;
}

// What TRACE_BLOCK puts into the kernel. An action that finds no room is counted and not kept: the host sees how many there were and says so.
struct TraceBlock {
    int room;                          // records that still fit; 0 or less in every thread but the first: these write nothing

    TRACE_QUIET __device__ TraceBlock(int batch, int head, int tile) : room(0) {
        if (!trace_is_first()) return;
        room = (int)flashviz_trace_capacity;
        trace_begin(batch, head, tile, trace_number());
    }
    TRACE_QUIET __device__ ~TraceBlock() {             // wherever the kernel returns
        if (trace_is_first()) trace_end((unsigned)flashviz_trace_capacity - room, trace_number());
    }
    TRACE_QUIET __device__ void append(unsigned action, unsigned tiles, int first, int second) {
        TRACE_HOST(action, tiles, first, second);
        if (room > 0) trace_write(flashviz_trace_capacity - room, action, tiles, first, second, trace_number());
        --room;
    }
};

// What TRACE_ROLE puts into the kernel: the same for a role, in a region of its own. Which thread writes is the kernel's choice.
struct TraceRole {
    int room;
    unsigned role;                     // ~0 in threads that write nothing

    TRACE_QUIET __device__ TraceRole(unsigned role, bool first, int batch, int head, int tile) : room(0), role(~0u) {
        if (!first || role >= flashviz_trace_roles) return;    // one that the header does not name has no region
        this->role = role;
        room = (int)flashviz_trace_capacity;
        trace_begin(batch, head, tile, number());
    }
    TRACE_QUIET __device__ ~TraceRole() {
        if (role != ~0u) trace_end((unsigned)flashviz_trace_capacity - room, number());
    }
    TRACE_QUIET __device__ void append(unsigned action, unsigned tiles, int first, int second) {
        TRACE_HOST(action, tiles, first, second);
        if (room > 0) trace_write(flashviz_trace_capacity - room, action | (role + 1) << 16, tiles, first, second, number());
        --room;
    }
    TRACE_QUIET __device__ unsigned long long number() const { return trace_number() * flashviz_trace_roles + role; }
};

// What TRACE finds where no TRACE_BLOCK is in sight, which is in a function: the place is kept in the block's region.
struct TraceCalled {
    TRACE_QUIET __device__ void append(unsigned action, unsigned tiles, int first, int second) {
        TRACE_HOST(action, tiles, first, second);
        if (!trace_is_first()) return;
        const unsigned n = flashviz_trace_regions[trace_number()].called++;
        if (n < flashviz_trace_capacity) trace_write(n, action, tiles, first, second, trace_number());
    }
};
__device__ TraceCalled trace_block;

// What TRACE_BLOCK_AND_CALLS puts into the kernel, under a name that hides nothing.
struct TraceCalls {
    TRACE_QUIET __device__ TraceCalls(int batch, int head, int tile) {
        if (trace_is_first()) trace_begin(batch, head, tile, trace_number());
    }
    TRACE_QUIET __device__ ~TraceCalls() {
        if (!trace_is_first()) return;
        unsigned& called = flashviz_trace_regions[trace_number()].called;
        trace_end(called, trace_number());
        called = 0;
    }
};

template <class Block>
__device__ inline void trace_action(Block& block, unsigned action, int first) { block.append(action, 1, first, 0); }
template <class Block>
__device__ inline void trace_action(Block& block, unsigned action, int first, int second) { block.append(action, 2, first, second); }

#define TRACE_BLOCK(batch, head, tile) TraceBlock trace_block(batch, head, tile)
#define TRACE_BLOCK_AND_CALLS(batch, head, tile) const TraceCalls trace_calls(batch, head, tile)
#define TRACE_ROLE(role, first, batch, head, tile) TraceRole trace_block(role, first, batch, head, tile)
#define TRACE(action, ...) trace_action(trace_block, TRACE_ID_##action, __VA_ARGS__)

#endif
