// order.cpp: when what one block wrote may be read by another: after a fence, through an atomic operation on one place that both do.
//
// The pattern is that of "the last block to finish": every thread writes its part and calls __threadfence(); after a barrier one
// thread counts the block with an atomic; the block whose count is the last reads, behind another barrier, what all the others wrote.
// Blocks run one after the other here, so an atomic of this block comes after all of the earlier blocks' on the same place: it
// acquires what they released. A thread's atomic releases its own writes before its last fence, and, of what lies before the last
// barrier, everything when it has called a fence since, else everything if no thread had written something after its own last fence.
#include "state.hpp"

namespace fv {

struct Release {
    const void* at;
    uint32_t epoch;
    uint16_t thread;
    bool whole, own;  // what lies before the barrier; what this thread did
};
struct Acquire {
    const void* at;
    uint32_t epoch;
    uint16_t thread;
};
static Release* releases;
static size_t release_count, release_room;
static size_t* first_release;  // of each block that ran
static size_t block_count, block_room;
static Acquire acquired[64];
static int acquired_count;
static bool block_unfenced;

void order_begin() { release_count = block_count = 0; }
void order_block() {
    if (block_count == block_room) {
        block_room = block_room * 2 + 64;
        first_release = static_cast<size_t*>(realloc(first_release, block_room * sizeof(size_t)));
    }
    first_release[block_count++] = release_count;
    acquired_count = 0;
    block_unfenced = false;
    for (size_t i = 0; i < fiber_count; ++i) {
        fibers[i].unfenced = false;
        fibers[i].fence_epoch = 0;
    }
}
void order_barrier() {
    block_unfenced = false;
    for (size_t i = 0; i < fiber_count; ++i) block_unfenced |= fibers[i].unfenced;
}
void fence() {
    self->unfenced = false;
    self->fence_epoch = epoch;
}
void order_atomic(const void* p) {
    const Release now = {p, epoch, (uint16_t)self->linear, self->fence_epoch == epoch || !block_unfenced, !self->unfenced};
    for (size_t n = release_count; n > first_release[block_count - 1]; --n)  // once for each place, thread and epoch
        if (releases[n - 1].at == p && releases[n - 1].thread == now.thread && releases[n - 1].epoch == epoch) {
            releases[n - 1].whole |= now.whole;
            releases[n - 1].own |= now.own;
            return;
        } else if (release_count - n > 16) break;
    if (release_count == release_room) {
        release_room = release_room * 2 + 64;
        releases = static_cast<Release*>(realloc(releases, release_room * sizeof(Release)));
    }
    releases[release_count++] = now;
    if (acquired_count < 64) acquired[acquired_count++] = {p, epoch, now.thread};
}

// Whether what `t`, of an earlier block, did is over and to be seen by this block's thread `now`.
bool ordered(uint32_t block, const Touch& t, const Touch& now) {
    const size_t end = block + 1 < block_count ? first_release[block + 1] : release_count;
    for (int n = 0; n < acquired_count; ++n) {
        const Acquire& a = acquired[n];
        if (a.epoch >= epoch && a.thread != now.thread) continue;  // no barrier since
        for (size_t i = first_release[block]; i < end; ++i) {
            const Release& r = releases[i];
            if (r.at != a.at || t.epoch > r.epoch) continue;
            if (t.atomic || (r.whole && t.epoch < r.epoch) || (r.own && t.thread == r.thread)) return true;
        }
    }
    return false;
}

}  // namespace fv
