"""Pictures that were received before are not new: what a dead origin, a loop and a recording send again.

Encoders are real ffmpeg processes, origins real web servers. Silence and retries are shortened; a dead channel is
watched until it has been opened several times after the silence that starts a new epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from monitor.ingest.repeats import MAX_KEYS, MAX_STORED, REMEMBERED_S, STORED_S, RepeatDetector
from monitor.ops.channel_status import ChannelReport
from reference_db.media.frames import KeyPicture
from tests.support.hls_encoder import hls_encoder, serve_folder
from tests.support.live_stream import LiveStream, WebServer
from tests.support.media import write_film
from tests.support.running_source import (
    LENGTH_S,
    SHORT_TIMEOUTS,
    RunningSource,
    running_source,
    write_still,
    write_stream_clip,
)
from tests.support.stream_servers import Running

TIMEOUTS = replace(SHORT_TIMEOUTS, segments_s=5.0, no_progress_s=3.0, silence_s=4.0, repeated_retry_s=0.5)
N_AGAIN = 2  # connections to a dead origin


# --- decisions -----------------------------------------------------------------------------------------------------


def key(n: int, *, is_fresh: bool = False) -> KeyPicture:
    return KeyPicture(float(n), n, is_fresh)


def verdicts(detector: RepeatDetector, *numbers: int, is_fresh: bool = False, is_silent: bool = False) -> list[str]:
    """Of a connection to a playlist with one key picture a second."""
    detector.connect()
    return [push(detector, key(n, is_fresh=is_fresh), n, is_silent=is_silent) for n in numbers]


def push(detector: RepeatDetector, one: KeyPicture, second: int, *, is_silent: bool = False) -> str:
    """A frame with a key picture of its own."""
    detector.push_key(one)
    return detector.push(one, second, in_segments=True, is_silent=is_silent)


def test_what_a_new_connection_sends_again_is_repeated_and_what_follows_is_new() -> None:
    detector = RepeatDetector()
    assert verdicts(detector, 1, 2, 3) == ["new"] * 3
    assert verdicts(detector, 2, 3) == ["repeated"] * 2
    assert verdicts(detector, 2, 3, is_silent=True) == ["repeated"] * 2
    assert verdicts(detector, 3, 4) == ["repeated", "new"]


def test_a_film_that_starts_again_is_new_once_its_source_produces() -> None:
    detector = RepeatDetector()
    verdicts(detector, 0, 1, 2, 3)
    detector.connect()
    started = [(0, False), (1, False), (2, True), (3, True), (4, True)]
    found = [push(detector, key(n, is_fresh=fresh), n, is_silent=True) for n, fresh in started]
    assert found == ["repeated", "repeated", "new", "new", "new"]


def test_a_loop_is_never_new_however_fresh_it_looks() -> None:
    detector = RepeatDetector()
    assert verdicts(detector, 0, 1, 2, 0, 1, 2, is_fresh=True) == ["new"] * 3 + ["looped"] * 3
    assert verdicts(detector, 0, 1, is_fresh=True) == ["looped"] * 2  # a connection later
    assert verdicts(detector, 3, 0, is_fresh=True) == ["new", "new"]  # something else was on air in between


def test_a_sender_without_segments_may_start_its_film_again_within_a_connection() -> None:
    detector = RepeatDetector()
    detector.connect()
    found = [detector.push(key(n), n, in_segments=False, is_silent=False) for n in (0, 1, 2, 0, 1)]
    assert found == ["new"] * 5


def test_the_rest_of_an_interrupted_group_of_pictures_is_new_unless_the_break_was_long() -> None:
    for is_silent, rest in ((False, "new"), (True, "repeated")):
        detector = RepeatDetector()
        detector.connect()
        assert [detector.push(key(0), n, in_segments=True, is_silent=False) for n in (0, 1, 2)] == ["new"] * 3
        detector.connect()
        again = [detector.push(key(0), n, in_segments=True, is_silent=is_silent) for n in (0, 1, 2, 3, 4)]
        assert again == ["repeated"] * 3 + [rest] * 2


def test_a_stream_without_time_stamps_is_always_new() -> None:
    detector = RepeatDetector()
    assert [detector.push(None, 0, in_segments=True, is_silent=True) for _ in range(3)] == ["new"] * 3


def test_only_the_newest_pictures_are_remembered_and_fewer_stored() -> None:
    detector = RepeatDetector()
    assert set(verdicts(detector, *range(2 * REMEMBERED_S))) == {"new"}
    assert verdicts(detector, REMEMBERED_S + 1, 0) == ["repeated", "new"]
    stored = detector.stored()
    assert STORED_S <= len(stored) <= STORED_S + 2
    resumed = RepeatDetector()
    resumed.resume(stored)
    newest = 2 * REMEMBERED_S - 1
    assert verdicts(resumed, newest, newest + 1, REMEMBERED_S) == ["repeated", "new", "new"]
    many = RepeatDetector()
    assert {many.push(key(n), 0, in_segments=True, is_silent=False) for n in range(2 * MAX_KEYS)} == {"new"}
    assert len(many._received) <= MAX_KEYS
    for n in range(2 * MAX_KEYS, 3 * MAX_KEYS):
        many.push_key(key(n))
    assert (len(many._received), len(many.stored())) == (MAX_KEYS, MAX_STORED)


# --- real encoders and origins -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    write_stream_clip(folder / "film.ts")
    write_stream_clip(folder / "other.ts", 2)
    write_still(folder / "still.ts")
    write_film(folder / "recording.ts", 3, 10)
    return folder


def report(running: RunningSource) -> ChannelReport:
    return running.metrics.channels.of(running.source.channel).report()


def stays_down(running: RunningSource, cause: str, n_again: int = N_AGAIN) -> None:
    """Waits for some more connections, none of which may deliver anything, change the epoch or end the outage."""
    before, last_new_at = len(running.samples), report(running).last_new_at
    n_before = running.value("copywatch_reconnects_total", reason=cause)
    running.wait(
        lambda: running.value("copywatch_reconnects_total", reason=cause) >= n_before + n_again, f"{n_again} reconnects"
    )
    assert running.seconds[before:] == []
    assert running.value("copywatch_epochs_total") == len(running.epochs)
    now = report(running)
    assert (now.state, now.is_up, now.last_new_at) == ("stalled", False, last_new_at)


@contextmanager
def dead_channel(clip: Path, folder: Path, *, mode: str) -> Iterator[RunningSource]:
    """A channel whose encoder was killed; its origin serves the last playlist."""
    with hls_encoder(clip, folder) as encoder, serve_folder(folder) as web:
        url = f"http://127.0.0.1:{web.port}/live.m3u8"
        wait_for_playlist(folder, encoder)
        with running_source(url, mode=mode, timeouts=TIMEOUTS) as running:
            running.wait_for_state("up")
            running.wait_for_more(6)
            encoder.kill()
            encoder.wait()
            running.wait_for_state("stalled")
            yield running


def wait_for_playlist(folder: Path, encoder: Running) -> None:
    while not (folder / "live.m3u8").exists():
        with pytest.raises(Exception, match="timed out"):
            encoder.wait(0.1)  # it runs


# How a channel comes back: its mode, the film and the options of its encoder.
RETURNS = {
    "from its beginning, with the same time stamps": ("exact", "film.ts", []),
    "with other pictures and time stamps from 0": ("economy", "other.ts", []),
    "with the same film as a new broadcast": ("auto", "film.ts", ["-output_ts_offset", "5000"]),
    "with the numbers of its playlist continued": ("exact", "film.ts", ["-start_number", "5000"]),
}


def die_and_return(clips: Path, folder: Path, how: str) -> None:
    """An encoder dies while its origin serves on, and later returns."""
    mode, film, options = RETURNS[how]
    with dead_channel(clips / "film.ts", folder, mode=mode) as running:
        assert "has sent no picture for" in (report(running).reason or "")
        stays_down(running, "repeated")
        assert "serves only pictures that were received before; nothing new since" in (report(running).reason or "")
        assert report(running).dropped["repeated"] >= N_AGAIN
        n_before = len(running.samples)
        assert len(running.epochs) == 1
        with hls_encoder(clips / film, folder, *options):
            running.wait_for_state("up")
            running.wait_for_more(6)
            assert report(running).reason is None
        assert len({sample.epoch for sample in running.samples[n_before:]}) == 1
        assert len(running.epochs) == 2


def loop(clips: Path, loop_s: int) -> None:
    """An origin sends the same seconds again and again, under new numbers, and at last something else."""
    stream, leaves = LiveStream(clips / "film.ts", LENGTH_S), [False]

    def answer(request: BaseHTTPRequestHandler) -> None:
        newest = int(stream.at_s)
        if request.path.startswith("/live.m3u8"):
            lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:1", f"#EXT-X-MEDIA-SEQUENCE:{newest}"]
            for number in range(newest, newest + 3):
                at = "#EXT-X-DISCONTINUITY\n" if number % loop_s == 0 else ""
                lines += [f"{at}#EXTINF:1,", f"s{number}.ts"]
            body = "\n".join(lines).encode()
        else:
            number = int(request.path.removeprefix("/s").removesuffix(".ts"))
            body = stream.seconds(number if leaves[0] else number % loop_s, 1)
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    with WebServer(answer) as web:
        url = f"http://user:s3cret@127.0.0.1:{web.port}/live.m3u8?token=s3cret"
        with running_source(url, timeouts=TIMEOUTS) as running:
            running.wait(lambda: report(running).cause == "looped", "loop")
            assert len(running.seconds) == len(set(running.seconds))
            n_before, ends_s = len(running.samples), stream.at_s + 1.5 * loop_s
            running.wait(lambda: stream.at_s > ends_s, "another lap")
            now = report(running)
            assert (len(running.samples), now.state, now.cause, now.is_up) == (n_before, "stalled", "looped", False)
            assert "sends the same pictures again and again; nothing new since" in (now.reason or "")
            assert "s3cret" not in (now.reason or "")
            leaves[0] = True
            running.wait_for_state("up")
            running.wait_for_more()


LOOPS = {"loop of 6 s": 6, "loop of 12 s": 12}  # a clock that jumps back by less than 10 s, or by more


@pytest.fixture(scope="module")
def scenarios(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[None]]:
    """All of them at once: they mostly wait."""
    folder = tmp_path_factory.mktemp("origins")
    with ThreadPoolExecutor(len(RETURNS) + len(LOOPS)) as pool:
        started = {name: pool.submit(loop, clips, loop_s) for name, loop_s in LOOPS.items()}
        for n, how in enumerate(RETURNS):
            started[how] = pool.submit(die_and_return, clips, folder / f"{n}", how)
        return started


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("how", RETURNS)
def test_a_dead_encoder_is_down_until_it_comes_back(scenarios: dict[str, Future[None]], how: str) -> None:
    scenarios[how].result()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_looped_playlist_is_stalled_until_something_else_is_on_air(
    scenarios: dict[str, Future[None]], name: str
) -> None:
    scenarios[name].result()


@pytest.mark.system
@pytest.mark.slow
def test_a_frozen_encoder_and_a_slate_are_impaired_with_the_reason(clips: Path, tmp_path: Path) -> None:
    with hls_encoder(clips / "still.ts", tmp_path / "hls") as encoder, serve_folder(tmp_path / "hls") as web:
        wait_for_playlist(tmp_path / "hls", encoder)
        with running_source(f"http://127.0.0.1:{web.port}/live.m3u8", timeouts=TIMEOUTS) as running:
            running.wait_for_state("impaired")
            sentence = f"the same picture has been shown for {TIMEOUTS.impaired_s} s: a frozen encoder or a slate"
            assert (report(running).cause, report(running).reason) == ("frozen", sentence)


@pytest.mark.slow
def test_a_recording_is_read_once_however_often_it_is_served(clips: Path) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        body = (clips / "recording.ts").read_bytes()
        request.send_response(200)
        request.send_header("ETag", '"1"')
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    with (
        WebServer(answer) as web,
        running_source(f"http://127.0.0.1:{web.port}/film.ts", timeouts=TIMEOUTS) as running,
    ):
        running.wait(lambda: running.value("copywatch_reconnects_total", reason="ended") >= 1, "its end")
        assert running.seconds == sorted(set(running.seconds))
        stays_down(running, "ended")
        assert "has ended" in (report(running).reason or "")


@pytest.mark.slow
def test_an_address_with_nothing_behind_it_is_said_to_have_nothing(clips: Path) -> None:
    with (
        WebServer(lambda request: request.send_error(404)) as web,
        running_source(f"http://user:s3cret@127.0.0.1:{web.port}/no.m3u8?token=s3cret", timeouts=TIMEOUTS) as running,
    ):
        running.wait_for_state("denied")
        sentence = f"http://127.0.0.1:{web.port} has nothing at this address (404); check the path"
        assert (report(running).cause, report(running).reason) == ("missing", sentence)
