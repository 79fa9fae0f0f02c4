"""`scripts/bench.py channels` measures a real run and prints every figure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from monitor.demo.films import Film
from tests.support import media

pytestmark = pytest.mark.system  # ffmpeg

ROOT = Path(__file__).parents[2]
FILM = Film("film", "The Film", 77, ("hills", "face", "city"), 12.0)


def test_one_run_gives_every_figure(tmp_path: Path) -> None:
    pictures = ((n / 10, FILM.picture(n / 10)) for n in range(120))
    film = media.write_clip(tmp_path / "film.mp4", pictures, fps=10, gop=16, b_frames=0)
    size = ["--channels", "2", "--seconds", "8", "--warm-up", "4", "--reference-seconds", "60"]
    command = [sys.executable, ROOT / "scripts/bench.py", "channels", film, *size, "--json"]
    done = subprocess.run([str(one) for one in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["channels"] == 2
    assert figures["reference_seconds"] == 72
    assert figures["cpu_ratio"] > 0
    assert 0 < figures["of_it_in_children"] < figures["cpu_s_per_channel_minute"]
    assert 0 <= figures["channels_held"] <= 2
    assert figures["memory_mb"]["per_channel"] > figures["memory_mb"]["child"] > 0
    assert figures["stage_ms_per_second"]["encode"] > 0
    delay = figures["alert_delay_s"]
    assert figures["alerts_started"] == 0 or 0 < delay["p50"] <= delay["p95"] <= delay["max"]
