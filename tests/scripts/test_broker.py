"""scripts/broker: its arguments, its output, and the broker that it runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from tests.support.broker import PASSWORD, ROOT, USER, Broker, Record, is_alive, trusting

SCRIPT = str(ROOT / "scripts" / "broker")


def run(*words: str, **environment: str) -> tuple[int, str]:
    """Exit code, and everything that was printed."""
    whole = {**os.environ, **environment}
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, env=whole, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_a_broker_retains_records_across_a_restart_and_a_kill(broker: Broker) -> None:
    broker.create_topic("records", 3)
    broker.write("records", [Record(f"{n}".encode(), b"key", [("h", b"1")]) for n in range(5)])
    pid = broker._pid
    broker.stop()
    assert not is_alive(pid)
    broker.start()
    broker.write("records", [Record(b"5", b"key")])
    broker.kill()
    broker.start()
    found = broker.read("records")
    assert [record.value for record in found] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert found[0].headers == (("h", b"1"),)
    assert sum(broker.end_offsets("records").values()) == 6


def test_status_and_a_second_start_print_its_address(broker: Broker) -> None:
    broker.require_own()
    assert run("status", "--data", str(broker.folder)) == (0, f"The broker is running at {broker.address}.\n")
    code, words = run("start", "--data", str(broker.folder))
    assert code == 1
    assert words == f"broker: a broker is already running in {broker.folder}, at {broker.address}.\n"


def test_its_secure_listeners_check_certificate_and_password(broker: Broker) -> None:
    broker.create_topic("listeners")

    async def send(protocol: str, **more: object) -> None:
        more |= {"security_protocol": protocol, "retry_backoff_ms": 10}
        async with AIOKafkaProducer(bootstrap_servers=broker.listener(protocol), **more) as producer:
            await producer.send_and_wait("listeners", protocol.encode())

    plain = {"sasl_mechanism": "PLAIN", "sasl_plain_username": USER}
    asyncio.run(send("SSL", ssl_context=trusting(broker)))
    asyncio.run(send("SASL_PLAINTEXT", **plain, sasl_plain_password=PASSWORD))
    with pytest.raises(KafkaError):
        asyncio.run(send("SASL_PLAINTEXT", **plain, sasl_plain_password="wrong"))
    assert [record.value for record in broker.read("listeners")] == [b"SSL", b"SASL_PLAINTEXT"]


def test_stop_and_status_without_a_broker(tmp_path: Path) -> None:
    assert run("stop", "--data", str(tmp_path)) == (0, f"No broker is running in {tmp_path}.\n")
    assert run("status", "--data", str(tmp_path)) == (1, f"No broker responds in {tmp_path}.\n")


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["start", "--port", "0"], {}, "expected a number from 1 to 65535, got '0'"),
        (["start", "--memory", "3"], {}, "--memory 3 is too little for Kafka; use 128 or more."),
        (["start", "--set", "lonely"], {}, "--set needs KEY=VALUE on one line"),
        (["fetch"], {"COPYWATCH_KAFKA_HOME": "/nonexistent"}, "/nonexistent/libs has no kafka_*.jar"),
        (["start"], {"JAVA_HOME": "/nonexistent"}, "JAVA_HOME is /nonexistent, which has no Java 17 or newer"),
    ],
)
def test_an_invalid_option_or_folder_is_named(
    words: list[str], environment: dict[str, str], expected: str, tmp_path: Path, broker: Broker
) -> None:
    where = ["--data", str(tmp_path)] if words[0] == "start" else []
    code, answer = run(*words, *where, **environment)
    assert code != 0
    assert expected in answer
    assert "Traceback" not in answer


def test_a_port_in_use_and_a_setting_that_kafka_refuses_are_named(broker: Broker, tmp_path: Path) -> None:
    port = broker.address.rpartition(":")[2]
    code, answer = run("start", "--data", str(tmp_path / "a"), "--port", port)
    assert (code, answer) == (
        1,
        f"broker: port {port} is in use; choose another by --port, or omit it for a free one.\n",
    )
    code, answer = run("start", "--data", str(tmp_path / "b"), "--set", "num.io.threads=many")
    assert code == 1
    assert "num.io.threads" in answer
    assert "Traceback" not in answer


def test_a_failed_download_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    broken = tmp_path / "mvn"
    broken.write_text("#!/bin/sh\necho '[ERROR] no such host'\nexit 1\n")
    broken.chmod(0o755)
    cache = tmp_path / "cache"
    path = f"{tmp_path}:{os.environ['PATH']}"
    code, answer = run("fetch", XDG_CACHE_HOME=str(cache), PATH=path, COPYWATCH_KAFKA_HOME="")
    assert code == 1
    assert "Maven could not download Apache Kafka" in answer
    assert "no such host" in answer
    assert not [path for path in cache.rglob("*") if path.is_file()]
