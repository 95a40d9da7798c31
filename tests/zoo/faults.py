"""Planted faults, at least two a kernel file: an edit of a kernel that comes with flashviz, and what a check must say of it.

A new kernel file joins with entries of its own; `test_every_file_and_kind_is_here` asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashviz.cuda.sources import find


@dataclass(frozen=True)
class Fault:
    """``old`` (its first occurrence in the code) becomes ``new`` in ``file``; ``kind`` must be reported on ``array`` at
    the line that holds ``at``, or at the edited line; with ``until``, at a line from there to the one that holds it."""

    name: str
    file: str
    old: str
    new: str
    kind: str
    array: str = ""
    at: str = ""
    until: str = ""

    def source(self) -> str:
        text = find(self.file).text
        start = text.index("#include")
        assert self.old in text[start:], (
            f"{self.file}.cu has changed: give the fault {self.name!r} another text to replace"
        )
        at = text.index(self.old, start)
        return text[:at] + self.new + text[at + len(self.old) :]

    @property
    def lines(self) -> range:
        """The lines of which one must be named: mostly a single one."""
        text = self.source()
        start = text.index("#include")
        place = text.index(self.at or self.new, start)
        first = text.count("\n", 0, place) + 1
        last = text.count("\n", 0, text.index(self.until, place)) + 1 if self.until else first
        return range(first, last + 1)


FA1, FA2, FAR = "flash_attention_1", "flash_attention_2", "flash_attention_2_rope"
FD, OS, ROPE, SA = "flash_decoding", "online_softmax", "rope", "standard_attention"
LIB = "attention_library"
WARPS, MMA, ASYNC = "flash_attention_2_warps", "flash_attention_2_mma", "flash_attention_2_async"
REGISTERS, TF32 = "flash_attention_2_registers", "flash_attention_2_tf32"
TUNED = "flash_attention_2_tuned"
VECTORS, HEADS = "flash_decoding_vectors", "flash_decoding_heads"

FAULTS = [
    # ---- FlashAttention-2
    Fault(
        "barrier for half of the threads",
        FA2,
        "__syncthreads();  // each row",
        "if (threadIdx.x < 16) __syncthreads();  //",
        "barrier",
    ),
    Fault(
        "two barriers in one place",
        FA2,
        "__syncthreads();  // Kj and Vj",
        "if (threadIdx.x < 7) __syncthreads();\nelse __syncthreads();  //",
        "barrier",
    ),
    Fault(
        "a thread that leaves early",
        FA2,
        "    for (int j = ",
        "    if (i * Br + (int)threadIdx.x >= Nq) return;\n    for (int j = ",
        "barrier",
        at="__syncthreads();  // Kj and Vj",
    ),
    Fault(
        "a part carved too small",
        FA2,
        'carve.tile<Br, Bc>("Sij")',
        'carve.tile<Br - 1, Bc>("Sij")',
        "bounds",
        "Sij",
        at="Sij[r][c] = seen",
    ),
    Fault(
        "a row that is read one too far",
        FA2,
        "for (int c = 0; c < Bc; ++c) m_new",
        "for (int c = 0; c <= Bc; ++c) m_new",
        "race",
        "Sij",
    ),
    Fault(
        "scores past the end of the tile",
        FA2,
        "e < Br * Bc; e += blockDim.x) {\n            const int r = e / Bc, c = e % Bc;",
        "e <= Br * Bc; e += blockDim.x) {\n            const int r = e / Bc, c = e % Bc;",
        "bounds",
        "Qi",
        at="s += Qi[r][x] * Kj[x][c];",
    ),
    Fault(
        "tail of V not set to 0",
        FA2,
        "Vj[c][x] = k < Nk ? V[(long long)k * D + x] : 0.f;",
        "if (k < Nk) Vj[c][x] = V[(long long)k * D + x];",
        "unwritten",
        "Vj",
        at="o += Sij[r][c] * Vj[c][x]",
    ),
    Fault(
        "no tail mask on K",
        FA2,
        "Kj[x][c] = k < Nk ? K[(long long)k * D + x] : 0.f;",
        "Kj[x][c] = K[(long long)k * D + x];",
        "bounds",
        "K",
    ),
    Fault(
        "no tail mask on O", FA2, "if (q < Nq) O[(long long)q * D + x] =", "O[(long long)q * D + x] =", "bounds", "O"
    ),
    Fault("no tail mask on L", FA2, "if (q < Nq) L[q] =", "L[q] =", "bounds", "L"),
    Fault(
        "the last row never stored",
        FA2,
        "if (q < Nq) O[(long long)q * D + x] =",
        "if (q + 1 < Nq) O[(long long)q * D + x] =",
        "missing",
        "O",
    ),
    Fault(
        "all blocks store their first row",
        FA2,
        "const int q = i * Br + r;\n        if (q < Nq) O",
        "const int q = r;\n        if (q < Nq) O",
        "blocks",
        "O",
        at="if (q < Nq) O",
    ),
    Fault("mi never set", FA2, "        mi[r] = -INFINITY;\n", "", "unwritten", "mi", at="float m_new = mi[r];"),
    Fault("another thread's row", FA2, "float m_new = mi[r];", "float m_new = mi[(r + 1) % Br];", "race", "mi"),
    Fault(
        "a loop that stands still",
        FA2,
        "j < tiles; ++j) {",
        "j < tiles; j += 0) {",
        "endless",
        until="TRACE(store_o, i);",
    ),
    Fault("a wild pointer", FA2, "Qi[r][x] = q < Nq ? Q[", "Qi[r][x] = q < Nq ? Q[4000000000000LL + ", "wild"),
    Fault("a null pointer", FA2, "li[r] = 0.f;\n", "*(volatile float*)nullptr = 0.f;\n", "wild"),
    Fault(
        "division by a count of zero",
        FA2,
        "const int h_kv = h / (Hq / Hkv);",
        "const int h_kv = h / (Hq / Hkv - Hq / Hkv);",
        "crash",
    ),
    # ---- FlashAttention-1
    Fault(
        "Oi loaded from the next rows",
        FA1,
        "Oi[r][x] = q < Nq ? O[(long long)q * D + x] : 0.f;",
        "Oi[r][x] = q + 1 < Nq ? O[(long long)(q + 1) * D + x] : 0.f;",
        "race",
        "O",
    ),
    Fault("m not set in HBM", FA1, "if (q < Nq) m[q] = -INFINITY;", ";", "unwritten", "m", at="mi[r] = q < Nq ? m[q]"),
    Fault(
        "a write to Q",
        FA1,
        "Qi[r][x] = q < Nq ? Q[(long long)q * D + x] : 0.f;",
        "if (q < Nq) Qi[r][x] = ((float*)Q)[(long long)q * D + x] *= scale;",
        "input",
        "Q",
    ),
    Fault(
        "heads that share O",
        FA1,
        "O += ((long long)b * Hq + h) * Nq * D;",
        "O += (long long)b * Hq * Nq * D;",
        "blocks",
        "O",
        at="if (q < Nq) O[(long long)q * D + e % D] = 0.f;",
    ),
    Fault("l stored past Nq", FA1, "if (q < Nq) l[q] = li[r];", "l[q] = li[r];", "bounds", "l"),
    Fault(
        "accumulate reads the scores' column",
        FA1,
        "o += Sij[r][c] * Vj[c][x];",
        "o += Sij[r][c] * Vj[c + 1][x];",
        "bounds",
        "Vj",
    ),
    # ---- rotary embedding, alone and fused into FlashAttention-2
    Fault(
        "O of the next row",
        ROPE,
        "O[(long long)n * D + z] = xi[r][z];",
        "O[(long long)n * D + D + z] = xi[r][z];",
        "bounds",
        "O",
    ),
    Fault("angles past the table", ROPE, "ci[r][p] = n < N ? cos[", "ci[r][p] = n < N + R ? cos[", "bounds", "cos"),
    Fault("rotated columns loaded over", FAR, "if (x >= 2 * Pairs) Qi[r][x]", "if (x >= Pairs) Qi[r][x]", "race", "Qi"),
    Fault(
        "the partner in the next key",
        FAR,
        "b = K[(long long)k * D + p + Pairs];",
        "b = K[(long long)k * D + p + D];",
        "bounds",
        "K",
    ),
    # ---- the library step
    Fault(
        "every thread sets row 0",
        LIB,
        "mi[r] = -INFINITY;",
        "mi[0] = mi[r] = -INFINITY;",
        "race",
        "mi",
    ),
    Fault(
        "keys in use, and none behind them",
        LIB,
        "Nk = kv_len;",
        "Nk = kv_len + Bc;",
        "bounds",
        "K",
        at="attention_pass<Br, Bc, D>(",
    ),
    # ---- flash decoding
    Fault(
        "splits that overlap",
        FD,
        "Os += part * rows * D;",
        "Os += head * rows * D;",
        "blocks",
        "Os",
        at="Os[e] = l[r] == 0.f",
    ),
    Fault(
        "an empty split that writes nothing",
        FD,
        "TRACE(store_partial, s);",
        "TRACE(store_partial, s);\n    if (first == last) return;",
        "missing",
        "Os",
    ),
    Fault(
        "weights by one thread for others' rows",
        FD,
        "__syncthreads();  // the weights",
        ";  //",
        "race",
        "w",
        at="o[r][x] += w[r][s]",
    ),
    Fault(
        "one split too many",
        FD,
        "for (int s = 0; s < Splits; ++s) {\n        TRACE(load_o, s);",
        "for (int s = 0; s <= Splits; ++s) {\n        TRACE(load_o, s);",
        "bounds",
        "Os",
        at="os[e / D][e % D] = Os[",
    ),
    Fault(
        "a barrier in the tiles' loop of some splits",
        FD,
        "const int k = j * Bc + c;              // row of K",
        "if (c == 3) __syncthreads(); const int k = j * Bc + c;  //",
        "barrier",
    ),
    # ---- online softmax
    Fault(
        "fold reads past the tile",
        OS,
        "part[e] = Join::of(part[e], part[e + half]);",
        "part[e] = Join::of(part[e], part[e + half + 1]);",
        "bounds",
        "part",
    ),
    Fault("a tail that is not masked", OS, "xi[e] = n < N ? x[n] : -INFINITY;", "xi[e] = x[n];", "bounds", "x"),
    Fault("y of one row too many", OS, "if (n < N) y[n] = pi[e];", "y[n] = pi[e];", "blocks", "y"),
    Fault("rescale by all threads", OS, "if (threadIdx.x == 0) d[0] *= c[0];", "d[0] *= c[0];", "race", "d"),
    # ---- standard attention
    Fault(
        "half of the lanes shuffle",
        SA,
        "for (int far = 16; far; far /= 2) m = ",
        "for (int far = 16; far; far /= 2) if (lane < 20) m = ",
        "warp",
        "__shfl_xor_sync",
    ),
    Fault(
        "a lane leaves before the shuffle",
        SA,
        "float m = -INFINITY;",
        "if (lane > 28) return;\n        float m = -INFINITY;",
        "warp",
        "__shfl_xor_sync",
        at="m = fmaxf(m, __shfl",
    ),
    Fault(
        "rows past Nq are read",
        SA,
        "k < Nk && q < Nq; k += 32) Si[r][k] = S[",
        "k < Nk; k += 32) Si[r][k] = S[",
        "bounds",
        "S",
    ),
    Fault("keys past Nk are stored", SA, "if (q < Nq && k < Nk) S[", "if (q < Nq) S[", "blocks", "S"),
    Fault(
        "an assert that fails",
        SA,
        "    TRACE(init_o, i); ",
        "    if (Nk > 40) __trap();\n    TRACE(init_o, i); ",
        "trap",
        at="__trap()",
    ),
    # ---- the ladder
    Fault(
        "tail of V not set to 0 in rung 1",
        WARPS,
        "Vj[e / D][e % D] = k < Nk ? V[(long long)k * D + e % D] : 0.f;",
        "if (k < Nk) Vj[e / D][e % D] = V[(long long)k * D + e % D];",
        "unwritten",
        "Vj",
        at="v[y] = Vj[from",
    ),
    Fault("the next warp's row", WARPS, "q = Qi[row + r][x]", "q = Qi[row + r + 1][x]", "bounds", "Qi"),
    Fault(
        "lanes with a column take p, the others do not",
        WARPS,
        "const float p = __shfl_sync(ALL_LANES, s[r][n], from);",
        "const float p = lane < 20 ? __shfl_sync(ALL_LANES, s[r][n], from) : 0.f;",
        "warp",
        "__shfl_sync",
    ),
    Fault(
        "probabilities read before the warp has written them",
        REGISTERS,
        "__syncwarp();  // the warp's rows",
        ";  //",
        "race",
        "Pij",
        at="read4(p + y, Pij[k]",
    ),
    Fault(
        "no room for the last key's probabilities",
        REGISTERS,
        'carve.tile<Bc, Br + 8>("Pij")',
        'carve.tile<Bc - 1, Br + 8>("Pij")',
        "bounds",
        "Pij",
        at="write4(Pij[c + 8 * n]",
    ),
    Fault("a row behind the last", TF32, "if (row < exist) v =", "if (row <= exist) v =", "bounds"),
    Fault(
        "two lanes do not take part in the maximum",
        TF32,
        "for (int bit = 1; bit <= 2; bit *= 2) m_new =",
        "if (lane < 30) for (int bit = 1; bit <= 2; bit *= 2) m_new =",
        "warp",
        "__shfl_xor_sync",
    ),
    Fault(
        "rows of V that are not of the tile",
        MMA,
        "&Vj[8 * n + lane % 16]",
        "&Vj[8 * n + 8 + lane % 16]",
        "bounds",
        "Vj",
    ),
    Fault(
        "half a row of 16 bytes further",
        MMA,
        "[x + lane / 8 % 2 * 8]));",
        "[x + lane / 8 % 2 * 4]));",
        "aligned",
        "Kj",
    ),
    Fault(
        "lanes that see the first key multiply",
        MMA,
        "mma_m16n8k16<T>(s[n], q, k[0], k[1]);",
        "if (2 * t <= i * Br + row + g) mma_m16n8k16<T>(s[n], q, k[0], k[1]);",
        "warp",
        "mma_m16n8k16",
    ),
    Fault(
        "a wait for all groups but one",
        ASYNC,
        "cp_async_wait<0>();                        // this thread's",
        "cp_async_wait<1>();                        // this thread's",
        "pending",
        at="ldmatrix_x4(q",
    ),
    Fault(
        "copies that are in no group",
        ASYNC,
        "    cp_async_commit();\n\n    for",
        "    for",
        "pending",
        at="ldmatrix_x4(q",
    ),
    Fault(
        "the next tile into the half that is read",
        ASYNC,
        "(v_tiles + next, V, (j + 1)",
        "(v_tiles + now, V, (j + 1)",
        "race",
        "Vj",
        at="ldmatrix_x4_trans(v",
    ),
    Fault(
        "rows behind the last are copied",
        ASYNC,
        "const bool exists = first + r < end;",
        "const bool exists = first + r <= end;",
        "bounds",
        at="cp_async_16(tile",
    ),
    Fault(
        "no wait for the tile's copies",
        TUNED,
        "cp_async_wait<Stages - 2>();               // this",
        ";  // this",
        "pending",
        at="ldmatrix_x4(",
        until="mma_m16n8k16<T>(s[w][n]",
    ),
    Fault(
        "O read before the warp has written it",
        TUNED,
        "__syncwarp();  // the warp's rows of O",
        ";  //",
        "race",
        "Qi",
        at="(Oi + place<D>(r, c))",
    ),
    Fault(
        "warps right of the diagonal alone do not vote",
        TUNED,
        "if (__any_sync(ALL_LANES, j == 0 || signs >= 0)) {",
        "if ((lane < 16 || signs < 0) && __any_sync(ALL_LANES, j == 0 || signs >= 0)) {",
        "warp",
        "__any_sync",
    ),
    Fault(
        "the last split takes itself for the last block",
        VECTORS,
        "if (!is_last_block(query, splits)) return;",
        "if (s != splits - 1) return;",
        "blocks",
        "Os",
        at="const float4 low = __ldcg(part)",
    ),
    Fault(
        "a part of the next split",
        VECTORS,
        "(Os + s * queries * D + x) =",
        "(Os + (s + 1) * queries * D + x) =",
        "bounds",
        "Os",
    ),
    Fault(
        "keys behind the last are read",
        VECTORS,
        "k[n] = load_once(K + (long long)min(key + n * Groups, kv_len - 1) * D);",
        "k[n] = load_once(K + (long long)(key + n * Groups) * D);",
        "bounds",
        "K",
    ),
    Fault(
        "lanes whose row does not exist do not multiply",
        HEADS,
        "mma_m16n8k16<T>(p, a, q[c][x], q[c][x + 1]);",
        "if (g < rows) mma_m16n8k16<T>(p, a, q[c][x], q[c][x + 1]);",
        "warp",
        "mma_m16n8k16",
    ),
    Fault(
        "eight rows are stored, however many there are",
        HEADS,
        "if (e < rows * D) store(",
        "store(",
        "bounds",
        "O",
        at="*reinterpret_cast<uint2*>(O + e) =",
    ),
    Fault("O from a neighbour's sum", SA, "Oi[r][x] = o;", "atomicAdd(&Oi[0][0], o); Oi[r][x] = o;", "race", "Oi"),
]
