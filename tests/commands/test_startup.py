"""Start-up: a command loads torch, FAISS, OpenVINO, FastAPI and the like only if it needs them.

Every command of the app runs twice, each time in a process of its own: with `--help`, which may load none of them, and
as `RUNS` says: for real, or refused early where it would load models or servers.
"""

from __future__ import annotations

import json
import os
import pprint
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from monitor.alerting.outbox import Outbox, OutboxEntry
from monitor.alerting.webhooks import WebhookStore
from monitor.cli import app
from monitor.rights.store import RightsStore
from monitor.web.auth.tokens import Tokens
from reference_db.store.catalog import Catalog, Reference, ReferenceFeatures, ReferenceId
from tests.support.sample_alert import sample_alert

SLOW = ("torch", "faiss", "openvino", "av", "fastapi", "uvicorn", "aiokafka", "aiohttp")
MODELS = {"torch", "faiss", "openvino"}

# Forks for each command line of stdin, so that each runs in a fresh process without the cost of starting Python.
RUNNER = """
import json, os, sys
from monitor.cli import main
slow = sys.argv[1].split(",")
for line in sys.stdin:
    reading, writing = os.pipe()
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        try:
            main(json.loads(line))
        except SystemExit as exit:
            sys.stdout.flush()
            print("\\0" + json.dumps([exit.code, [name for name in slow if name in sys.modules]]), flush=True)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as output:
        print(json.dumps(output.read()), flush=True)
    os.wait()
"""


def leaves(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    subcommands: dict[str, object] | None = getattr(command, "commands", None)
    if subcommands is None:
        yield path
        return
    for name, subcommand in subcommands.items():
        yield from leaves(subcommand, (*path, name))


COMMANDS = [" ".join(path) for path in leaves(get_command(app))]

# Command -> arguments, exit code, what it may load. CONFIG has one channel; its broker and its `serve` do not answer.
# The reference was made with another encoder than the shipped one, which `doctor`, `reindex` and `import` report.
RUNS: dict[str, tuple[str, int, set[str]]] = {
    # These load models and servers when they run; an invalid configuration is refused before that.
    "serve": ("", 3, set()),
    "ingest": ("", 3, set()),
    "match": ("", 3, {"aiokafka"}),
    "demo": ("--data-dir copywatch.yaml", 1, {*MODELS, "av", "fastapi", "uvicorn", "aiokafka", "aiohttp"}),
    "check": ("none.ts", 1, MODELS),
    "doctor": ("--config CONFIG", 1, {*MODELS, "av"}),
    "init": ("", 0, set()),
    "version": ("--json", 0, set()),
    "refs add": ("none.mp4", 1, MODELS),
    "refs list": ("", 0, set()),
    "refs show": ("film", 0, MODELS),
    "refs rm": ("other", 1, set()),
    "refs verify": ("", 0, set()),
    "refs reindex": ("", 1, {"faiss"}),
    "refs export": ("film --output film.copywatch", 0, set()),
    "refs import": ("film.copywatch --data-dir elsewhere", 1, {"faiss"}),
    "refs exclude": ("film 0 5", 0, set()),
    "refs exclusions": ("", 0, set()),
    "refs include": ("film 1", 0, set()),
    "channels add": ("six udp://239.0.0.1:1234 --config CONFIG", 0, set()),
    "channels list": ("--config CONFIG", 0, set()),
    "channels rm": ("six --config CONFIG", 0, set()),
    "channels test": ("http://127.0.0.1:9/x.ts", 4, set()),
    "alerts list": ("", 0, set()),
    "alerts show": ("ALERT", 0, set()),
    "alerts export": ("ALERT", 0, set()),
    "alerts tail": ("--no-follow --after 0", 0, set()),
    "alerts review": ("ALERT confirmed", 0, set()),
    "licences add": ("--reference film", 0, set()),
    "licences list": ("", 0, set()),
    "licences rm": ("L1", 0, set()),
    "tokens add": ("ada", 0, set()),
    "tokens list": ("", 0, set()),
    "tokens rm": ("eve", 0, set()),
    "webhooks add": ("https://192.0.2.1/x", 0, set()),
    "webhooks list": ("", 0, set()),
    "webhooks test": ("WEBHOOK", 1, {"aiohttp"}),
    "webhooks deliveries": ("WEBHOOK", 0, set()),
    "webhooks replay": ("WEBHOOK 1", 0, set()),
    "webhooks enable": ("WEBHOOK", 0, set()),
    "webhooks rotate": ("WEBHOOK", 0, set()),
    "webhooks rm": ("WEBHOOK", 0, set()),
    "audit list": ("", 0, set()),
    "audit export": ("", 0, set()),
    "audit verify": ("", 0, set()),
    "purge person": ("ada", 0, {"fastapi", "uvicorn"}),
    "purge alert": ("ALERT", 1, set()),
    "purge expired": ("", 0, set()),
    "config check": ("--config CONFIG", 0, set()),
    "config show": ("", 0, set()),
    "config schema": ("", 0, set()),
}
KAFKA = ("channels list", "channels add five http://192.0.2.1/x", "channels rm five")


def run_all(lines: list[list[str]], folder: Path) -> list[tuple[int, set[str], str]]:
    """Exit code, loaded slow libraries and output of each command line, run in turn."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, ",".join(SLOW)],
        input="".join(json.dumps(line) + "\n" for line in lines),
        env=environment | {"COPYWATCH_DATA_DIR": str(folder / "data")},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    results = []
    for output in map(json.loads, done.stdout.splitlines()):
        text, _, end = output.rpartition("\0")
        assert text or end, output
        code, loaded = json.loads(end)
        results.append((code, set(loaded), text))
    return results


def a_reference(n_seconds: int = 8) -> tuple[Reference, ReferenceFeatures]:
    added_at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    reference = Reference(ReferenceId("film"), "Film", "ACME", {}, "c" * 64, n_seconds, 0, "enc-1", "", added_at)
    return reference, ReferenceFeatures(np.eye(n_seconds, 512, dtype=np.float16), np.ones(n_seconds, np.bool_))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small stores of every kind, and a configuration."""
    data_dir = tmp_path / "data"
    with Catalog.open(data_dir, write=True) as catalog:
        catalog.add(*a_reference())
    with Outbox.open(data_dir, ()) as outbox:
        outbox.write([OutboxEntry("ch5", [sample_alert()])])
    RightsStore(data_dir).add_licence(reference="film")
    Tokens(data_dir).add("eve", "read")
    WebhookStore(data_dir).add("http://127.0.0.1:9/x", ())
    (tmp_path / "recording.ts").touch()
    config = "kafka: {bootstrap: '127.0.0.1:9'}\nweb: {port: 0}\nchannels: [{name: five, url: recording.ts}]\n"
    (tmp_path / "copywatch.yaml").write_text(config)
    return tmp_path


def arguments(command: str, words: str, folder: Path) -> list[str]:
    (webhook,) = WebhookStore(folder / "data").all()
    names = {"CONFIG": "copywatch.yaml", "ALERT": sample_alert().id, "WEBHOOK": webhook.id}
    return [names.get(word, word) for word in f"{command} {words}".split()]


def test_help_of_no_command_loads_a_slow_library(tmp_path: Path) -> None:
    results = run_all([["--help"], *([*command.split(), "--help"] for command in COMMANDS)], tmp_path)
    loaded = {command: found for command, (_, found, _) in zip(["", *COMMANDS], results, strict=True) if found}
    assert loaded == {}
    assert {code for code, _, _ in results} == {0}


@pytest.mark.slow
def test_a_command_loads_only_what_it_needs(folder: Path) -> None:
    assert set(RUNS) == set(COMMANDS), "enter a new command here: arguments, exit code, what it may load"
    results = run_all([arguments(command, RUNS[command][0], folder) for command in COMMANDS], folder)
    wrong = {
        command: (code, loaded - RUNS[command][2], output)
        for command, (code, loaded, output) in zip(COMMANDS, results, strict=True)
        if code != RUNS[command][1] or loaded - RUNS[command][2]
    }
    assert not wrong, pprint.pformat(wrong)


def test_commands_of_shared_channels_load_only_the_kafka_client(folder: Path) -> None:
    lines = [arguments(words, "--kafka --config CONFIG", folder) for words in KAFKA]
    for code, loaded, output in run_all(lines, folder):
        assert (code, loaded) == (4, {"aiokafka"}), output  # the broker does not answer


@pytest.mark.slow
@pytest.mark.parametrize(("features", "models"), [(False, set()), (True, {"torch"})])
def test_ingest_loads_torch_only_to_send_feature_rows(features: bool, models: set[str], folder: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from monitor.config.settings import load_settings\n"
        "from monitor.roles.kafka_ingest import ingest\n"
        "async def run():\n"
        "    stop, settings = asyncio.Event(), load_settings(Path('copywatch.yaml'))\n"
        f"    await ingest(settings, features={features}, stop=stop, on_ready=lambda address: stop.set())\n"
        "asyncio.run(run())\n"
        "print({'torch', 'faiss', 'av'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(models)
