// state.hpp: what runtime.cpp (fibers, barriers, memory, launch) and checks.cpp (who touched what) share.
#pragma once
#include "runtime.hpp"
#include "switch.hpp"

namespace fv {

// What a run can report. flashviz/checks/kernels.py has the words for each.
enum Kind : int {
    NONE,
    RACE,          // two threads of a block touch one element, at least one writes, and no barrier lies between
    UNWRITTEN,     // an element is read that nothing wrote
    BOUNDS,        // past the end of a shared array or part, or of a global array
    BARRIER,       // threads of a block wait at different barriers, or some have ended
    BLOCKS,        // two blocks of a launch touch one element, at least one writes
    WARP,          // a warp intrinsic that not all lanes of its mask reach
    WILD,          // an address that belongs to no array
    INPUT,         // a write to an array that the kernel declares const
    SHARED_BYTES,  // more shared memory than the launch gives
    CRASH,         // the processor stopped the kernel: no such memory, division by zero
    ENDLESS,       // still running at the time limit
    TRAP,          // __trap() or a failed assert
    PENDING,       // an element is touched while an asynchronous copy to it is under way
    MISALIGNED,    // an access of several bytes at an address that is no multiple of them
};

// One side of a finding: which thread did what where. A memory access has `pc`, a barrier or intrinsic file and line; `last` is the last
// access before a crash. `calls` are where the functions that it happened in were called, innermost first. All but file and line are
// offsets from the anchor, 0 for none.
constexpr int CALLS = 6;
struct Side {
    int present, write;
    unsigned block[3], thread[3];
    int64_t pc, last, calls[CALLS];
    const char* file;
    int line;
};

// What the warps of a launch did at one place to one array of shared memory: warp accesses, their phases, and how many passes those took.
struct BankUse {
    char array[64];
    int64_t pc, calls[CALLS];
    uint32_t chain;
    int write, bytes;
    uint64_t accesses, phases, wavefronts;
};

// The first thing that went wrong in a launch. `element` counts from the array's start and may be negative or past `count`.
struct Finding {
    int kind;
    char array[64];
    int64_t element, count;
    int shared;
    Side first, second;
    char detail[160];
};

enum State : uint8_t { RUNNABLE, AT_BARRIER, AT_WARP, ENDED };

constexpr int DEPTH = 32;  // of calls that are followed
struct Fiber : Thread {
    Context context;
    State state;
    int predicate, count;        // of __syncthreads_count
    unsigned mask;               // of the warp operation it waits in
    void *in, *out;
    Exchange all;
    const char *what, *file;     // where it waits
    int line;
    uint32_t chain, chains[DEPTH];  // in checking mode: which calls led to where it is (0: the kernel itself), and to its callers
    int depth;
    bool unfenced;               // it has written to memory outside of the block since its last __threadfence()
    uint32_t fence_epoch;        // in which that was, 0 for never
    const void* pc;              // of its last memory access, in checking mode
    uint32_t actions;            // how many it has begun
    uint16_t action;             // the one it is in, NO_ACTION before the first
    uint8_t tiles;
    int32_t first, second;
};

struct Array {
    const char* name;
    size_t offset, bytes, element;  // in the arena
    const char* file;
    int line;
};

// One memory access, logged: by which thread, in which of its actions, to which element of which array.
struct Access {
    uint32_t block, ordinal;     // in the order of blockIdx (x fastest); how many actions the thread had begun, 0 before the first
    uint16_t thread, action;
    int32_t first, second;       // the action's tile coordinates, as many of them as `tiles` says
    int16_t array;               // number of the buffer; -1 for the dynamic shared array as a whole; -2 - number of the shared array
    uint8_t tiles, write;
    int64_t element;
};
constexpr uint16_t NO_ACTION = 0xffff;

// One memory access as a cell remembers it. An asynchronous copy writes twice: when it begins and when it is waited for. What a warp reads
// together (ldmatrix) is read before any of its lanes goes on: a later write of the same warp is no race.
enum How : uint8_t { READ, READ_TOGETHER, WRITE, ATOMIC, COPY_BEGINS, COPY_ENDS };
inline bool writes(How how) { return how >= WRITE; }
struct Touch {
    int32_t pc;      // offset from the anchor
    uint32_t chain;  // of calls that led there
    uint32_t epoch, warp_epoch;
    uint16_t thread;
    bool atomic;
    How how;
};

struct Cell;
enum : int { CONST_ARRAY = 1, OUTPUT = 2, KNOWN = 4 };  // KNOWN: may be touched, is not looked at (a trace buffer)
struct Buffer {
    char name[64];
    char *memory, *base;
    size_t bytes, element, guard;
    int flags;
    Cell* cells;      // one for each 4 bytes, for what is written
    Cell** bytewise;  // four for each of those that was touched by a narrower access
};

// The dynamic array as a whole, then named arrays. None shares its GRAINs with another. A part of the dynamic array starts as far
// behind a multiple of SWIZZLE as it does on a GPU: arithmetic with the low bits of its addresses gives the same.
constexpr size_t SWIZZLE = 1024;
constexpr size_t ARENA = 1 << 20, RAW = 256 << 10, FENCE = 128, GRAIN = 256;
constexpr int MOST_ARRAYS = 256, MOST_BUFFERS = 64, MOST_THREADS = 1024;

extern FV_LOCAL Fiber fibers[MOST_THREADS];
extern FV_LOCAL Fiber* self;
extern FV_LOCAL size_t fiber_count;
extern FV_LOCAL Array arrays[MOST_ARRAYS];
extern FV_LOCAL int array_count;
extern FV_LOCAL uint16_t array_at[ARENA / GRAIN];  // 1 + number of the array that has elements there, 0 for none
extern FV_LOCAL Buffer buffers[MOST_BUFFERS];
extern FV_LOCAL int buffer_count;
extern FV_LOCAL size_t dynamic_bytes;
extern FV_LOCAL bool checking;
extern FV_LOCAL uint32_t epoch, block_epoch, warp_epoch[MOST_THREADS / 32];  // counted over the whole launch, from 1
extern FV_LOCAL const char anchor;
extern FV_LOCAL Access* log_records;  // where accesses are logged, null when they are not
extern FV_LOCAL size_t log_room, log_count;

// Report and end the launch; the first report stands. `leave` goes back to the launch and never returns.
FV_LOCAL Finding* report(Kind kind, const char* array);
[[noreturn]] FV_LOCAL void leave();
FV_LOCAL void fill_side(Side& side, const Fiber& f, bool write, const void* pc);
FV_LOCAL void fill_calls(Side& side, uint32_t chain);
FV_LOCAL void fill_wait(Side& side, const Fiber& f);

// checks.cpp
FV_LOCAL void checks_begin();                  // a launch
FV_LOCAL void checks_block();                  // a block begins: epoch == block_epoch
FV_LOCAL bool checks_barrier();                // a barrier is complete, or the block has ended; false when something is wrong
FV_LOCAL bool checks_end();                    // the launch has ended
FV_LOCAL void access(const void* p, size_t bytes, How how, const void* pc);
FV_LOCAL void copy_ends(const void* p, size_t bytes, int32_t pc, uint32_t chain);  // pc, chain: where it was issued
[[noreturn]] FV_LOCAL void misaligned(const void* p, size_t bytes, bool write, const void* pc);
[[noreturn]] FV_LOCAL void stray(const void* p, size_t bytes, bool write, const void* pc, const char* detail);  // not where it must be
FV_LOCAL void free_cells(Buffer& b);
FV_LOCAL int64_t unwritten(const Buffer& b, int64_t* element);  // how many elements of an output nothing wrote, and the first of them

// copies.cpp
FV_LOCAL void copies_block();
FV_LOCAL void copies_free();
FV_LOCAL char* shared_place(unsigned at, size_t bytes, bool write, const void* pc);  // the place of an address; aligned to its bytes

// banks.cpp, in checking mode
extern FV_LOCAL bool counting_banks;
FV_LOCAL void banks_begin();
FV_LOCAL void banks_note(size_t offset, size_t bytes, int array, const Touch& now);
FV_LOCAL void banks_block();

// order.cpp, in checking mode
FV_LOCAL void order_begin();
FV_LOCAL void order_block();
FV_LOCAL void order_barrier();
FV_LOCAL void order_atomic(const void* p);
FV_LOCAL bool ordered(uint32_t block, const Touch& earlier, const Touch& now);

}  // namespace fv
