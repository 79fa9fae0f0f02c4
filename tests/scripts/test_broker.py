"""scripts/broker: what it takes, what it says, and the broker that it runs."""

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


def said(*words: str, **environment: str) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    whole = {**os.environ, **environment}
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, env=whole, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_a_broker_answers_keeps_records_over_a_restart_and_a_kill_and_stops(broker: Broker) -> None:
    broker.create_topic("kept", 3)
    broker.write("kept", [Record(f"{n}".encode(), b"key", [("h", b"1")]) for n in range(5)])
    pid = broker._pid
    broker.stop()
    assert not is_alive(pid)
    broker.start()
    broker.write("kept", [Record(b"5", b"key")])
    broker.kill()
    broker.start()
    found = broker.read("kept")
    assert [record.value for record in found] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert found[0].headers == (("h", b"1"),)
    assert sum(broker.end_offsets("kept").values()) == 6


def test_status_and_a_second_start_say_where_it_is(broker: Broker) -> None:
    broker._ours()
    assert said("status", "--data", str(broker.folder)) == (0, f"The broker answers at {broker.address}.\n")
    code, words = said("start", "--data", str(broker.folder))
    assert code == 1
    assert words == f"broker: a broker runs in {broker.folder} already, at {broker.address}.\n"


def test_its_other_doors_want_the_right_certificate_and_password(broker: Broker) -> None:
    broker.create_topic("doors")

    async def through(protocol: str, **more: object) -> None:
        more |= {"security_protocol": protocol, "retry_backoff_ms": 10}
        async with AIOKafkaProducer(bootstrap_servers=broker.door(protocol), **more) as producer:
            await producer.send_and_wait("doors", protocol.encode())

    plain = {"sasl_mechanism": "PLAIN", "sasl_plain_username": USER}
    asyncio.run(through("SSL", ssl_context=trusting(broker)))
    asyncio.run(through("SASL_PLAINTEXT", **plain, sasl_plain_password=PASSWORD))
    with pytest.raises(KafkaError):
        asyncio.run(through("SASL_PLAINTEXT", **plain, sasl_plain_password="wrong"))
    assert [record.value for record in broker.read("doors")] == [b"SSL", b"SASL_PLAINTEXT"]


def test_where_none_runs_stop_and_status_say_so(tmp_path: Path) -> None:
    assert said("stop", "--data", str(tmp_path)) == (0, f"No broker runs in {tmp_path}.\n")
    assert said("status", "--data", str(tmp_path)) == (1, f"No broker answers in {tmp_path}.\n")


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["start", "--port", "0"], {}, "expected a number from 1 to 65535, got '0'"),
        (["start", "--memory", "3"], {}, "--memory 3 is too little for Kafka; give it 128 or more."),
        (["start", "--set", "lonely"], {}, "--set wants KEY=VALUE on one line"),
        (["fetch"], {"COPYWATCH_KAFKA_HOME": "/nonexistent"}, "/nonexistent/libs has no kafka_*.jar"),
        (["start"], {"JAVA_HOME": "/nonexistent"}, "JAVA_HOME is /nonexistent, but Java 17 or newer is not there"),
    ],
)
def test_what_it_cannot_use_it_names(
    words: list[str], environment: dict[str, str], expected: str, tmp_path: Path, broker: Broker
) -> None:
    where = ["--data", str(tmp_path)] if words[0] == "start" else []
    code, answer = said(*words, *where, **environment)
    assert code != 0
    assert expected in answer
    assert "Traceback" not in answer


def test_a_taken_port_and_a_setting_that_kafka_refuses_are_named(broker: Broker, tmp_path: Path) -> None:
    port = broker.address.rpartition(":")[2]
    code, answer = said("start", "--data", str(tmp_path / "a"), "--port", port)
    assert (code, answer) == (
        1,
        f"broker: port {port} is taken; name another by --port, or leave it out for a free one.\n",
    )
    code, answer = said("start", "--data", str(tmp_path / "b"), "--set", "num.io.threads=many")
    assert code == 1
    assert "num.io.threads" in answer
    assert "Traceback" not in answer


def test_what_maven_cannot_fetch_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    broken = tmp_path / "mvn"
    broken.write_text("#!/bin/sh\necho '[ERROR] no such host'\nexit 1\n")
    broken.chmod(0o755)
    cache = tmp_path / "cache"
    path = f"{tmp_path}:{os.environ['PATH']}"
    code, answer = said("fetch", XDG_CACHE_HOME=str(cache), PATH=path, COPYWATCH_KAFKA_HOME="")
    assert code == 1
    assert "Maven could not fetch Apache Kafka" in answer
    assert "no such host" in answer
    assert not [path for path in cache.rglob("*") if path.is_file()]
