// shared.cuh: the block's shared memory, carved into named tiles and vectors of float.
//
// A static `__shared__` array ends at 48 KB. A block may have more (up to 227 KB on an H100) only as the one *dynamic* array whose
// size the launch gives, so a kernel carves its tiles from that array one after the other:
//
//     SharedCarver carve;
//     const auto Qi = carve.tile<Br, D>("Qi");      // use it as Qi[row][column]
//     const auto mi = carve.vector<Br>("mi");       // use it as mi[row]
//
//     const auto Kj = carve.tile<half, Bc, D + 8>("Kj");    // of another type than float: named first
//
// These lines are the only place that says how much shared memory a kernel needs: the launcher reads names and sizes from them,
// so each part stands on a line of its own and its sizes use only template parameters and whole numbers.
// Nothing is initialised: shared memory starts with whatever the last block left there.
#pragma once

// On the processor (kernels/host/) each part gets a place of its own with fences around it; on a GPU it is where it was carved.
#ifndef SHARED_PART
#define SHARED_PART(name, first, count) (first)
#define SHARED_INLINE __forceinline__
#endif

extern __shared__ __align__(1024) float dynamic_shared[];

template <int Cols, typename T = float>
struct SharedTile {
    T* first;
    __device__ SHARED_INLINE T* operator[](int row) const { return first + row * Cols; }
};

struct SharedCarver {
    int used = 0;  // floats handed out so far

    template <int Rows, int Cols>
    __device__ SharedTile<Cols> tile([[maybe_unused]] const char* name) {
        float* first = SHARED_PART(name, dynamic_shared + used, Rows * Cols);
        used += Rows * Cols;
        return {first};
    }

    template <typename T, int Rows, int Cols>
    __device__ SharedTile<Cols, T> tile([[maybe_unused]] const char* name) {
        static_assert(Rows * Cols * sizeof(T) % 16 == 0, "the next part must start at a multiple of 16 bytes");
        T* first = SHARED_PART(name, reinterpret_cast<T*>(dynamic_shared + used), Rows * Cols);
        used += Rows * Cols * sizeof(T) / sizeof(float);
        return {first};
    }

    template <int Length>
    __device__ float* vector([[maybe_unused]] const char* name) {
        float* first = SHARED_PART(name, dynamic_shared + used, Length);
        used += Length;
        return first;
    }
};
