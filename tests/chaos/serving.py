"""Faults of a running `copywatch serve` and of its host: kills at named points, disks, file descriptors, clocks.

Every scenario runs a real process on a real channel. It raises AssertionError if an alert is lost, emitted twice or
left open, or if the monitor does not report the problem or does not recover. The F-numbers are faults of the host;
those of disks and clocks need root, strace and the Debian package faketime.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from monitor.alerting.outbox import FILE, History
from monitor.demo.broadcast import BroadcastServer
from tests.chaos import names
from tests.chaos.disks import small_disk
from tests.support.killed_serve import POINTS
from tests.support.serve_runs import TIMEOUT_S, SampleLibrary, ServeRun, alert_lines, build_sample_library

Figures = dict[str, float]
Events = list[dict[str, Any]]

KILLS = 3  # consecutive ones at each point
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
DISK_KB = 64 << 10


class MonitoredServe:
    """A `serve` that monitors the live recording, with its health and metrics."""

    def __init__(self, serve: ServeRun, config: Path, data: Path) -> None:
        self.serve, self.config, self.data = serve, config, data
        self.address = ""

    def ready(self) -> tuple[bool, str]:
        """Whether it is ready, and the problems that it reports."""
        if not self.address:
            found = [re.search(r"health at (http://\S+)", line) for line in list(self.serve.log)]
            self.address = next((one.group(1).rstrip('"},') for one in found if one), "")
        if not self.address:
            return False, ""
        try:
            with urllib.request.urlopen(f"{self.address}/readyz", timeout=5) as reply:
                return True, reply.read().decode()
        except urllib.error.HTTPError as error:
            return False, error.read().decode()
        except OSError as error:
            return False, str(error)

    def value(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as reply:
            found = re.findall(rf"^{name}(?:\{{.*?\}})? (\S+)", reply.read().decode(), re.M)
        return sum(float(one) for one in found)

    def wait(self, is_so: Callable[[], bool], what: str) -> float:
        began = time.monotonic()
        while not is_so():
            assert self.serve.process.poll() is None, f"serve ended:\n{''.join(self.serve.log)[-2000:]}"
            assert time.monotonic() - began < TIMEOUT_S, f"no {what}; {self.ready()}; {''.join(self.serve.log)[-2000:]}"
            time.sleep(0.2)  # polls another process
        return time.monotonic() - began

    def events(self) -> Events:
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.config.parent / "alerts.jsonl").read_text().splitlines()]
        return []

    def has_emitted(self, type_: str, n: int = 1) -> bool:
        return [event["type"] for event in self.events()].count(type_) >= n

    def run_to_end(self) -> Figures:
        """Waits until both copies are alerted, each event once and stored; then stops cleanly."""
        self.wait(lambda: self.has_emitted("alert.ended", 2), "two alerts that ended")
        self.wait(lambda: self.ready()[0], "ready again")
        self.wait(lambda: self.value("copywatch_outbox_unsaved_events") == 0, "all saved")
        assert self.serve.end(signal.SIGTERM) == 0, "".join(self.serve.log)[-2000:]
        events = self.events()
        by_id = defaultdict(list)
        for event in events:
            by_id[event["id"]].append(event)
        for own in by_id.values():
            assert [event["seq"] for event in own] == list(range(1, len(own) + 1)), own
            assert own[-1]["type"] in ("alert.ended", "alert.retracted"), own
        stored = {(event.alert.id, event.alert.seq) for event in History(self.data).events()}
        assert stored == {(event["id"], event["seq"]) for event in events}
        return {"alerts": len(by_id), "events": len(events)}


@contextmanager
def serving(
    library: SampleLibrary,
    folder: Path,
    *,
    data: Path | None = None,
    under: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[MonitoredServe]:
    """A `serve` that is ready, with the recording live."""
    with BroadcastServer(library.recording) as broadcast:
        config = library.config(folder, broadcast.url, data=data)
        serve = ServeRun(config, under=under, environment=environment)
        try:
            one = MonitoredServe(serve, config, data or folder / "data")
            one.wait(lambda: one.ready()[0], "ready")
            yield one
        finally:
            serve.process.kill()
            serve.process.wait()


def killed_at(point: str) -> Callable[[SampleLibrary, Path], Figures]:
    """Killed there repeatedly, it emits in the end what an undisturbed run emits."""

    def scenario(library: SampleLibrary, folder: Path) -> Figures:
        expected = _read_through(library.config(folder / "undisturbed", str(library.recording)))
        config = library.config(folder / "killed", str(library.recording))
        points = ["after-commit", *[point] * KILLS]  # the first run has nothing to restore, and leaves a snapshot
        for one in points:
            serve = ServeRun(config, one)
            code = serve.process.wait(TIMEOUT_S)
            assert code == -signal.SIGKILL, (one, code, serve.log)
        assert _read_through(config) == expected
        return {"kills": len(points), "events": len(expected)}

    return scenario


def _read_through(config: Path) -> list[dict[str, object]]:
    serve = ServeRun(config)
    try:
        serve.wait_for("the stream ended")
        assert serve.end(signal.SIGTERM) == 0
    finally:
        serve.process.kill()
        serve.process.wait()
    return alert_lines(config)


def disk_full(library: SampleLibrary, folder: Path) -> Figures:
    """No space is left for alerts and snapshots: alerts are sent anyway, and stored once there is space again."""
    with small_disk(DISK_KB) as disk, serving(library, folder, data=disk / "data") as one:
        _fill(disk / "filler")
        noticed_s = one.wait(lambda: not one.ready()[0] and "outbox" in one.ready()[1], "not ready")
        assert one.value("copywatch_outbox_up") == 0
        one.wait(lambda: one.has_emitted("alert.started"), "an alert, with a full disk")
        assert one.value("copywatch_outbox_unsaved_events") > 0
        (disk / "filler").unlink()
        back_s = one.wait(lambda: one.ready()[0], "ready again")
        return {"noticed_s": noticed_s, "back_s": back_s, **one.run_to_end()}


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while file.write(b"\0" * size):
                    pass


def failing_call(call: str, error: str, when: str) -> Callable[[SampleLibrary, Path], Figures]:
    """A system call on the outbox fails for a while, as on a failing or read-only disk."""

    def scenario(library: SampleLibrary, folder: Path) -> Figures:
        strace = shutil.which("strace")
        assert strace, "this needs the Debian package strace"
        data = (folder / "data").absolute()
        paths = [part for name in ("", "-wal") for part in ("-P", str(data / f"{FILE}{name}"))]
        inject = ["-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={when}"]
        under = [strace, "-D", "-f", "-q", "-o", str(folder / "calls"), *paths, *inject]
        folder.mkdir(parents=True, exist_ok=True)
        with serving(library, folder, data=data, under=under) as one:
            figures = one.run_to_end()
        failed = (folder / "calls").read_text().count(error)
        assert failed, "no call failed"
        assert any("outbox" in line for line in one.serve.log), "the fault was not logged"
        return {"failed_calls": failed, **figures}

    return scenario


def no_files(library: SampleLibrary, folder: Path) -> Figures:
    """No file descriptors are left, and the decoder dies: it recovers once there are descriptors again."""
    with serving(library, folder) as one:
        pid = one.serve.process.pid
        one.wait(lambda: one.value("copywatch_frames_processed_total") > 3, "seconds")
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), limits[1]))
        subprocess.run(["pkill", "-KILL", "-P", str(pid), "-f", "reference_db.media.decoder"], check=True)
        serve = one.serve
        one.wait(lambda: any("Too many open files" in line for line in list(serve.log)), "an error in the log")
        time.sleep(3)  # long enough for a process that gives up to exit
        assert serve.process.poll() is None
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        before = one.value("copywatch_frames_processed_total")
        back_s = one.wait(lambda: one.value("copywatch_frames_processed_total") > before, "seconds again")
        one.wait(lambda: one.has_emitted("alert.ended"), "an alert that ended")
        assert serve.end(signal.SIGTERM) == 0
        return {"back_s": back_s}


def clock_set(library: SampleLibrary, folder: Path) -> Figures:
    """The wall clock is set an hour forward, then two back, during a copy: its alert retains its id."""
    assert Path(FAKETIME).exists(), "this needs the Debian package faketime"
    clock = folder / "clock"
    folder.mkdir(parents=True, exist_ok=True)
    clock.write_text("+0\n")
    environment = {
        "LD_PRELOAD": FAKETIME,
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with serving(library, folder, environment=environment) as one:
        one.wait(lambda: one.has_emitted("alert.started"), "an alert")
        clock.write_text("+3600\n")
        one.wait(lambda: one.has_emitted("alert.ended"), "its end")
        clock.write_text("-3600\n")
        figures = one.run_to_end()
        assert figures["alerts"] == 2, one.events()
        first, last = one.events()[0], one.events()[-1]
        assert last["started_at"] < first["started_at"]  # displayed times follow the wall clock
        assert {event["id"] for event in one.events() if event["seq"] == 1} == {event["id"] for event in one.events()}
        return figures


def frozen(library: SampleLibrary, folder: Path) -> Figures:
    """The monitor gets no CPU for 8 s during a copy: it catches up and alerts once."""
    with serving(library, folder) as one:
        one.wait(lambda: one.has_emitted("alert.started"), "an alert")
        one.serve.process.send_signal(signal.SIGSTOP)
        time.sleep(8)  # the fault itself
        one.serve.process.send_signal(signal.SIGCONT)
        return one.run_to_end()


SCENARIOS: dict[str, Callable[[SampleLibrary, Path], Figures]] = {
    **{f"killed: {point}": killed_at(point) for point in POINTS},
    "F39 name server hangs": lambda library, folder: names.hanging(folder),
    "F56 disk full": disk_full,
    "F57 fsync fails": failing_call("fsync,fdatasync", "EIO", "6..9"),
    "F58 read-only disk": failing_call("pwrite64", "EROFS", "30..60"),
    "F59 no file descriptors": no_files,
    "F60 wall clock set": clock_set,
    "F61 no CPU": frozen,
}


def run(
    scenarios: dict[str, Callable[[SampleLibrary, Path], Figures]],
    folder: Path,
    at_once: int,
    say: Callable[[str, dict[str, Any]], None],
) -> dict[str, dict[str, Any]]:
    """Runs the scenarios, several at once; `failures` is 1 where one failed. Calls `say` as each ends."""
    library = build_sample_library(folder)

    def run_one(name: str) -> dict[str, Any]:
        place, began = folder / re.sub(r"\W+", "-", name), time.monotonic()
        result: dict[str, Any]
        try:
            figures = scenarios[name](library, place)
            result = {**{key: round(value, 1) for key, value in figures.items()}, "failures": 0}
        except Exception as error:  # a scenario that cannot run has failed too
            result = {"failures": 1, "error": f"{type(error).__name__}: {error}"[:2000]}
        say(f"{name} ({time.monotonic() - began:.0f} s)", result)
        return result

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return dict(zip(scenarios, pool.map(run_one, scenarios), strict=True))
