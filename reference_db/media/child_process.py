"""Set-up of a child process that answers one request: JSON on stdin, answers on what was stdout.

The decoding child and the registration child start with it. The parent writes its pid into the request.
"""

import ctypes
import json
import os
import signal
import sys
from typing import Any, BinaryIO

PR_SET_PDEATHSIG = 1


def receive_request(buffer_bytes: int = -1) -> tuple[dict[str, Any], BinaryIO]:
    """The request, and the pipe for the answers, with a write buffer of `buffer_bytes`.

    From now on the kernel kills this process when the parent's thread that started it ends. Exits at once if the
    parent is gone already.
    """
    answers = os.fdopen(os.dup(1), "wb", buffer_bytes)
    os.dup2(2, 1)  # a stray print goes to stderr, not into the answers
    request: dict[str, Any] = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:
        sys.exit(0)
    return request, answers


def wipe_environment() -> None:
    """Clears the environment and overwrites its values: a proxy's password stays nowhere in this process."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name in list(os.environ):
        if address := libc.getenv(name.encode()):
            ctypes.memset(address, 0, len(ctypes.string_at(address)))
        del os.environ[name]
