// attention.cuh: the steps of attention as functions on tiles, for kernels of your own. flashviz/tiles.py has the same names.
//
//     online_softmax<Br, Bc, D>(acc, m, l, s, v);        one key tile: acc gains softmax(s) v, unnormalised
//     attention<Br, Bc, D>(acc, q, K, V, scale, ...);    all key tiles: acc becomes softmax(q K^T * scale) V
//     mask_cols<Br, Bc>(s, cols);                        scores from column `cols` on become -inf
//     causal_mask<Br, Bc>(s, row0, col0, window);        scores above the diagonal become -inf, and those before the window
//     rope<R>(x, cos, sin); rope_pairs<R>(...);          rotary positions, see rope.cuh
//
// All threads of the block call them together. Tiles are in shared memory, [rows, columns]; m and l are [Br]. A function puts the barriers
// that it needs inside; what it is given is complete before the call, and whoever reads what it leaves waits first, unless it says otherwise.
// kernels/attention_library.cu is FlashAttention-2 built from them: the compiler makes of it what it makes of the one written out.
#pragma once

#include "numbers.cuh"
#include "rope.cuh"
#include "shared.cuh"
#include "trace.cuh"

// ---- One score at its place ----

// Whether a row sees the key that lies `ago` keys back from its own, ahead where negative: its own and those before it; with a window (not
// 0) only the last `window` of these.
__device__ __forceinline__ bool causal_sees(int ago, int window = 0) { return ago >= 0 && (!window || ago < window); }

// acc / l; 0 for a row that saw no key.
__device__ __forceinline__ float normalise(float acc, float l) { return l == 0.f ? 0.f : acc / l; }

// ---- Tiles ----

// tile [R, D] from rows first .. first + R - 1 of X [end, D] in HBM; 0 from row `end` on, for what lies there could be NaN, and 0 * NaN is no 0.
template <int R, int D>
__device__ __forceinline__ void load_rows(SharedTile<D> tile, const float* X, int first, int end) {
    for (int e = threadIdx.x; e < R * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row, 0 .. R-1; column, 0 .. D-1
        tile[r][x] = first + r < end ? X[(long long)(first + r) * D + x] : 0.f;
    }
}

// The same, transposed: tile [D, R].
template <int R, int D>
__device__ __forceinline__ void load_columns(SharedTile<R> tile, const float* X, int first, int end) {
    for (int e = threadIdx.x; e < R * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row of X, 0 .. R-1; column of X, 0 .. D-1
        tile[x][r] = first + r < end ? X[(long long)(first + r) * D + x] : 0.f;
    }
}

// s [Br, Bc] = q k^T * scale for q [Br, D] and k [D, Bc], which is transposed; -inf where not sees(r, c).
template <int Br, int Bc, int D, class Sees>
__device__ __forceinline__ void scores(SharedTile<Bc> s, SharedTile<D> q, SharedTile<Bc> k, float scale, Sees sees) {
    for (int e = threadIdx.x; e < Br * Bc; e += blockDim.x) {
        const int r = e / Bc, c = e % Bc;          // row, 0 .. Br-1; column, 0 .. Bc-1
        float dot = 0.f;
        for (int x = 0; x < D; ++x) dot += q[r][x] * k[x][c];
        s[r][c] = sees(r, c) ? dot * scale : -INFINITY;
    }
}

// s [Br, Bc]: -inf from column `cols` on. Each thread masks the elements that it fills in scores(): no barrier between the two.
template <int Br, int Bc>
__device__ __forceinline__ void mask_cols(SharedTile<Bc> s, int cols) {
    for (int e = threadIdx.x; e < Br * Bc; e += blockDim.x)
        if (e % Bc >= cols) s[e / Bc][e % Bc] = -INFINITY;
}

// s [Br, Bc]: -inf above the diagonal, and before the window where there is one. row0 is the key at which row 0 stands (its query + Nk - Nq),
// col0 the key of column 0. Elements and threads as above.
template <int Br, int Bc>
__device__ __forceinline__ void causal_mask(SharedTile<Bc> s, int row0, int col0, int window = 0) {
    for (int e = threadIdx.x; e < Br * Bc; e += blockDim.x) {
        const int r = e / Bc, c = e % Bc;          // row, 0 .. Br-1; column, 0 .. Bc-1
        if (!causal_sees(row0 + r - (col0 + c), window)) s[r][c] = -INFINITY;
    }
}

// One step of the online softmax, one thread a row: s [Br, Bc] comes in as scores and becomes e^(s - m); m and l take the new keys in, and acc
// [Br, D] shrinks to the new maximum.
template <int Br, int Bc, int D>
__device__ __forceinline__ void softmax_step(SharedTile<D> acc, float* m, float* l, SharedTile<Bc> s) {
    for (int r = threadIdx.x; r < Br; r += blockDim.x) {
        float m_new = m[r];
        for (int c = 0; c < Bc; ++c) m_new = fmaxf(m_new, s[r][c]);
        const float base = m_new == -INFINITY ? 0.f : m_new;   // no key seen so far: e^(-inf - 0) = 0 where -inf - -inf is NaN

        float sum = 0.f;
        for (int c = 0; c < Bc; ++c) {
            const float p = expf(s[r][c] - base);
            s[r][c] = p;
            sum += p;
        }
        const float corr = expf(m[r] - base);      // what the earlier tiles' terms shrink by, 0 .. 1
        l[r] = l[r] * corr + sum;
        m[r] = m_new;
        for (int x = 0; x < D; ++x) acc[r][x] *= corr;
    }
}

// acc [Br, D] += p v for p [Br, Bc] and v [Bc, D].
template <int Br, int Bc, int D>
__device__ __forceinline__ void accumulate(SharedTile<D> acc, SharedTile<Bc> p, SharedTile<D> v) {
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row, 0 .. Br-1; column, 0 .. D-1
        float o = acc[r][x];
        for (int c = 0; c < Bc; ++c) o += p[r][c] * v[c][x];
        acc[r][x] = o;
    }
}

// The library step: acc [Br, D] gains the softmax of s [Br, Bc], scaled and masked scores, times v [Bc, D]. Start with acc = 0, m = -inf and
// l = 0; divide acc by l after the last step. s is left as unnormalised probabilities. Put a barrier before s or v is overwritten.
// `step` is the tile's number, for the trace.
template <int Br, int Bc, int D>
__device__ __forceinline__ void online_softmax(SharedTile<D> acc, float* m, float* l, SharedTile<Bc> s, SharedTile<D> v,
                                               [[maybe_unused]] int step = 0) {
    TRACE(softmax, step);
    softmax_step<Br, Bc, D>(acc, m, l, s);
    __syncthreads();  // s holds probabilities and acc is rescaled before all threads use them

    TRACE(accumulate, step);
    accumulate<Br, Bc, D>(acc, s, v);
}

// ---- The whole pass ----

// What a row block sees: queries row .. row + Br - 1 of Nq look at the first Nk keys; key tiles other than first .. end - 1 are never loaded.
struct Sight {
    int row, Nq, Nk, causal, window, first, end;
};

// Br rows from `row` on, in tiles of Bc keys. Causal masks are aligned bottom-right: query q stands at key q + Nk - Nq; window 0: none.
template <int Br, int Bc>
__device__ __forceinline__ Sight sight(int row, int Nq, int Nk, int causal, int window) {
    const int last_row = min(row + Br, Nq) - 1;
    const int visible = causal ? max(0, min(Nk, last_row + 1 + (Nk - Nq))) : Nk;
    const int end = (visible + Bc - 1) / Bc;
    const int first = causal && window ? max(0, row + 1 + (Nk - Nq) - window) / Bc : 0;
    return {row, Nq, Nk, causal, window, first, end};
}

// All key tiles that the block sees. acc [Br, D], m and l [Br] are the carries, set to 0, -inf and 0 by the caller, and come back unnormalised.
// q is [Br, D]; K and V are [Nk, D] in HBM; k [D, Bc], v [Bc, D] and s [Br, Bc] are room to work in. Ends with a barrier.
template <int Br, int Bc, int D>
__device__ __forceinline__ void attention_pass(SharedTile<D> acc, float* m, float* l, SharedTile<D> q, const float* K, const float* V,
                                               float scale, Sight see, SharedTile<Bc> k, SharedTile<D> v, SharedTile<Bc> s) {
    for (int j = see.first; j < see.end; ++j) {
        TRACE(load_k, j);
        load_columns<Bc, D>(k, K, j * Bc, see.Nk);

        TRACE(load_v, j);
        load_rows<Bc, D>(v, V, j * Bc, see.Nk);
        __syncthreads();  // k and v are complete before any thread reads them

        TRACE(scores, j);
        scores<Br, Bc, D>(s, q, k, scale, [&](int r, int c) {
            const int q = see.row + r, k = j * Bc + c;
            const bool near = causal_sees((q - see.Nq) - (k - see.Nk), see.window);
            return k < see.Nk && (!see.causal || near);
        });
        __syncthreads();  // each row of s is complete before one thread reads all of it

        online_softmax<Br, Bc, D>(acc, m, l, s, v, j);
        __syncthreads();  // s and v are no longer read: the next tile may overwrite them
    }
}

// acc [Br, D] = softmax(q K^T * scale) V, normalised. The caller hands acc in as zeros; m and l start here and are left as the maximum and the
// denominator of each row: L = m + ln l. The other arguments are those of attention_pass. Each thread divides the elements e = threadIdx.x,
// threadIdx.x + blockDim.x, ...: who goes on with the same ones needs no barrier.
template <int Br, int Bc, int D>
__device__ __forceinline__ void attention(SharedTile<D> acc, float* m, float* l, SharedTile<D> q, const float* K, const float* V,
                                          float scale, Sight see, SharedTile<Bc> k, SharedTile<D> v, SharedTile<Bc> s) {
    for (int r = threadIdx.x; r < Br; r += blockDim.x) {
        m[r] = -INFINITY;
        l[r] = 0.f;
    }
    __syncthreads();  // m and l are set before others use them: a block that sees no key goes straight to the division
    attention_pass<Br, Bc, D>(acc, m, l, q, K, V, scale, see, k, v, s);
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) acc[e / D][e % D] = normalise(acc[e / D][e % D], l[e / D]);
}
