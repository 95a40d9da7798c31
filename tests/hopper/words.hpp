// words.hpp: the words of CUDA that the Hopper kernels use, for the emulation in machine.hpp. Each CUDA thread is a fiber; every wait gives
// the processor to the next one.
#pragma once
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __constant__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
using std::max;
using std::min;

constexpr int SharedBytes = 232448, MostThreads = 512;
extern float dynamic_shared[];

namespace emulation {

struct Index {
    int x = 0, y = 0, z = 0;
};
struct Fiber {
    ucontext_t context;
    Index index;
    bool ended = false;
    std::string waits;                     // for what
};
struct Meeting {                           // of a number of threads: the last to come lets all go on
    int there = 0;
    unsigned times = 0;
};
extern std::vector<Fiber> fibers;
extern int current;
extern bool progress;                      // somebody went on since it was last set to false
extern Index block, grid, size;
extern Meeting warps[MostThreads / 32], whole;

void give_way();                           // to the next thread
void stop(const std::string& why);         // the launch
void meet(Meeting& meeting, int threads, const char* what);

// Every lane gives a value; each gets that of the lane that `from` names.
template <typename T, typename From>
T exchange(T mine, From from) {
    static T given[MostThreads];
    const int first = current / 32 * 32;
    given[current] = mine;
    meet(warps[current / 32], 32, "the warp's exchange");
    const T got = from(given + first, current - first);
    meet(warps[current / 32], 32, "the warp's exchange");
    return got;
}

}  // namespace emulation

#define threadIdx (emulation::fibers[emulation::current].index)
#define blockIdx emulation::block
#define gridDim emulation::grid
#define blockDim emulation::size
inline void __syncwarp() { emulation::meet(emulation::warps[emulation::current / 32], 32, "__syncwarp"); }
inline void __syncthreads() { emulation::meet(emulation::whole, emulation::size.x, "__syncthreads"); }
template <typename T>
T __shfl_xor_sync(unsigned, T mine, int flip) {
    return emulation::exchange(mine, [=](const T* all, int lane) { return all[lane ^ flip]; });
}
template <typename T>
T __shfl_sync(unsigned, T mine, int source) {
    return emulation::exchange(mine, [=](const T* all, int) { return all[source]; });
}
inline bool __any_sync(unsigned, bool mine) {
    return emulation::exchange((int)mine, [](const int* all, int) { return (int)(std::count(all, all + 32, 1) > 0); });
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
// What trace.cuh asks: a clock that ticks each time, and a block is on a multiprocessor of its own.
inline unsigned long long fv_host_globaltimer() {
    static unsigned long long now = 1000;
    return ++now;
}
inline unsigned fv_host_smid() { return emulation::block.x; }
inline void fv_host_action(unsigned, unsigned, int, int) {}
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
