"""A name server whose answers a test changes between two connections, as an attacker does (DNS rebinding)."""

from __future__ import annotations

import socket
from typing import Any

import pytest


class ChangingNames:
    """Replaces what the system's resolver answers; names that are not in `numbers` are resolved as usual."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **numbers: str) -> None:
        self.numbers = {name.replace("_", "."): number for name, number in numbers.items()}
        ask = socket.getaddrinfo

        def answer(host: str, *args: Any, **options: Any) -> Any:
            return ask(self.numbers.get(host, host), *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", answer)
