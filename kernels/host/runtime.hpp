// runtime.hpp: what kernels/host/cuda.hpp asks of the runtime that plays the GPU. Only the C library is used: no std:: headers.
//
// A block's CUDA threads are fibers of one thread of the processor. A fiber runs until it waits (__syncthreads, a warp intrinsic) or ends;
// then the next one runs. Blocks run one after the other. So a run is the same every time, in whichever of three thread orders.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define FV_EXPORT extern "C" __declspec(dllexport)
#define FV_LOCAL
#else
#define FV_EXPORT extern "C" __attribute__((visibility("default")))
#define FV_LOCAL __attribute__((visibility("hidden")))
#endif
#define FV_RAW __attribute__((noinline, no_sanitize("thread")))  // its own memory accesses are not the kernel's

namespace fv {

struct Index {
    unsigned x, y, z;
};

// What a kernel can ask about the thread that runs now.
struct Thread {
    Index index;
    unsigned linear, lane, warp;
};
extern FV_LOCAL Thread* current;
extern FV_LOCAL Index block_index, block_size, grid_size;

// Barriers. `what` is the intrinsic's name, file and line where it stands.
FV_LOCAL void sync_block(const char* file, int line);
FV_LOCAL int sync_block_count(int predicate, const char* file, int line);  // how many threads of the block gave a true predicate
FV_LOCAL void sync_warp(unsigned mask, const char* file, int line);

// An exchange between the lanes of a warp: `all` runs once, when every lane named in `mask` that has not ended has called with its `in`.
// A lane that takes no part has in[lane] == nullptr.
using Exchange = void (*)(void* const in[32], void* const out[32], unsigned mask);
FV_LOCAL void exchange(unsigned mask, void* in, void* out, Exchange all, const char* what, const char* file, int line);
FV_LOCAL void absent_lane(int lane);  // called by an Exchange: a lane asks for the value of one that takes no part
FV_LOCAL void missing_lane(int lane);  // called by an Exchange that all 32 lanes must take part in: this one has ended

// Shared memory: an array (or a part of the dynamic one) by name, with fences around it, filled with NaN when the block starts.
FV_LOCAL void* shared_array(const char* name, size_t bytes, size_t element, const char* file, int line);
FV_LOCAL void* shared_part(const char* name, size_t offset, size_t bytes, size_t element);
extern FV_LOCAL char arena[];  // the dynamic shared array as a whole starts here

// Addresses in shared memory, asynchronous copies and what the tensor cores do: see ptx.hpp. `pc` is where the kernel calls.
enum Element { F16, BF16, TF32 };
FV_LOCAL unsigned shared_offset(const void* p, const void* pc);
FV_LOCAL void load_global(void* to, const void* from, size_t bytes, const void* pc);
FV_LOCAL void copy_issue(unsigned to, const void* from, bool exists, const void* pc);
FV_LOCAL void copy_commit();
FV_LOCAL void copy_wait(unsigned pending);
FV_LOCAL void load_matrices(unsigned* registers, unsigned row, bool transposed, const char* what, const void* pc, const char* file, int line);
FV_LOCAL void multiply(float* d, const unsigned* a, unsigned b0, unsigned b1, Element element, const char* what, const char* file, int line);
FV_LOCAL unsigned transpose(unsigned a, const char* what, const char* file, int line);
FV_LOCAL void fence();  // __threadfence()

FV_LOCAL void assigned(const void* to, const void* from, size_t bytes, const void* pc);
FV_LOCAL void atomic_access(const void* p, size_t bytes, const void* pc);
FV_LOCAL unsigned long long nanoseconds();
FV_LOCAL void begin_action(unsigned action, int tiles, int first, int second);
FV_LOCAL void stop(const char* what, const char* file, int line);  // __trap(), a failed assert

// One kernel as the launcher calls it: `invoke` gets a pointer to each argument.
struct Kernel {
    const char* name;
    void (*invoke)(void** arguments);
    int parameters;
};

}  // namespace fv
