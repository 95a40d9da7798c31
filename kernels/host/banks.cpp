// banks.cpp: how often the lanes of a warp wait for each other at the 32 banks of shared memory.
//
// A bank gives one word of 4 bytes at a time. A warp's access of 4 bytes a lane (or fewer) is one phase of 32 lanes, of 8 bytes two phases
// of 16, of 16 bytes (each of ldmatrix's four matrices, a float4, an asynchronous copy) four phases of 8. A phase takes as many passes,
// wavefronts, as the bank that it wants most different words of. Lanes that want the same word share it.
//
// Lanes run one after the other here, so what a warp does together has to be put together again: the k-th time that each lane is at one
// place (instruction and calls that led there) between two barriers. Where lanes go different ways that is a guess, as it is on a GPU.
#include "state.hpp"

namespace fv {

struct Record {
    int32_t pc;
    uint32_t chain, epoch, time;  // of all of the block's records; then which time the thread was there
    uint32_t offset;
    uint16_t thread;
    int16_t array;
    uint8_t bytes, write;
};
static Record* records;
static size_t record_count, record_room;
static BankUse* uses;
static int use_count, use_room;
bool counting_banks;

void banks_note(size_t offset, size_t bytes, int array, const Touch& now) {
    if (now.how == COPY_ENDS) return;
    if (record_count == record_room) {
        record_room = record_room * 2 + 4096;
        records = static_cast<Record*>(realloc(records, record_room * sizeof(Record)));
    }
    records[record_count] = {now.pc, now.chain, now.epoch, (uint32_t)record_count, (uint32_t)offset, now.thread, (int16_t)array, (uint8_t)bytes, writes(now.how)};
    ++record_count;
}

#define FV_COMPARE(x, y) \
    if ((x) != (y)) return (x) < (y) ? -1 : 1
static int by_thread(const void* a, const void* b) {
    const Record &x = *static_cast<const Record*>(a), &y = *static_cast<const Record*>(b);
    FV_COMPARE(x.thread, y.thread);
    FV_COMPARE(x.pc, y.pc);
    FV_COMPARE(x.chain, y.chain);
    FV_COMPARE(x.epoch, y.epoch);
    FV_COMPARE(x.time, y.time);
    return 0;
}
static bool same_place(const Record& x, const Record& y) { return x.pc == y.pc && x.chain == y.chain && x.epoch == y.epoch; }
static int by_warp(const void* a, const void* b) {
    const Record &x = *static_cast<const Record*>(a), &y = *static_cast<const Record*>(b);
    FV_COMPARE(x.thread / 32, y.thread / 32);
    FV_COMPARE(x.pc, y.pc);
    FV_COMPARE(x.chain, y.chain);
    FV_COMPARE(x.epoch, y.epoch);
    FV_COMPARE(x.time, y.time);
    FV_COMPARE(x.thread, y.thread);
    return 0;
}
static bool same_access(const Record& x, const Record& y) {
    return same_place(x, y) && x.thread / 32 == y.thread / 32 && x.time == y.time && x.bytes == y.bytes && x.array == y.array;
}

static BankUse& use_of(const Record& r) {
    const char* name = r.array < 0 ? "dynamic shared memory" : arrays[r.array].name;
    for (int i = use_count; i-- > 0;) {
        BankUse& u = uses[i];
        if (u.pc == r.pc && u.chain == r.chain && u.write == r.write && u.bytes == r.bytes && !strcmp(u.array, name)) return u;
    }
    if (use_count == use_room) {
        use_room = use_room * 2 + 64;
        uses = static_cast<BankUse*>(realloc(uses, use_room * sizeof(BankUse)));
    }
    BankUse& u = uses[use_count++];
    memset(&u, 0, sizeof u);
    strncpy(u.array, name, sizeof u.array - 1);
    u.pc = r.pc;
    u.chain = r.chain;
    u.write = r.write;
    u.bytes = r.bytes;
    Side side = {};
    fill_calls(side, r.chain);
    memcpy(u.calls, side.calls, sizeof u.calls);
    return u;
}

// One access of a warp: records [first, end), in the order of their lanes.
static void count_access(const Record* first, const Record* end) {
    BankUse& use = use_of(*first);
    const unsigned words = first->bytes < 4 ? 1 : first->bytes / 4, lanes = 32 / (words > 4 ? 4 : words);
    ++use.accesses;
    while (first < end) {
        const unsigned phase = first->thread % 32 / lanes;
        static uint32_t wanted[32][32 * 4];  // no local array: past 4 KB, a frame needs a function that is not linked on Windows
        int count[32] = {}, most = 0;
        for (; first < end && first->thread % 32 / lanes == phase; ++first)
            for (unsigned w = 0; w < words; ++w) {
                const uint32_t word = first->offset / 4 + w, bank = word % 32;
                int n = 0;
                while (n < count[bank] && wanted[bank][n] != word) ++n;
                if (n == count[bank]) wanted[bank][count[bank]++] = word;
                if (count[bank] > most) most = count[bank];
            }
        ++use.phases;
        use.wavefronts += most;
    }
}

void banks_begin() { record_count = 0, use_count = 0; }
void banks_block() {  // a block has ended
    qsort(records, record_count, sizeof(Record), by_thread);
    uint32_t times = 0;
    for (size_t i = 0; i < record_count; ++i) {
        const bool again = i && records[i].thread == records[i - 1].thread && same_place(records[i], records[i - 1]);
        times = again ? times + 1 : 0;
        records[i].time = times;
    }
    qsort(records, record_count, sizeof(Record), by_warp);
    for (size_t i = 0, end; i < record_count; i = end) {
        for (end = i + 1; end < record_count && same_access(records[i], records[end]);) ++end;
        count_access(records + i, records + end);
    }
    record_count = 0;
}

}  // namespace fv

// Count in the next checked launches; what the last one did, and how many entries that has.
FV_EXPORT void fv_count_banks(int on) { fv::counting_banks = on; }
FV_EXPORT const fv::BankUse* fv_bank_uses() { return fv::uses; }
FV_EXPORT int fv_bank_use_count() { return fv::use_count; }
FV_EXPORT size_t fv_bank_use_size() { return sizeof(fv::BankUse); }
