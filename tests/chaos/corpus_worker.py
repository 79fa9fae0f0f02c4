"""Decodes what the requests on stdin name by the decoding child's own code; a line of JSON for each. See corpus.py."""

import json
import resource
import signal
import sys
import time
from pathlib import Path

import av

from reference_db.media.decoder import MEMORY_BYTES, Answer, Records


def main() -> None:
    alarm_s, requests = sys.argv[1], json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    av.logging.set_level(None)
    records = Records(sys.stderr.buffer)
    for request in requests:
        signal.alarm(int(alarm_s))  # ends the process: nothing else would end FFmpeg
        began = time.monotonic()
        answer = Answer({**request, "allow": [], "no_video_s": 10.0}, records)
        try:
            for _ in answer.records():
                pass
            verdict = "decoded"
        except Exception as error:
            verdict = "refused" if answer.explained(error)[0] != "crashed" else "broke"
        rss_mb = _most_mb()
        print(json.dumps({"verdict": verdict, "took_s": time.monotonic() - began, "rss_mb": rss_mb}), flush=True)


def _most_mb() -> int:
    """The most memory so far; getrusage would count that of the process which started us, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


main()
