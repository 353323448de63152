"""Loading a compiled kernel: an x86-64 ELF object into executable memory, without LLVM.

A kernel's object needs little: its sections side by side, 64-bit addresses filled in, and a few C functions.  What
this file does not know it refuses with `Rejected`; such a kernel is compiled in the process instead.  Numba's error
paths call the Python API; kernels never raise, so these calls are bound to `abort`.  Format: System V ABI, AMD64.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from dataclasses import dataclass, field

from pantheon.accel.cpu.arena import round_up

_HEADER, _SECTION, _SYMBOL, _RELA = struct.Struct("<16xHH20xQ10xHHH"), struct.Struct("<IIQQQQIIQQ"), \
    struct.Struct("<IBBHQQ"), struct.Struct("<QQq")  # fmt: skip
_MAGIC, _RELOCATABLE, _X86_64 = b"\x7fELF\x02\x01\x01", 1, 62
_SYMTAB, _RELOCATIONS, _NOBITS, _ALLOC = 2, 4, 8, 2
_UNDEFINED, _ABSOLUTE, _COMMON = 0, 0xFFF1, 0xFFF2
_R_64, _R_PC32, _R_PLT32, _R_PC64 = 1, 2, 4, 24
_ERROR_PATHS = ("Py", "_Py", "numba_", "NRT_")
ENTRY_PREFIX = "cfunc."

#: code lives as long as the process: tables and threads hold its addresses
_kept: list[mmap.mmap] = []


class Rejected(Exception):
    """An object that this loader does not understand."""


@dataclass
class _Object:
    """An ELF file; `at`: offset in memory of section i, or of common symbol j under -1 - j; `size` of all of them."""

    data: bytes
    #: (name, type, flags, address, offset, size, link, info, alignment, entry size)
    sections: list[tuple[int, ...]]
    names: list[str]
    at: dict[int, int] = field(default_factory=dict)
    size: int = 0


def load(data: bytes) -> int:
    """The address of the one C function of an object file.  Raises Rejected."""
    try:
        return _load(data)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError, OverflowError) as fault:
        raise Rejected(f"damaged: {fault}") from None


def _load(data: bytes) -> int:
    made = _sections(data)
    table = next((s for s in made.sections if s[1] == _SYMTAB), None)
    if table is None:
        raise Rejected("no symbols")
    symbols = [_SYMBOL.unpack_from(data, at) for at in range(table[4], table[4] + table[5], _SYMBOL.size)]
    names = [_text(data, made.sections[table[6]][4] + s[0]) for s in symbols]
    _place(made, symbols)
    memory = mmap.mmap(-1, round_up(made.size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    base = ctypes.addressof(view)
    for i, at in made.at.items():
        offset, size = made.sections[i][4:6] if i >= 0 else (0, 0)
        if i >= 0 and made.sections[i][1] != _NOBITS:
            memory[at : at + size] = data[offset : offset + size]
    values = [_value(made, base, i, s, name) for i, (s, name) in enumerate(zip(symbols, names, strict=True))]
    for section in made.sections:
        if section[1] == _RELOCATIONS and section[7] in made.at:
            _relocate(made, section, memory, base, values)
    entries = [v for v, name, s in zip(values, names, symbols, strict=True) if name.startswith(ENTRY_PREFIX) and s[3]]
    if len(entries) != 1:
        raise Rejected(f"{len(entries)} entry functions")
    _make_executable(base, len(memory))
    _kept.append(memory)
    del view
    return entries[0]


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _sections(data: bytes) -> _Object:
    if not data.startswith(_MAGIC):
        raise Rejected("no 64-bit little-endian ELF file")
    kind, machine, start, size, count, names = _HEADER.unpack_from(data)
    if (kind, machine, size) != (_RELOCATABLE, _X86_64, _SECTION.size):
        raise Rejected(f"type {kind} for machine {machine}")
    sections = [_SECTION.unpack_from(data, start + i * size) for i in range(count)]
    for s in sections:
        if s[1] != _NOBITS and s[4] + s[5] > len(data):
            raise Rejected("a section ends behind the file")
    return _Object(data, sections, [_text(data, sections[names][4] + s[0]) for s in sections])


def _place(made: _Object, symbols: list[tuple[int, ...]]) -> None:
    """Decide the offsets of sections that run or are read, and of common symbols."""
    for i, s in enumerate(made.sections):
        if s[2] & _ALLOC and s[5] and made.names[i] != ".eh_frame":  # nothing unwinds through kernels
            made.at[i] = made.size = round_up(made.size, max(1, s[8]))
            made.size += s[5]
    made.size = round_up(made.size, 64)
    for i, symbol in enumerate(symbols):
        if symbol[3] == _COMMON:
            made.at[-1 - i] = made.size
            made.size += round_up(symbol[5], 64)
    made.size = max(made.size, 1)


def _value(made: _Object, base: int, index: int, symbol: tuple[int, ...], name: str) -> int:
    section, value = symbol[3], symbol[4]
    if section == _ABSOLUTE:
        return value
    if section == _COMMON:
        return base + made.at[-1 - index]
    if section == _UNDEFINED:
        return _outside(name) if name else 0
    return base + made.at.get(section, 0) + value


def _outside(name: str) -> int:
    """The address of a function of the C library."""
    if name.startswith(_ERROR_PATHS):
        name = "abort"
    for library in (None, "libm.so.6"):
        try:
            return int(ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value or 0)
        except (AttributeError, OSError):
            continue
    raise Rejected(f"needs {name}")


def _relocate(made: _Object, section: tuple[int, ...], memory: mmap.mmap, base: int, values: list[int]) -> None:
    place, size = made.at[section[7]], made.sections[section[7]][5]
    for at in range(section[4], section[4] + section[5], _RELA.size):
        offset, info, addend = _RELA.unpack_from(made.data, at)
        kind, value = info & 0xFFFFFFFF, values[info >> 32] + addend
        here = place + offset
        width = 8 if kind in (_R_64, _R_PC64) else 4
        if offset + width > size:
            raise Rejected("a relocation behind its section")
        if kind == _R_64:
            struct.pack_into("<Q", memory, here, value)
        elif kind == _R_PC64:
            struct.pack_into("<q", memory, here, value - base - here)
        elif kind in (_R_PC32, _R_PLT32):
            struct.pack_into("<i", memory, here, value - base - here)  # out of reach: struct.error, so rejected
        else:
            raise Rejected(f"relocation {kind}")


def _make_executable(base: int, size: int) -> None:
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if protect(base, size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise Rejected(f"the system forbids executable memory (errno {ctypes.get_errno()})")
