// tensor.cpp: what a warp does together on a tensor core's behalf: ldmatrix, mma, movmatrix. Each is one exchange between 32 lanes.
//
// In all of them lane 4g + t holds, of an 8 x 8 matrix of 16-bit elements, columns 2t and 2t + 1 of row g in one register.
#include "floats.hpp"
#include "state.hpp"

namespace fv {

static constexpr unsigned EVERY_LANE = 0xffffffffu;

// Whether all 32 lanes take part; the first that does not is reported.
static bool all_here(void* const in[32]) {
    for (int lane = 0; lane < 32; ++lane)
        if (!in[lane]) {
            missing_lane(lane);
            return false;
        }
    return true;
}
static uint16_t part(unsigned pair, int which) { return (uint16_t)(which ? pair >> 16 : pair); }

// ---- ldmatrix ----

struct Row {
    const char* from;      // the row whose address the lane gave
    uint16_t elements[8];
    const void* pc;
    bool transposed, checked;
};
// Reads all rows at once, when every lane has come; each read is its lane's own.
static void read_rows(void* const in[32]) {
    Fiber* const last = self;
    for (int lane = 0; lane < 32; ++lane) {
        Row& r = *static_cast<Row*>(in[lane]);
        self = &fibers[last->warp * 32 + lane];
        if (r.checked) access(r.from, 16, READ_TOGETHER, r.pc);
        memcpy(r.elements, r.from, 16);
    }
    self = last;
}
static void deal(void* const in[32], void* const out[32], unsigned) {
    if (!all_here(in)) return;
    read_rows(in);
    const bool transposed = static_cast<Row*>(in[0])->transposed;
    for (int lane = 0; lane < 32; ++lane)
        for (int matrix = 0; matrix < 4; ++matrix) {
            unsigned pair = 0;
            for (int which = 0; which < 2; ++which) {
                const int row = lane / 4, column = lane % 4 * 2 + which;
                const Row& r = *static_cast<Row*>(in[matrix * 8 + (transposed ? column : row)]);
                pair |= (unsigned)r.elements[transposed ? row : column] << 16 * which;
            }
            static_cast<unsigned*>(out[lane])[matrix] = pair;
        }
}
void load_matrices(unsigned* registers, unsigned row, bool transposed, const char* what, const void* pc, const char* file, int line) {
    Row mine = {shared_place(row, 16, false, pc), {}, pc, transposed, checking};
    exchange(EVERY_LANE, &mine, registers, deal, what, file, line);
}

// ---- mma ----

struct Fragments {
    float* d;
    const unsigned* a;
    unsigned b[2];
    Element element;
};
static float value(unsigned bits, Element element) {
    return element == TF32 ? bits_float(bits & 0xffffe000u) : element == F16 ? from_half((uint16_t)bits) : from_bfloat16((uint16_t)bits);
}
static void product(void* const in[32], void* const*, unsigned) {
    if (!all_here(in)) return;
    const Element element = static_cast<Fragments*>(in[0])->element;
    const int depth = element == TF32 ? 8 : 16;
    static double a[16][16], b[16][8], sum[16][8];  // not on the lane's stack; one warp at a time comes here
    memset(sum, 0, sizeof sum);
    for (int lane = 0; lane < 32; ++lane) {
        const Fragments& f = *static_cast<Fragments*>(in[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {  // a[i]: rows g, g + 8, g, g + 8; from the first half of the columns, then from the second
            const int row = g + i % 2 * 8;
            if (element == TF32) a[row][t + i / 2 * 4] = value(f.a[i], element);
            else
                for (int which = 0; which < 2; ++which) a[row][2 * t + which + i / 2 * 8] = value(part(f.a[i], which), element);
        }
        for (int i = 0; i < 2; ++i) {
            if (element == TF32) b[t + i * 4][g] = value(f.b[i], element);
            else
                for (int which = 0; which < 2; ++which) b[2 * t + which + i * 8][g] = value(part(f.b[i], which), element);
        }
    }
    for (int k = 0; k < depth; ++k)
        for (int row = 0; row < 16; ++row)
            for (int column = 0; column < 8; ++column) sum[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; ++lane) {
        float* d = static_cast<Fragments*>(in[lane])->d;
        for (int i = 0; i < 4; ++i) d[i] = (float)(d[i] + sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
}
void multiply(float* d, const unsigned* a, unsigned b0, unsigned b1, Element element, const char* what, const char* file, int line) {
    Fragments mine = {d, a, {b0, b1}, element};
    exchange(EVERY_LANE, &mine, nullptr, product, what, file, line);
}

// ---- movmatrix ----

static void turn(void* const in[32], void* const out[32], unsigned) {
    if (!all_here(in)) return;
    for (int lane = 0; lane < 32; ++lane) {
        unsigned pair = 0;
        for (int which = 0; which < 2; ++which) {
            const int row = lane / 4, column = lane % 4 * 2 + which;  // of the result: element (column, row) of what came in
            pair |= (unsigned)part(*static_cast<unsigned*>(in[column * 4 + row / 2]), row % 2) << 16 * which;
        }
        *static_cast<unsigned*>(out[lane]) = pair;
    }
}
unsigned transpose(unsigned a, const char* what, const char* file, int line) {
    unsigned result = 0;
    exchange(EVERY_LANE, &a, &result, turn, what, file, line);
    return result;
}

}  // namespace fv
