"""`scripts/bench.py decoder` starts the child with and without its sandbox and prints every figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.media import write_film

ROOT = Path(__file__).parents[2]


def test_one_run_gives_every_figure(tmp_path: Path) -> None:
    film = write_film(tmp_path / "film.mp4", 1, 2)
    command = [sys.executable, ROOT / "scripts/bench.py", "decoder", film, "--rounds", "1", "--json"]
    done = subprocess.run([str(one) for one in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["cpu_ratio"] > 0
    for side in ("confined", "bare"):
        assert 0 < figures[side]["first_picture_s"] <= figures[side]["wall_s"]
