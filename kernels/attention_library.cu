// attention_library.cu: FlashAttention-2 built from the library, kernels/include/attention.cuh, in two lengths.
//
// `attention_library` does what kernels/flash_attention_2.cu does, in the same order: the compiler makes the same instructions of it
// (tests/cuda/test_attention_library.py). `attention_short` calls the one function that makes a whole pass, as short as such a kernel can be;
// it pays for that with one more trip of Oi through shared memory at the end.
//
// Layout   float32, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq]
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Window   with causal, of these keys only the last `window`; 0 for all
// kv_len   how many rows of K and V are used: it stands for Nk in what a query sees, and what lies behind is never touched
// Launch   one block per row block, query head and batch; any number of threads, with dynamic shared memory for the parts below
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernel, what to compile, what to check.
// @paper     arXiv 2307.08691, Algorithm 1
// @grid      ceil(Nq / Br), Hq, B
// @block     min(512, max(32, Br * Bc))
// @arch      75
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @default   kv_len = Nk
// @default   window = 0
// @require   Hq % Hkv == 0
// @require   kv_len <= Nk
// @instance  Br=4 Bc=4 D=8
// @instance  Br=16 Bc=16 D=32
// @instance  Br=32 Bc=32 D=64
// @instance  Br=64 Bc=64 D=64
// @instance  Br=32 Bc=32 D=128
// @instance  Br=64 Bc=64 D=128
// @instance  Br=64 Bc=32 D=64
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33 causal=0
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70 causal=1
// @shape     B=1 Hq=2 Hkv=2 Nq=70 Nk=5 causal=1
// @shape     B=1 Hq=2 Hkv=1 Nq=40 Nk=70 causal=1 kv_len=61 window=9
//
// @kernel    attention_library
//
// @kernel    attention_short
#include "include/attention.cuh"

template <int Br, int Bc, int D>
__global__ void attention_library(const float* Q, const float* K, const float* V, float* O, float* L,
                                  int Nq, int Nk, float scale, int causal, int Hq, int Hkv, int kv_len, int window) {
    const int i = blockIdx.x;              // row block,  0 .. ceil(Nq / Br) - 1
    const int h = blockIdx.y;              // query head, 0 .. Hq - 1
    const int b = blockIdx.z;              // batch,      0 .. B - 1
    const int h_kv = h / (Hq / Hkv);       // the head of K and V that this query head reads, 0 .. Hkv - 1
    TRACE_BLOCK_AND_CALLS(b, h, i);

    // From here Q, O, L and K, V are those of this head alone. 64-bit: B * H * N * D passes 2^31 long before the memory is full.
    Q += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    O += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    L += ((long long)b * Hq + h) * Nq;             // [Nq]
    K += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    V += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    Nk = kv_len;                                   // and from here the keys behind the used ones do not exist

    SharedCarver carve;
    const auto Qi = carve.tile<Br, D>("Qi");
    const auto Kj = carve.tile<D, Bc>("Kj");       // transposed: neighbouring threads score neighbouring keys and read neighbouring words
    const auto Vj = carve.tile<Bc, D>("Vj");
    const auto Oi = carve.tile<Br, D>("Oi");       // unnormalised
    const auto Sij = carve.tile<Br, Bc>("Sij");    // scores, then probabilities before their division by li
    const auto mi = carve.vector<Br>("mi");
    const auto li = carve.vector<Br>("li");

    const Sight see = sight<Br, Bc>(i * Br, Nq, Nk, causal, window);   // which keys the rows see, and in which tiles they lie

    TRACE(load_q, i);
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row of the tile, 0 .. Br-1; column, 0 .. D-1
        const int q = i * Br + r;                  // row of Q, may be past Nq in the last block
        Qi[r][x] = q < Nq ? Q[(long long)q * D + x] : 0.f;
        Oi[r][x] = 0.f;
    }
    for (int r = threadIdx.x; r < Br; r += blockDim.x) {
        mi[r] = -INFINITY;
        li[r] = 0.f;
    }
    __syncthreads();  // Qi, Oi, mi and li are complete before others use them: a block that sees no key goes straight to its store

    attention_pass<Br, Bc, D>(Oi, mi, li, Qi, K, V, scale, see, Kj, Vj, Sij);

    TRACE(store_o, i);
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row, 0 .. Br-1; column, 0 .. D-1
        const int q = i * Br + r;
        if (q < Nq) O[(long long)q * D + x] = normalise(Oi[r][x], li[r]);   // the one division
    }
    for (int r = threadIdx.x; r < Br; r += blockDim.x) {
        const int q = i * Br + r;
        if (q < Nq) L[q] = mi[r] + logf(li[r]);    // -inf where no key was seen
    }
}

template <int Br, int Bc, int D>
__global__ void attention_short(const float* Q, const float* K, const float* V, float* O, float* L,
                                int Nq, int Nk, float scale, int causal, int Hq, int Hkv, int kv_len, int window) {
    const int i = blockIdx.x;              // row block,  0 .. ceil(Nq / Br) - 1
    const int h = blockIdx.y;              // query head, 0 .. Hq - 1
    const int b = blockIdx.z;              // batch,      0 .. B - 1
    const int h_kv = h / (Hq / Hkv);       // the head of K and V that this query head reads, 0 .. Hkv - 1
    TRACE_BLOCK_AND_CALLS(b, h, i);

    // From here Q, O, L and K, V are those of this head alone. 64-bit: B * H * N * D passes 2^31 long before the memory is full.
    Q += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    O += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    L += ((long long)b * Hq + h) * Nq;             // [Nq]
    K += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    V += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    Nk = kv_len;                                   // and from here the keys behind the used ones do not exist

    SharedCarver carve;
    const auto Qi = carve.tile<Br, D>("Qi");
    const auto Kj = carve.tile<D, Bc>("Kj");       // transposed: neighbouring threads score neighbouring keys and read neighbouring words
    const auto Vj = carve.tile<Bc, D>("Vj");
    const auto Oi = carve.tile<Br, D>("Oi");       // unnormalised
    const auto Sij = carve.tile<Br, Bc>("Sij");    // scores, then probabilities before their division by li
    const auto mi = carve.vector<Br>("mi");
    const auto li = carve.vector<Br>("li");

    const Sight see = sight<Br, Bc>(i * Br, Nq, Nk, causal, window);

    TRACE(load_q, i);
    load_rows<Br, D>(Qi, Q, i * Br, Nq);
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) Oi[e / D][e % D] = 0.f;
    attention<Br, Bc, D>(Oi, mi, li, Qi, K, V, scale, see, Kj, Vj, Sij);   // begins with a barrier

    TRACE(store_o, i);
    for (int e = threadIdx.x; e < Br * D; e += blockDim.x) {
        const int r = e / D, x = e % D;            // row, 0 .. Br-1; column, 0 .. D-1
        const int q = i * Br + r;
        if (q < Nq) O[(long long)q * D + x] = Oi[r][x];
    }
    for (int r = threadIdx.x; r < Br; r += blockDim.x) {
        const int q = i * Br + r;
        if (q < Nq) L[q] = mi[r] + logf(li[r]);    // -inf where no key was seen
    }
}
