"""Replaces functions that a loaded library imports, in its table of imported functions (GOT).

Input: part of the library's file name, and C callbacks by the name of the function. Only that library calls them; no
file is modified. Needs Linux and 64-bit ELF.
"""

import ctypes
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

# Constants of <elf.h> and <sys/mman.h>.
PT_DYNAMIC = 2
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 5, 6, 7, 8, 23
PROT_READ, PROT_WRITE = 1, 2

_callbacks: list[object] = []  # C holds pointers to these; they must not be garbage-collected


def replace(library: str, functions: Mapping[bytes, Any]) -> set[bytes]:
    """The names of those functions that the library imports; it now calls ours. Empty if it cannot be changed."""
    libc = ctypes.CDLL(None, use_errno=True)
    _callbacks.extend(functions.values())
    replaced = set()
    try:
        for name, slot in imported_functions(base_address(library)):
            if name in functions:
                _write_pointer(libc, slot, ctypes.cast(functions[name], ctypes.c_void_p).value or 0)
                replaced.add(name)
    except (OSError, ValueError, struct.error):
        replaced.clear()
    return replaced


def base_address(library: str) -> int:
    """Where the dynamic loader mapped the library."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if library in line:
                return int(line.partition("-")[0], 16)
    raise ValueError(f"{library} is not loaded")


def imported_functions(base: int) -> Iterator[tuple[bytes, int]]:
    """Name and pointer's address of every function that the library at this address imports."""
    if ctypes.string_at(base, 5) != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF library")
    dynamic = _dynamic_section(base)

    def at(tag: int) -> int:  # on most systems the loader has made these absolute
        return dynamic[tag] if dynamic[tag] >= base else base + dynamic[tag]

    for table, length in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        if table not in dynamic:
            continue
        for offset, info, _ in struct.iter_unpack("=QQq", ctypes.string_at(at(table), dynamic[length])):
            if symbol := info >> 32:
                (name,) = struct.unpack_from("=I", ctypes.string_at(at(DT_SYMTAB) + 24 * symbol, 4))
                yield ctypes.string_at(at(DT_STRTAB) + name), base + offset


def _dynamic_section(base: int) -> dict[int, int]:
    """The library's dynamic section, tag -> value, found by its program headers."""
    (headers,) = struct.unpack_from("=Q", ctypes.string_at(base + 0x20, 8))
    size, count = struct.unpack_from("=HH", ctypes.string_at(base + 0x36, 4))
    dynamic: dict[int, int] = {}
    for number in range(count):
        kind, _, _, entry = struct.unpack_from("=IIQQ", ctypes.string_at(base + headers + number * size, 24))
        while kind == PT_DYNAMIC:
            tag, value = struct.unpack_from("=qQ", ctypes.string_at(base + entry, 16))
            if tag == 0:
                break
            dynamic[tag], entry = value, entry + 16
    return dynamic


def _write_pointer(libc: ctypes.CDLL, slot: int, value: int) -> None:
    page = os.sysconf("SC_PAGESIZE")
    start = slot // page * page
    if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(slot + 8 - start), PROT_READ | PROT_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.c_uint64.from_address(slot).value = value
