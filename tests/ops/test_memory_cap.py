"""The memory cap of registrations: allocations beyond it fail, and it ends with its block."""

from __future__ import annotations

import resource
import subprocess
import sys

from monitor.ops.memory_cap import INDEX_BYTES_PER_S, capped_memory, registration_bytes

PROGRAM = """
import resource
from monitor.ops.memory_cap import capped_memory
with capped_memory(200_000_000):
    try:
        bytearray(300_000_000)
    except MemoryError:
        print("refused")
    bytearray(20_000_000)
bytearray(300_000_000)
print("allowed")
"""


def test_an_allocation_beyond_the_cap_fails_and_none_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["refused", "allowed"], "")


def test_a_lower_limit_of_the_system_stays_in_force() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with capped_memory(8 << 30), capped_memory(16 << 30):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == 8 << 30
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_large_library_raises_the_cap_by_its_index() -> None:
    assert registration_bytes(1 << 30, 0) == 1 << 30
    assert registration_bytes(0, 36_000_000) == 36_000_000 * INDEX_BYTES_PER_S
