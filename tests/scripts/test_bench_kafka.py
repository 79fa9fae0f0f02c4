"""`scripts/bench.py kafka` runs on a real broker, and its figures are consistent."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.broker import ROOT, Broker


def test_match_is_compared_with_both_baselines(broker: Broker) -> None:
    arguments = [
        "scripts/bench.py",
        "kafka",
        "--kafka",
        broker.address,
        "--channels",
        "2",
        "--seconds",
        "120",
        "--json",
    ]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["records"] == 240
    assert figures["match_over_read"] == figures["match_per_s"] / figures["read_per_s"]
    assert 0 < figures["match_over_read"] < 1
    assert figures["match_stages_ms_each"]["encode"] > 0
    assert figures["event_loop_lag_ms"] >= 0
