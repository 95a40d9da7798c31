// rope.cu: rotary position embedding: every row of x is turned, pair by pair, by angles that depend on the row's position alone.
//
// Two kernels, made of the same actions. They differ in one line: which two elements of a row are a pair. `rope_rows` pairs element p
// with element p + Pairs (rotate-half form), `rope_pairs_rows` pairs element 2p with element 2p + 1 (interleaved form). A block owns R rows of one
// head: it brings them and the rows' angles (their cosines and sines) to shared memory, rotates there, and writes the rows to O. The angles
// are the same for every head and batch.
//
// Layout   float32, row-major, contiguous:  x, O [B, H, N, D]   cos, sin [N, Pairs]
// Partial  the first 2 * Pairs elements of a row are rotated, those after them copied
// Launch   one block per R rows, head and batch; any number of threads, with dynamic shared memory for the parts below
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernels, what to compile, what to check.
// @paper     arXiv 2104.09864, section 3.4.2
// @grid      ceil(N / R), H, B
// @block     min(512, max(32, R * Pairs))
// @arch      75
// @blocks    R
// @array     x [B, H, N, D]
// @array     cos [N, Pairs]
// @array     sin [N, Pairs]
// @array     O [B, H, N, D]
// @require   2 * Pairs <= D
// @instance  R=4 D=8 Pairs=4
// @instance  R=4 D=8 Pairs=2
// @instance  R=3 D=10 Pairs=5
// @instance  R=1 D=4 Pairs=2
// @instance  R=16 D=64 Pairs=32
// @instance  R=16 D=128 Pairs=64
// @instance  R=16 D=128 Pairs=16
// @shape     B=1 H=1 N=4
// @shape     B=2 H=3 N=5
// @shape     B=1 H=2 N=33
//
// @kernel    rope_rows
//
// @kernel    rope_pairs_rows
#include "include/rope.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

// ---- the actions that both kernels share -----------------------------------------------------------------------------------------

template <int R, int D>
__device__ void load_x(SharedTile<D> xi, const float* x, int i, int N) {
    TRACE(load_x, i);
    for (int e = threadIdx.x; e < R * D; e += blockDim.x) {
        const int r = e / D, z = e % D;                // row of the tile, 0 .. R-1; element, 0 .. D-1
        const int n = i * R + r;                       // row of x, may be past N in the last block
        xi[r][z] = n < N ? x[(long long)n * D + z] : 0.f;
    }
}

template <int R, int Pairs>
__device__ void load_angles(SharedTile<Pairs> ci, SharedTile<Pairs> si, const float* cos, const float* sin, int i, int N) {
    TRACE(load_angles, i);
    for (int e = threadIdx.x; e < R * Pairs; e += blockDim.x) {
        const int r = e / Pairs, p = e % Pairs;        // row of the tile, 0 .. R-1; pair, 0 .. Pairs-1
        const int n = i * R + r;                       // row of the tables, may be past N in the last block
        ci[r][p] = n < N ? cos[(long long)n * Pairs + p] : 0.f;
        si[r][p] = n < N ? sin[(long long)n * Pairs + p] : 0.f;
    }
    __syncthreads();  // xi, ci and si are complete: a pair is rotated by another thread than those that loaded it
}

// ---- the kernels -----------------------------------------------------------------------------------------------------------------

// Halves: elements p and p + Pairs are a pair.
template <int R, int D, int Pairs>
__global__ void rope_rows(const float* x, const float* cos, const float* sin, float* O, int N, int H) {
    const int i = blockIdx.x;                          // rows i * R .. i * R + R - 1, i = 0 .. ceil(N / R) - 1
    const int h = blockIdx.y, b = blockIdx.z;          // head, 0 .. H - 1; batch, 0 .. B - 1
    TRACE_BLOCK_AND_CALLS(b, h, i);
    x += ((long long)b * H + h) * N * D;               // [N, D]; 64-bit: B * H * N * D passes 2^31 long before the memory is full
    O += ((long long)b * H + h) * N * D;               // [N, D]

    SharedCarver carve;
    const auto xi = carve.tile<R, D>("xi");
    const auto ci = carve.tile<R, Pairs>("ci");        // cosines of the rows' angles
    const auto si = carve.tile<R, Pairs>("si");        // sines

    load_x<R>(xi, x, i, N);
    load_angles<R>(ci, si, cos, sin, i, N);

    TRACE(rotate, i);
    rope<R>(xi, ci, si);
    __syncthreads();  // every pair is rotated before a thread writes elements that another one rotated

    TRACE(store_o, i);
    for (int e = threadIdx.x; e < R * D; e += blockDim.x) {
        const int r = e / D, z = e % D;                // row of the tile, 0 .. R-1; element, 0 .. D-1
        const int n = i * R + r;
        if (n < N) O[(long long)n * D + z] = xi[r][z];
    }
}

// Pairs: elements 2p and 2p + 1 are a pair.
template <int R, int D, int Pairs>
__global__ void rope_pairs_rows(const float* x, const float* cos, const float* sin, float* O, int N, int H) {
    const int i = blockIdx.x;                          // rows i * R .. i * R + R - 1, i = 0 .. ceil(N / R) - 1
    const int h = blockIdx.y, b = blockIdx.z;          // head, 0 .. H - 1; batch, 0 .. B - 1
    TRACE_BLOCK_AND_CALLS(b, h, i);
    x += ((long long)b * H + h) * N * D;               // [N, D]
    O += ((long long)b * H + h) * N * D;               // [N, D]

    SharedCarver carve;
    const auto xi = carve.tile<R, D>("xi");
    const auto ci = carve.tile<R, Pairs>("ci");        // cosines of the rows' angles
    const auto si = carve.tile<R, Pairs>("si");        // sines
    const EveryOther<D> x0{xi.first}, x1{xi.first + 1};

    load_x<R>(xi, x, i, N);
    load_angles<R>(ci, si, cos, sin, i, N);

    TRACE(rotate, i);
    rope_pairs<R>(x0, x1, ci, si);
    __syncthreads();  // every pair is rotated before a thread writes elements that another one rotated

    TRACE(store_o, i);
    for (int e = threadIdx.x; e < R * D; e += blockDim.x) {
        const int r = e / D, z = e % D;                // row of the tile, 0 .. R-1; element, 0 .. D-1
        const int n = i * R + r;
        if (n < N) O[(long long)n * D + z] = xi[r][z];
    }
}
