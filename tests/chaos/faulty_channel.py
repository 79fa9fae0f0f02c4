"""Shared by the stream scenarios: clips, and a live channel behind a fault proxy with the recovery that is expected."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av

from tests.support import media
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.live_stream import LiveStream, serve_stream
from tests.support.running_source import FPS, LENGTH_S, RunningSource, running_source, write_still, write_stream_clip

Figures = dict[str, float]

LASTING_S = 4.0  # stream seconds that a fault lasts at least


class ClipSet:
    """The clips, written once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.clip = write_stream_clip(folder / "stream.ts")
        self.larger = write_stream_clip(folder / "larger.ts", 2, width=320, height=180)
        self.mpeg4 = write_stream_clip(folder / "mpeg4.ts", 3, codec="mpeg4")
        self.black = write_still(folder / "black.ts", 16)
        self.frozen = write_still(folder / "frozen.ts")
        self.sound = write_sound_stream(folder / "sound.ts")
        self.both = write_both(folder / "both.ts")

    @contextmanager
    def channel(self, name: str, clip: Path | None = None, *, mode: str = "exact") -> Iterator[FaultyChannel]:
        """A live channel behind a fault proxy, read by a source and up."""
        stream = LiveStream(clip or self.clip, LENGTH_S)
        began = time.monotonic()
        with (
            serve_stream(stream) as web,
            FaultProxy(web.port) as proxy,
            running_source(f"http://127.0.0.1:{proxy.port}/{name}.ts", name, mode=mode) as running,
        ):
            running.wait_for_state("up")
            start_s = time.monotonic() - began
            running.wait_for_more()
            yield FaultyChannel(stream, proxy, running, start_s)


def write_sound_stream(path: Path) -> Path:
    """Writes an MPEG-TS file with sound only."""
    with av.open(str(path), "w") as container:
        media._write_tone(container, container.add_stream("mp2", rate=16000), float(LENGTH_S))
    return path


def write_both(path: Path) -> Path:
    """Writes a clip with pictures and sound."""
    times = [n / FPS for n in range(LENGTH_S * FPS)]
    pictures = ((t, media.picture(4, t, 160, 90)) for t in times)
    return media.write_clip(path, pictures, fps=FPS, gop=FPS, b_frames=0, sound=True)


class FaultyChannel:
    """One live channel that a fault is injected into."""

    def __init__(self, stream: LiveStream, proxy: FaultProxy, running: RunningSource, start_s: float) -> None:
        self.stream, self.proxy, self.running, self.start_s = stream, proxy, running, start_s

    def recover_from(self, fault: Fault, *states: str) -> Figures:
        """Injects the fault, waits for a state, lifts the fault, and checks the recovery: same epoch, gap reported."""
        running, stream = self.running, self.stream
        fault_s = stream.at_s
        self.proxy.fault = fault
        running.wait(lambda: running.source.state in states, " or ".join(states))
        noticed_s = stream.at_s - fault_s
        # The server starts each connection a second in the past: a shorter fault may leave no gap.
        running.wait(lambda: stream.at_s - fault_s >= LASTING_S, "the fault lasts")
        self.proxy.fault = "none"
        lasted_s, lifted_s = stream.at_s - fault_s, stream.at_s
        running.wait_for_state("up")
        running.wait_for_more()
        back_s = stream.at_s - lifted_s
        assert len(running.epochs) == 1, running.epochs
        assert running.holes, "the gap must be reported"
        assert {reason for _, _, reason in running.holes} == {"reconnect"}
        assert sum_of(running, "copywatch_reconnects_total") >= 1
        missed = sum(n for _, n, _ in running.holes)
        assert missed <= lasted_s + back_s + 3
        return {"noticed_s": noticed_s, "back_s": back_s, "missed_s": missed}


def sum_of(running: RunningSource, name: str) -> float:
    """Sum over all labels except the channel."""
    return sum(
        sample.value
        for family in running.metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and sample.labels.get("channel") == running.source.channel
    )
