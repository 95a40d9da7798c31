// online_softmax.cu: the softmax of a row that is met in tiles: y = softmax(x), or o = softmax(x) V without ever holding y.
//
// Three kernels, made of the same actions. `safe_softmax` goes over x three times: for the maximum, for the sum, for the division.
// `online_softmax` goes twice, since one more action, `rescale`, lets the sum run along with the maximum: a new maximum only scales what
// has been summed so far. `fused_softmax` needs no y in HBM: it takes the tiles of V along and reads x and V once. A block owns one row and
// keeps the tile xi, its terms pi and the carries m and d (and o) in shared memory. Element e of a tile always belongs to the same thread.
// Barriers stand where one thread reads what another wrote: in the fold, and after the three actions that leave something for all threads.
//
// Layout   float32, row-major, contiguous:  x, y [R, N]   V [N, D]   o [R, D]
// Masked   x may hold -inf. A row that holds nothing else gets y = 0 and o = 0
// Launch   one block per row; any number of threads, with dynamic shared memory for the parts below
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernels, what to compile, what to check.
// @grid      R
// @block     min(512, max(32, Tile))
// @arch      75
// @blocks    Tile
// @array     x [R, N]
// @array     y [R, N]
// @require   N > 0
// @shape     R=1 N=12
// @shape     R=3 N=33
// @shape     R=2 N=1
//
// @kernel    safe_softmax
// @paper     arXiv 1805.02867, Algorithm 2
// @instance  Tile=4
// @instance  Tile=33
// @instance  Tile=256
// @instance  Tile=1024
//
// @kernel    online_softmax
// @paper     arXiv 1805.02867, Algorithm 3
// @instance  Tile=4
// @instance  Tile=33
// @instance  Tile=256
// @instance  Tile=1024
//
// @kernel    fused_softmax
// @paper     arXiv 1805.02867, Algorithm 3, with the product with V in the same pass
// @array     x [R, N]
// @array     V [N, D]
// @array     o [R, D]
// @instance  Tile=4 D=4
// @instance  Tile=33 D=40
// @instance  Tile=64 D=64
// @instance  Tile=128 D=128
#include "include/numbers.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

// ---- one value from a whole tile -------------------------------------------------------------------------------------------------

struct Larger { static __device__ float of(float a, float b) { return fmaxf(a, b); } };
struct Sum    { static __device__ float of(float a, float b) { return a + b; } };

// Folds part[0 .. Tile-1] in half until part[0] is left, which thread 0 wrote and may read. Overwrites part; all threads call it.
template <class Join, int Tile>
__device__ void fold(float* part) {
    for (int n = Tile; n > 1; n = (n + 1) / 2) {       // n values are left: Tile, half of it, ..., 2
        __syncthreads();  // what was put into part, or the last round, is complete before a thread reads another's value
        const int half = (n + 1) / 2;
        for (int e = threadIdx.x; e < n - half; e += blockDim.x) part[e] = Join::of(part[e], part[e + half]);
    }
}

// What is subtracted from scores before they are exponentiated: m, or 0 while nothing but -inf was seen. e^(-inf - 0) = 0, where
// -inf - -inf is NaN.
__device__ float base_of(float m) { return m == -INFINITY ? 0.f : m; }

// ---- the actions -----------------------------------------------------------------------------------------------------------------

// The carries before the first tile; o [D] where there is one. No barrier: m, d and each element of o are first read by the thread that
// sets them.
template <int D>
__device__ void start(float* m, float* d, float* o) {
    TRACE(start, 0);
    if (threadIdx.x == 0) {
        m[0] = -INFINITY;
        d[0] = 0.f;
    }
    for (int z = threadIdx.x; z < D; z += blockDim.x) o[z] = 0.f;
}

template <int Tile>
__device__ void load_x(float* xi, const float* x, int i, int N) {
    TRACE(load_x, i);
    for (int e = threadIdx.x; e < Tile; e += blockDim.x) {
        const int n = i * Tile + e;                    // element of the row, may be past N in the last tile
        xi[e] = n < N ? x[n] : -INFINITY;              // the maximum and the sum do not see it
    }
}

// m = max(m, xi). c is what all that was summed relative to the old maximum shrinks by, 0 .. 1; null where nothing is rescaled.
template <int Tile>
__device__ void running_max(float* m, float* c, const float* xi, float* part, int i) {
    TRACE(running_max, i);
    for (int e = threadIdx.x; e < Tile; e += blockDim.x) part[e] = xi[e];
    fold<Larger, Tile>(part);
    if (threadIdx.x == 0) {
        const float m_new = fmaxf(m[0], part[0]);
        if (c) c[0] = expf(m[0] - base_of(m_new));     // first tile: e^(-inf - m_new) = 0, and there is nothing to keep
        m[0] = m_new;
    }
    __syncthreads();  // m is complete before all threads subtract it, and part is no longer read
}

__device__ void rescale(float* d, const float* c, int i) {
    TRACE(rescale, i);
    if (threadIdx.x == 0) d[0] *= c[0];                // the denominator, as if the new maximum had been known all along
}

// d gains the tile's terms e^(xi - m). w is the share of the old terms in the new d, 0 .. 1; null where there is no o.
template <int Tile>
__device__ void running_sum(float* d, float* w, float* pi, const float* m, const float* xi, float* part, int i) {
    TRACE(running_sum, i);
    for (int e = threadIdx.x; e < Tile; e += blockDim.x) {
        pi[e] = expf(xi[e] - base_of(m[0]));           // 0 .. 1
        part[e] = pi[e];
    }
    fold<Sum, Tile>(part);
    if (threadIdx.x == 0) {
        const float d_new = d[0] + part[0];
        if (w) w[0] = d_new == 0.f ? 0.f : d[0] / d_new;
        d[0] = d_new;
    }
    __syncthreads();  // d, w and pi are complete before all threads use them, and part is no longer read
}

template <int Tile>
__device__ void divide(float* pi, const float* xi, const float* m, const float* d, int i) {
    TRACE(divide, i);
    for (int e = threadIdx.x; e < Tile; e += blockDim.x) pi[e] = d[0] == 0.f ? 0.f : expf(xi[e] - base_of(m[0])) / d[0];
}

template <int Tile>
__device__ void store_y(float* y, const float* pi, int i, int N) {
    TRACE(store_y, i);
    for (int e = threadIdx.x; e < Tile; e += blockDim.x) {
        const int n = i * Tile + e;
        if (n < N) y[n] = pi[e];
    }
}

template <int Tile, int D>
__device__ void load_v(SharedTile<D> Vi, const float* V, int i, int N) {
    TRACE(load_v, i);
    for (int e = threadIdx.x; e < Tile * D; e += blockDim.x) {
        const int k = e / D, z = e % D;                // row of the tile, 0 .. Tile-1; column, 0 .. D-1
        const int n = i * Tile + k;                    // row of V, may be past N in the last tile
        Vi[k][z] = n < N ? V[(long long)n * D + z] : 0.f;   // 0, for what lies there could be NaN, and 0 * NaN is no 0
    }
}

// o stays normalised: after every tile it is softmax(x) V over what has been seen.
template <int Tile, int D>
__device__ void accumulate(float* o, const float* w, const float* pi, const float* d, SharedTile<D> Vi, int i) {
    TRACE(accumulate, i);
    for (int z = threadIdx.x; z < D; z += blockDim.x) {    // one thread a column
        float sum = 0.f;
        for (int k = 0; k < Tile; ++k) sum += pi[k] * Vi[k][z];
        o[z] = o[z] * w[0] + (d[0] == 0.f ? 0.f : sum / d[0]);
    }
    __syncthreads();  // pi, Vi, d and w are no longer read: the next tile may overwrite them
}

template <int D>
__device__ void store_o(float* out, const float* o) {
    TRACE(store_o, 0);
    for (int z = threadIdx.x; z < D; z += blockDim.x) out[z] = o[z];
}

// ---- the kernels -----------------------------------------------------------------------------------------------------------------

// Three passes over x: the maximum, the sum of e^(x - m), the division.
template <int Tile>
__global__ void safe_softmax(const float* x, float* y, int N) {
    const int r = blockIdx.x;                          // row, 0 .. R - 1
    TRACE_BLOCK_AND_CALLS(0, 0, r);
    x += (long long)r * N;                             // [N]; 64-bit: R * N passes 2^31 long before the memory is full
    y += (long long)r * N;                             // [N]

    SharedCarver carve;
    const auto xi = carve.vector<Tile>("xi");
    const auto pi = carve.vector<Tile>("pi");          // terms, then probabilities
    const auto part = carve.vector<Tile>("part");      // scratch of the folds
    const auto m = carve.vector<1>("m");
    const auto d = carve.vector<1>("d");
    const int tiles = (N + Tile - 1) / Tile;

    start<0>(m, d, nullptr);
    for (int i = 0; i < tiles; ++i) {
        load_x<Tile>(xi, x, i, N);
        running_max<Tile>(m, nullptr, xi, part, i);
    }
    for (int i = 0; i < tiles; ++i) {
        load_x<Tile>(xi, x, i, N);
        running_sum<Tile>(d, nullptr, pi, m, xi, part, i);
    }
    for (int i = 0; i < tiles; ++i) {
        load_x<Tile>(xi, x, i, N);
        divide<Tile>(pi, xi, m, d, i);
        store_y<Tile>(y, pi, i, N);
    }
}

// Two passes: the maximum and the sum run together.
template <int Tile>
__global__ void online_softmax(const float* x, float* y, int N) {
    const int r = blockIdx.x;                          // row, 0 .. R - 1
    TRACE_BLOCK_AND_CALLS(0, 0, r);
    x += (long long)r * N;                             // [N]
    y += (long long)r * N;                             // [N]

    SharedCarver carve;
    const auto xi = carve.vector<Tile>("xi");
    const auto pi = carve.vector<Tile>("pi");          // terms, then probabilities
    const auto part = carve.vector<Tile>("part");      // scratch of the folds
    const auto m = carve.vector<1>("m");
    const auto c = carve.vector<1>("c");               // e^(old m - new m)
    const auto d = carve.vector<1>("d");
    const int tiles = (N + Tile - 1) / Tile;

    start<0>(m, d, nullptr);
    for (int i = 0; i < tiles; ++i) {
        load_x<Tile>(xi, x, i, N);
        running_max<Tile>(m, c, xi, part, i);
        rescale(d, c, i);
        running_sum<Tile>(d, nullptr, pi, m, xi, part, i);
    }
    for (int i = 0; i < tiles; ++i) {
        load_x<Tile>(xi, x, i, N);
        divide<Tile>(pi, xi, m, d, i);
        store_y<Tile>(y, pi, i, N);
    }
}

// One pass: V comes along, and y is never held.
template <int Tile, int D>
__global__ void fused_softmax(const float* x, const float* V, float* o, int N) {
    const int r = blockIdx.x;                          // row, 0 .. R - 1
    TRACE_BLOCK_AND_CALLS(0, 0, r);
    x += (long long)r * N;                             // [N]
    o += (long long)r * D;                             // [D]

    SharedCarver carve;
    const auto xi = carve.vector<Tile>("xi");
    const auto pi = carve.vector<Tile>("pi");          // terms
    const auto part = carve.vector<Tile>("part");      // scratch of the folds
    const auto Vi = carve.tile<Tile, D>("Vi");
    const auto m = carve.vector<1>("m");
    const auto c = carve.vector<1>("c");               // e^(old m - new m)
    const auto d = carve.vector<1>("d");
    const auto w = carve.vector<1>("w");               // old d * c / new d
    const auto oi = carve.vector<D>("o");
    const int tiles = (N + Tile - 1) / Tile;

    start<D>(m, d, oi);
    for (int i = 0; i < tiles; ++i) {
        load_x<Tile>(xi, x, i, N);
        load_v<Tile, D>(Vi, V, i, N);
        running_max<Tile>(m, c, xi, part, i);
        rescale(d, c, i);
        running_sum<Tile>(d, w, pi, m, xi, part, i);
        accumulate<Tile, D>(oi, w, pi, d, Vi, i);
    }
    store_o<D>(o, oi);
}
