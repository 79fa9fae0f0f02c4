"""The demo from end to end: render media, register references, watch the broadcast live, and check the result.

The monitor is `serve` itself, with one channel whose address is the demo's broadcast. Everything is stored in the
folder `demo` of the data folder; the user's own library is not touched.
"""

import asyncio
import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from monitor.alerting.alerts import ENDED, RETRACTED, STARTED, Alert
from monitor.config.settings import AlertingSettings, ChannelSettings, LoggingSettings, Settings, WebSettings
from monitor.demo.broadcast import BURST_S, BroadcastServer, Pace, wall_clock
from monitor.demo.media import BROADCAST_S, REFERENCES, Media, PlantedCopy, render_media
from monitor.ops.channel_status import ChannelStatuses
from monitor.ops.logs import configure_logging
from monitor.roles.serve import serve
from reference_db.features.encoder import load_encoder
from reference_db.registration import register
from reference_db.store.catalog import Catalog

CHANNEL = "demo"
LEAST_OVERLAP = 0.5  # of both time lines, for an alert to count as a planted copy
AHEAD_S = 30.0  # how far `--fast` is ahead of matching; the monitor's buffer holds 64 s
TIMEOUT_S = 20.0  # after the last byte, without progress

POLL_S = 0.5


@dataclass(slots=True)
class DemoResult:
    """The planted copies compared with the alerts."""

    copies: list[PlantedCopy]
    alerts: list[Alert]
    found: list[tuple[PlantedCopy, Alert | None]] = field(init=False)
    false_alarms: list[Alert] = field(init=False)

    def __post_init__(self) -> None:
        self.found = [(copy, max(self._of(copy), key=lambda alert: alert.score, default=None)) for copy in self.copies]
        matched = {alert.id for copy in self.copies for alert in self._of(copy)}
        self.false_alarms = [alert for alert in self.alerts if alert.id not in matched]

    def _of(self, copy: PlantedCopy) -> list[Alert]:
        return [alert for alert in self.alerts if overlap(alert, copy) >= LEAST_OVERLAP]

    @property
    def is_correct(self) -> bool:
        return not self.false_alarms and all(alert is not None for _, alert in self.found)


def overlap(alert: Alert, copy: PlantedCopy) -> float:
    """Intersection over union of the spans, the smaller of broadcast and reference; 0 for another film."""
    if alert.reference != copy.reference:
        return 0.0
    return min(
        _iou(alert.channel_start, alert.channel_end, copy.channel_start, copy.channel_end),
        _iou(alert.reference_start, alert.reference_end, copy.reference_start, copy.reference_end),
    )


def _iou(a_start: float, a_end: float, b_start: float, b_end: float) -> float:
    both = min(a_end, b_end) - max(a_start, b_start)
    return both / (max(a_end, b_end) - min(a_start, b_start)) if both > 0 else 0.0


def run_demo(settings: Settings, *, fast: bool, leave: bool) -> bool:
    """True when every copy was found and nothing else. Without `leave` the broadcast repeats until interrupted."""
    home = settings.data_dir / "demo"
    home.mkdir(parents=True, exist_ok=True)
    write = partial(Console(highlight=False, soft_wrap=True).print, markup=False)
    write("[1/4] rendering three reference films and a three-minute broadcast")
    with _bar() as bar:
        task = bar.add_task("rendering")
        media = render_media(home, lambda done, total: bar.update(task, completed=done, total=total))
    write("[2/4] registering the films")
    shutil.rmtree(home / "library", ignore_errors=True)  # in the first format of the catalogue
    library, alerts = home / "library-2", home / "alerts.jsonl"
    alerts.unlink(missing_ok=True)  # of the previous demo
    for left in (*library.glob("alerts.*"), *library.glob("rights.*"), *library.glob("desk.*")):
        left.unlink()  # history and snapshots of the previous demo
    shutil.rmtree(library / "evidence", ignore_errors=True)
    _register(settings, library, media)
    serve_settings = settings.model_copy(
        update={
            "data_dir": library,
            "alerting": AlertingSettings(min_confidence=settings.alerting.min_confidence, output=alerts),
            "web": WebSettings(port=0),
        }
    )
    with (home / "demo.log").open("w", encoding="utf-8") as log:
        configure_logging(LoggingSettings(format="json"), log)
        demo = DemoRun(media, home, fast=fast, leave=leave, write=write)
        return asyncio.run(demo.run(serve_settings))


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _register(settings: Settings, library: Path, media: Media) -> None:
    encoder = load_encoder(settings.encoder, threads=settings.compute.threads)
    with Catalog.open(library, write=True) as catalog, _bar() as bar:
        _remove_stale(catalog, encoder.encoder_id, media)
        for film in REFERENCES:
            task = bar.add_task(film.title, total=film.duration_s)
            register(
                media.reference(film),
                catalog,
                encoder,
                id=film.name,
                title=film.title,
                owner="Copywatch demo",
                progress=partial(_step, bar, task),
            )


def _remove_stale(catalog: Catalog, encoder_id: str, media: Media) -> None:
    """Removes references of a previous demo with another encoder or other films."""
    films = {hashlib.sha256(media.reference(film).read_bytes()).hexdigest() for film in REFERENCES}
    for reference in catalog.references():
        if reference.encoder_id != encoder_id or reference.content_sha256 not in films:
            catalog.remove(reference.id)


def _step(bar: Progress, task: TaskID, done: int, _total: int | None) -> None:
    bar.update(task, completed=done)


class DemoRun:
    """The broadcast, the monitor that watches it, and the alerts so far."""

    def __init__(self, media: Media, home: Path, *, fast: bool, leave: bool, write: Callable[[str], None]) -> None:
        self._copies = media.copies()
        self._home = home
        self._leave = leave
        self._write = write
        self._fast = fast
        self._broadcast = BroadcastServer(media.broadcast, self._matched_pace if fast else wall_clock, repeat=not leave)
        self._address = ""  # the link to the dashboard, once known
        self._statuses = ChannelStatuses()
        self._status = self._statuses.of(CHANNEL)
        self._open: set[str] = set()
        self._ended: list[Alert] = []
        self._is_over = False  # the first broadcast
        self._result: DemoResult | None = None

    async def run(self, settings: Settings) -> bool:
        """True when the first broadcast gave the correct alerts, or the user interrupted it."""
        stop = asyncio.Event()
        channel = ChannelSettings(name=CHANNEL, url=self._broadcast.url)
        settings = settings.model_copy(update={"channels": [channel]})
        try:
            with self._broadcast:
                async with asyncio.TaskGroup() as tasks:
                    waiting = tasks.create_task(self._wait_for_end(stop))
                    await serve(
                        settings,
                        on_alert=self._print_alert,
                        on_ready=self._ready,
                        stop=stop,
                        ends_on_stop=True,
                        real_time=not self._fast,
                        statuses=self._statuses,
                    )
                    waiting.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group  # one sentence instead of a tree
        if not self._is_over:
            self._write("Stopped before the end of the broadcast; the result is not checked.")
            return not self._leave  # `--exit` asked for the result
        return self._report().is_correct

    def _ready(self, address: str) -> None:
        self._address = address
        self._write(f"[3/4] watching {self._broadcast.url}")
        self._write(f"      dashboard {address}")
        self._write("[4/4] alerts, times are those of the broadcast" + ("" if self._leave else "; Ctrl-C to stop"))

    def _print_alert(self, alert: Alert) -> None:
        if alert.type == STARTED:
            self._open.add(alert.id)
            delay = f"{alert.detected_at - alert.channel_start:.0f} s after its start"
            span = f"on air since {clock(alert.channel_start)}, from its {clock(alert.reference_start)}"
            self._write(f"      COPY   {alert.reference:17} {span}   confidence {alert.confidence or 0:.2f}   {delay}")
        elif alert.type in (ENDED, RETRACTED):
            self._open.discard(alert.id)
            span = f"on air {clock(alert.channel_start)}-{clock(alert.channel_end)}"
            speed = "" if alert.speed is None else f" at {alert.speed:.2f}x"
            part = f"its {clock(alert.reference_start)}-{clock(alert.reference_end)}{speed}"
            state = "ended" if alert.type == ENDED else "false"
            self._write(
                f"      {state}  {alert.reference:17} {span} is {part}   confidence {alert.confidence or 0:.2f}"
            )
            if alert.type == ENDED:
                self._ended.append(alert)

    async def _wait_for_end(self, stop: asyncio.Event) -> None:
        """Waits until the first broadcast and its alerts have ended, then reports."""
        progress_s, before = time.monotonic(), -1
        while time.monotonic() - progress_s < TIMEOUT_S:
            matched = self._n_matched()
            if matched >= BROADCAST_S - 1 and (self._leave or not self._open):
                break
            if matched > before or not self._broadcast.ended.is_set():
                progress_s, before = time.monotonic(), matched
            await asyncio.sleep(POLL_S)
        self._is_over = True
        if self._leave:
            stop.set()  # ends open alerts
        else:
            self._report()
            self._write(f"The broadcast starts again; Ctrl-C to stop. Dashboard: {self._address}")

    def _report(self) -> DemoResult:
        """The result of the first broadcast; prints it once."""
        if self._result is None:
            self._result = DemoResult(self._copies, list(self._ended))
            for line in _result_lines(self._result):
                self._write(line)
            self._write(f"Films, broadcast, library, alerts and log are in {self._home}")
        return self._result

    def _matched_pace(self) -> Pace:
        """A pace slightly ahead of matching, so that nothing is dropped and the monitor never waits."""
        before = self._n_matched()
        return lambda: BURST_S + AHEAD_S + self._n_matched() - before

    def _n_matched(self) -> int:
        """Frames matched so far, one per stream second."""
        return self._status.report().n_processed


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60:02}:{int(seconds) % 60:02}"


def _result_lines(result: DemoResult) -> list[str]:
    lines = ["", "What was broadcast, and what was found:"]
    for copy, alert in result.found:
        planted = f"{copy.reference:17} {copy.edit:12} {clock(copy.channel_start)}-{clock(copy.channel_end)}"
        if alert is None:
            lines.append(f"  MISSED {planted}")
        else:
            found = f"{clock(alert.channel_start)}-{clock(alert.channel_end)}   confidence {alert.confidence or 0:.2f}"
            lines.append(f"  found  {planted} as {found}")
    for alert in result.false_alarms:
        span = f"{clock(alert.channel_start)}-{clock(alert.channel_end)}"
        lines.append(f"  FALSE  {alert.reference:17} {span}: no such copy was broadcast")
    n_found = sum(alert is not None for _, alert in result.found)
    lines.append(f"{n_found} of {len(result.found)} copies found, {len(result.false_alarms)} false alarms.")
    return lines
