// walk.cuh: what one of a few thread blocks has to do that stay for all of the work, row block after row block.
//
// With a thread block for each row block, each begins by waiting for its first tiles and ends by waiting for its last store. Blocks that
// stay, as many as the GPU has multiprocessors, can have the next rows under way before the last ones are done. Which rows are whose
// follows from blockIdx.x and gridDim.x alone: every warp of a block walks for itself, and all walk alike.
#pragma once

// `at` a tile of keys, j, of a row block, i, of a query head (batch and head as one number). Without causal a block takes every
// gridDim.x-th row block. With causal row block i has about i tiles, so long and short ones are taken in pairs of equal work, the longer
// one first.
template <int Br, int Bc, bool Causal>
struct Walk {
    int Nq, Nk, heads;
    int turn = 0;           // row blocks taken so far
    int head = 0, i = 0;    // 0 .. heads-1; 0 .. ceil(Nq / Br)-1
    int j = 0, tiles = 0;   // 0 .. tiles-1
    bool more = true;       // false behind the last

    __device__ Walk(int Nq, int Nk, int heads) : Nq(Nq), Nk(Nk), heads(heads) { next_rows(); }

    __device__ void next() {
        if (++j == tiles) next_rows();
    }

    // The row block's number among those of all heads.
    __device__ int number() const { return head * ((Nq + Br - 1) / Br) + i; }

    // How many keys the rows before `row` see: queries and keys end together, bottom-right. Negative far before the first that sees one.
    __device__ int keys_seen_before(int row) const { return Causal ? min(Nk, row + Nk - Nq) : Nk; }

    __device__ void next_rows() {
        const int row_blocks = (Nq + Br - 1) / Br, each = Causal ? (row_blocks + 1) / 2 : row_blocks;  // pairs, or singles, of a head
        bool alone;         // the middle one of an odd number is a pair by itself: it has no second
        do {
            const int n = blockIdx.x + (Causal ? turn / 2 : turn) * gridDim.x;
            const bool second = Causal && turn % 2;
            head = n / each;
            i = Causal && !second ? row_blocks - 1 - n % each : n % each;
            alone = second && i == row_blocks - 1 - i;
            ++turn;
        } while (alone);
        more = head < heads;
        // At least one tile, all masked if need be: rows that see no key are written like any others.
        tiles = max(1, (keys_seen_before((i + 1) * Br) + Bc - 1) / Bc);
        j = 0;
    }
};
