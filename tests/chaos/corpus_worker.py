"""Decodes the files of the requests on stdin with the code of the decoding child; one JSON line each. See corpus.py."""

import json
import resource
import signal
import sys
import time
from pathlib import Path

import av

from reference_db.media.decoding_session import DecodingSession
from reference_db.media.sandbox.confinement import MEMORY_BYTES


def main() -> None:
    alarm_s, requests = sys.argv[1], json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    av.logging.set_level(None)
    for request in requests:
        signal.alarm(int(alarm_s))  # ends the process: nothing else interrupts FFmpeg
        began = time.monotonic()
        session = DecodingSession({**request, "allow": [], "no_video_s": 10.0}, gateway=None)
        try:
            for _ in session.decode(*session.ffmpeg_input()):  # without the sandbox: one process for many files
                pass
            verdict = "decoded"
        except Exception as error:
            verdict = "refused" if session.explain(error)[0] != "crashed" else "failed"
        rss_mb = _peak_mb()
        print(json.dumps({"verdict": verdict, "took_s": time.monotonic() - began, "rss_mb": rss_mb}), flush=True)


def _peak_mb() -> int:
    """Peak memory so far; getrusage would include that of the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


main()
