"""A limit on the memory of a process that works on files from elsewhere, set by itself.

The limit is RLIMIT_DATA: what the process may allocate. RLIMIT_AS would count the address space that libraries reserve
and never use, 4 GB for the encoder alone.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

# For each second of the library, besides the fixed part: its code in the index twice, while shards are merged, and its
# share of the rows on which the code book is trained.
INDEX_BYTES_PER_S = 300


def registration_bytes(fixed_bytes: int, n_library_seconds: int) -> int:
    """The memory that a registration may use in a library of this size; the setting is the fixed part."""
    return fixed_bytes + INDEX_BYTES_PER_S * n_library_seconds


@contextmanager
def capped_memory(n_bytes: int) -> Iterator[None]:
    """While open, allocations beyond this limit fail with MemoryError; a lower limit of the system stays in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [n_bytes, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
