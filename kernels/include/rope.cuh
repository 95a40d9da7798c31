// rope.cuh: rotary position embedding on tiles: each pair of elements of a row is turned by an angle that its position gives it.
//
//     rope<R>(x, cos, sin);            rotate-half form (GPT-NeoX, Hugging Face's LLaMA): element p meets element p + Pairs
//     rope_pairs<R>(x0, x1, cos, sin); interleaved form (GPT-J, llama.cpp by default): element 2p meets element 2p + 1
//
// Both work in place, are called by all threads of a block and put no barrier: x, cos and sin are complete before the call, and whoever
// reads x after it waits first. Su and others, arXiv 2104.09864, section 3.4.2.
#pragma once

#include "include/shared.cuh"

// One pair, turned by one angle. Both elements are in registers, so that none is overwritten before it was read.
__device__ __forceinline__ void rotate_pair(float& a, float& b, float cos, float sin) {
    const float turned = a * cos - b * sin;
    b = b * cos + a * sin;
    a = turned;
}

// x [R, D], cos and sin [R, Pairs], 2 * Pairs <= D: [a cos - b sin, b cos + a sin] for the halves a, b of the first 2 * Pairs elements of
// each row; the elements after them stay as they are. Both halves' elements are copied out before either is written.
template <int R, int Pairs, int D>
__device__ __forceinline__ void rope(SharedTile<D> x, SharedTile<Pairs> cos, SharedTile<Pairs> sin) {
    for (int e = threadIdx.x; e < R * Pairs; e += blockDim.x) {
        const int r = e / Pairs, p = e % Pairs;        // row, 0 .. R-1; pair, 0 .. Pairs-1
        float a = x[r][p], b = x[r][p + Pairs];
        rotate_pair(a, b, cos[r][p], sin[r][p]);
        x[r][p] = a;
        x[r][p + Pairs] = b;
    }
}

// Every other element of each row of a tile: element p of row r is the tile's element 2p, or 2p + 1 where `first` is one further.
template <int Cols>
struct EveryOther {
    float* first;
    __device__ __forceinline__ float& at(int row, int p) const { return first[row * Cols + 2 * p]; }
};

// x0 and x1 hold the even and the odd elements of R rows, cos and sin are [R, Pairs]: [x0 cos - x1 sin] and [x1 cos + x0 sin]. The data
// is not moved to pair it: x0 and x1 are two ways to look at one tile.
template <int R, int Pairs, int D>
__device__ __forceinline__ void rope_pairs(EveryOther<D> x0, EveryOther<D> x1, SharedTile<Pairs> cos, SharedTile<Pairs> sin) {
    for (int e = threadIdx.x; e < R * Pairs; e += blockDim.x) {
        const int r = e / Pairs, p = e % Pairs;        // row, 0 .. R-1; pair, 0 .. Pairs-1
        float a = x0.at(r, p), b = x1.at(r, p);
        rotate_pair(a, b, cos[r][p], sin[r][p]);
        x0.at(r, p) = a;
        x1.at(r, p) = b;
    }
}
