// copies.cpp: asynchronous copies from HBM to shared memory, and plain reads of HBM, as the instructions of ptx.hpp do them.
//
// What a thread has issued is kept in a queue, with the number of the group that it belongs to: that of the next commit.
#include "state.hpp"

namespace fv {

struct Copy {
    uint32_t to, group, chain;  // chain, pc: where it was issued
    int32_t pc;
    unsigned char bytes[16];
};
struct Queue {
    Copy* copies;
    uint32_t first, end, room;
    uint32_t groups;  // committed so far in this block
};
static Queue queues[MOST_THREADS];

void copies_block() {
    for (size_t i = 0; i < fiber_count; ++i) queues[i].first = queues[i].end = queues[i].groups = 0;
}
void copies_free() {
    for (Queue& q : queues) {
        free(q.copies);
        q = {};
    }
}

unsigned shared_offset(const void* p, const void* pc) {
    const size_t offset = (size_t)((const char*)p - arena);
    if (offset > ARENA) stray(p, 1, false, pc, "shared memory is wanted here");
    return (unsigned)offset;
}
char* shared_place(unsigned at, size_t bytes, bool write, const void* pc) {
    if (at + bytes > ARENA) stray(arena + at, bytes, write, pc, "shared memory is wanted here");
    if (at % bytes) misaligned(arena + at, bytes, write, pc);
    return arena + at;
}
void load_global(void* to, const void* from, size_t bytes, const void* pc) {
    if ((size_t)((const char*)from - arena) < ARENA) stray(from, bytes, false, pc, "memory outside of the block is wanted here");
    if ((uintptr_t)from % bytes) misaligned(from, bytes, false, pc);
    if (checking) access(from, bytes, READ, pc);
    memcpy(to, from, bytes);
}

void copy_issue(unsigned to, const void* from, bool exists, const void* pc) {
    Queue& q = queues[self->linear];
    char* place = shared_place(to, 16, true, pc);
    Copy copy = {to, q.groups, self->chain, (int32_t)((const char*)pc - &anchor), {}};
    if (exists) load_global(copy.bytes, from, 16, pc);
    else if ((uintptr_t)from % 16) misaligned(from, 16, false, pc);
    if (checking) access(place, 16, COPY_BEGINS, pc);
    memset(place, 0xff, 16);
    if (q.end == q.room) {
        q.room = q.room * 2 + 32;
        q.copies = static_cast<Copy*>(realloc(q.copies, q.room * sizeof(Copy)));
    }
    q.copies[q.end++] = copy;
}
void copy_commit() { ++queues[self->linear].groups; }
void copy_wait(unsigned pending) {
    Queue& q = queues[self->linear];
    for (; q.first < q.end && q.copies[q.first].group + pending < q.groups; ++q.first) {
        const Copy& copy = q.copies[q.first];
        if (checking) copy_ends(arena + copy.to, 16, copy.pc, copy.chain);
        memcpy(arena + copy.to, copy.bytes, 16);
    }
    if (q.first == q.end) q.first = q.end = 0;
}

}  // namespace fv
