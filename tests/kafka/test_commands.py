"""Commands for shared channels, and tests with a named broker or none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from monitor.config.settings import ChannelSettings
from monitor.errors import ConfigError
from monitor.kafka.channel_assignment import refuse_files
from tests.support.broker import NAMED, Broker, free_ports, session_broker
from tests.support.command import copywatch
from tests.support.planted_fleet import PlantedFleet, PlantedLibrary

pytest_plugins = ["pytester"]


def test_shared_channels_are_added_listed_and_removed(broker: Broker, tmp_path: Path) -> None:
    config = str(PlantedFleet(PlantedLibrary(tmp_path, ""), broker, "commands", "commands.frames").config(partitions=2))
    shared = ("--kafka", "--config", config)
    added = copywatch("channels", "add", "seven", "-", *shared, stdin="rtsp://u:s3cret@cam/7\n")
    assert (added.returncode, added.stdout) == (0, "shared: seven (rtsp://cam)\n")
    refused = copywatch("channels", "rm", "seven", "eight", *shared)
    assert refused.returncode == 3
    assert "no shared channel eight" in refused.stderr
    listed = copywatch("channels", "list", "--json", *shared)
    assert [(one["name"], one["url"]) for one in json.loads(listed.stdout)] == [("seven", "rtsp://***@cam/7")]
    removed = copywatch("channels", "rm", "seven", *shared)
    assert (removed.returncode, removed.stdout) == (0, "removed: seven\n")
    assert broker.read("commands.channels")[-1].value is None


def test_an_unreachable_broker_and_a_file_are_refused_in_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "copywatch.yaml"
    config.write_text(f"kafka: {{bootstrap: '127.0.0.1:{free_ports(1)[0]}'}}\n")
    done = copywatch("channels", "list", "--kafka", "--config", str(config))
    assert done.returncode == 4
    assert "does not answer" in done.stderr.splitlines()[-1]
    with pytest.raises(ConfigError, match="a network address, not a file"):
        refuse_files(ChannelSettings(name="seven", url="film.mp4"))


def test_no_kafka_skips_the_tests_that_need_a_broker_only(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import broker, pytest_addoption, pytest_collection_modifyitems")
    pytester.makepyfile("def test_with(broker): raise AssertionError\ndef test_without(): pass")
    pytester.inline_run("--no-kafka", "-p", "no:cacheprovider").assertoutcome(passed=1)


def test_a_named_broker_is_used_and_never_stopped(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMED, broker.address)
    named = session_broker(tmp_path)
    assert named.topics() == broker.topics()
    with pytest.raises(pytest.skip.Exception, match="is not stopped by tests"):
        named.kill()


@pytest.mark.system
def test_without_a_broker_the_tests_fail_with_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unused = f"127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setenv(NAMED, unused)
    with pytest.raises(pytest.fail.Exception, match=f"{NAMED} is {unused}, but nothing answers there"):
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
    for text in ("The Kafka tests need a broker.", "apt-get install maven", NAMED, "--no-kafka"):
        assert text in str(failed.value)
