"""A source that is gone for as long as one likes, an hour say, and a real `copywatch serve` that waits for it.

Two channels air the same film over and over, each from a server of its own. One is taken away while its alert is open,
and comes back; the other must not notice. Nothing is hurried: states, pauses and silences are those of production.
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
from tests.chaos.studio import Figures, Studio
from tests.support import media
from tests.support.fault_proxy import FaultProxy
from tests.support.live_stream import Air, on_air
from tests.support.serve_process import Serve, until

FPS, LENGTH_S = 5, 90
FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), float(LENGTH_S))
LOOK_S = 3.0  # between two looks at the monitor while it waits
LONGEST_S = (
    1.2 * 30 + 15
)  # between two attempts: the longest pause with its jitter, and a busy machine's start of a decoder
MORE_MB = 12.0  # that an hour may add to the monitor's memory; the allocator's own ups and downs
SETTLED = 0.25  # of the time, after which memory is compared


def gone(away_s: float) -> Callable[[Studio], Figures]:
    """Away for so long, more than the 30 s that a clock bridges."""

    def story(studio: Studio) -> Figures:
        folder = studio.folder / "outage"
        folder.mkdir()
        pictures = [(n / FPS, FILM.picture(n / FPS)) for n in range(LENGTH_S * FPS)]
        clip = media.write_clip(folder / "air.ts", pictures, fps=FPS, gop=FPS, b_frames=0)
        film = media.write_clip(folder / "film.mp4", pictures, fps=FPS)
        # In a process of its own: the memory of this one, which holds what reads all streams, is judged.
        add = [sys.executable, "-m", "monitor.cli", "refs", "add", str(film)]
        subprocess.run(
            add, check=True, capture_output=True, env={**os.environ, "COPYWATCH_DATA_DIR": str(folder / "data")}
        )
        air = Air(clip, LENGTH_S)
        with (
            on_air(air) as fickle,
            on_air(Air(clip, LENGTH_S)) as steady,
            FaultProxy(fickle.port) as proxy,
        ):
            config = folder / "copywatch.yaml"
            config.write_text(
                "data_dir: data\nalerting: {output: alerts.jsonl}\nweb: {port: 0}\nchannels:\n"
                f'  - {{name: gone, url: "http://127.0.0.1:{proxy.port}/", mode: economy}}\n'
                f'  - {{name: witness, url: "http://127.0.0.1:{steady.port}/", mode: economy}}\n'
            )
            with Serve(config) as serve:
                return _Outage(serve, proxy, config, air).live_through(away_s)

    return story


class _Outage:
    def __init__(self, serve: Serve, proxy: FaultProxy, config: Path, air: Air) -> None:
        self._serve, self._proxy, self._config, self._air = serve, proxy, config, air
        self._n_connected = 0  # before it went
        self._tries: list[float] = []  # when each was seen
        self._memory_mb: list[float] = []

    def live_through(self, away_s: float) -> Figures:
        proxy = self._proxy
        self._wait(lambda: self._is("gone", "up") and self._is("witness", "up"), "both up")
        self._wait(lambda: 20 <= self._film_s <= 60 and bool(self._open_alerts("gone")), "an alert in mid-film")
        last_s = self._told("gone")[-1]["channel_end"]
        gap_before = self._value("copywatch_gap_seconds_total", "gone")
        before = self._told("gone")
        self._n_connected = proxy.n_connections
        proxy.fault, began = "refuse", time.monotonic()
        self._wait(lambda: self._is("gone", "stalled") or self._is("gone", "failed"), "noticed")
        noticed_s = time.monotonic() - began
        self._wait(lambda: self._open_alerts("gone") == set(), "the end of its alerts")
        ended_s = time.monotonic() - began
        ended = self._told("gone", "alert.ended")[-1]
        assert ended["channel_end"] >= last_s - 2, ended
        assert [gap["reason"] for gap in ended["gaps"]] == ["reconnect"], ended
        assert 30 <= ended["gaps"][0]["seconds"] <= 60, ended
        silent = len(self._told("gone"))
        self._look_until(lambda: time.monotonic() > began + away_s and 2 <= self._film_s <= 8)  # back in mid-film
        away_s = time.monotonic() - began
        assert len(self._told("gone")) == silent, "an alert of a channel that is not there"
        proxy.fault, healed = "none", time.monotonic()
        self._wait(lambda: self._is("gone", "up"), "up again")
        back_s = time.monotonic() - healed
        assert back_s <= LONGEST_S + 20, back_s
        self._wait(lambda: len(self._told("gone")) > silent, "an alert again")
        again = self._told("gone")[silent]
        missed_s = self._value("copywatch_gap_seconds_total", "gone") - gap_before
        assert away_s - 5 <= missed_s <= away_s + back_s + 20, (missed_s, away_s, back_s)
        assert again["type"] == "alert.started", again
        assert again["id"] not in {event["id"] for event in before}
        assert [gap["seconds"] for gap in again["gaps"]] == [missed_s], (again, missed_s)
        assert self._value("copywatch_epochs_total", "gone") == 2
        return {
            "away_s": healed - began,
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
        """The second of the film that is on air."""
        return self._air.at_s % LENGTH_S

    def _look_until(self, is_over: Callable[[], bool]) -> None:
        """Watches the monitor while the source is away: it tries now and then, is ready, and takes no more memory."""
        n_files, n_threads = self._n_of("fd"), self._n_of("task")
        while not is_over():
            n_new = self._proxy.n_connections - self._n_connected - len(self._tries)
            self._tries += [time.monotonic()] * n_new
            assert self._is("gone", "failed") or self._is("gone", "stalled"), self._serve.log[-5:]
            assert self._serve.problems() == {}, "one channel that is gone is no reason not to be ready"
            assert self._value("copywatch_channel_up", "witness") == 1
            self._memory_mb.append(self._resident_mb())
            time.sleep(LOOK_S)  # the fault itself takes its time
        assert self._n_of("fd") <= n_files + 8, "files are left open"
        assert self._n_of("task") <= n_threads + 4, "threads are left"
        assert self._more_memory_mb() <= MORE_MB, self._memory_mb

    def _longest_pause_s(self, began: float) -> float:
        """Between two attempts to connect. They become seldom, and never stop."""
        tries = self._tries
        pauses = [after - before for before, after in pairwise(tries)]
        assert tries, "nobody tried again"
        assert max(pauses, default=0.0) <= LONGEST_S + LOOK_S, pauses
        away_s = tries[-1] - began
        assert len(tries) <= 12 + away_s / (0.8 * 30), (len(tries), away_s)
        return max(pauses, default=0.0)

    def _witness(self) -> Figures:
        until(lambda: self._value("copywatch_frames_waiting", "witness") == 0, lambda: "seconds wait")
        seen = self._value("copywatch_frames_processed_total", "witness")
        assert self._value("copywatch_gap_seconds_total", "witness") <= 0
        assert self._value("copywatch_epochs_total", "witness") == 1
        metrics = self._serve.get("/metrics")[1]
        assert not re.search(r'copywatch_reconnects_total{channel="witness".*} [1-9]', metrics)
        assert not re.search(r'copywatch_frames_dropped_total{channel="witness".*} [1-9]', metrics)
        return {"witness_seconds": seen, "witness_alerts": len(self._told("witness", "alert.started"))}

    def _told(self, channel: str, type_: str = "alert.") -> list[dict[str, Any]]:
        path = self._config.parent / "alerts.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in events if event["channel"] == channel and event["type"].startswith(type_)]

    def _open_alerts(self, channel: str) -> set[str]:
        events = self._told(channel)
        over = {event["id"] for event in events if event["type"] in ("alert.ended", "alert.retracted")}
        return {event["id"] for event in events} - over

    def _is(self, channel: str, state: str) -> bool:
        return self._serve.value("copywatch_channel_state", channel=channel, state=state) == 1

    def _value(self, name: str, channel: str) -> float:
        return max(0.0, self._serve.value(name, channel=channel))

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        until(is_so, lambda: f"no {what}:\n{''.join(self._serve.log[-20:])}")

    def _resident_mb(self) -> float:
        status = Path(f"/proc/{self._serve.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024

    def _n_of(self, what: str) -> int:
        """Of the monitor's open files (fd) or threads (task)."""
        return len(os.listdir(f"/proc/{self._serve.process.pid}/{what}"))

    def _more_memory_mb(self) -> float:
        """From when the first quarter was over to the end, as medians of a tenth."""
        settled = self._memory_mb[int(SETTLED * len(self._memory_mb)) :]
        part = max(1, len(settled) // 10)
        return median(settled[-part:]) - median(settled[:part])
