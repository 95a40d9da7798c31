// checks.cpp: who touched what. The kernel is compiled with -fsanitize=thread, so the compiler puts a call before every memory access
// that may be seen by other threads; the functions it calls are here, and no sanitizer is linked or preloaded.
//
// For each 4 bytes of shared memory and of output arrays (each byte of those that were touched by narrower accesses) a cell knows the
// last write and two readers since the last barrier. Two readers are enough to contradict any writer: they are of two warps when threads
// of two warps read, else two lanes of one. The epoch counts barriers, so an earlier one means that a barrier lies between.
#include "state.hpp"

#include <stdio.h>

namespace fv {

struct Cell {
    Touch write, read[2];
    Touch earlier;  // the last read by a block before the current one
    bool split;     // its four bytes have cells of their own
};

static Cell shared_cells[ARENA / 4];
static Cell* shared_bytewise[ARENA / 4];
static Finding pending_shared, pending_global;  // reads of what nothing wrote: they become a race when another thread writes it later
static uint32_t* block_starts;                  // epoch in which each block that ran began, ascending, and which block it was
static Index* block_names;
static size_t block_total, block_room;

// Chains of calls, each kept once: a call and the chain of its caller. Number 0 is no call.
struct Call {
    const void* pc;
    uint32_t outer;
};
constexpr uint32_t MOST_CHAINS = 1 << 13;
static Call chains[MOST_CHAINS];

static uint32_t chain_of(const void* pc, uint32_t outer) {
    uint32_t at = ((uint32_t)(uintptr_t)pc * 2654435761u ^ outer * 40503u) % MOST_CHAINS;
    for (uint32_t tries = 0; tries < MOST_CHAINS; ++tries, at = (at + 1) % MOST_CHAINS) {
        if (at == 0) continue;
        if (!chains[at].pc) chains[at] = {pc, outer};
        if (chains[at].pc == pc && chains[at].outer == outer) return at;
    }
    return outer;  // full: the innermost calls are left out
}
void fill_calls(Side& side, uint32_t chain) {
    for (int n = 0; n < CALLS && chain; ++n, chain = chains[chain].outer) side.calls[n] = (const char*)chains[chain].pc - &anchor;
}

static int32_t offset_of(const void* pc) { return pc ? (int32_t)((const char*)pc - &anchor) : 0; }

static size_t block_of(const Touch& t) {  // number of the block that was running at that epoch
    size_t low = 0, high = block_total;
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        (block_starts[middle] <= t.epoch ? low : high) = middle;
    }
    return low;
}
static void side_of(Side& side, const Touch& t, bool write) {
    memset(&side, 0, sizeof side);
    const size_t low = block_of(t);
    side.present = 1;
    side.write = write;
    side.pc = t.pc;
    fill_calls(side, t.chain);
    const Index b = block_names[low], i = fibers[t.thread].index;
    const unsigned block[] = {b.x, b.y, b.z}, thread[] = {i.x, i.y, i.z};
    memcpy(side.block, block, sizeof block);
    memcpy(side.thread, thread, sizeof thread);
}

struct Place {
    const char* name;
    int64_t element, count;
    bool shared;
};

static void describe(Finding* f, const Place& at) {
    f->element = at.element;
    f->count = at.count;
    f->shared = at.shared;
}
static void conflict(Kind kind, const Place& at, const Touch& first, bool first_writes, const Touch& second, bool second_writes) {
    Finding* f = report(kind, at.name);
    describe(f, at);
    side_of(f->first, first, first_writes);
    side_of(f->second, second, second_writes);
    leave();
}
[[noreturn]] static void give_up(Kind kind, const Place& at, const Touch& now, bool write) {
    // A thread that has read what nothing wrote goes astray afterwards: that read is the fault.
    const Finding& earlier = pending_shared.kind != NONE ? pending_shared : pending_global;
    if (earlier.kind != NONE) {
        *report(UNWRITTEN, "") = earlier;
        leave();
    }
    Finding* f = report(kind, at.name);
    describe(f, at);
    side_of(f->first, now, write);
    leave();
}

// Whether `t`, of another thread of this block, has no barrier between it and now.
static bool unordered(const Touch& t, const Touch& now) {
    if (t.epoch != epoch || t.thread == now.thread) return false;
    const unsigned warp = now.thread / 32;
    return t.thread / 32 != warp || t.warp_epoch >= warp_epoch[warp];
}

// Whether `t` was of an earlier block that this one has not waited for.
static bool other_block(const Touch& t, const Touch& now) {
    return t.epoch < block_epoch && !ordered((uint32_t)block_of(t), t, now);
}

static void note_read(Cell& c, const Touch& now) {
    Touch &a = c.read[0], &b = c.read[1];
    for (Touch& t : c.read)
        if (t.epoch && t.epoch < block_epoch) {
            c.earlier = t;
            t.epoch = 0;
        }
    if (a.epoch != epoch || a.thread == now.thread) {
        if (a.epoch != epoch && b.epoch == epoch && b.thread == now.thread) b = now;
        else a = now;
    } else if (b.epoch != epoch || b.thread == now.thread) b = now;
    else if (a.thread / 32 == b.thread / 32) {  // a third reader: keep two warps if there are two, else the most recent
        if (now.thread / 32 != a.thread / 32) b = now;
        else if (!unordered(a, now)) a = now;
        else if (!unordered(b, now)) b = now;
    }
}

static void touch(Cell& c, const Place& at, const Touch& now, bool write, bool track_unwritten) {
    const bool across_blocks = !at.shared;
    if (across_blocks && c.write.epoch && !(now.atomic && c.write.atomic) && other_block(c.write, now))
        conflict(BLOCKS, at, c.write, true, now, write);
    if (unordered(c.write, now) && !(now.atomic && c.write.atomic)) conflict(RACE, at, c.write, true, now, write);
    if (c.write.how == COPY_BEGINS && c.write.epoch >= block_epoch && now.how != COPY_ENDS) conflict(PENDING, at, c.write, true, now, write);
    if (write) {
        for (const Touch& t : c.read)
            if (unordered(t, now)) conflict(RACE, at, t, false, now, true);
        if (across_blocks) {
            if (c.earlier.epoch && other_block(c.earlier, now)) conflict(BLOCKS, at, c.earlier, false, now, true);
            for (const Touch& t : c.read)
                if (t.epoch && other_block(t, now)) conflict(BLOCKS, at, t, false, now, true);
        }
    }
    const uint32_t since = across_blocks ? 1 : block_epoch;
    if ((!write || now.atomic) && track_unwritten && c.write.epoch < since) {
        Finding& f = at.shared ? pending_shared : pending_global;
        if (f.kind == NONE) {
            memset(&f, 0, sizeof f);
            f.kind = UNWRITTEN;
            strncpy(f.array, at.name, sizeof f.array - 1);
            describe(&f, at);
            side_of(f.first, now, false);
        }
    }
    if (write) c.write = now;
    else note_read(c, now);
}

// The cells of [offset, offset + bytes) of an array whose first cell is `cells`.
static void touch_range(Cell* cells, Cell** bytewise, size_t offset, size_t bytes, Place& at, size_t start, size_t element, const Touch& now,
                        bool write, bool track_unwritten) {
    const bool whole = offset % 4 == 0 && bytes % 4 == 0;
    for (size_t word = offset / 4; word * 4 < offset + bytes; ++word) {
        Cell& c = cells[word];
        if (whole && !c.split) {
            at.element = (int64_t)((word * 4 - start) / element);
            touch(c, at, now, write, track_unwritten);
            continue;
        }
        if (!c.split) {
            if (!bytewise[word]) bytewise[word] = static_cast<Cell*>(malloc(4 * sizeof(Cell)));
            for (int i = 0; i < 4; ++i) bytewise[word][i] = c;
            c.split = true;
        }
        for (size_t byte = word * 4; byte < word * 4 + 4; ++byte) {
            if (byte < offset || byte >= offset + bytes) continue;
            at.element = (int64_t)((byte - start) / element);
            touch(bytewise[word][byte % 4], at, now, write, track_unwritten);
        }
    }
}

static int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// Each element that an access touches, once; an atomic reads and writes. An asynchronous copy writes when it is issued.
static void log_access(int array, size_t offset, size_t bytes, size_t size, How how) {
    if (how == COPY_ENDS) return;
    const Fiber& f = *self;
    const uint32_t block = (block_index.z * grid_size.y + block_index.y) * grid_size.x + block_index.x;
    for (size_t element = offset / size; element * size < offset + bytes; ++element)
        for (int both = how == ATOMIC ? 0 : writes(how); both <= writes(how); ++both) {
            if (log_count++ >= log_room) continue;
            log_records[log_count - 1] = {block, f.actions, (uint16_t)f.linear, f.action, f.first, f.second, (int16_t)array, f.tiles, (uint8_t)both, (int64_t)element};
        }
}

// Which array an address outside of all of them belongs to: the one whose fence it hits, else the last one before it.
static Array nearest_array(size_t offset, const Array& raw) {
    int next = 0;
    while (next < array_count && arrays[next].offset <= offset) ++next;
    const Array& before = next ? arrays[next - 1] : raw;
    const bool in_next_fence = next < array_count && arrays[next].offset - offset <= FENCE;
    return in_next_fence && offset - before.offset - before.bytes >= FENCE ? arrays[next] : before;
}
static void shared_access(size_t offset, size_t bytes, bool write, const Touch& now) {
    const int number = array_at[offset / GRAIN] - 1;
    const Array raw = {"dynamic shared memory", 0, dynamic_bytes, 4, "", 0};
    const Array& a = number >= 0 ? arrays[number] : raw;
    const int64_t count = (int64_t)(a.bytes / a.element);
    if (offset < a.offset || offset + bytes > a.offset + a.bytes) {
        if (offset >= a.offset && offset < a.offset + a.bytes) give_up(BOUNDS, {a.name, count, count, true}, now, write);
        const Array closest = nearest_array(offset, raw);
        const int64_t element = floor_divide((int64_t)offset - (int64_t)closest.offset, (int64_t)closest.element);
        give_up(BOUNDS, {closest.name, element, (int64_t)(closest.bytes / closest.element), true}, now, write);
    }
    if (counting_banks) banks_note(offset, bytes, number, now);
    if (log_records) log_access(-2 - number, offset - a.offset, bytes, a.element, now.how);
    Place at = {a.name, 0, count, true};
    touch_range(shared_cells, shared_bytewise, offset, bytes, at, a.offset, a.element, now, write, true);
}

static void buffer_access(Buffer& b, const char* p, size_t bytes, bool write, const Touch& now) {
    const int64_t count = (int64_t)(b.bytes / b.element);
    if (p < b.base || p + bytes > b.base + b.bytes) {
        const int64_t element = floor_divide(p - b.base, (int64_t)b.element);
        give_up(BOUNDS, {b.name, element < count && element >= 0 ? count : element, count, false}, now, write);
    }
    if (b.flags & KNOWN) return;
    Place at = {b.name, (p - b.base) / (int64_t)b.element, count, false};
    if (log_records) log_access((int)(&b - buffers), p - b.base, bytes, b.element, now.how);
    if (b.flags & CONST_ARRAY) {
        if (write) give_up(INPUT, at, now, true);
        return;
    }
    self->unfenced |= now.how == WRITE;
    touch_range(b.cells, b.bytewise, p - b.base, bytes, at, 0, b.element, now, write, b.flags & OUTPUT);
}

static Touch now_at(int32_t pc, uint32_t chain, How how) {
    return {pc, chain, epoch, warp_epoch[self->warp] - (how == READ_TOGETHER), (uint16_t)self->linear, how == ATOMIC, how};
}
void copy_ends(const void* p, size_t bytes, int32_t pc, uint32_t chain) {
    shared_access((size_t)((const char*)p - arena), bytes, true, now_at(pc, chain, COPY_ENDS));
}
void access(const void* where, size_t bytes, How how, const void* pc) {
    const char* p = static_cast<const char*>(where);
    self->pc = pc;
    if (on_stack(self->context, p)) return;
    const bool write = writes(how);
    const Touch now = now_at(offset_of(pc), self->chain, how);
    const size_t offset = (size_t)(p - arena);
    if (offset < ARENA) return shared_access(offset, bytes, write, now);
    Buffer* nearest = nullptr;
    for (int i = 0; i < buffer_count; ++i) {
        Buffer& b = buffers[i];
        if (p >= b.base && p < b.base + b.bytes) return buffer_access(b, p, bytes, write, now);
        if (p >= b.base - b.guard && p < b.base + b.bytes + b.guard) nearest = &b;
    }
    if (nearest) return buffer_access(*nearest, p, bytes, write, now);
    const ptrdiff_t away = p - &anchor;
    if (away > -(64 << 20) && away < (64 << 20)) return;  // the library's own: device globals, constants, threadIdx
    give_up(WILD, {"", 0, 0, false}, now, write);
}

// The array that an address lies in, for a report; no name where there is none.
static Place place_of(const char* p) {
    const size_t offset = (size_t)(p - arena);
    if (offset < ARENA) {
        const int number = array_at[offset / GRAIN] - 1;
        if (number < 0) return {"dynamic shared memory", (int64_t)offset / 4, (int64_t)dynamic_bytes / 4, true};
        const Array& a = arrays[number];
        return {a.name, floor_divide((int64_t)offset - (int64_t)a.offset, (int64_t)a.element), (int64_t)(a.bytes / a.element), true};
    }
    for (int i = 0; i < buffer_count; ++i) {
        const Buffer& b = buffers[i];
        if (p >= b.base && p < b.base + b.bytes) return {b.name, (p - b.base) / (int64_t)b.element, (int64_t)(b.bytes / b.element), false};
    }
    return {"", 0, 0, false};
}
static Finding* odd_access(Kind kind, const void* p, bool write, const void* pc) {
    const Place at = place_of(static_cast<const char*>(p));
    Finding* f = report(kind, at.name);
    describe(f, at);
    fill_side(f->first, *self, write, pc);
    return f;
}
void misaligned(const void* p, size_t bytes, bool write, const void* pc) {
    Finding* f = odd_access(MISALIGNED, p, write, pc);
    snprintf(f->detail, sizeof f->detail, "%zu bytes at an address that is %zu past a multiple of %zu", bytes, (size_t)((uintptr_t)p % bytes), bytes);
    leave();
}
void stray(const void* p, size_t, bool write, const void* pc, const char* detail) {
    Finding* f = odd_access(WILD, p, write, pc);
    snprintf(f->detail, sizeof f->detail, "%s", detail);
    leave();
}

void free_cells(Buffer& b) {
    for (size_t word = 0; b.bytewise && word <= b.bytes / 4; ++word) free(b.bytewise[word]);
    free(b.bytewise);
    free(b.cells);
    b.bytewise = nullptr;
    b.cells = nullptr;
}

void checks_begin() {
    pending_shared.kind = pending_global.kind = NONE;
    block_total = 0;
    memset(shared_cells, 0, sizeof shared_cells);
    for (int i = 0; i < buffer_count; ++i) {
        Buffer& b = buffers[i];
        free_cells(b);
        if (b.flags & (CONST_ARRAY | KNOWN)) continue;
        b.cells = static_cast<Cell*>(calloc(b.bytes / 4 + 1, sizeof(Cell)));
        b.bytewise = static_cast<Cell**>(calloc(b.bytes / 4 + 1, sizeof(Cell*)));
    }
}
void checks_block() {
    if (block_total == block_room) {
        block_room = block_room * 2 + 64;
        block_starts = static_cast<uint32_t*>(realloc(block_starts, block_room * sizeof *block_starts));
        block_names = static_cast<Index*>(realloc(block_names, block_room * sizeof *block_names));
    }
    block_starts[block_total] = block_epoch;
    block_names[block_total++] = block_index;
}
bool checks_barrier() {
    if (pending_shared.kind == NONE) return true;
    *report(UNWRITTEN, "") = pending_shared;
    return false;
}
bool checks_end() {
    if (pending_global.kind == NONE) return true;
    *report(UNWRITTEN, "") = pending_global;
    return false;
}
int64_t unwritten(const Buffer& b, int64_t* element) {
    int64_t missing = 0;
    for (size_t at = 0; b.cells && at < b.bytes; at += b.element) {
        const Cell& c = b.cells[at / 4];
        if (c.split ? b.bytewise[at / 4][at % 4].write.epoch : c.write.epoch) continue;
        if (!missing++) *element = (int64_t)(at / b.element);
    }
    return missing;
}

}  // namespace fv

// ---- what the compiler calls ----

#define CALLER __builtin_return_address(0)
#define TSAN(type) extern "C" FV_LOCAL type
static inline void seen(const void* p, size_t n, bool write, const void* pc) {
    if (fv::checking) fv::access(p, n, write ? fv::WRITE : fv::READ, pc);
}
// The compiler takes the address for a multiple of the bytes, and so would a GPU.
static inline void aligned(const void* p, size_t n, bool write, const void* pc) {
    if (fv::checking && (uintptr_t)p % n && !fv::on_stack(fv::self->context, static_cast<const char*>(p))) fv::misaligned(p, n, write, pc);
    seen(p, n, write, pc);
}
void fv::assigned(const void* to, const void* from, size_t bytes, const void* pc) {
    aligned(from, bytes, false, pc);
    aligned(to, bytes, true, pc);
}
static void seen_range(const void* p, size_t n, bool write, const void* pc) {
    const char* at = static_cast<const char*>(p);
    for (; n >= 4; n -= 4, at += 4) seen(at, 4, write, pc);
    for (; n; --n, ++at) seen(at, 1, write, pc);
}
#define ACCESS(n)                                                                                        \
    TSAN(void) __tsan_read##n(void* p) { aligned(p, n, false, CALLER); }                                  \
    TSAN(void) __tsan_write##n(void* p) { aligned(p, n, true, CALLER); }                                  \
    TSAN(void) __tsan_unaligned_read##n(void* p) { seen(p, n, false, CALLER); }                           \
    TSAN(void) __tsan_unaligned_write##n(void* p) { seen(p, n, true, CALLER); }                           \
    TSAN(void) __tsan_volatile_read##n(void* p) { seen(p, n, false, CALLER); }                            \
    TSAN(void) __tsan_volatile_write##n(void* p) { seen(p, n, true, CALLER); }                            \
    TSAN(void) __tsan_unaligned_volatile_read##n(void* p) { seen(p, n, false, CALLER); }                  \
    TSAN(void) __tsan_unaligned_volatile_write##n(void* p) { seen(p, n, true, CALLER); }                  \
    TSAN(void) __tsan_read_write##n(void* p) { seen(p, n, false, CALLER), seen(p, n, true, CALLER); }     \
    TSAN(void) __tsan_unaligned_read_write##n(void* p) { seen(p, n, false, CALLER), seen(p, n, true, CALLER); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
TSAN(void) __tsan_read_range(void* p, size_t n) { seen_range(p, n, false, CALLER); }
TSAN(void) __tsan_write_range(void* p, size_t n) { seen_range(p, n, true, CALLER); }
TSAN(void*) __tsan_memcpy(void* to, const void* from, size_t n) {
    seen_range(from, n, false, CALLER);
    seen_range(to, n, true, CALLER);
    return memcpy(to, from, n);
}
TSAN(void*) __tsan_memmove(void* to, const void* from, size_t n) {
    seen_range(from, n, false, CALLER);
    seen_range(to, n, true, CALLER);
    return memmove(to, from, n);
}
TSAN(void*) __tsan_memset(void* to, int value, size_t n) {
    seen_range(to, n, true, CALLER);
    return memset(to, value, n);
}
TSAN(void) __tsan_func_entry(void* caller) {
    fv::Fiber* f = fv::self;
    if (!f) return;
    if (f->depth < fv::DEPTH) f->chains[f->depth] = f->chain;
    if (f->depth++) f->chain = fv::chain_of(caller, f->chain);  // the first is the kernel, which no kernel called
}
TSAN(void) __tsan_func_exit() {
    fv::Fiber* f = fv::self;
    if (f && --f->depth < fv::DEPTH) f->chain = f->chains[f->depth];
}
TSAN(void) __tsan_init() {}
TSAN(void) __tsan_vptr_update(void**, void*) {}
TSAN(void) __tsan_vptr_read(void**) {}
