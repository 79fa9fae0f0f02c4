"""Licences and reviews on the command line take effect in a running `serve`, for open and for ended alerts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monitor.demo.broadcast import BroadcastServer
from monitor.evidence.store import EvidenceStore
from monitor.rights.store import RightsStore
from tests.support.serve_process import ServeProcess, clean_environment, wait_until
from tests.support.serve_runs import build_sample_library

pytestmark = pytest.mark.slow  # a real serve


def copywatch(data_dir: Path, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "monitor.cli", *arguments, "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_commands_beside_a_running_monitor_take_effect(tmp_path: Path) -> None:
    library = build_sample_library(tmp_path)
    with BroadcastServer(library.recording) as transmitter:
        config = library.config(tmp_path / "live", transmitter.url)
        data = config.parent / "data"
        # A second channel reads the recording as fast as it goes: its two copies have ended when the first airs.
        live = f'{{name: ch5, url: "{transmitter.url}", mode: exact}}'
        past = f'{{name: past, url: "{library.recording}"}}'
        config.write_text(config.read_text().rpartition("channels:")[0] + f"channels: [{live}, {past}]\n")
        copywatch(data, "licences", "add", "--reference", "film", "--channel", "past")

        def emitted(channel: str) -> list[dict[str, Any]]:
            lines = (config.parent / "alerts.jsonl").read_text().splitlines()
            return [alert for alert in map(json.loads, lines) if alert["channel"] == channel]

        def types(channel: str, alert_id: str) -> list[str]:
            return [alert["type"].removeprefix("alert.") for alert in emitted(channel) if alert["id"] == alert_id]

        with ServeProcess(config) as serve:
            wait_until(lambda: [one["type"] for one in emitted("past")].count("alert.ended") == 2, lambda: serve.log)
            assert {alert["licence"] for alert in emitted("past")} == {"L1"}
            ended = emitted("past")[0]["id"]
            copywatch(data, "alerts", "review", ended, "false", "--by", "Ann")
            wait_until(lambda: types("past", ended)[-1] == "retracted", lambda: emitted("past"))

            wait_until(lambda: bool(emitted("ch5")), lambda: serve.log)
            on_air = emitted("ch5")[0]["id"]
            copywatch(data, "alerts", "review", on_air, "false", "--by", "Ann", "--note", "an ident")
            wait_until(lambda: types("ch5", on_air)[-1] == "retracted", lambda: emitted("ch5"))
            last = emitted("ch5")[-1]
            assert last["reason"] == "reviewed: false positive"
            assert [one["seq"] for one in emitted("ch5")] == list(range(1, last["seq"] + 1))
            wait_until(lambda: not RightsStore(data).unapplied_reviews(), lambda: RightsStore(data).unapplied_reviews())
            assert serve.value("copywatch_reviews_total", decision="false") == 2
            counted = {"channel": "past", "event": "ended", "licensed": "yes"}
            assert serve.value("copywatch_alerts_total", **counted) == 2
            store = EvidenceStore(data)  # written by a thread of low priority, after the events
            wait_until(lambda: store.has(on_air) and store.has(ended), lambda: serve.log)
            wait_until(
                lambda: serve.value("copywatch_evidence_bytes") == sum(one.size_bytes for one in store.entries()),
                lambda: serve.log,
            )
    shown = json.loads(copywatch(data, "alerts", "show", on_air, "--json"))
    assert [review["by"] for review in shown["reviews"]] == ["Ann"]
    assert shown["evidence"]["frames"][0]["air"] == "air-start.jpg"
    assert {path.name for path in EvidenceStore(data).paths(ended)} >= {
        "air-start.jpg",
        "ref-end.jpg",
        "tile-start.png",
    }
