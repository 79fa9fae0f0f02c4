"""The demo from end to end: media made, references registered, the broadcast aired and watched live, the result judged.

Watching is `serve` itself, with one channel whose address is the demo's transmitter. All that is kept lies in the
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
from monitor.demo.broadcast import BURST_S, Pace, Transmitter, wall_clock
from monitor.demo.media import BROADCAST_S, REFERENCES, Aired, Media, make_media
from monitor.ops.channel_status import ChannelStatuses
from monitor.ops.logs import configure_logging
from monitor.roles.serve import serve
from reference_db.features.encoder import load_encoder
from reference_db.registration import register
from reference_db.store.catalog import Catalog

CHANNEL = "demo"
LEAST_OVERLAP = 0.5  # of both time lines, for an alert to count as the copy that was aired
AHEAD_S = 30.0  # how far `--fast` airs ahead of what was matched; the monitor's buffer holds 64 s
PATIENCE_S = 20.0  # wait for the last word after the last byte was sent and nothing moves

POLL_S = 0.5


@dataclass(slots=True)
class Verdict:
    """What was aired against what was told."""

    aired: list[Aired]
    told: list[Alert]
    found: list[tuple[Aired, Alert | None]] = field(init=False)
    strays: list[Alert] = field(init=False)

    def __post_init__(self) -> None:
        self.found = [(copy, max(self._of(copy), key=lambda alert: alert.score, default=None)) for copy in self.aired]
        belonging = {alert.id for copy in self.aired for alert in self._of(copy)}
        self.strays = [alert for alert in self.told if alert.id not in belonging]

    def _of(self, copy: Aired) -> list[Alert]:
        return [alert for alert in self.told if overlap(alert, copy) >= LEAST_OVERLAP]

    @property
    def is_right(self) -> bool:
        return not self.strays and all(alert is not None for _, alert in self.found)


def overlap(alert: Alert, copy: Aired) -> float:
    """Shared part of both spans (intersection over union), the smaller of air and reference; 0 for another film."""
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
    """True when every copy was found and nothing else. Without `leave` it goes on airing until interrupted."""
    home = settings.data_dir / "demo"
    home.mkdir(parents=True, exist_ok=True)
    say = Console(highlight=False, soft_wrap=True).print
    say("[1/4] making three reference films and a three-minute broadcast", markup=False)
    with _bar() as bar:
        task = bar.add_task("rendering")
        media = make_media(home, lambda done, total: bar.update(task, completed=done, total=total))
    say("[2/4] registering the films", markup=False)
    shutil.rmtree(home / "library", ignore_errors=True)  # in the catalogue's first format
    library, alerts = home / "library-2", home / "alerts.jsonl"
    alerts.unlink(missing_ok=True)  # those of an earlier demo
    for left in (*library.glob("alerts.*"), *library.glob("rights.*"), *library.glob("desk.*")):
        left.unlink()  # their history, and where an earlier demo stopped
    shutil.rmtree(library / "evidence", ignore_errors=True)
    _register(settings, library, media)
    watching = settings.model_copy(
        update={
            "data_dir": library,
            "alerting": AlertingSettings(threshold=settings.alerting.threshold, output=alerts),
            "web": WebSettings(port=0),
        }
    )
    with (home / "demo.log").open("w", encoding="utf-8") as log:
        configure_logging(LoggingSettings(format="json"), log)
        show = Show(media, home, fast=fast, leave=leave, say=lambda line: say(line, markup=False))
        return asyncio.run(show.run(watching))


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
    """Removes what a demo left that had another encoder or other films."""
    films = {hashlib.sha256(media.reference(film).read_bytes()).hexdigest() for film in REFERENCES}
    for reference in catalog.references():
        if reference.encoder_id != encoder_id or reference.content_sha256 not in films:
            catalog.remove(reference.id)


def _step(bar: Progress, task: TaskID, done: int, _total: int | None) -> None:
    bar.update(task, completed=done)


class Show:
    """One sitting: the transmitter, the monitor that watches it, and what it told."""

    def __init__(self, media: Media, home: Path, *, fast: bool, leave: bool, say: Callable[[str], None]) -> None:
        self._aired = media.aired()
        self._home = home
        self._leave = leave
        self._say = say
        self._fast = fast
        self._transmitter = Transmitter(media.broadcast, self._matched_pace if fast else wall_clock, again=not leave)
        self._address = ""  # of dashboard and metrics, once known
        self._statuses = ChannelStatuses()
        self._status = self._statuses.of(CHANNEL)
        self._open: set[str] = set()
        self._told: list[Alert] = []
        self._is_over = False  # the first airing
        self._verdict: Verdict | None = None

    async def run(self, settings: Settings) -> bool:
        """True when the first airing was judged right, or who was to watch it left before its end."""
        stop = asyncio.Event()
        channel = ChannelSettings(name=CHANNEL, url=self._transmitter.url)
        settings = settings.model_copy(update={"channels": [channel]})
        try:
            with self._transmitter:
                async with asyncio.TaskGroup() as tasks:
                    judging = tasks.create_task(self._judge(stop))
                    await serve(
                        settings,
                        on_alert=self._tell,
                        on_ready=self._ready,
                        stop=stop,
                        ends_on_stop=True,
                        real_time=not self._fast,
                        statuses=self._statuses,
                    )
                    judging.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group  # the sentence, not the tree
        if not self._is_over:
            self._say("Stopped before the broadcast was over, so what was found is not judged.")
            return not self._leave  # a machine that asked for the verdict has none
        return self._conclude().is_right

    def _ready(self, address: str) -> None:
        self._address = address
        self._say(f"[3/4] watching {self._transmitter.url}   dashboard {address}")
        self._say("[4/4] alerts, times are those of the broadcast" + ("" if self._leave else "; Ctrl-C to stop"))

    def _tell(self, alert: Alert) -> None:
        if alert.type == STARTED:
            self._open.add(alert.id)
            waited = f"{alert.detected_at - alert.channel_start:.0f} s after it began"
            where = f"on air since {clock(alert.channel_start)}, from its {clock(alert.reference_start)}"
            self._say(f"      COPY   {alert.reference:17} {where}   score {alert.score:.2f}   {waited}")
        elif alert.type in (ENDED, RETRACTED):
            self._open.discard(alert.id)
            air = f"on air {clock(alert.channel_start)}-{clock(alert.channel_end)}"
            its = f"its {clock(alert.reference_start)}-{clock(alert.reference_end)}"
            word = "ended" if alert.type == ENDED else "false"
            self._say(
                f"      {word}  {alert.reference:17} {air} is {its} at {alert.speed:.2f}x   score {alert.score:.2f}"
            )
            if alert.type == ENDED:
                self._told.append(alert)

    async def _judge(self, stop: asyncio.Event) -> None:
        """Waits for the end of the first airing and its last word."""
        quiet_since, before = time.monotonic(), -1
        while time.monotonic() - quiet_since < PATIENCE_S:
            matched = self._n_matched()
            if matched >= BROADCAST_S - 1 and (self._leave or not self._open):
                break
            if matched > before or not self._transmitter.ended.is_set():
                quiet_since, before = time.monotonic(), matched
            await asyncio.sleep(POLL_S)
        self._is_over = True
        if self._leave:
            stop.set()  # closes what is still open
        else:
            self._conclude()
            self._say(f"The broadcast starts again; dashboard {self._address}; Ctrl-C to stop.")

    def _conclude(self) -> Verdict:
        """The verdict on the first airing, told once."""
        if self._verdict is None:
            self._verdict = Verdict(self._aired, list(self._told))
            for line in _report(self._verdict):
                self._say(line)
            self._say(f"Films, broadcast, library, alerts and log are in {self._home}")
        return self._verdict

    def _matched_pace(self) -> Pace:
        """A pace that stays a little ahead of what was matched, so that nothing is dropped and nobody waits."""
        before = self._n_matched()
        return lambda: BURST_S + AHEAD_S + self._n_matched() - before

    def _n_matched(self) -> int:
        """Frames matched so far, one per stream second."""
        return self._status.report().n_processed


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60:02}:{int(seconds) % 60:02}"


def _report(verdict: Verdict) -> list[str]:
    lines = ["", "What was aired, and what was told:"]
    for copy, alert in verdict.found:
        aired = f"{copy.reference:17} {copy.edit:12} {clock(copy.channel_start)}-{clock(copy.channel_end)}"
        if alert is None:
            lines.append(f"  MISSED {aired}")
        else:
            told = f"{clock(alert.channel_start)}-{clock(alert.channel_end)}   score {alert.score:.2f}"
            lines.append(f"  found  {aired} as {told}")
    for alert in verdict.strays:
        span = f"{clock(alert.channel_start)}-{clock(alert.channel_end)}"
        lines.append(f"  FALSE  {alert.reference:17} {span}: nothing of the kind was aired")
    n_found = sum(alert is not None for _, alert in verdict.found)
    lines.append(f"{n_found} of {len(verdict.found)} copies found, {len(verdict.strays)} false alarms.")
    return lines
