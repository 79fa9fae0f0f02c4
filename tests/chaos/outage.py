"""A source that is away for long, for example an hour, and a real `copywatch serve` that waits for it.

Two channels loop the same film, each from its own server. One goes away while its alert is open, and comes back; the
other must not be affected. All time-outs, retry delays and silences are those of production.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from monitor.demo.films import Film
from tests.chaos.faulty_channel import ClipSet, Figures
from tests.support import media
from tests.support.fault_proxy import FaultProxy
from tests.support.live_stream import LiveStream, serve_stream
from tests.support.serve_process import ServeProcess, wait_until

FPS, LENGTH_S = 5, 90
FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), float(LENGTH_S))
LOOK_S = 3.0  # between two checks of the monitor while it waits
LONGEST_S = (
    1.2 * 30 + 15
)  # between two attempts: the longest delay with jitter, and the start of a decoder on a busy machine
MORE_MB = 12.0  # that an hour may add to the monitor's memory: noise of the allocator
SETTLED = 0.25  # share of the time before memory is compared


def away(away_s: float) -> Callable[[ClipSet], Figures]:
    """Away for so long; must exceed the 30 s that a clock bridges."""

    def scenario(clips: ClipSet) -> Figures:
        folder = clips.folder / "outage"
        folder.mkdir()
        pictures = [(n / FPS, FILM.picture(n / FPS)) for n in range(LENGTH_S * FPS)]
        clip = media.write_clip(folder / "stream.ts", pictures, fps=FPS, gop=FPS, b_frames=0)
        film = media.write_clip(folder / "film.mp4", pictures, fps=FPS)
        # In another process: the memory of this one, which reads all streams, is measured.
        add = [sys.executable, "-m", "monitor.cli", "refs", "add", str(film)]
        subprocess.run(
            add, check=True, capture_output=True, env={**os.environ, "COPYWATCH_DATA_DIR": str(folder / "data")}
        )
        stream = LiveStream(clip, LENGTH_S)
        with (
            serve_stream(stream) as unsteady,
            serve_stream(LiveStream(clip, LENGTH_S)) as steady,
            FaultProxy(unsteady.port) as proxy,
        ):
            config = folder / "copywatch.yaml"
            config.write_text(
                "data_dir: data\nalerting: {output: alerts.jsonl}\nweb: {port: 0}\nchannels:\n"
                f'  - {{name: away, url: "http://127.0.0.1:{proxy.port}/", mode: economy}}\n'
                f'  - {{name: witness, url: "http://127.0.0.1:{steady.port}/", mode: economy}}\n'
            )
            with ServeProcess(config) as serve:
                return _Outage(serve, proxy, config, stream).run(away_s)

    return scenario


class _Outage:
    def __init__(self, serve: ServeProcess, proxy: FaultProxy, config: Path, stream: LiveStream) -> None:
        self._serve, self._proxy, self._config, self._stream = serve, proxy, config, stream
        self._n_connected = 0  # before the outage
        self._tries: list[float] = []  # time of each
        self._memory_mb: list[float] = []

    def run(self, away_s: float) -> Figures:
        proxy = self._proxy
        self._wait(lambda: self._is("away", "up") and self._is("witness", "up"), "both up")
        self._wait(lambda: 20 <= self._film_s <= 60 and bool(self._open_alerts("away")), "an alert in mid-film")
        last_s = self._events("away")[-1]["channel_end"]
        gap_before = self._value("copywatch_gap_seconds_total", "away")
        before = self._events("away")
        self._n_connected = proxy.n_connections
        proxy.fault, began = "refuse", time.monotonic()
        self._wait(lambda: self._is("away", "stalled") or self._is("away", "failed"), "noticed")
        noticed_s = time.monotonic() - began
        self._wait(lambda: self._open_alerts("away") == set(), "the end of its alerts")
        ended_s = time.monotonic() - began
        ended = self._events("away", "alert.ended")[-1]
        assert ended["channel_end"] >= last_s - 2, ended
        assert [gap["reason"] for gap in ended["gaps"]] == ["reconnect"], ended
        assert 30 <= ended["gaps"][0]["seconds"] <= 60, ended
        silent = len(self._events("away"))
        self._check_until(lambda: time.monotonic() > began + away_s and 2 <= self._film_s <= 8)  # back in mid-film
        away_s = time.monotonic() - began
        assert len(self._events("away")) == silent, "an alert of a channel that is away"
        proxy.fault, lifted = "none", time.monotonic()
        self._wait(lambda: self._is("away", "up"), "up again")
        back_s = time.monotonic() - lifted
        assert back_s <= LONGEST_S + 20, back_s
        self._wait(lambda: len(self._events("away")) > silent, "an alert again")
        again = self._events("away")[silent]
        missed_s = self._value("copywatch_gap_seconds_total", "away") - gap_before
        assert away_s - 5 <= missed_s <= away_s + back_s + 20, (missed_s, away_s, back_s)
        assert again["type"] == "alert.started", again
        assert again["id"] not in {event["id"] for event in before}
        assert [gap["seconds"] for gap in again["gaps"]] == [missed_s], (again, missed_s)
        assert self._value("copywatch_epochs_total", "away") == 2
        return {
            "away_s": lifted - began,
            "noticed_s": noticed_s,
            "alert_ended_s": ended_s,
            "tries": len(self._tries),
            "longest_pause_s": self._longest_pause_s(began),
            "back_s": back_s,
            "missed_s": missed_s,
            "more_memory_mb": self._more_memory_mb(),
            **self._witness(),
        }

    @property
    def _film_s(self) -> float:
        """The current second of the film."""
        return self._stream.at_s % LENGTH_S

    def _check_until(self, is_over: Callable[[], bool]) -> None:
        """Checks during the outage that the monitor retries, stays ready and does not grow."""
        n_files, n_threads = self._n_of("fd"), self._n_of("task")
        while not is_over():
            n_new = self._proxy.n_connections - self._n_connected - len(self._tries)
            self._tries += [time.monotonic()] * n_new
            assert self._is("away", "failed") or self._is("away", "stalled"), self._serve.log[-5:]
            assert self._serve.problems() == {}, "the process must stay ready while one channel is away"
            assert self._value("copywatch_channel_up", "witness") == 1
            self._memory_mb.append(self._resident_mb())
            time.sleep(LOOK_S)  # the outage itself
        assert self._n_of("fd") <= n_files + 8, "files leak"
        assert self._n_of("task") <= n_threads + 4, "threads leak"
        assert self._more_memory_mb() <= MORE_MB, self._memory_mb

    def _longest_pause_s(self, began: float) -> float:
        """Longest pause between two attempts; checks that they slow down and never stop."""
        tries = self._tries
        pauses = [after - before for before, after in pairwise(tries)]
        assert tries, "no retry"
        assert max(pauses, default=0.0) <= LONGEST_S + LOOK_S, pauses
        away_s = tries[-1] - began
        assert len(tries) <= 12 + away_s / (0.8 * 30), (len(tries), away_s)
        return max(pauses, default=0.0)

    def _witness(self) -> Figures:
        wait_until(lambda: self._value("copywatch_frames_waiting", "witness") == 0, lambda: "seconds wait")
        seen = self._value("copywatch_frames_processed_total", "witness")
        assert self._value("copywatch_gap_seconds_total", "witness") <= 0
        assert self._value("copywatch_epochs_total", "witness") == 1
        metrics = self._serve.get("/metrics")[1]
        assert not re.search(r'copywatch_reconnects_total{channel="witness".*} [1-9]', metrics)
        assert not re.search(r'copywatch_frames_dropped_total{channel="witness".*} [1-9]', metrics)
        return {"witness_seconds": seen, "witness_alerts": len(self._events("witness", "alert.started"))}

    def _events(self, channel: str, type_: str = "alert.") -> list[dict[str, Any]]:
        path = self._config.parent / "alerts.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in events if event["channel"] == channel and event["type"].startswith(type_)]

    def _open_alerts(self, channel: str) -> set[str]:
        events = self._events(channel)
        closed = {event["id"] for event in events if event["type"] in ("alert.ended", "alert.retracted")}
        return {event["id"] for event in events} - closed

    def _is(self, channel: str, state: str) -> bool:
        return self._serve.value("copywatch_channel_state", channel=channel, state=state) == 1

    def _value(self, name: str, channel: str) -> float:
        return max(0.0, self._serve.value(name, channel=channel))

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        wait_until(is_so, lambda: f"no {what}:\n{''.join(self._serve.log[-20:])}")

    def _resident_mb(self) -> float:
        status = Path(f"/proc/{self._serve.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024

    def _n_of(self, what: str) -> int:
        """Number of open files (fd) or threads (task) of the monitor."""
        return len(os.listdir(f"/proc/{self._serve.process.pid}/{what}"))

    def _more_memory_mb(self) -> float:
        """Growth after the first quarter: median of the last tenth minus median of the first."""
        settled = self._memory_mb[int(SETTLED * len(self._memory_mb)) :]
        part = max(1, len(settled) // 10)
        return median(settled[-part:]) - median(settled[:part])
