"""What users and testers type: channels in the topic, and tests with another broker or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker import NAMED, ROOT, Broker, free_ports
from tests.planted_fleet import Fleet, House
from tests.test_channels import copywatch

ONE_TEST = "tests/scripts/test_broker.py::test_status_and_a_second_start_say_where_it_is"


def test_channels_are_shared_listed_and_removed_by_command(broker: Broker, tmp_path: Path) -> None:
    config = str(Fleet(House(tmp_path, ""), broker, "commands", "commands.frames").config(partitions=2))
    shared = ("--kafka", "--config", config)
    added = copywatch("channels", "add", "seven", "-", *shared, stdin="rtsp://u:s3cret@cam/7\n")
    assert (added.returncode, added.stdout) == (0, "shared: seven (rtsp://cam)\n")
    listed = copywatch("channels", "list", "--json", *shared)
    assert [(one["name"], one["url"]) for one in json.loads(listed.stdout)] == [("seven", "rtsp://***@cam/7")]
    gone = copywatch("channels", "rm", "eight", *shared)
    assert gone.returncode == 3
    assert "no channel eight is shared" in gone.stderr
    removed = copywatch("channels", "rm", "seven", *shared)
    assert (removed.returncode, removed.stdout) == (0, "removed: seven\n")
    assert copywatch("channels", "list", "--json", *shared).stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["channels", "add", "seven", "film.mp4"], "a channel that is shared needs a network address, not a file."),
        (["channels", "list"], "does not answer"),
    ],
)
def test_what_cannot_be_shared_is_said_in_a_sentence(tmp_path: Path, words: list[str], expected: str) -> None:
    config = tmp_path / "copywatch.yaml"
    config.write_text(f"kafka: {{bootstrap: '127.0.0.1:{free_ports(1)[0]}'}}\n")
    done = copywatch(*words, "--kafka", "--config", str(config))
    assert done.returncode != 0
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def pytested(*words: str, **environment: str) -> str:
    """What a run of pytest says."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    whole = {name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=whole | environment, timeout=120)
    return done.stdout


def test_no_kafka_leaves_out_what_needs_a_broker_and_nothing_else() -> None:
    said = pytested("--no-kafka", "--collect-only", ONE_TEST.partition(":")[0])
    assert "deselected" in said
    assert ONE_TEST not in said
    assert "test_where_none_runs_stop_and_status_say_so" in said


def test_a_broker_that_is_named_is_used_as_it_is(broker: Broker) -> None:
    assert "1 skipped" in pytested("-rs", ONE_TEST, **{NAMED: broker.address})  # it is not ours to ask about


def test_where_no_broker_can_be_had_the_tests_fail_with_what_to_do(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    assert f"{NAMED} is {nobody}, and nothing answers there" in pytested(ONE_TEST, **{NAMED: nobody})
    for tool in ("bash", "sh", "dirname", "openssl", "id", "env", "cat"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    (tmp_path / "python3").symlink_to(sys.executable)
    bare = {"PATH": str(tmp_path), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}  # no Java, no Maven, no apt
    said = pytested(ONE_TEST, **bare)
    assert "The Kafka tests need a broker." in said
    assert "apt-get install maven" in said
    assert "--no-kafka" in said
    assert "1 error" in said
