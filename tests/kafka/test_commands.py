"""What users and testers type: channels in the topic, and tests with another broker or none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from monitor.config.settings import ChannelSettings
from monitor.errors import ConfigError
from monitor.kafka.channel_assignment import refuse_files
from tests.commands.test_channels import copywatch
from tests.support.broker import NAMED, Broker, free_ports, session_broker
from tests.support.planted_fleet import Fleet, House

pytest_plugins = ["pytester"]


def test_channels_are_shared_listed_and_removed_by_command(broker: Broker, tmp_path: Path) -> None:
    config = str(Fleet(House(tmp_path, ""), broker, "commands", "commands.frames").config(partitions=2))
    shared = ("--kafka", "--config", config)
    added = copywatch("channels", "add", "seven", "-", *shared, stdin="rtsp://u:s3cret@cam/7\n")
    assert (added.returncode, added.stdout) == (0, "shared: seven (rtsp://cam)\n")
    gone = copywatch("channels", "rm", "seven", "eight", *shared)
    assert gone.returncode == 3
    assert "no channel eight is shared" in gone.stderr
    listed = copywatch("channels", "list", "--json", *shared)
    assert [(one["name"], one["url"]) for one in json.loads(listed.stdout)] == [("seven", "rtsp://***@cam/7")]
    removed = copywatch("channels", "rm", "seven", *shared)
    assert (removed.returncode, removed.stdout) == (0, "removed: seven\n")
    assert broker.read("commands.channels")[-1].value is None


def test_a_broker_that_does_not_answer_and_a_file_are_refused_in_a_sentence(tmp_path: Path) -> None:
    config = tmp_path / "copywatch.yaml"
    config.write_text(f"kafka: {{bootstrap: '127.0.0.1:{free_ports(1)[0]}'}}\n")
    done = copywatch("channels", "list", "--kafka", "--config", str(config))
    assert done.returncode == 4
    assert "does not answer" in done.stderr.splitlines()[-1]
    with pytest.raises(ConfigError, match="a network address, not a file"):
        refuse_files(ChannelSettings(name="seven", url="film.mp4"))


def test_no_kafka_leaves_out_what_needs_a_broker_and_nothing_else(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import broker, pytest_addoption, pytest_collection_modifyitems")
    pytester.makepyfile("def test_with(broker): raise AssertionError\ndef test_without(): pass")
    pytester.inline_run("--no-kafka", "-p", "no:cacheprovider").assertoutcome(passed=1)


def test_a_broker_that_is_named_is_used_as_it_is_and_not_broken(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMED, broker.address)
    named = session_broker(tmp_path)
    assert named.topics() == broker.topics()
    with pytest.raises(pytest.skip.Exception, match="not ours to break"):
        named.kill()


@pytest.mark.system
def test_where_no_broker_can_be_had_the_tests_fail_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setenv(NAMED, nobody)
    with pytest.raises(pytest.fail.Exception, match=f"{NAMED} is {nobody}, and nothing answers there"):
        session_broker(tmp_path / "broker")
    monkeypatch.delenv(NAMED)
    for tool in ("bash", "sh", "dirname", "openssl", "id", "env", "cat"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    (tmp_path / "python3").symlink_to(sys.executable)
    for name in ("PATH", "HOME", "XDG_CACHE_HOME"):  # no Java, no Maven, no apt
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("COPYWATCH_KAFKA_HOME", "JAVA_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(pytest.fail.Exception) as failed:
        session_broker(tmp_path / "broker")
    for words in ("The Kafka tests need a broker.", "apt-get install maven", NAMED, "--no-kafka"):
        assert words in str(failed.value)
