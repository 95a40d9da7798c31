// trace.cuh: the names of a kernel's actions, written where they happen.
//
//     TRACE_BLOCK(b, h, i);    once, first: which block the actions belong to (batch, head, row block)
//     TRACE(load_k, j);        right before the lines that perform load_k on tile j
//     TRACE(scores, j, i);     the variables of two loops, outermost first
//
// Both compile to nothing, unless FLASHVIZ_TRACE is defined: then thread 0 of each block appends what it is about to do, on which tile,
// on which multiprocessor and when, to the block's own region of a buffer; the host sets three device globals before the launch and reads the
// buffer after it. The actions' names are numbered in their order of appearance when the source is assembled, so a name is written in
// the kernel and nowhere else; an action's lines, and its time, run from its TRACE to the next.
#pragma once

#ifndef FLASHVIZ_TRACE

#define TRACE_BLOCK(batch, head, tile) ((void)0)
#define TRACE(action, ...) ((void)0)

#else

#if defined(FLASHVIZ_HOST) && defined(_WIN32)
#define TRACE_SYMBOL __declspec(dllexport)
#define TRACE_QUIET __attribute__((noinline, no_sanitize("thread")))
#elif defined(FLASHVIZ_HOST)
#define TRACE_SYMBOL __attribute__((visibility("default")))
#define TRACE_QUIET __attribute__((noinline, no_sanitize("thread")))  // a trace's own accesses are not the kernel's
#else
#define TRACE_SYMBOL
#define TRACE_QUIET
#endif

// One action as it begins. Sizes and order are those of flashviz/cuda/trace.py.
struct TraceRecord {
    unsigned short action;             // TRACE_ID_...
    unsigned char role;                // 0: the block as a whole
    unsigned char tiles;               // how many of the two coordinates are given, 1 or 2
    unsigned multiprocessor;
    int first, second;
    unsigned long long nanoseconds;    // of the GPU's global timer
};

// One block, in the order of blockIdx (x fastest).
struct TraceRegion {
    unsigned count;                    // actions performed, which may be more than there was room for
    int batch, head, tile;
    unsigned long long begin, end;     // when thread 0 came to TRACE_BLOCK, and when it left the kernel
};

extern "C" {
TRACE_SYMBOL __device__ TraceRecord* flashviz_trace_records;           // [blocks, capacity]
TRACE_SYMBOL __device__ TraceRegion* flashviz_trace_regions;           // [blocks]
TRACE_SYMBOL __device__ unsigned long long flashviz_trace_capacity;    // records a block
}

__device__ inline unsigned long long trace_region() {
    return ((unsigned long long)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
}

__device__ inline bool trace_is_first() { return (threadIdx.x | threadIdx.y | threadIdx.z) == 0; }

__device__ inline unsigned long long trace_time() {
#ifdef FLASHVIZ_HOST
    return fv_host_globaltimer();
#else
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");  // memory: no access of another action moves past it
    return now;
#endif
}

__device__ inline unsigned trace_multiprocessor() {
#ifdef FLASHVIZ_HOST
    return fv_host_smid();
#else
    unsigned number;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
    return number;
#endif
}

// No atomics: a region belongs to one block, and of its threads only the first writes. A role of its own warps (a producer beside consumers)
// would need a region of its own, or an atomic count.
TRACE_QUIET __device__ inline void trace_append(unsigned action, unsigned role, unsigned tiles, int first, int second) {
#ifdef FLASHVIZ_HOST
    fv_host_action(action, tiles, first, second);      // each thread: whose accesses are logged as that action's
#endif
    if (!trace_is_first()) return;
    const unsigned long long region = trace_region();
    const unsigned n = flashviz_trace_regions[region].count++;
    if (n >= flashviz_trace_capacity) return;          // counted, not kept: the host sees how many there were and says so
    TraceRecord record;
    record.action = (unsigned short)action;
    record.role = (unsigned char)role;
    record.tiles = (unsigned char)tiles;
    record.multiprocessor = trace_multiprocessor();
    record.first = first;
    record.second = second;
    record.nanoseconds = trace_time();
    flashviz_trace_records[region * flashviz_trace_capacity + n] = record;
}
__device__ inline void trace_action(unsigned action, int first) { trace_append(action, 0, 1, first, 0); }
__device__ inline void trace_action(unsigned action, int first, int second) { trace_append(action, 0, 2, first, second); }

struct TraceBlock {
    TRACE_QUIET __device__ TraceBlock(int batch, int head, int tile) {
        if (!trace_is_first()) return;
        TraceRegion& region = flashviz_trace_regions[trace_region()];
        region.count = 0;
        region.batch = batch;
        region.head = head;
        region.tile = tile;
        region.begin = trace_time();
    }
    TRACE_QUIET __device__ ~TraceBlock() {             // wherever the kernel returns
        if (trace_is_first()) flashviz_trace_regions[trace_region()].end = trace_time();
    }
};

#define TRACE_BLOCK(batch, head, tile) const TraceBlock trace_block(batch, head, tile)
#define TRACE(action, ...) trace_action(TRACE_ID_##action, __VA_ARGS__)

#endif
