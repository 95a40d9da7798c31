// hopper_steps.cu: Hopper's instructions one at a time, before flash_attention_3.cu uses them together. Four kernels of one block each,
// exact where sums are whole numbers:
//
// 1  hopper_scores    S = Q K^T: one wgmma a 16 columns, both sides read from shared memory
// 2  hopper_values    O = P V: the left side from registers, the right side with its columns contiguous
// 3  hopper_copy      one tile by the copy engine, there and back, and how it lies in shared memory
// 4  hopper_ring      a producer and four consumer warps at a ring of slots with full and empty barriers
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernel, what to compile, what to check.
// @arch     90a
//
// @kernel   hopper_scores
// @grid     1
// @block    128
// @array    Q [64, D]
// @array    K [Bc, D]
// @array    S [64, Bc]
// @instance T=half Bc=64 D=64
// @instance T=bfloat16 Bc=128 D=128
// @instance T=half Bc=32 D=64
// @instance T=half Bc=256 D=128
// @shape    B=1
//
// @kernel   hopper_values
// @grid     1
// @block    128
// @array    P [64, Bc]
// @array    V [Bc, D]
// @array    O [64, D]
// @instance T=half Bc=64 D=64
// @instance T=bfloat16 Bc=128 D=128
// @instance T=half Bc=16 D=256
// @instance T=half Bc=32 D=64
// @shape    B=1
//
// @kernel   hopper_copy
// @grid     1
// @block    128
// @array    x [H, N, D]
// @array    tile [Rows, D]
// @array    y [H, N, D]
// @map      x const T [Rows, D] swizzle Swizzle
// @map      y T [Rows, D] swizzle Swizzle
// @require  row < N
// @require  head < H
// @instance T=half Rows=64 D=64 Swizzle=128
// @instance T=bfloat16 Rows=32 D=128 Swizzle=128
// @instance T=half Rows=16 D=64 Swizzle=64
// @instance T=half Rows=16 D=64 Swizzle=32
// @instance T=half Rows=16 D=64 Swizzle=0
// @shape    H=3 N=100 row=70 head=1
// @shape    H=1 N=64 row=0 head=0
//
// @kernel   hopper_ring
// @grid     1
// @block    160
// @array    x [H, N, 64]
// @array    total [H, 64]
// @map      x const half [Rows, 64] swizzle 128
// @instance Rows=16 Stages=1
// @instance Rows=16 Stages=2
// @instance Rows=32 Stages=3
// @shape    H=2 N=1000
// @shape    H=1 N=5
#include "include/shared.cuh"
#include "include/wgmma.cuh"

// Copies a row-major array of Rows x D from HBM into a swizzled tile, with ordinary loads and stores: to see each instruction alone.
template <typename T, int Rows, int D>
__device__ void fill_tile(SharedAddress tile, const T* from) {
    for (int e = threadIdx.x; e < Rows * D / 2; e += blockDim.x) {
        const int r = e / (D / 2), x = e % (D / 2) * 2;                       // row, and the first of two columns
        store_shared(swizzled<Rows>(tile, r, x), reinterpret_cast<const unsigned*>(from)[e]);
    }
    fence_async_proxy();  // the tensor cores read by the other way ...
    __syncthreads();      // ... what all threads stored
}

// The accumulator of one thread to where it belongs in a row-major array of 64 x N.
template <int N>
__device__ void write_result(float* to, const float (&d)[N / 2]) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) to[(row + i / 2 % 2 * 8) * N + column + i / 4 * 8 + i % 2] = d[i];
}

// ---- 1 ---------------------------------------------------------------------------------------------------------------------------
template <typename T, int Bc, int D>
__global__ void __launch_bounds__(128) hopper_scores(const T* Q, const T* K, float* S) {
    SharedCarver carve;
    const auto Qi = carve.tile<T, 64, D>("Qi");
    const auto Kj = carve.tile<T, Bc, D>("Kj");
    fill_tile<T, 64, D>(shared_address(Qi[0]), Q);
    fill_tile<T, Bc, D>(shared_address(Kj[0]), K);

    float s[Bc / 2];                                                          // the first product overwrites what is in them
#pragma unroll
    for (int i = 0; i < Bc / 2; ++i) s[i] = 0.f;
    wgmma_keep(s);
    wgmma_fence();
    wgmma_scores<T, Bc, D>(s, shared_address(Qi[0]), shared_address(Kj[0]));
    wgmma_wait<0>();
    wgmma_keep(s);
    write_result<Bc>(S, s);
}

// ---- 2 ---------------------------------------------------------------------------------------------------------------------------
template <typename T, int Bc, int D>
__global__ void __launch_bounds__(128) hopper_values(const T* P, const T* V, float* O) {
    SharedCarver carve;
    const auto Vj = carve.tile<T, Bc, D>("Vj");
    fill_tile<T, Bc, D>(shared_address(Vj[0]), V);

    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    unsigned p[Bc / 16][4];                                                   // rows row and row + 8, then the same 8 columns on
#pragma unroll
    for (int i = 0; i < Bc / 4; ++i)
        p[i / 4][i % 4] = *reinterpret_cast<const unsigned*>(P + (row + i % 2 * 8) * Bc + column + i / 2 * 8);

    float o[D / 2];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
    wgmma_keep(o);
    wgmma_fence();
    wgmma_values<T, Bc, D>(o, p, shared_address(Vj[0]));
    wgmma_wait<0>();
    wgmma_keep(o);
    write_result<D>(O, o);
}

// ---- 3 ---------------------------------------------------------------------------------------------------------------------------
// `tile` receives the shared memory as it lies; rows of x that do not exist are zeros in it, and are not written to y.
template <typename T, int Rows, int D, int Swizzle>
__global__ void __launch_bounds__(128) hopper_copy(const __grid_constant__ TensorMap x, T* tile, const __grid_constant__ TensorMap y,
                                                   int row, int head) {
    SharedCarver carve;
    const auto X = carve.tile<T, Rows, D>("X");
    const auto bars = carve.tile<Barrier, 1, 2>("bars");                      // one would do, but parts are multiples of 16 bytes
    Barrier& full = bars[0][0];
    if (threadIdx.x == 0) {
        full.init(1);
        barriers_ready();
        full.arrive_expecting(Rows * D * sizeof(T));                      // the one arrival, by who asks for the bytes
        tma_load(shared_address(X[0]), x, full, row, head);
    }
    __syncthreads();      // the barrier is one before others wait at it
    full.wait(0);     // the tile is there

    for (int e = threadIdx.x; e < Rows * D; e += blockDim.x) tile[e] = X[0][e];
    if (threadIdx.x == 0) {
        tma_store(y, shared_address(X[0]), row, head);
        tma_store_wait(); // shared memory must live until the copy engine has read it
    }
}

// ---- 4 ---------------------------------------------------------------------------------------------------------------------------
// The sum of each column of x: warp 4 asks for tiles, warps 0 to 3 add up 16 columns each. A slot is filled again when all four warps
// have said that they are done with it.
template <int Rows, int Stages>
__global__ void __launch_bounds__(160) hopper_ring(const __grid_constant__ TensorMap x, float* total, int H, int N) {
    SharedCarver carve;
    const auto X = carve.tile<half, Stages * Rows, 64>("X");
    const auto bars = carve.tile<Barrier, 2, Stages>("bars");
    Barrier* full = bars[0];
    Barrier* empty = bars[1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (N + Rows - 1) / Rows;
    if (threadIdx.x == 0) {
        for (int s = 0; s < Stages; ++s) {
            full[s].init(1);                                                  // the producer's, and its bytes
            empty[s].init(4);                                                 // one of each consumer warp
        }
        barriers_ready();
    }
    __syncthreads();      // barriers are initialised before any of the others uses one

    RingPlace at;
    if (warp == 4) {
        if (lane == 0) {
            for (int n = 0; n < H * tiles; ++n, at.next(Stages)) {
                empty[at.slot].wait(at.parity ^ 1);                           // in the first round all slots are empty
                full[at.slot].arrive_expecting(Rows * 128);
                tma_load(shared_address(X[at.slot * Rows]), x, full[at.slot], n % tiles * Rows, n / tiles);
            }
        }
        return;
    }
    const int column = warp * 16 + lane % 8 * 2;                              // this one and the next, of every fourth row
    for (int h = 0; h < H; ++h) {
        float sum[2] = {0.f, 0.f};
        for (int n = 0; n < tiles; ++n, at.next(Stages)) {
            full[at.slot].wait(at.parity);
            for (int r = lane / 8; r < Rows; r += 4) {                        // rows past N are zeros
                float low, high;
                unpack<half>(low, high, load_shared(swizzled<Rows>(shared_address(X[at.slot * Rows]), r, column)));
                sum[0] += low;
                sum[1] += high;
            }
            __syncwarp();                                                     // all lanes have read ...
            if (lane == 0) empty[at.slot].arrive();                           // ... and one speaks for them
        }
        for (int e = 0; e < 2; ++e) {
            sum[e] += __shfl_xor_sync(~0u, sum[e], 8);
            sum[e] += __shfl_xor_sync(~0u, sum[e], 16);
            if (lane < 8) total[h * 64 + column + e] = sum[e];
        }
    }
}
