"""Counts refused requests, so that an attacker cannot fill the audit log.

The first refusals of an address get an entry each; the others are counted, and one entry per address and window says
how many there were. Many addresses share one more count. Nothing here reads a clock or a disk.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

WINDOW_S = 600.0
SHOWN_EACH = 10  # entries of one address within a window
SHOWN_IN_ALL = 60  # entries of all addresses within a window
MAX_GROUPS = 20  # addresses that are counted each for itself
OTHERS = None  # the group of all further addresses


@dataclass(frozen=True, slots=True)
class Refusals:
    """Requests of one group within a window that got no entry of their own."""

    group: str | None  # an address or a name; None: several
    n: int


class RefusalCounter:
    """The refusals of the current window, by group: the peer's network, or a token's name."""

    def __init__(self) -> None:
        self._window_ends_s: float | None = None
        self._n_shown: dict[str | None, int] = {}
        self._n_counted: dict[str | None, int] = {}

    def count(self, group: str, now_s: float) -> bool:
        """Counts one refusal; whether it gets its own entry. `now_s` never decreases."""
        if self._window_ends_s is None:
            self._window_ends_s = now_s + WINDOW_S
        key = group if group in self._n_shown or len(self._n_shown) < MAX_GROUPS else OTHERS
        shown = self._n_shown.setdefault(key, 0)
        if shown < SHOWN_EACH and sum(self._n_shown.values()) < SHOWN_IN_ALL:
            self._n_shown[key] += 1
            return True
        self._n_counted[key] = self._n_counted.get(key, 0) + 1
        return False

    def take(self, now_s: float | None = None) -> list[Refusals]:
        """What was counted in a window that has ended by `now_s`, or until now; a new window starts."""
        if self._window_ends_s is None or (now_s is not None and now_s < self._window_ends_s):
            return []
        counted = [Refusals(group, n) for group, n in self._n_counted.items()]
        self._window_ends_s, self._n_shown, self._n_counted = None, {}, {}
        return counted


def network_of(address: str) -> str:
    """The address, or the network of an IPv6 address that one customer owns as a whole (/64)."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is None:
        return str(ipaddress.ip_network((number, 64), strict=False))
    return address
