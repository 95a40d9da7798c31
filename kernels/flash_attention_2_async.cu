// flash_attention_2_async.cu: rung 4 of the ladder, float16 or bfloat16. FlashAttention-2 whose copies run while the tensor cores do.
//
// In flash_attention_2_mma.cu, rung 3, a block loads a tile and waits for it, computes and waits for the next: the tensor cores idle
// through every trip to HBM. cp.async copies 16 bytes from HBM to shared memory, through no register, and goes on at once. So there is room
// for two tiles of K and of V: while the block computes on tile j, tile j + 1 is on its way into the other half.
//
// One barrier a tile is enough. It stands after a thread's wait for its own copies, and says two things at once: tile j is here for
// everybody, and everybody is done with tile j - 1, whose half the copies of tile j + 1 may now overwrite.
//
// `Layout` says where the 16 bytes, chunk c of row r, lie in shared memory, and is there to be timed. A bank is 4 bytes wide, there are 32:
//
//     0   plain      rows of D numbers. The eight rows that ldmatrix reads begin in the same bank, and come one after the other
//     1   padded     rows of D + 8 numbers: each row begins four banks further on. Rung 3's way; costs 16 bytes a row
//     2   swizzled   rows of D numbers, and chunk c of row r in place c ^ (r % 8): eight rows, eight places, no memory lost
//
// Layout   T, row-major, contiguous, 16-byte aligned:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq], float
// Heads    query head h reads K, V head h / (Hq / Hkv)
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Rounding sums, softmax, O and L are float. P is rounded to T before it meets V, by up to 2^-11 of it (bfloat16: 2^-8), and O at the end
// Launch   one block per row block, query head and batch; a warp for each 16 of its rows, with dynamic shared memory for the parts below
//
// @kernel    flash_attention_2_async
// @paper     arXiv 2307.08691, Algorithm 1
// @grid      ceil(Nq / Br), Hq, B
// @block     2 * Br
// @arch      80
// @blocks    Br, Bc
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @default   scale = 1 / sqrt(D)
// @require   Hq % Hkv == 0
// @require   Layout <= 2
// @instance  T=half Br=16 Bc=16 D=16 Layout=2
// @instance  T=bfloat16 Br=32 Bc=16 D=32 Layout=2
// @instance  T=half Br=64 Bc=64 D=64 Layout=0
// @instance  T=half Br=64 Bc=64 D=64 Layout=1
// @instance  T=half Br=64 Bc=64 D=64 Layout=2
// @instance  T=half Br=64 Bc=64 D=128 Layout=0
// @instance  T=half Br=64 Bc=64 D=128 Layout=1
// @instance  T=half Br=64 Bc=64 D=128 Layout=2
// @instance  T=bfloat16 Br=64 Bc=64 D=64 Layout=2
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33 causal=0
// @shape     B=2 Hq=3 Hkv=1 Nq=5 Nk=70 causal=1
// @shape     B=1 Hq=2 Hkv=2 Nq=70 Nk=5 causal=1
#include "include/numbers.cuh"
#include "include/ptx.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

// Where chunk c of row r begins, in bytes from the tile's first. A swizzled row may go no further than itself: where it has fewer than
// eight chunks, several rows fill the 128 bytes of all banks together, and they are swizzled alike.
template <int Layout, int D>
__device__ __forceinline__ SharedAddress place(int r, int c) {
    constexpr int Chunks = D / 8, Alike = Chunks < 8 ? 8 / Chunks : 1;
    if (Layout == 2) c ^= r / Alike % (Chunks < 8 ? Chunks : 8);
    return r * (D + 8 * (Layout == 1)) * 2 + c * 16;
}

// Starts to copy rows first .. first + Rows - 1 of X [end, D]; zeros from row `end` on, for what lies there could be NaN, and 0 * NaN is no 0.
template <typename T, int Rows, int D, int Layout>
__device__ __forceinline__ void copy_rows(SharedAddress tile, const T* X, int first, int end) {
    for (int e = threadIdx.x; e < Rows * D / 8; e += blockDim.x) {
        const int r = e / (D / 8), c = e % (D / 8);            // row of the tile, 0 .. Rows-1; chunk, 0 .. D/8-1
        const bool exists = first + r < end;
        cp_async_16(tile + place<Layout, D>(r, c), X + (long long)(exists ? first + r : 0) * D + c * 8, exists);
    }
}

template <typename T, int Br, int Bc, int D, int Layout>
__global__ void __launch_bounds__(2 * Br)
flash_attention_2_async(const T* Q, const T* K, const T* V, T* O, float* L,
                      int Nq, int Nk, float scale, int causal, int Hq, int Hkv) {
    static_assert(Br % 16 == 0 && Bc % 16 == 0 && D % 16 == 0, "tiles are made of 16 x 16 operands");
    const int i = blockIdx.x;                      // row block,  0 .. ceil(Nq / Br) - 1
    const int h = blockIdx.y;                      // query head, 0 .. Hq - 1
    const int b = blockIdx.z;                      // batch,      0 .. B - 1
    const int h_kv = h / (Hq / Hkv);               // the head of K and V that this query head reads, 0 .. Hkv - 1
    TRACE_BLOCK(b, h, i);

    // From here Q, O, L and K, V are those of this head alone.
    Q += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    O += ((long long)b * Hq + h) * Nq * D;         // [Nq, D]
    L += ((long long)b * Hq + h) * Nq;             // [Nq]
    K += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]
    V += ((long long)b * Hkv + h_kv) * Nk * D;     // [Nk, D]

    SharedCarver carve;
    const auto Qi = carve.tile<T, Br, D + 8 * (Layout == 1)>("Qi");
    const auto Kj = carve.tile<T, 2 * Bc, D + 8 * (Layout == 1)>("Kj");    // tile j in the half j % 2
    const auto Vj = carve.tile<T, 2 * Bc, D + 8 * (Layout == 1)>("Vj");
    constexpr int Half = Bc * (D + 8 * (Layout == 1)) * 2;                 // bytes
    const SharedAddress q_tile = shared_address(Qi[0]), k_tiles = shared_address(Kj[0]), v_tiles = shared_address(Vj[0]);

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = threadIdx.x / 32 * 16;         // the warp's first row of the tile; it owns row .. row + 15, this lane row + g and row + g + 8

    float o[D / 8][4] = {};                        // o[y]: the warp's rows, columns 8y .. 8y + 7; unnormalised
    float m[2] = {-INFINITY, -INFINITY};           // of rows g and g + 8, the same in the four lanes of a row
    float l[2] = {};                               // of these rows, this lane's share: the keys whose scores it holds

    // How many keys the block's last row sees: tiles behind them are never loaded.
    const int last_row = min((i + 1) * Br, Nq) - 1;
    const int visible = causal ? max(0, min(Nk, last_row + 1 + (Nk - Nq))) : Nk;
    const int tiles = (visible + Bc - 1) / Bc;

    TRACE(load_q, i);
    copy_rows<T, Br, D, Layout>(q_tile, Q, i * Br, Nq);
    if (tiles > 0) {
        TRACE(load_k, 0);
        copy_rows<T, Bc, D, Layout>(k_tiles, K, 0, Nk);

        TRACE(load_v, 0);
        copy_rows<T, Bc, D, Layout>(v_tiles, V, 0, Nk);
    }
    cp_async_commit();

    for (int j = 0; j < tiles; ++j) {
        cp_async_wait<0>();                        // this thread's copies of tile j are there
        __syncthreads();  // everybody's copies of tile j (and of Qi) are there, and all are done with tile j - 1
        const int now = j % 2 * Half, next = Half - now;       // where tiles j and j + 1 begin
        if (j + 1 < tiles) {
            TRACE(load_k, j + 1);
            copy_rows<T, Bc, D, Layout>(k_tiles + next, K, (j + 1) * Bc, Nk);

            TRACE(load_v, j + 1);
            copy_rows<T, Bc, D, Layout>(v_tiles + next, V, (j + 1) * Bc, Nk);
            cp_async_commit();
        }

        TRACE(scores, j);
        float s[Bc / 8][4] = {};                   // s[n]: the warp's rows, keys 8n .. 8n + 7 of the tile
#pragma unroll
        for (int x = 0; x < D; x += 16) {
            unsigned q[4];                         // 16 rows, columns x .. x + 15
            ldmatrix_x4(q, q_tile + place<Layout, D>(row + lane % 16, x / 8 + lane / 16));
#pragma unroll
            for (int n = 0; n < Bc / 8; n += 2) {
                unsigned k[4];                     // 16 keys, the same columns: k[0], k[1] of the first eight, k[2], k[3] of the others
                ldmatrix_x4(k, k_tiles + now + place<Layout, D>(8 * n + lane / 16 * 8 + lane % 8, x / 8 + lane / 8 % 2));
                mma_m16n8k16<T>(s[n], q, k[0], k[1]);
                mma_m16n8k16<T>(s[n + 1], q, k[2], k[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int q = i * Br + row + g + e / 2 * 8, k = j * Bc + 8 * n + 2 * t + e % 2;
                const bool seen = k < Nk && (!causal || k <= q + (Nk - Nq));
                s[n][e] = seen ? s[n][e] * scale : -INFINITY;
            }
        }

        TRACE(softmax, j);
#pragma unroll
        for (int u = 0; u < 2; ++u) {              // row g, then row g + 8: elements 2u and 2u + 1 of each accumulator
            float m_new = m[u];
#pragma unroll
            for (int n = 0; n < Bc / 8; ++n) m_new = fmaxf(m_new, fmaxf(s[n][2 * u], s[n][2 * u + 1]));
            m_new = fmaxf(m_new, __shfl_xor_sync(ALL_LANES, m_new, 1));    // the four lanes of a row differ in two bits
            m_new = fmaxf(m_new, __shfl_xor_sync(ALL_LANES, m_new, 2));
            const float base = m_new == -INFINITY ? 0.f : m_new;           // no key seen so far: e^(-inf - 0) = 0 where -inf - -inf is NaN

            const float corr = expf(m[u] - base);  // what the earlier tiles' terms shrink by, 0 .. 1
            m[u] = m_new;
            l[u] *= corr;
#pragma unroll
            for (int y = 0; y < D / 8; ++y) {
                o[y][2 * u] *= corr;
                o[y][2 * u + 1] *= corr;
            }
#pragma unroll
            for (int n = 0; n < Bc / 8; ++n) {
                s[n][2 * u] = expf(s[n][2 * u] - base);                    // from here s holds probabilities before their division by l
                s[n][2 * u + 1] = expf(s[n][2 * u + 1] - base);
                l[u] += s[n][2 * u] + s[n][2 * u + 1];
            }
        }

        TRACE(accumulate, j);
#pragma unroll
        for (int n = 0; n < Bc / 8; n += 2) {      // 16 keys: two accumulators of S are one operand
            const unsigned p[4] = {pack<T>(s[n][0], s[n][1]), pack<T>(s[n][2], s[n][3]),
                                   pack<T>(s[n + 1][0], s[n + 1][1]), pack<T>(s[n + 1][2], s[n + 1][3])};
#pragma unroll
            for (int y = 0; y < D / 8; y += 2) {
                unsigned v[4];                     // these keys, 16 columns: v[0], v[1] of the first eight, v[2], v[3] of the others
                ldmatrix_x4_trans(v, v_tiles + now + place<Layout, D>(8 * n + lane % 16, y + lane / 16));
                mma_m16n8k16<T>(o[y], p, v[0], v[1]);
                mma_m16n8k16<T>(o[y + 1], p, v[2], v[3]);
            }
        }
    }

    cp_async_wait<0>();                            // a block that sees no key has not waited for Qi yet
    TRACE(store_o, i);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        l[u] += __shfl_xor_sync(ALL_LANES, l[u], 1);           // the shares of the four lanes of a row
        l[u] += __shfl_xor_sync(ALL_LANES, l[u], 2);
        const int q = i * Br + row + g + 8 * u;
        if (q >= Nq) continue;                     // the shuffles are done: lanes may part
        const float inverse = l[u] == 0.f ? 0.f : 1.f / l[u];  // the one division; 0 for a row that saw no key
#pragma unroll
        for (int y = 0; y < D / 8; ++y)            // two numbers at a time: what a lane has side by side
            *reinterpret_cast<unsigned*>(&O[(long long)q * D + 8 * y + 2 * t]) = pack<T>(o[y][2 * u] * inverse, o[y][2 * u + 1] * inverse);
        if (t == 0) L[q] = m[u] + logf(l[u]);      // -inf where no key was seen
    }
}
