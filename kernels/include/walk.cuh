// walk.cuh: what one of a few thread blocks has to do that stay for all of the work, row block after row block.
//
// With a thread block for each row block, each begins by waiting for its first tiles and ends by waiting for its last store. Blocks that
// stay, as many as the GPU has multiprocessors, can have the next rows under way before the last ones are done. Which rows are whose
// follows from blockIdx.x and gridDim.x alone: every warp of a block walks for itself, and all walk alike.
#pragma once

// `at` a tile of keys, j, of a row block, i, of a query head (batch and head as one number). Row blocks end with the last 64 rows, so that
// the one that is not full, if any, is the first: with causal it has the fewest tiles.
//
// Without causal a block takes every gridDim.x-th row block. With causal row block i has about i tiles, so that they are taken in pairs of
// equal work, the longer one first: the last with the first, and so on. An odd number of them leaves one in the middle: it is paired with
// that of the next head, which is why heads are counted by twos.
template <int Br, int Bc, bool Causal>
struct Walk {
    int Nq, Nk, heads;
    unsigned inverse;       // 2^32 / row blocks: to divide by them anew for each takes as long as a third of a tile
    int turn = 0;           // row blocks taken so far
    int head = 0, i = 0;    // 0 .. heads-1; 0 .. ceil(Nq / Br)-1
    int j = 0, tiles = 0;   // 0 .. tiles-1
    bool more = true;       // false behind the last

    __device__ Walk(int Nq, int Nk, int heads) : Nq(Nq), Nk(Nk), heads(heads), inverse(~0u / row_blocks()) { next_rows(); }

    __device__ void next() {
        if (++j == tiles) next_rows();
    }

    __device__ int row_blocks() const { return (Nq + Br - 1) / Br; }
    // The row block's number among those of all heads, and its first row, negative where the first block is not full.
    __device__ int number() const { return head * row_blocks() + i; }
    __device__ int row() const { return (Nq + 63) / 64 * 64 - (row_blocks() - i) * Br; }

    // How many keys the rows before `row` see: queries and keys end together, bottom-right. Negative far before the first that sees one.
    __device__ int keys_seen_before(int row) const { return Causal ? min(Nk, row + Nk - Nq) : Nk; }

    __device__ void next_rows() {
        const int count = row_blocks(), odd = count % 2, half = count / 2;
        bool second;
        do {
            second = Causal && turn % 2;
            const int n = blockIdx.x + (Causal ? turn / 2 : turn) * gridDim.x;
            head = (unsigned long long)n * inverse >> 32;           // n / count, or one less
            head += n >= (head + 1) * count;
            i = n - head * count;
            if (Causal) {                                           // of two heads, the pair in the middle, if any; of one head; of the other
                const bool middle = i < odd, other = i >= odd + half;
                const int pair = i - odd - (other ? half : 0);
                head = 2 * head + (middle ? second : other);
                i = middle ? half : second ? pair : count - 1 - pair;
            }
            ++turn;
        } while (second && head == heads);                          // the middle one of the last of an odd number of heads is alone
        more = head < heads;
        // At least one tile, all masked if need be: rows that see no key are written like any others.
        tiles = max(1, (keys_seen_before(row() + Br) + Bc - 1) / Bc);
        j = 0;
    }
};
