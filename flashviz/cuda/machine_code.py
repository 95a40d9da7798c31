"""How many machine instructions of each kind a compiled kernel has: read from the cubin itself, with no disassembler.

Since Volta (sm_70) an instruction has 16 bytes, and the low 9 bits of the first two say what it does; three more say where its
operands come from (register, immediate, constant). The names are those that cuobjdump prints; a kind without a name here is its number.
"""

from __future__ import annotations

import struct
from collections import Counter

NAMES = {
    0x002: "MOV", 0x007: "SEL", 0x008: "FSEL", 0x009: "FMNMX", 0x00B: "FSETP", 0x00C: "ISETP", 0x010: "IADD3",
    0x011: "LEA", 0x012: "LOP3", 0x017: "IMNMX", 0x019: "SHF", 0x01C: "PLOP3", 0x020: "FMUL", 0x021: "FADD", 0x023: "FFMA",
    0x024: "IMAD", 0x025: "IMAD.WIDE", 0x027: "IMAD.HI", 0x108: "MUFU", 0x118: "NOP", 0x119: "S2R", 0x11D: "BAR", 0x141: "BSYNC",
    0x145: "BSSY", 0x147: "BRA", 0x14D: "EXIT", 0x181: "LDG", 0x184: "LDS", 0x186: "STG", 0x188: "STS",
}  # fmt: skip


def sections(cubin: bytes) -> dict[str, bytes]:
    """The machine code of each kernel of a cubin, by its mangled name. Raises ValueError for what is no cubin."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError("this is no cubin: an ELF file is expected")
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    table = [struct.unpack_from("<IIQQQQIIQQ", cubin, headers + n * size) for n in range(count)]
    found = {}
    for name, _, _, _, offset, length, *_ in table:
        start = table[names][4] + name
        label = cubin[start : cubin.index(b"\0", start)].decode()
        if label.startswith(".text."):
            found[label.removeprefix(".text.")] = cubin[offset : offset + length]
    return found


def instructions(code: bytes) -> Counter[str]:
    """How many instructions of each kind machine code has; the padding at its end (NOP) is not counted.

    >>> instructions(bytes.fromhex("237a0000000000000000000000000000" "18790000000000000000000000000000"))
    Counter({'FFMA': 1})
    """
    kinds = (struct.unpack_from("<H", code, n)[0] & 0x1FF for n in range(0, len(code), 16))
    return Counter(NAMES.get(kind, hex(kind)) for kind in kinds if NAMES.get(kind) != "NOP")
