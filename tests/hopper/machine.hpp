// machine.hpp: Hopper's copy engine, barriers and products played on the processor, to find a kernel's mistakes in who waits for whom. Included
// behind the kernel. What the functions of include/hopper.cuh and wgmma.cuh promise is kept, and nothing beyond it:
//
// * a copy happens at some later moment, in any order; until then what a load will bring is NaN;
// * with `late` a product is computed at the last moment, in the wait for it, else when it is started: so that what is read too late and
//   what is read too early are both seen;
// * warps go on in an order that changes from round to round, and are held up after an arrival, by the seed;
// * a block in which nothing can go on, a barrier with too many arrivals, a block that ends before its copies do: each ends the launch
//   with a sentence.
//
// One block runs after the other: kernels whose blocks wait for each other are not for this.
#pragma once

alignas(1024) float dynamic_shared[SharedBytes / 4];

namespace emulation {

std::vector<Fiber> fibers;
int current;
bool progress, late;
Index block, grid, size;
Meeting warps[MostThreads / 32], whole, groups[MostThreads / 128];
std::mt19937 chance;
static ucontext_t scheduler;
static std::string fault;
static char* const shared = (char*)dynamic_shared;

void give_way() { swapcontext(&fibers[current].context, &scheduler); }
void stop(const std::string& why) {
    fault = why + " (thread " + std::to_string(current) + " of block " + std::to_string(block.x) + ")";
    give_way();                                                    // and nobody comes back
}
void meet(Meeting& meeting, int threads, const char* what) {
    const unsigned times = meeting.times;
    if (++meeting.there == threads) {
        meeting.there = 0;
        ++meeting.times;
        progress = true;
    }
    fibers[current].waits = what;
    while (meeting.times == times) give_way();
}

// ---- barriers ----------------------------------------------------------------------------------------------------------------------
struct Phase {                                                     // of the barrier at an address
    int expected, missing, bytes;
    unsigned parity;
};
static std::map<SharedAddress, Phase> barriers;
static struct {
    Meeting meeting;
    int threads = 0;
} named[16];

static Phase& phase_of(const Barrier& barrier) {
    const auto found = barriers.find(barrier.address());
    if (found == barriers.end()) stop("a barrier is used that was not initialised");
    return found->second;
}
static void advance(Phase& phase) {
    if (phase.missing < 0) stop("more arrivals at a barrier than it waits for");
    if (phase.missing || phase.bytes) return;
    phase.missing = phase.expected;
    phase.parity ^= 1;
    progress = true;
}
static void named_arrival(int number, int threads) {
    if (number < 0 || number > 15) stop("there are named barriers 0 to 15");
    if (named[number].meeting.there && named[number].threads != threads) stop("a named barrier with two numbers of threads");
    named[number].threads = threads;
}

// ---- the copy engine ---------------------------------------------------------------------------------------------------------------
struct Map {                                                       // what the test puts into a TensorMap
    char* first;
    long long strides[3];                                          // bytes: row, panel, head
    int sizes[4], box[4];                                          // columns, rows, panels, heads
    int swizzle;
};
struct Copy {
    bool load;
    SharedAddress place;
    Map map;
    int row, head, thread;
    const Barrier* full;
    bool slow;                                                     // done when nothing else goes on: others overtake it
};
static std::vector<Copy> copies;                                   // not done yet

static SharedAddress swizzle_address(SharedAddress a, int bytes) { return a ^ (a >> 7 & (bytes / 16 - (bytes > 0))) << 4; }
static Map map_of(const TensorMap& map) {
    Map said;
    memcpy(&said, map.opaque, sizeof said);
    return said;
}
static void perform(size_t which) {
    const Copy copy = copies[which];
    copies.erase(copies.begin() + which);
    const Map& m = copy.map;
    SharedAddress at = copy.place;
    for (int panel = 0; panel < m.box[2]; ++panel)
        for (int r = 0; r < m.box[1]; ++r)
            for (int c = 0; c < m.box[0]; ++c, at += 2) {
                const int row = copy.row + r;
                const bool exists = row >= 0 && row < m.sizes[1] && copy.head < m.sizes[3];
                char* global = m.first + 2 * c + row * m.strides[0] + panel * m.strides[1] + copy.head * m.strides[2];
                char* here = shared + swizzle_address(at, m.swizzle);
                if (copy.load && exists) memcpy(here, global, 2);
                else if (copy.load) memset(here, 0, 2);
                else if (exists) memcpy(global, here, 2);
            }
    if (copy.load) {
        Phase& phase = phase_of(*copy.full);
        phase.bytes -= (int)(at - copy.place);
        advance(phase);
    }
    progress = true;
}

// ---- products ----------------------------------------------------------------------------------------------------------------------
struct Product {                                                   // one thread's part
    float* d;
    const unsigned* registers;                                     // of A, or null
    unsigned long long a, b;
    int n;
    bool add;
    float (*value)(unsigned short);
};
using Group = std::vector<Product>;
static std::vector<Group> open;                                    // by thread
static std::vector<std::vector<Group>> started;

static float element(unsigned long long tile, int outer, int inner, bool outer_contiguous, float (*value)(unsigned short)) {
    const unsigned first = (tile & 0x3fff) << 4, panel = (tile >> 16 & 0x3fff) << 4, eight = (tile >> 32 & 0x3fff) << 4;
    if (tile >> 62 != 1) stop("a descriptor without the 128-byte swizzle");
    const unsigned at = outer_contiguous ? inner / 8 * eight + inner % 8 * 128 + outer / 64 * panel + outer % 64 * 2
                                         : outer / 8 * eight + outer % 8 * 128 + inner * 2;
    unsigned short bits;
    memcpy(&bits, shared + swizzle_address(first + at, 128), 2);
    return value(bits);
}
static void compute_oldest(int warpgroup) {
    std::vector<Group>* threads = &started[warpgroup * 128];
    const size_t count = threads[0][0].size();
    for (int t = 0; t < 128; ++t)
        if (threads[t].empty() || threads[t][0].size() != count) stop("the threads of a warpgroup started different products");
    for (size_t k = 0; k < count; ++k) {
        const Product& one = threads[0][0][k];
        static float a[64][16], b[16][256];
        for (int r = 0; r < 64; ++r)
            for (int x = 0; x < 16; ++x) {
                if (!one.registers) {
                    a[r][x] = element(one.a, r, x, false, one.value);
                    continue;
                }
                const Product& holder = threads[r / 16 * 32 + r % 8 * 4 + x % 8 / 2][0][k];
                const unsigned both = holder.registers[r % 16 / 8 + x / 8 * 2];
                a[r][x] = one.value(x % 2 ? both >> 16 : both & 0xffff);
            }
        for (int x = 0; x < 16; ++x)
            for (int c = 0; c < one.n; ++c) b[x][c] = element(one.b, c, x, one.registers != nullptr, one.value);
        for (int t = 0; t < 128; ++t) {
            const Product& own = threads[t][0][k];
            if (own.a != one.a || own.b != one.b) stop("the threads of a warpgroup name different tiles");
            for (int i = 0; i < one.n / 2; ++i) {
                const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
                float sum = own.add ? own.d[i] : 0.f;
                for (int x = 0; x < 16; ++x) sum += a[row][x] * b[x][column];
                own.d[i] = sum;
            }
        }
    }
    for (int t = 0; t < 128; ++t) threads[t].erase(threads[t].begin());
}
static void compute(int pending) {                                 // the whole warpgroup, until so many groups are left
    Meeting& meeting = groups[current / 128];
    if (meeting.there == 127)
        while ((int)started[current].size() > pending) compute_oldest(current / 128);
    meet(meeting, 128, "the warpgroup's products");
}

// ---- a launch ----------------------------------------------------------------------------------------------------------------------
static void (*body)(void**);
static void** arguments;
static void enter() {
    body(arguments);
    fibers[current].ended = progress = true;
    give_way();
}
static void run_block(int threads) {
    static std::vector<std::vector<char>> stacks(MostThreads, std::vector<char>(1 << 16));
    memset(shared, 0xff, SharedBytes);
    barriers.clear();
    copies.clear();
    std::fill(warps, warps + MostThreads / 32, Meeting());
    std::fill(groups, groups + MostThreads / 128, Meeting());
    whole = Meeting();
    for (auto& one : named) one = {};
    fibers.assign(threads, Fiber());
    open.assign(threads, {});
    started.assign(threads, {});
    for (int t = 0; t < threads; ++t) {
        getcontext(&fibers[t].context);
        fibers[t].index.x = t;
        fibers[t].context.uc_stack.ss_sp = stacks[t].data();
        fibers[t].context.uc_stack.ss_size = stacks[t].size();
        fibers[t].context.uc_link = nullptr;
        makecontext(&fibers[t].context, enter, 0);
    }
    for (int idle = 0, left = threads; left && fault.empty();) {
        progress = false;
        left = 0;
        const int first = chance() % (threads / 32) * 32;
        for (int n = 0; n < threads && fault.empty(); ++n) {
            current = (first + n) % threads;
            if (fibers[current].ended) continue;
            ++left;
            swapcontext(&scheduler, &fibers[current].context);
        }
        if (!copies.empty() && fault.empty() && chance() % 2) {
            const size_t which = chance() % copies.size();
            if (!copies[which].slow || !progress) perform(which);
        }
        idle = progress || !copies.empty() ? 0 : idle + 1;
        if (idle < 4 || !left || !fault.empty()) continue;
        fault = "nothing goes on in block " + std::to_string(block.x) + ":";
        for (const Fiber& fiber : fibers)
            if (!fiber.ended && fiber.index.x % 128 == 0) fault += " thread " + std::to_string(fiber.index.x) + " waits for " + fiber.waits + ";";
    }
    if (fault.empty() && !copies.empty()) fault = copies[0].load ? "a load that nobody waited for" : "a block ended before its store was read";
    for (const auto& groups_left : started)
        if (fault.empty() && !groups_left.empty()) fault = "products that nobody waited for";
}

template <typename... P, size_t... I>
void call(void (*kernel)(P...), void** given, std::index_sequence<I...>) { kernel(*static_cast<std::remove_reference_t<P>*>(given[I])...); }
template <typename... P>
void call(void (*kernel)(P...), void** given) { call(kernel, given, std::index_sequence_for<P...>()); }
template <auto Kernel>
void invoke(void** given) { call(Kernel, given); }
extern void (*const kernels[])(void**);                            // the test's list

}  // namespace emulation

// A launch; what went wrong, or nothing.
extern "C" const char* emulate(int kernel, int blocks, int threads, void** given, unsigned seed, int late) {
    using namespace emulation;
    body = kernels[kernel], arguments = given, emulation::late = late;
    chance.seed(seed);
    fault.clear();
    grid.x = blocks, size.x = threads;
    for (block.x = 0; block.x < blocks && fault.empty(); ++block.x) run_block(threads);
    return fault.c_str();
}

// ---- the functions of hopper.cuh and wgmma.cuh ---------------------------------------------------------------------------------------
void Barrier::init(int arrivals) { emulation::barriers[address()] = {arrivals, arrivals, 0, 0}; }
void Barrier::arrive() {
    emulation::Phase& phase = emulation::phase_of(*this);
    --phase.missing;
    emulation::advance(phase);
    while (emulation::chance() % 2) {                              // who has said that it is done may be held up before it goes on
        emulation::progress = true;
        emulation::give_way();
    }
}
void Barrier::arrive_expecting(unsigned bytes) {
    emulation::phase_of(*this).bytes += (int)bytes;
    arrive();
}
void Barrier::wait(unsigned parity) const {
    const emulation::Phase& phase = emulation::phase_of(*this);
    emulation::fibers[emulation::current].waits = "the barrier at " + std::to_string(address());
    while (phase.parity == parity) emulation::give_way();
}
void barriers_ready() {}
void named_barrier_wait(int number, int threads) {
    emulation::named_arrival(number, threads);
    emulation::meet(emulation::named[number].meeting, threads, "a named barrier");
}
void named_barrier_arrive(int number, int threads) {
    emulation::named_arrival(number, threads);
    emulation::Meeting& meeting = emulation::named[number].meeting;
    if (++meeting.there < threads) return;
    meeting.there = 0;
    ++meeting.times;
    emulation::progress = true;
}
void tma_load(SharedAddress to, const TensorMap& from, const Barrier& full, int row, int head) {
    const emulation::Map map = emulation::map_of(from);
    if (map.swizzle && to % 1024) emulation::stop("a swizzled tile that does not start at a multiple of 1024");
    memset(emulation::shared + to, 0xff, 2 * map.box[0] * map.box[1] * map.box[2]);
    emulation::copies.push_back({true, to, map, row, head, emulation::current, &full, emulation::chance() % 4 == 0});
}
void tma_store(const TensorMap& to, SharedAddress from, int row, int head) {
    if (row < 0) emulation::stop("a tile that is stored may end outside of the array, and may not begin before it");
    emulation::copies.push_back({false, from, emulation::map_of(to), row, head, emulation::current, nullptr, emulation::chance() % 4 == 0});
}
void tma_store_wait() {
    for (size_t n = emulation::copies.size(); n-- > 0;)
        if (!emulation::copies[n].load && emulation::copies[n].thread == emulation::current) emulation::perform(n);
}
void fence_async_proxy() {}
void store_shared(SharedAddress to, unsigned value) { memcpy(emulation::shared + to, &value, 4); }
unsigned load_shared(SharedAddress from) {
    unsigned value;
    memcpy(&value, emulation::shared + from, 4);
    return value;
}
template <int Registers>
void give_registers() {}
template <int Registers>
void take_registers() {}

void wgmma_fence() {}
void wgmma_commit() {
    emulation::started[emulation::current].push_back(std::move(emulation::open[emulation::current]));
    emulation::open[emulation::current].clear();
    if (!emulation::late) emulation::compute(0);
}
template <int Pending>
void wgmma_wait() { emulation::compute(Pending); }
template <int N>
void wgmma_keep(float (&)[N]) {}
template <typename T, int N>
void wgmma(float (&d)[N], unsigned long long a, unsigned long long b, bool add) {
    emulation::open[emulation::current].push_back({d, nullptr, a, b, 2 * N, add, from_bits<T>});
}
template <typename T, int N>
void wgmma(float (&d)[N], const unsigned (&a)[4], unsigned long long b, bool add) {
    emulation::open[emulation::current].push_back({d, a, 0, b, 2 * N, add, from_bits<T>});
}
