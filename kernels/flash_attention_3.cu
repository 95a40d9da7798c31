// flash_attention_3.cu: attention, forward, with Hopper's own instructions: O = softmax(Q K^T * scale) V and L = logsumexp(Q K^T * scale).
//
// FlashAttention-3 (Shah et al., arXiv 2407.08608) without its 8-bit part. The algorithm is that of the rungs below it; what changes is
// who waits for whom. Until here every warp loaded, multiplied and took exponentials in turn. Now
//
// * the copy engine loads. One thread, the *producer*, asks it for tiles of K and V into a ring of `Stages` slots; for each slot there is a
//   barrier `full` (the bytes are there) and a barrier `empty` (no consumer warp reads it any more);
// * tensor cores work by themselves. A *consumer*, a warpgroup with 64 rows of Q, starts S = Q K^T of the next tile and O += P V of the
//   last one together and takes the exponentials of one while the other is still being computed;
// * the consumers take turns at starting products, so that the exponentials of one fall into the products of another;
// * a thread block does not end with its rows. As many as the GPU has multiprocessors stay and take row block after row block: the
//   scores of the next are under way before the O of the last is stored.
//
// Layout   half or bfloat16, row-major, contiguous:  Q, O [B, Hq, Nq, D]   K, V [B, Hkv, Nk, D]   L [B, Hq, Nq] float, natural log
// Heads    query head h reads K, V head h / (Hq / Hkv); `heads` is B * Hq
// Causal   aligned bottom-right: query q sees the keys k <= q + Nk - Nq. A row that sees no key gets O = 0 and L = -inf
// Launch   Br / 64 consumers and the producer's warpgroup; D is 64 or 128, Br 128 or 192, Bc 64 or 128
//
// The lines that start with @ are read by the launcher and the tests: how to launch the kernel, what to compile, what to check.
// @kernel    flash_attention_3
// @paper     arXiv 2407.08608
// @grid      min(multiprocessors, ceil(heads * ceil(Nq / Br) / (1 + Causal)))
// @block     2 * Br + 128
// @arch      90a
// @instead   flash_attention_2_tuned, flash_attention_2
// @blocks    Bc
// @roles     producer, consumer 1, consumer 2, consumer 3
// @array     Q [B, Hq, Nq, D]
// @array     K [B, Hkv, Nk, D]
// @array     V [B, Hkv, Nk, D]
// @array     O [B, Hq, Nq, D]
// @array     L [B, Hq, Nq]
// @map       Q const T [64, D] swizzle 128
// @map       K const T [Bc, D] swizzle 128
// @map       V const T [Bc, D] swizzle 128
// @map       O T [64, D] swizzle 128
// @default   scale = 1 / sqrt(D)
// @default   heads = B * Hq
// @require   Hq % Hkv == 0
// @require   heads == B * Hq
// @instance  T=half Br=192 Bc=128 D=64 Causal=0 Stages=3
// @instance  T=half Br=192 Bc=128 D=64 Causal=1 Stages=3
// @instance  T=half Br=128 Bc=128 D=128 Causal=0 Stages=2
// @instance  T=half Br=128 Bc=128 D=128 Causal=1 Stages=2
// @instance  T=bfloat16 Br=192 Bc=128 D=64 Causal=1 Stages=3
// @instance  T=bfloat16 Br=128 Bc=128 D=128 Causal=1 Stages=2
// @tune      Br=192 Bc=128 Stages=2,3
// @tune      Br=128 Bc=64,128 Stages=2,3,4
// @shape     B=1 Hq=1 Hkv=1 Nq=33 Nk=33
// @shape     B=2 Hq=4 Hkv=2 Nq=300 Nk=700
// @shape     B=1 Hq=2 Hkv=1 Nq=700 Nk=300
#include "include/numbers.cuh"
#include "include/rows.cuh"
#include "include/shared.cuh"
#include "include/trace.cuh"
#include "include/walk.cuh"
#include "include/wgmma.cuh"

template <typename T, int Br, int Bc, int D, bool Causal, int Stages>
__global__ void __launch_bounds__(2 * Br + 128, 1)
flash_attention_3(const __grid_constant__ TensorMap Q, const __grid_constant__ TensorMap K, const __grid_constant__ TensorMap V,
                  const __grid_constant__ TensorMap O, float* L, int Nq, int Nk, float scale, int Hq, int Hkv, int heads) {
    constexpr int Consumers = Br / 64;
    static_assert(Consumers == 2 || Consumers == 3, "other numbers have other shares of the registers");
    // Tiles that the last rows see and the first 64 do not may be skipped, if the ring has room for them between the two that are in use.
    constexpr bool Skips = Causal && (Br - 64 + Bc - 1) / Bc + 2 <= Stages;
    constexpr unsigned QBytes = 64 * D * sizeof(T), KBytes = Bc * D * sizeof(T);

    SharedCarver carve;
    const auto Qi = carve.tile<T, 2 * Br, D>("Qi");            // two row blocks, 64 rows a consumer; O leaves by the way that Q came
    const auto Kj = carve.tile<T, Stages * Bc, D>("Kj");
    const auto Vj = carve.tile<T, Stages * Bc, D>("Vj");
    const auto kv_bars = carve.tile<Barrier, 4, Stages>("kv_bars");
    const auto q_bars = carve.tile<Barrier, 4, Br / 64>("q_bars");
    Barrier *k_full = kv_bars[0], *k_empty = kv_bars[1], *v_full = kv_bars[2], *v_empty = kv_bars[3];
    Barrier *q_full = q_bars[0], *q_empty = q_bars[2];         // of both row blocks, one a consumer
    const auto q_part = [&](int slot, int w) { return shared_address(Qi[(slot * Consumers + w) * 64]); };
    const auto k_part = [&](int slot) { return shared_address(Kj[slot * Bc]); };
    const auto v_part = [&](int slot) { return shared_address(Vj[slot * Bc]); };

    if (threadIdx.x == 0) {
        for (int s = 0; s < Stages; ++s) {
            k_full[s].init(1), v_full[s].init(1);                               // the producer's arrival, and its bytes
            k_empty[s].init(4 * Consumers), v_empty[s].init(4 * Consumers);     // one of each consumer warp
        }
        for (int s = 0; s < 2 * Consumers; ++s) q_full[s].init(1), q_empty[s].init(1);
        barriers_ready();
    }
    __syncthreads();  // the barriers are initialised before any other thread uses one

    Walk<Br, Bc, Causal> at(Nq, Nk, heads);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);   // the shuffle tells the compiler that it is the same in the whole warp
    if (warpgroup == 0) {  // ---- producer ------------------------------------------------------------------------------------------
        give_registers<Consumers == 2 ? 40 : 32>();
        if (threadIdx.x != 0) return;
        TRACE_ROLE(0, true, 0, 0, blockIdx.x);
        const int group = Hq / Hkv;
        RingPlace kv, q;
        for (; at.more; at.next(), kv.next(Stages)) {
            TRACE(load_k, at.number(), at.j);
            k_empty[kv.slot].wait(kv.parity ^ 1);
            k_full[kv.slot].arrive_expecting(KBytes);
            tma_load(k_part(kv.slot), K, k_full[kv.slot], at.j * Bc, at.head / group);
            if (at.j == 0) {
                for (int w = 0; w < Consumers; ++w) {
                    const int part = q.slot * Consumers + w;
                    TRACE(load_q, w + 1, at.number());
                    q_empty[part].wait(q.parity ^ 1);
                    q_full[part].arrive_expecting(QBytes);
                    tma_load(q_part(q.slot, w), Q, q_full[part], at.row() + 64 * w, at.head);
                }
                q.next(2);
            }
            TRACE(load_v, at.number(), at.j);
            v_empty[kv.slot].wait(kv.parity ^ 1);
            v_full[kv.slot].arrive_expecting(KBytes);
            tma_load(v_part(kv.slot), V, v_full[kv.slot], at.j * Bc, at.head / group);
        }
        k_empty[kv.slot].wait(kv.parity ^ 1);
        k_full[kv.slot].arrive();                              // behind the last tile: the consumers always wait for a next one
        return;
    }

    // ---- consumers --------------------------------------------------------------------------------------------------------------------
    take_registers<Consumers == 2 ? 232 : 160>();
    const int w = warpgroup - 1, t = threadIdx.x % 128, lane = t % 32;
    TRACE_ROLE(warpgroup, t == 0, 0, 0, blockIdx.x);
    const int row = 64 * w + t / 32 * 16 + lane / 4;           // of the row block; this thread has that one and row + 8
    // Below, scores are those of a positive scale: for a negative one the signs of Q are turned, and 0 is 10^-30, so that -inf stays -inf.
    const bool turned = scale < 0.f;
    scale = fmaxf(fabsf(scale), 1e-30f);
    const float log2_scale = scale * 1.44269504f;
    float s[Bc / 2], o[D / 2], m[2], l[2], corr[2], inverse[2];
    unsigned p[Bc / 16][4];                                    // probabilities, as the left side of a product wants them
    RingPlace here, before, q;                                 // of the tile at hand, of the one whose p is not used yet, of the rows
    bool owed = false;                                         // the copy engine may still be reading O from the other part of Qi

    const auto my_turn = [&] { named_barrier_wait(1 + w, 256); };              // 256: the one who waits and the one who says so
    const auto pass_turn = [&] { named_barrier_arrive(1 + (w + 1) % Consumers, 256); };
    const auto done_with = [&](Barrier& empty) { if (lane == 0) empty.arrive(); };
    const auto forget = [&] { m[0] = m[1] = -INFINITY, l[0] = l[1] = 0.f; };
    const auto clear = [&] {
#pragma unroll
        for (int n = 0; n < D / 2; ++n) o[n] = 0.f;
    };
    int whole, seen;                                           // so many tiles hide nothing from these 64 rows; so many are seen at all
    const auto look = [&] {                                    // when `at` has moved
        if (at.j > 0) return;
        whole = at.keys_seen_before(at.row() + 64 * w + 1) / Bc;
        seen = (at.keys_seen_before(at.row() + 64 * w + 64) + Bc - 1) / Bc;
    };
    const auto softmax_here = [&] {                            // of the tile that `at` is at
        if (at.j >= whole) {
            const int next = at.row() + row + 1;
            mask(s, at.j * Bc + lane % 4 * 2, at.keys_seen_before(next), at.keys_seen_before(next + 8));
        }
        return softmax(s, m, l, corr, log2_scale);
    };
    const auto wait_for_q = [&] {
        q_full[q.slot * Consumers + w].wait(q.parity);
        if (turned) {
            for (int n = t; n < 64 * D / 2; n += 128)
                store_shared(q_part(q.slot, w) + 4 * n, load_shared(q_part(q.slot, w) + 4 * n) ^ 0x80008000u);
            fence_async_proxy();
            named_barrier_wait(8 + w, 128);
        }
    };
    const auto to_p = [&] {
#pragma unroll
        for (int n = 0; n < Bc / 4; ++n) p[n / 4][n % 4] = pack<T>(s[2 * n], s[2 * n + 1]);
    };
    // Of rows whose scores are all in: L to HBM, and 1 / l for when O is too.
    const auto finish = [&](int head, int first) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = row_sum(l[r]);
            const int query = first + row + 8 * r;
            inverse[r] = sum == 0.f ? 0.f : __fdividef(1.f, sum);
            if (lane % 4 == 0 && query >= 0 && query < Nq) L[(long long)head * Nq + query] = m[r] * scale + __logf(sum);
        }
    };
    const auto store = [&](int slot, int head, int first) {
        multiply(o, inverse);
#pragma unroll
        for (int n = 0; n < D / 4; ++n)
            store_shared(swizzled<64>(q_part(slot, w), row - 64 * w + n % 2 * 8, n / 2 * 8 + lane % 4 * 2), pack<T>(o[2 * n], o[2 * n + 1]));
        fence_async_proxy();                                   // the copy engine reads by the other way ...
        named_barrier_wait(8 + w, 128);                        // ... what all threads of this consumer stored
        if (t == 0 && first + 64 * w >= 0) tma_store(O, q_part(slot, w), first + 64 * w, head);   // rows past Nq are left out
    };
    const auto settle = [&] {                                  // a round later: the copy engine has read it, a new Q may come
        if (!owed) return;
        TRACE(give_back, warpgroup);
        owed = false;
        if (t != 0) return;
        tma_store_wait();
        q_empty[(q.slot ^ 1) * Consumers + w].arrive();
    };

    // The first scores, alone: there is no product of values yet to start them with.
    if (w == Consumers - 1) pass_turn();
    look();
    forget();
    clear();
    TRACE(scores, at.number(), 0);
    wait_for_q();
    k_full[0].wait(0);
    my_turn();
    wgmma_fence();
    wgmma_scores<T, Bc, D>(s, q_part(0, w), k_part(0));
    wgmma_wait<0>();
    wgmma_keep(s);
    pass_turn();
    done_with(k_empty[0]);
    TRACE(softmax, at.number(), 0);
    softmax_here();
    TRACE(probabilities, at.number(), 0);
    to_p();
    RingPlace ahead = here.after(Stages);
    k_full[ahead.slot].wait(ahead.parity);

    auto last = at;                                            // the tile whose p is not used yet
    for (;;) {
        last = at;
        at.next();
        look();
        before = here, here = ahead;
        while (Skips && at.j > 0 && at.j >= seen) {            // none of these 64 rows sees any of it
            TRACE(skip, at.number(), at.j);
            v_full[here.slot].wait(here.parity);
            my_turn();
            pass_turn();
            done_with(k_empty[here.slot]);
            done_with(v_empty[here.slot]);
            at.next();
            look();
            here.next(Stages);
            k_full[here.slot].wait(here.parity);
        }
        if (!at.more) break;
        const bool fresh = at.j == 0;                          // other rows begin; p and o are still those of the last
        if (fresh) settle(), q.next(2);
        TRACE(scores, at.number(), at.j);
        if (fresh) wait_for_q();
        my_turn();
        wgmma_keep(o);
        wgmma_fence();
        wgmma_scores<T, Bc, D>(s, q_part(q.slot, w), k_part(here.slot));
        v_full[before.slot].wait(before.parity);
        wgmma_fence();
        wgmma_values<T, Bc, D>(o, p, v_part(before.slot));
        pass_turn();
        wgmma_wait<1>();                                       // the scores are there, the product of values is still under way
        wgmma_keep(s);
        done_with(k_empty[here.slot]);
        settle();
        if (fresh) {
            TRACE(store_l, last.number());
            finish(last.head, last.row());
            forget();
        }
        TRACE(softmax, at.number(), at.j);
        const bool raised = softmax_here();
        wgmma_keep(s);
        TRACE(accumulate, last.number(), last.j);
        // K of the next tile, so that it is there when the turn comes. Its parity asks whether l is negative, which it never is: else the
        // assembler may move the softmax behind the next wait, whatever is volatile, and nothing overlaps.
        ahead = here.after(Stages);
        k_full[ahead.slot].wait(ahead.parity ^ (l[0] + l[1] < 0.f));
        wgmma_wait<0>();
        wgmma_keep(o);
        done_with(v_empty[before.slot]);
        if (fresh) {
            TRACE(store_o, last.number());
            store(q.slot ^ 1, last.head, last.row());
            owed = true;
        }
        TRACE(probabilities, at.number(), at.j);
        if (fresh) {
            clear();
        } else if (raised) {
            multiply(o, corr);
        }
        to_p();
    }
    TRACE(accumulate, last.number(), last.j);
    v_full[before.slot].wait(before.parity);
    wgmma_keep(o);
    wgmma_fence();
    wgmma_values<T, Bc, D>(o, p, v_part(before.slot));
    wgmma_wait<0>();
    wgmma_keep(o);
    TRACE(store_l, last.number());
    finish(last.head, last.row());
    TRACE(store_o, last.number());
    store(q.slot, last.head, last.row());
    TRACE(give_back, warpgroup);
    if (t == 0) tma_store_wait();  // shared memory must live until the copy engine has read it
}
