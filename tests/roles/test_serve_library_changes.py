"""References are added, removed and damaged while `copywatch serve` watches a live channel."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monitor.demo.films import Film
from reference_db.library import ReferenceLibrary
from tests.support import media
from tests.support.live_stream import LiveStream, serve_stream
from tests.support.serve_process import ServeProcess, wait_until

pytestmark = pytest.mark.slow  # a real serve on live channels

FPS, LENGTH_S = 5, 60
FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), float(LENGTH_S))
CHANNEL = {"channel": "ch"}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[tuple[ServeProcess, LiveStream]]:
    """Watches a channel that airs the film over and over; the library is empty."""
    pictures = [(n / FPS, FILM.picture(n / FPS)) for n in range(LENGTH_S * FPS)]
    media.write_clip(tmp_path / "film.mp4", pictures, fps=FPS)
    stream = LiveStream(media.write_clip(tmp_path / "live.ts", pictures, fps=FPS, gop=FPS, b_frames=0), LENGTH_S)
    with serve_stream(stream) as server:
        config = tmp_path / "copywatch.yaml"
        config.write_text(
            "data_dir: data\nalerting: {output: alerts.jsonl}\nweb: {port: 0}\nchannels:\n"
            f'  - {{name: ch, url: "http://127.0.0.1:{server.port}/", mode: economy}}\n'
        )
        with ServeProcess(config) as running:
            yield running, stream


def test_changes_of_the_library_apply_to_the_running_channel_at_once(
    serve: tuple[ServeProcess, LiveStream], tmp_path: Path
) -> None:
    running, stream = serve
    library = ReferenceLibrary(tmp_path / "data")

    def alerts(**wanted: str) -> list[dict[str, Any]]:
        path = tmp_path / "alerts.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [alert for alert in found if all(alert[name] == value for name, value in wanted.items())]

    def n_matched() -> float:
        return running.value("copywatch_frames_processed_total", **CHANNEL) or 0.0

    def wait_for(known: set[str], **wanted: str) -> dict[str, Any]:
        """The first alert with these fields whose id is not in `known`."""

        def new() -> list[dict[str, Any]]:
            return [alert for alert in alerts(**wanted) if alert["id"] not in known]

        wait_until(lambda: bool(new()), lambda: f"{wanted} of {alerts()}\n{''.join(running.log)}")
        return new()[0]

    wait_until(lambda: n_matched() >= 2, lambda: "".join(running.log))
    (added,) = library.add([tmp_path / "film.mp4"], id="film")
    assert added.error is None
    added_at = stream.at_s
    started = wait_for(set(), type="alert.started")
    print(f"added at {added_at:.1f} s of the stream, alert at its {started['detected_at']:.0f} s", file=sys.stderr)
    library.rm("film")
    ended = wait_for(set(), type="alert.ended", reason="reference removed")
    known = {alert["id"] for alert in alerts()}  # the film is repeated: each time is another alert
    assert ended["id"] in known
    list(library.add([tmp_path / "film.mp4"], id="film"))
    again = wait_for(known, type="alert.started")
    (path,) = (tmp_path / "data" / "features").iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-5000] + bytes([content[-5000] ^ 1]) + content[-4999:])
    assert list(library.verify().damaged) == ["film"]
    ended = wait_for(known, type="alert.ended", reason="reference quarantined")
    assert ended["channel_start"] >= again["channel_start"]
    # Every received second was matched, and none is missing between them.
    wait_until(lambda: running.value("copywatch_frames_waiting", **CHANNEL) == 0, lambda: running.get("/metrics")[1])
    metrics = running.get("/metrics")[1]
    (received,) = re.findall(r'frames_received_total{channel="ch"} ([\d.]+)', metrics)
    (matched,) = re.findall(r'frames_processed_total{channel="ch"} ([\d.]+)', metrics)
    assert received == matched
    assert not re.search(r'gap_seconds_total{channel="ch"} [1-9]', metrics)
