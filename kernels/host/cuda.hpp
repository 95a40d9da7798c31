// cuda.hpp: the words of CUDA C++ that kernels use, for a host C++17 compiler. It is put in front of the assembled source.
//
// Not here: cuda_fp16.h (include/half.cuh has what kernels need), textures, cooperative groups, inline PTX but for the functions of
// include/ptx.cuh. A kernel that uses them does not compile for the processor.
#pragma once
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime.hpp"

#define FLASHVIZ_HOST 1

#define __global__
#define __device__
#define __host__
#define __constant__
#if defined(FV_CHECK)  // then a call is a call, so that a report can say where a function was called
#define __forceinline__ inline
#else
#define __forceinline__ inline __attribute__((always_inline))
#endif
#define FV_INLINE inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __restrict__ __restrict

using uint3 = fv::Index;
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// g++ tells nobody when what a function returns goes straight into memory, `tile[r] = make_float4(...)`: so an assignment says it itself.
#if defined(FV_CHECK)
#define FV_ASSIGNED(type)                                                               \
    FV_RAW type& operator=(const type& other) {                                         \
        fv::assigned(this, &other, sizeof(type), __builtin_return_address(0));          \
        memcpy(this, &other, sizeof(type));                                             \
        return *this;                                                                   \
    }
#else
#define FV_ASSIGNED(type)
#endif
#define FV_VECTOR(name, type, bytes, ...) \
    struct alignas(bytes) name {          \
        type __VA_ARGS__;                 \
        FV_ASSIGNED(name)                 \
    };
FV_VECTOR(float2, float, 8, x, y)
FV_VECTOR(float4, float, 16, x, y, z, w)
FV_VECTOR(int2, int, 8, x, y)
FV_VECTOR(int4, int, 16, x, y, z, w)
FV_VECTOR(uint2, unsigned, 8, x, y)
FV_VECTOR(uint4, unsigned, 16, x, y, z, w)
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#define threadIdx (fv::current->index)
#define blockIdx (fv::block_index)
#define blockDim (fv::block_size)
#define gridDim (fv::grid_size)
#define warpSize 32

// A part of the dynamic shared array (shared.cuh): its place in that array becomes a name and a place of its own.
#define SHARED_INLINE FV_INLINE
#define SHARED_PART(name, first, count) \
    (static_cast<decltype(first)>(fv::shared_part(name, (const char*)(first) - fv::arena, (count) * sizeof(*(first)), sizeof(*(first)))))

namespace fv {
template <class T>
struct element_of {
    using type = T;
};
template <class T, size_t N>
struct element_of<T[N]> {
    using type = typename element_of<T>::type;
};
template <class T>
T& shared(const char* name, const char* file, int line) {
    return *static_cast<T*>(shared_array(name, sizeof(T), sizeof(typename element_of<T>::type), file, line));
}

template <class T>
struct Offer {
    T value;
    int source;  // the lane whose value is wanted
};
template <class T>
FV_RAW T shuffle(unsigned mask, T value, int source, const char* what, const char* file, int line) {
    Offer<T> offer{value, source};
    T result = value;
    exchange(
        mask, &offer, &result,
        [](void* const* in, void* const* out, unsigned) {
            for (int lane = 0; lane < 32; ++lane) {
                if (!in[lane]) continue;
                const int source = static_cast<Offer<T>*>(in[lane])->source & 31;
                if (in[source]) *static_cast<T*>(out[lane]) = static_cast<Offer<T>*>(in[source])->value;
                else absent_lane(source);
            }
        },
        what, file, line);
    return result;
}
inline int lane_in(int width, int source) { return (current->lane & ~(width - 1)) | (source & (width - 1)); }
inline int lane_up(int width, unsigned delta) {
    return (current->lane & (width - 1)) >= delta ? current->lane - delta : current->lane;
}
inline int lane_down(int width, unsigned delta) {
    return (current->lane & (width - 1)) + delta < (unsigned)width ? current->lane + delta : current->lane;
}
inline int lane_xor(int width, int flip) {
    const int lane = current->lane ^ flip;
    return (lane & ~(width - 1)) <= (int)(current->lane & ~(width - 1)) ? lane : (int)current->lane;
}
inline int width_of(int width = 32) { return width; }

inline FV_RAW unsigned ballot(unsigned mask, int predicate, const char* what, const char* file, int line) {
    unsigned result = 0;
    exchange(
        mask, &predicate, &result,
        [](void* const* in, void* const* out, unsigned) {
            unsigned votes = 0;
            for (int lane = 0; lane < 32; ++lane)
                if (in[lane] && *static_cast<int*>(in[lane])) votes |= 1u << lane;
            for (int lane = 0; lane < 32; ++lane)
                if (in[lane]) *static_cast<unsigned*>(out[lane]) = votes;
        },
        what, file, line);
    return result;
}
inline FV_RAW int vote_all(unsigned mask, int predicate, const char* file, int line) {
    return ballot(mask, !predicate, "__all_sync", file, line) == 0;
}

template <class T, T (*F)(T, T)>
struct Reduce {
    static FV_RAW T apply(T* p, T value) {
        atomic_access(p, sizeof(T), __builtin_return_address(0));
        const T old = *p;
        *p = F(old, value);
        return old;
    }
};
template <class T>
T add(T a, T b) { return a + b; }
template <class T>
T subtract(T a, T b) { return a - b; }
template <class T>
T larger(T a, T b) { return a < b ? b : a; }
template <class T>
T smaller(T a, T b) { return b < a ? b : a; }
template <class T>
T other(T, T b) { return b; }
template <class T>
T counted(T old, T last) { return old >= last ? T(0) : old + 1; }  // atomicInc

template <auto F>
struct Invoker;
template <size_t... I>
struct Indices {};
template <size_t N, size_t... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I>
struct Count<0, I...> {
    using type = Indices<I...>;
};
template <class... A, void (*F)(A...)>
struct Invoker<F> {
    template <size_t... I>
    static FV_RAW void call(void** arguments, Indices<I...>) { F(*static_cast<A*>(arguments[I])...); }
    static FV_RAW void invoke(void** arguments) { call(arguments, typename Count<sizeof...(A)>::type{}); }
    static constexpr int parameters = sizeof...(A);
};
template <auto F>
Kernel kernel(const char* name) { return {name, &Invoker<F>::invoke, Invoker<F>::parameters}; }
}  // namespace fv

#define __syncthreads() fv::sync_block(__FILE__, __LINE__)
#define __syncthreads_count(p) fv::sync_block_count((p) != 0, __FILE__, __LINE__)
#define __syncthreads_or(p) (fv::sync_block_count((p) != 0, __FILE__, __LINE__) > 0)
#define __syncthreads_and(p) (fv::sync_block_count((p) == 0, __FILE__, __LINE__) == 0)
#define FV_FIRST_OR_ALL(...) (fv_mask(__VA_ARGS__))
inline unsigned fv_mask(unsigned mask = 0xffffffffu) { return mask; }
#define __syncwarp(...) fv::sync_warp(FV_FIRST_OR_ALL(__VA_ARGS__), __FILE__, __LINE__)
#define __activemask() 0xffffffffu
#define FV_SHUFFLE(name, mask, value, source) fv::shuffle((mask), (value), (source), name, __FILE__, __LINE__)
#define __shfl_sync(m, v, s, ...) FV_SHUFFLE("__shfl_sync", m, v, fv::lane_in(fv::width_of(__VA_ARGS__), (s)))
#define __shfl_up_sync(m, v, d, ...) FV_SHUFFLE("__shfl_up_sync", m, v, fv::lane_up(fv::width_of(__VA_ARGS__), (d)))
#define __shfl_down_sync(m, v, d, ...) FV_SHUFFLE("__shfl_down_sync", m, v, fv::lane_down(fv::width_of(__VA_ARGS__), (d)))
#define __shfl_xor_sync(m, v, x, ...) FV_SHUFFLE("__shfl_xor_sync", m, v, fv::lane_xor(fv::width_of(__VA_ARGS__), (x)))
#define __ballot_sync(m, p) fv::ballot((m), (p), "__ballot_sync", __FILE__, __LINE__)
#define __any_sync(m, p) (fv::ballot((m), (p), "__any_sync", __FILE__, __LINE__) != 0)
#define __all_sync(m, p) fv::vote_all((m), (p), __FILE__, __LINE__)
#define __trap() fv::stop("__trap", __FILE__, __LINE__)
#define assert(condition) ((condition) ? (void)0 : fv::stop("assert(" #condition ")", __FILE__, __LINE__))
#define __threadfence() fv::fence()
#define __threadfence_block() ((void)0)

#define atomicAdd(p, v) fv_atomic(p, v, add)
#define atomicSub(p, v) fv_atomic(p, v, subtract)
#define atomicMax(p, v) fv_atomic(p, v, larger)
#define atomicMin(p, v) fv_atomic(p, v, smaller)
#define atomicExch(p, v) fv_atomic(p, v, other)
#define atomicInc(p, v) fv_atomic(p, v, counted)
#define fv_atomic(p, v, how) fv_apply_##how(p, v)
template <class T, class V>
FV_INLINE T fv_apply_add(T* p, V v) { return fv::Reduce<T, fv::add<T>>::apply(p, (T)v); }
template <class T, class V>
FV_INLINE T fv_apply_subtract(T* p, V v) { return fv::Reduce<T, fv::subtract<T>>::apply(p, (T)v); }
template <class T, class V>
FV_INLINE T fv_apply_larger(T* p, V v) { return fv::Reduce<T, fv::larger<T>>::apply(p, (T)v); }
template <class T, class V>
FV_INLINE T fv_apply_smaller(T* p, V v) { return fv::Reduce<T, fv::smaller<T>>::apply(p, (T)v); }
template <class T, class V>
FV_INLINE T fv_apply_other(T* p, V v) { return fv::Reduce<T, fv::other<T>>::apply(p, (T)v); }
template <class T, class V>
FV_INLINE T fv_apply_counted(T* p, V v) { return fv::Reduce<T, fv::counted<T>>::apply(p, (T)v); }

FV_INLINE int max(int a, int b) { return a < b ? b : a; }
FV_INLINE unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
FV_INLINE long long max(long long a, long long b) { return a < b ? b : a; }
FV_INLINE float max(float a, float b) { return fmaxf(a, b); }
FV_INLINE int min(int a, int b) { return b < a ? b : a; }
FV_INLINE unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
FV_INLINE long long min(long long a, long long b) { return b < a ? b : a; }
FV_INLINE float min(float a, float b) { return fminf(a, b); }
FV_INLINE float rsqrtf(float x) { return 1.f / sqrtf(x); }
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __fdividef(a, b) ((a) / (b))
#define __frcp_rn(a) (1.f / (a))
#define __fmaf_rn(a, b, c) fmaf(a, b, c)
#define __ldg(p) (*(p))
#define __ldcg(p) (*(p))
#define __ldcs(p) (*(p))
#define __ldca(p) (*(p))
#define __stcg(p, v) ((void)(*(p) = (v)))
#define __stcs(p, v) ((void)(*(p) = (v)))
FV_INLINE int __float_as_int(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}
FV_INLINE float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
FV_INLINE unsigned __float_as_uint(float x) { return (unsigned)__float_as_int(x); }
FV_INLINE float __uint_as_float(unsigned bits) { return __int_as_float((int)bits); }
FV_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {  // its lowest 4 digits, each modulo 8, pick bytes: of a 0 to 3, of b 4 to 7
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int n = 0; n < 4; ++n) result |= (unsigned)(bytes >> 8 * (selector >> 4 * n & 7) & 255) << 8 * n;
    return result;
}
FV_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
FV_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
FV_INLINE int __ffs(int x) { return __builtin_ffs(x); }

// Inline PTX is what the processor cannot run; flashviz/cuda/cpu_build.py puts it in words.
#pragma GCC poison asm

// What trace.cuh reads from special registers on a GPU: here one multiprocessor, and the system's clock.
FV_INLINE unsigned fv_host_smid() { return 0; }
FV_INLINE unsigned long long fv_host_globaltimer() { return fv::nanoseconds(); }
// The thread that calls it begins an action: its memory accesses from here to its next call are logged as the action's (see fv_log).
FV_INLINE void fv_host_action(unsigned action, int tiles, int first, int second) { fv::begin_action(action, tiles, first, second); }
