// runtime.cpp: fibers, barriers, warp intrinsics, shared and global memory, and the launch. See runtime.hpp for the idea.
#define FV_DEFINE_JUMP
#include "state.hpp"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#if !defined(_WIN32)
#include <sys/time.h>
#if defined(__APPLE__)
#include <sys/ucontext.h>
#endif
#endif

namespace fv {

Thread* current;
Index block_index, block_size, grid_size;
Fiber fibers[MOST_THREADS];
Fiber* self;
size_t fiber_count;
Array arrays[MOST_ARRAYS];
int array_count;
uint16_t array_at[ARENA / GRAIN];
Access* log_records;
size_t log_room, log_count;
Buffer buffers[MOST_BUFFERS];
int buffer_count;
size_t dynamic_bytes;
bool checking;
uint32_t epoch, block_epoch, warp_epoch[MOST_THREADS / 32];
const char anchor = 0;
alignas(4096) char arena[ARENA];

static Context scheduler;
static const Kernel* kernel_;
static void** arguments_;
static Finding finding;
static size_t used;    // bytes of the arena that hold named arrays and their fences, from RAW on
static size_t statics; // bytes of static __shared__ arrays
static uint32_t random_state;
static volatile bool in_kernel;  // a fiber runs its own code, so that a signal may end the launch where it is

// ---- findings ----

Finding* report(Kind kind, const char* array) {
    static Finding ignored;
    Finding* f = finding.kind == NONE ? &finding : &ignored;
    memset(f, 0, sizeof *f);
    f->kind = kind;
    snprintf(f->array, sizeof f->array, "%s", array);
    return f;
}
void leave() {
    in_kernel = false;
    for (;;) jump(self->context, scheduler);
}
static void yield() {
    in_kernel = false;
    jump(self->context, scheduler);
    in_kernel = true;
}
static void copy_index(unsigned* to, Index i) {
    to[0] = i.x;
    to[1] = i.y;
    to[2] = i.z;
}
static int64_t offset_of(const void* pc) { return pc ? (const char*)pc - &anchor : 0; }
void fill_side(Side& side, const Fiber& f, bool write, const void* pc) {
    memset(&side, 0, sizeof side);
    side.present = 1;
    side.write = write;
    copy_index(side.block, block_index);
    copy_index(side.thread, f.index);
    side.pc = offset_of(pc);
    fill_calls(side, f.chain);
}
void fill_wait(Side& side, const Fiber& f) {
    fill_side(side, f, false, nullptr);
    side.file = f.file;
    side.line = f.line;
}
void stop(const char* what, const char* file, int line) {
    Finding* f = report(TRAP, "");
    snprintf(f->detail, sizeof f->detail, "%s", what);
    self->file = file;
    self->line = line;
    fill_wait(f->first, *self);
    leave();
}

// ---- shared memory ----

static char* add_array(const char* name, size_t bytes, size_t element, const char* file, int line, size_t start) {
    const size_t lowest = ((used + GRAIN - 1) & ~(GRAIN - 1)) + FENCE;
    const size_t offset = lowest + ((start - lowest) & (SWIZZLE - 1));
    if (offset + bytes + FENCE > ARENA || array_count == MOST_ARRAYS) {
        Finding* f = report(SHARED_BYTES, name);
        snprintf(f->detail, sizeof f->detail, "more shared memory than any block can have");
        leave();
    }
    used = offset + bytes + FENCE;
    arrays[array_count++] = {name, offset, bytes, element, file, line};
    for (size_t grain = offset / GRAIN; grain * GRAIN < offset + bytes; ++grain) array_at[grain] = (uint16_t)array_count;
    return arena + offset;
}
static char* too_many(const char* name, size_t needed, size_t given, const char* what) {
    Finding* f = report(SHARED_BYTES, name);
    f->element = (int64_t)needed;
    f->count = (int64_t)given;
    snprintf(f->detail, sizeof f->detail, "%s", what);
    fill_side(f->first, *self, false, nullptr);
    leave();
}
void* shared_array(const char* name, size_t bytes, size_t element, const char* file, int line) {
    for (int i = 0; i < array_count; ++i)
        if (arrays[i].line == line && !strcmp(arrays[i].name, name) && !strcmp(arrays[i].file, file)) return arena + arrays[i].offset;
    statics += bytes;
    if (statics > 48 << 10) too_many(name, statics, 48 << 10, "static");
    return add_array(name, bytes, element, file, line, 0);
}
void* shared_part(const char* name, size_t offset, size_t bytes, size_t element) {
    const int key = -(int)offset - 1;  // a part is known by its place in the dynamic array
    for (int i = 0; i < array_count; ++i)
        if (arrays[i].line == key && !strcmp(arrays[i].name, name)) return arena + arrays[i].offset;
    if (offset + bytes > dynamic_bytes) too_many(name, offset + bytes, dynamic_bytes, "dynamic");
    return add_array(name, bytes, element, "", key, offset);
}
// Whether the fences are as they were filled; the array beside the first that is not. In checking mode nothing can reach them.
static const Array* broken_fence() {
    for (int i = 0; i < array_count; ++i)
        for (size_t n = 0; n < FENCE; ++n)
            if (arena[arrays[i].offset + arrays[i].bytes + n] != (char)0xff || arena[arrays[i].offset - 1 - n] != (char)0xff) return arrays + i;
    return nullptr;
}

// ---- barriers and warp intrinsics ----

static void wait(State state, const char* what, const char* file, int line) {
    self->state = state;
    self->what = what;
    self->file = file;
    self->line = line;
    yield();
}
void sync_block(const char* file, int line) {
    self->predicate = 0;
    wait(AT_BARRIER, "__syncthreads", file, line);
}
int sync_block_count(int predicate, const char* file, int line) {
    self->predicate = predicate;
    wait(AT_BARRIER, "__syncthreads", file, line);
    return self->count;
}

// Complete the operation that `f` waits in if all lanes of its mask that have not ended wait there too.
static bool complete(Fiber& f) {
    void *in[32] = {}, *out[32] = {};
    const unsigned first = f.warp * 32;
    unsigned alive = 0;
    for (unsigned lane = 0; lane < 32 && first + lane < fiber_count; ++lane) {
        Fiber& g = fibers[first + lane];
        if (g.state == ENDED) continue;
        alive |= 1u << lane;
        if (!(f.mask >> lane & 1)) continue;
        if (g.state != AT_WARP || g.mask != f.mask || g.line != f.line || strcmp(g.what, f.what)) return false;
        in[lane] = g.in;
        out[lane] = g.out;
    }
    const unsigned taking_part = f.mask & alive;
    if (f.all) {
        const bool kept = checking;
        checking = false;  // lanes read each other's offers, which are no memory of the kernel
        f.all(in, out, taking_part);
        checking = kept;
    } else if (taking_part == alive) ++warp_epoch[f.warp];  // __syncwarp of the whole warp orders its memory accesses
    for (unsigned lane = 0; lane < 32; ++lane)
        if (in[lane] || (taking_part >> lane & 1)) fibers[first + lane].state = RUNNABLE;
    return true;
}
void exchange(unsigned mask, void* in, void* out, Exchange all, const char* what, const char* file, int line) {
    Fiber& f = *self;
    f.mask = mask;
    f.in = in;
    f.out = out;
    f.all = all;
    f.state = AT_WARP;
    f.what = what;
    f.file = file;
    f.line = line;
    if (!(mask >> f.lane & 1)) {
        Finding* found = report(WARP, what);
        snprintf(found->detail, sizeof found->detail, "mask 0x%08x leaves out lane %u, which calls it", mask, f.lane);
        fill_wait(found->first, f);
        leave();
    }
    if (!complete(f)) yield();
    if (finding.kind != NONE) leave();
}
void sync_warp(unsigned mask, const char* file, int line) { exchange(mask, nullptr, nullptr, nullptr, "__syncwarp", file, line); }
void absent_lane(int lane) {
    if (finding.kind != NONE) return;
    Finding* f = report(WARP, self->what);
    snprintf(f->detail, sizeof f->detail, "it asks for the value of lane %d, which takes no part", lane);
    fill_wait(f->first, *self);
}
void missing_lane(int lane) {
    if (finding.kind != NONE) return;
    Finding* f = report(WARP, self->what);
    snprintf(f->detail, sizeof f->detail, "lane %d, which must take part, has ended or does not exist", lane);
    fill_wait(f->first, *self);
}
void atomic_access(const void* p, size_t bytes, const void* pc) {
    if (!checking) return;
    order_atomic(p);
    access(p, bytes, ATOMIC, pc);
}
void begin_action(unsigned action, int tiles, int first, int second) {
    Fiber& f = *self;
    ++f.actions;
    f.action = (uint16_t)action;
    f.tiles = (uint8_t)tiles;
    f.first = first;
    f.second = second;
}
unsigned long long nanoseconds() {
    timespec t;
    timespec_get(&t, TIME_UTC);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

// ---- one block ----

static void fiber_main() {
    in_kernel = true;
    kernel_->invoke(arguments_);
    self->state = ENDED;
    leave();
}
static uint32_t random_number() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    random_state ^= random_state << 5;
    return random_state;
}
template <class T>
static void shuffle_order(T* order, size_t n) {
    for (size_t i = n; i-- > 1;) {
        const size_t j = random_number() % (i + 1);
        const T kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

enum Order { FORWARD, REVERSE, RANDOM };

// Nothing can run: every thread waits or has ended. False when that is a fault.
static bool barrier_reached() {
    Fiber *waiting = nullptr, *other = nullptr, *ended = nullptr, *in_warp = nullptr;
    size_t done = 0;
    int count = 0;
    for (size_t i = 0; i < fiber_count; ++i) {
        Fiber& f = fibers[i];
        if (f.state == ENDED) {
            ++done;
            if (!ended) ended = &f;
        } else if (f.state == AT_WARP) {
            if (!in_warp) in_warp = &f;
        } else {
            if (waiting && !other && (waiting->line != f.line || strcmp(waiting->file, f.file))) other = &f;
            if (!waiting) waiting = &f;
            count += f.predicate;
        }
    }
    if (in_warp) {
        Fiber* absent = nullptr;
        for (unsigned lane = 0; lane < 32 && in_warp->warp * 32 + lane < fiber_count; ++lane) {
            Fiber& g = fibers[in_warp->warp * 32 + lane];
            const bool same = g.state == AT_WARP && g.line == in_warp->line && g.mask == in_warp->mask;
            if ((in_warp->mask >> lane & 1) && g.state != ENDED && !same) absent = &g;
        }
        Finding* f = report(WARP, in_warp->what);
        snprintf(f->detail, sizeof f->detail, "mask 0x%08x names lanes that wait elsewhere", in_warp->mask);
        fill_wait(f->first, *in_warp);
        if (absent) fill_wait(f->second, *absent);
        return false;
    }
    if (done == fiber_count) return true;
    if (other || done) {
        Finding* f = report(BARRIER, "");
        fill_wait(f->first, *waiting);
        if (other) fill_wait(f->second, *other);
        else {
            fill_side(f->second, *ended, false, nullptr);
            snprintf(f->detail, sizeof f->detail, "%zu of %zu threads have ended", done, fiber_count);
        }
        return false;
    }
    if (checking && !checks_barrier()) return false;
    if (checking) order_barrier();
    ++epoch;
    for (size_t i = 0; i < fiber_count; ++i) {
        fibers[i].state = RUNNABLE;
        fibers[i].count = count;
    }
    return true;
}

static bool run_block(uint16_t* order, int how) {
    memset(arena, 0xff, RAW < dynamic_bytes + FENCE ? RAW : dynamic_bytes + FENCE);  // 0xff... is NaN in every floating type
    memset(arena + RAW, 0xff, used - RAW + FENCE);
    memset(array_at + RAW / GRAIN, 0, (used - RAW + GRAIN) / GRAIN * sizeof *array_at);
    array_count = 0;
    used = RAW;
    statics = 0;
    block_epoch = ++epoch;
    for (unsigned w = 0; w < MOST_THREADS / 32; ++w) ++warp_epoch[w];
    if (checking) {
        checks_block();
        order_block();
    }
    copies_block();
    for (size_t i = 0; i < fiber_count; ++i) {
        start(fibers[i].context, fiber_main);
        fibers[i].state = RUNNABLE;
        fibers[i].depth = 0;
        fibers[i].chain = 0;
        fibers[i].pc = nullptr;
        fibers[i].file = "";
        fibers[i].line = 0;
        fibers[i].actions = 0;
        fibers[i].action = NO_ACTION;
        fibers[i].tiles = 0;
        fibers[i].first = fibers[i].second = 0;
    }
    for (size_t ended = 0; ended < fiber_count;) {
        if (finding.kind != NONE) return false;
        if (how == RANDOM) shuffle_order(order, fiber_count);
        bool ran = false;
        for (size_t i = 0; i < fiber_count; ++i) {
            Fiber& f = fibers[order[i]];
            if (f.state != RUNNABLE) continue;
            self = &f;
            current = &f;
            jump(scheduler, f.context);
            ran = true;
            if (finding.kind != NONE) return false;
        }
        if (ran) continue;
        bool freed = false;  // lanes of a mask may have ended since another lane began to wait for them
        for (size_t i = 0; i < fiber_count && !freed; ++i)
            if (fibers[i].state == AT_WARP) {
                self = &fibers[i];
                freed = complete(fibers[i]);
            }
        if (finding.kind != NONE) return false;
        if (freed) continue;
        if (!barrier_reached()) return false;
        ended = 0;
        for (size_t i = 0; i < fiber_count; ++i) ended += fibers[i].state == ENDED;
    }
    if (checking && !checks_barrier()) return false;
    if (checking && counting_banks) banks_block();
    if (const Array* a = checking ? nullptr : broken_fence()) {
        Finding* f = report(BOUNDS, a->name);
        f->shared = 1;
        f->element = f->count = (int64_t)(a->bytes / a->element);
        return false;
    }
    return true;
}

// ---- device globals ----

// A launch that is stopped leaves them as they were before it: a count of blocks that began at 0 begins at 0 again.
#if defined(__linux__)
extern "C" char __start_fv_globals[] __attribute__((weak, visibility("hidden"))), __stop_fv_globals[] __attribute__((weak, visibility("hidden")));
static char* kept_globals;
static void keep_globals() {
    const size_t bytes = __stop_fv_globals - __start_fv_globals;
    if (bytes && !kept_globals) kept_globals = static_cast<char*>(malloc(bytes));
    if (bytes) memcpy(kept_globals, __start_fv_globals, bytes);
}
static void restore_globals() {
    if (kept_globals) memcpy(__start_fv_globals, kept_globals, __stop_fv_globals - __start_fv_globals);
}
#else
static void keep_globals() {}
static void restore_globals() {}
#endif

// ---- what the processor or the clock stops ----

#if !defined(_WIN32)
static volatile sig_atomic_t launching;
static struct sigaction before[8];
static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGPROF};

static void caught(int number, siginfo_t* info, void* context) {
    if (!launching) {  // not the kernel's: let it happen
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    (void)context;
    const void* pc = nullptr;  // stays so where the system's structure is not known here: then the last access has to do
#if defined(__APPLE__) && defined(__x86_64__)
    pc = (const void*)(((ucontext_t*)context)->uc_mcontext->__ss.__rip + 1);
#elif defined(__APPLE__) && defined(__aarch64__)
    pc = (const void*)(__darwin_arm_thread_state64_get_pc(((ucontext_t*)context)->uc_mcontext->__ss) + 1);
#elif defined(__linux__) && defined(__x86_64__)
    pc = (const void*)(((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1);
#elif defined(__linux__) && defined(__aarch64__)
    pc = (const void*)(((ucontext_t*)context)->uc_mcontext.pc + 1);
#endif
    const bool alarmed = number == SIGPROF;
    if (!alarmed || finding.kind == NONE) {
        const bool deep = !alarmed && number != SIGFPE && on_stack(self->context, info->si_addr);
        Finding* f = report(alarmed ? ENDLESS : CRASH, "");
        snprintf(f->detail, sizeof f->detail, "%s",
                 alarmed ? "" : number == SIGFPE ? "a whole number divided by zero" : number == SIGILL ? "an instruction that does not exist"
                 : deep ? "more local memory than a thread has here" : "memory that does not exist");
        fill_wait(f->first, *self);  // where it last waited: for a pc in this file
        if (in_kernel) f->first.pc = offset_of(pc);
        f->first.last = offset_of(self->pc);  // for a pc in the C library
    }
    if (alarmed && !in_kernel) return;  // between two fibers: the launch looks at the finding, or the next alarm comes
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, number);
    sigprocmask(SIG_UNBLOCK, &mask, nullptr);
    leave();
}
static void set_alarm(unsigned seconds) {  // of the processor's time: a busy machine ends no launch early
    itimerval timer = {};
    timer.it_value.tv_sec = seconds;
    timer.it_interval.tv_usec = seconds ? 50000 : 0;
    setitimer(ITIMER_PROF, &timer, nullptr);
}
static void catch_signals(bool on, unsigned seconds) {
    static char* stack = nullptr;
    if (on) {
        if (!stack) stack = new_stack();
        stack_t other = {};
        other.ss_sp = stack;
        other.ss_size = STACK_BYTES;
        sigaltstack(&other, nullptr);
        struct sigaction action = {};
        action.sa_sigaction = caught;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int i = 0; i < 5; ++i) sigaction(SIGNALS[i], &action, before + i);
        launching = 1;
        set_alarm(seconds);
    } else {
        set_alarm(0);
        launching = 0;
        for (int i = 0; i < 5; ++i) sigaction(SIGNALS[i], before + i, nullptr);
    }
}
#else
static void catch_signals(bool, unsigned) {}  // the caller's time limit and the exit code of the process have to do
#endif

}  // namespace fv

// ---- what Python calls ----

using namespace fv;

FV_EXPORT void* fv_buffer(const char* name, void* known, size_t bytes, size_t element, int flags, size_t guard) {
    if (buffer_count == MOST_BUFFERS) return nullptr;
    Buffer& b = buffers[buffer_count++];
    memset(&b, 0, sizeof b);
    snprintf(b.name, sizeof b.name, "%s", name);
    b.bytes = bytes;
    b.element = element;
    b.flags = flags;
    b.guard = known ? 0 : guard;
    if (known) b.base = static_cast<char*>(known);
    else {
        b.memory = static_cast<char*>(malloc(bytes + 2 * guard + 64));
        b.base = reinterpret_cast<char*>(((uintptr_t)b.memory + guard + 63) & ~(uintptr_t)63);
        const size_t fence = guard < FENCE ? guard : FENCE;
        memset(b.base - fence, 0xff, fence);
        memset(b.base + bytes, 0xff, fence);
    }
    return b.base;
}
FV_EXPORT void fv_free() {
    for (int i = 0; i < buffer_count; ++i) {
        free_cells(buffers[i]);
        free(buffers[i].memory);
    }
    buffer_count = 0;
    copies_free();
    for (Fiber& f : fibers) finish(f.context);
}
FV_EXPORT const Finding* fv_finding() { return &finding; }
FV_EXPORT size_t fv_finding_size() { return sizeof(Finding); }
FV_EXPORT const void* fv_anchor() { return &anchor; }
FV_EXPORT int64_t fv_unwritten(int buffer, int64_t* element) { return unwritten(buffers[buffer], element); }

// Log the accesses of the next checked launches into `records`; how many there were, which may be more than there was room for.
FV_EXPORT void fv_log(Access* records, size_t room) {
    log_records = records;
    log_room = room;
    log_count = 0;
}
FV_EXPORT size_t fv_logged() { return log_count; }
FV_EXPORT size_t fv_access_size() { return sizeof(Access); }
FV_EXPORT const char* fv_shared_name(int number) {  // of the block that ran last
    return number < array_count ? arrays[number].name : nullptr;
}

// 0 when the launch ran to its end and nothing was found. `seconds` 0: no time limit, and faults are the process's own.
FV_EXPORT int fv_launch(const Kernel* kernel, const unsigned* grid, const unsigned* block, size_t shared, void** arguments, int order,
                        unsigned seed, int check, unsigned seconds) {
    finding.kind = NONE;
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block[0], block[1], block[2]};
    kernel_ = kernel;
    arguments_ = arguments;
    dynamic_bytes = shared;
    checking = check != 0;
    fiber_count = (size_t)block[0] * block[1] * block[2];
    random_state = seed * 2654435761u | 1;
    used = used < RAW ? ARENA - GRAIN : used;
    epoch = 1;
    memset(warp_epoch, 0, sizeof warp_epoch);
    static uint16_t threads[MOST_THREADS];
    if (fiber_count == 0 || fiber_count > MOST_THREADS) return -1;
    for (unsigned i = 0; i < fiber_count; ++i) {
        Fiber& f = fibers[i];
        f.index = {i % block[0], i / block[0] % block[1], i / (block[0] * block[1])};
        f.linear = i;
        f.lane = i % 32;
        f.warp = i / 32;
        threads[i] = (uint16_t)(order == REVERSE ? fiber_count - 1 - i : i);
    }
    const size_t blocks = (size_t)grid[0] * grid[1] * grid[2];
    uint32_t* turns = order == RANDOM ? static_cast<uint32_t*>(malloc(blocks * sizeof(uint32_t))) : nullptr;
    for (size_t i = 0; turns && i < blocks; ++i) turns[i] = (uint32_t)i;
    if (turns) shuffle_order(turns, blocks);
    if (checking) {
        checks_begin();
        order_begin();
        banks_begin();
    }
    keep_globals();
    if (seconds) catch_signals(true, seconds);
    bool clean = true;
    for (size_t turn = 0; clean && turn < blocks; ++turn) {
        const size_t n = turns ? turns[turn] : order == REVERSE ? blocks - 1 - turn : turn;
        block_index = {(unsigned)(n % grid[0]), (unsigned)(n / grid[0] % grid[1]), (unsigned)(n / ((size_t)grid[0] * grid[1]))};
        clean = run_block(threads, order);
    }
    if (clean && checking) clean = checks_end();
    if (seconds) catch_signals(false, 0);
    free(turns);
    for (int i = 0; clean && !checking && i < buffer_count; ++i) {
        const Buffer& b = buffers[i];
        const size_t fence = b.guard < FENCE ? b.guard : FENCE;
        for (size_t n = 0; n < fence; ++n) {
            if (b.base[b.bytes + n] == (char)0xff && b.base[-1 - (ptrdiff_t)n] == (char)0xff) continue;
            Finding* f = report(BOUNDS, b.name);
            f->count = (int64_t)(b.bytes / b.element);
            f->element = b.base[b.bytes + n] != (char)0xff ? f->count + (int64_t)(n / b.element) : -1 - (int64_t)(n / b.element);
            clean = false;
            break;
        }
    }
    if (finding.kind != NONE) restore_globals();
    return finding.kind != NONE;
}
