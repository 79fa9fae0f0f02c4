"""The Kafka broker of the tests: Apache Kafka started by scripts/broker, one for a whole run, on free ports.

`COPYWATCH_TEST_KAFKA=host:port` names a running broker to use instead; tests that stop a broker or need its passwords
and certificates are then skipped. `--no-kafka` skips every test that needs a broker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

ROOT = Path(__file__).parents[2]
NAMED = "COPYWATCH_TEST_KAFKA"
LISTENERS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL", "PROXIED")
USER, PASSWORD = "alice", "pass-of-alice"
PATIENCE_S = 120.0

_STOPPERS: list[subprocess.Popen[bytes]] = []  # children that stop a broker after this process

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """A record to write."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int | None = None


@dataclass
class Broker:
    """A running broker; its methods return when their effect is visible."""

    address: str
    folder: Path | None = None  # None for a named one, which is never stopped
    ports: dict[str, int] = field(default_factory=dict)

    # ---- stopping it

    def start(self) -> None:
        assert self.folder
        _script("start", "--data", str(self.folder), *_settings(self.folder, self.ports))
        # It answers before its partitions have leaders.
        wait_for(lambda: run_now(self._with_admin(_has_leaders)), "the broker to lead its topics")

    def stop(self) -> None:
        """Stops it cleanly; clients see their connections closed."""
        self.require_own()
        _script("stop", "--data", str(self.folder))

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send(signal.SIGKILL)
        wait_for(lambda: not is_alive(self._pid), "the broker to end")

    def move(self) -> None:
        """Restarts it at another address."""
        self.stop()
        self.ports["PLAINTEXT"] = free_ports(1)[0]
        self.address = f"127.0.0.1:{self.ports['PLAINTEXT']}"
        self.start()

    def send(self, number: int) -> None:
        """Sends a signal; SIGSTOP and SIGCONT pause it."""
        self.require_own()
        os.kill(self._pid, number)

    @property
    def _pid(self) -> int:
        assert self.folder
        return int((self.folder / "broker.lock").read_text())

    def require_own(self) -> None:
        if self.folder is None:
            pytest.skip(f"the broker named by {NAMED} is not stopped by tests, and has no known certificates")

    # ---- its other listeners

    def proxied(self) -> tuple[int, int]:
        """Ports for a proxy: the advertised one, and the one that the broker listens on."""
        self.require_own()
        return self.ports["PROXY"], self.ports["PROXIED"]

    def listener(self, protocol: str) -> str:
        """The address for SSL, SASL_PLAINTEXT (mechanism PLAIN) or SASL_SSL (SCRAM-SHA-256)."""
        self.require_own()
        return f"localhost:{self.ports[protocol]}"

    @property
    def ca_file(self) -> Path:
        """The authority that signed its certificate."""
        self.require_own()
        assert self.folder
        return self.folder / "ca.pem"

    def add_scram_user(self, name: str, password: str) -> None:
        """Uses Kafka's own tool, since aiokafka cannot."""
        self.require_own()
        libs = f"{_script('fetch').partition(' is in ')[2].strip().rstrip('.')}/libs/*"
        tool = ["java", "-XX:TieredStopAtLevel=1", "-cp", libs, "kafka.admin.ConfigCommand", "--alter"]
        who = ["--bootstrap-server", self.address, "--entity-type", "users", "--entity-name", name]
        what = ["--add-config", f"SCRAM-SHA-256=[iterations=4096,password={password}]"]
        subprocess.run([*tool, *who, *what], check=True, capture_output=True, text=True)

    # ---- topics, for tests without an event loop

    def create_topic(self, name: str, partitions: int = 1, **configs: str) -> None:
        run_now(self._create(name, partitions, configs))

    def topics(self) -> set[str]:
        return set(run_now(self._with_admin(lambda admin: admin.list_topics())))

    def write(self, topic: str, records: Iterable[Record]) -> None:
        run_now(self._write(topic, records))

    def read(self, topic: str) -> list[ConsumerRecord[bytes, bytes]]:
        """All committed records, by partition and offset."""
        return run_now(self._read(topic))

    def end_offsets(self, topic: str) -> dict[int, int]:
        return run_now(self._end_offsets(topic))

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """The committed offsets of a consumer group."""
        offsets = run_now(self._with_admin(lambda admin: admin.list_consumer_group_offsets(group)))
        return {(at.topic, at.partition): found.offset for at, found in offsets.items()}

    async def _create(self, name: str, partitions: int, configs: Mapping[str, str]) -> None:
        config = {key.replace("_", "."): value for key, value in configs.items()}
        topic = NewTopic(name, partitions, 1, topic_configs=config)

        async def create(admin: AIOKafkaAdminClient) -> None:
            await admin.create_topics([topic])
            deadline = time.monotonic() + PATIENCE_S
            while not await _has_leaders(admin, [name]):  # they are elected a moment later
                assert time.monotonic() < deadline, f"topic {name} has no leaders"
                await asyncio.sleep(0.02)  # polling interval

        await self._with_admin(create)

    async def _with_admin(self, work: Callable[[AIOKafkaAdminClient], Coroutine[Any, Any, T]]) -> T:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.address)
        await admin.start()
        try:
            return await work(admin)
        finally:
            await admin.close()

    async def _write(self, topic: str, records: Iterable[Record]) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self.address, linger_ms=5, max_request_size=32 << 20) as producer:
            sent = [
                await producer.send(topic, one.value, one.key, partition=one.partition, headers=list(one.headers))
                for one in records
            ]
            await asyncio.gather(*sent)

    async def _end_offsets(self, topic: str) -> dict[int, int]:
        async with AIOKafkaConsumer(bootstrap_servers=self.address) as consumer:
            ends = await self._with_admin(lambda admin: _ends(admin, consumer, topic))
            return {at.partition: end for at, end in ends.items()}

    async def _read(self, topic: str) -> list[ConsumerRecord[bytes, bytes]]:
        reading = AIOKafkaConsumer(bootstrap_servers=self.address, isolation_level="read_committed")
        async with reading as consumer:
            ends = await self._with_admin(lambda admin: _ends(admin, consumer, topic))
            consumer.assign(list(ends))
            await consumer.seek_to_beginning()
            found: list[ConsumerRecord[bytes, bytes]] = []
            for at, end in ends.items():
                while await consumer.position(at) < end:
                    for records in (await consumer.getmany(timeout_ms=200)).values():
                        found += records
        return sorted(found, key=lambda record: (record.partition, record.offset))


async def _has_leaders(admin: AIOKafkaAdminClient, topics: list[str] | None = None) -> bool:
    """Whether all partitions of these topics, or of all topics, have leaders."""
    return all(
        found["error_code"] == 0 and all(one["error_code"] == 0 for one in found["partitions"])
        for found in await admin.describe_topics(topics)
    )


async def _ends(admin: AIOKafkaAdminClient, consumer: AIOKafkaConsumer, topic: str) -> dict[TopicPartition, int]:
    (found,) = await admin.describe_topics([topic])
    numbers = [one["partition"] for one in found["partitions"]]
    ends: dict[TopicPartition, int] = await consumer.end_offsets([TopicPartition(topic, n) for n in numbers])
    return ends


def start_broker(folder: Path) -> Broker:
    """A new broker with its data in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    make_certificates(folder)
    ports = dict(zip((*LISTENERS, "PROXY"), free_ports(len(LISTENERS) + 1), strict=True))
    broker = Broker(f"127.0.0.1:{ports['PLAINTEXT']}", folder, ports)
    broker.start()
    _stop_after_this_process(folder)
    return broker


def _stop_after_this_process(folder: Path) -> None:
    """Starts a child that waits for the end of its stdin, which comes even if this process is killed."""
    command = [
        "sh",
        "-c",
        'cat; exec "$@" >/dev/null',
        "sh",
        str(ROOT / "scripts" / "broker"),
        "stop",
        "--data",
        str(folder),
    ]
    _STOPPERS.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))


def session_broker(folder: Path) -> Broker:
    """The broker of this run; fails with instructions if there is none."""
    if named := os.environ.get(NAMED):
        host, _, port = named.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            pytest.fail(f"{NAMED} is {named}, but nothing answers there ({error})", pytrace=False)
        return Broker(named)
    try:
        return start_broker(folder)
    except subprocess.CalledProcessError as error:
        advice = f"name a running one with {NAMED}=host:port, or skip the Kafka tests with --no-kafka"
        pytest.fail(f"The Kafka tests need a broker. {error.stderr.strip()} Or {advice}.", pytrace=False)


def _settings(folder: Path, ports: Mapping[str, int]) -> list[str]:
    """One listener per protocol; short sessions are allowed, so that tests need not wait."""
    module = "org.apache.kafka.common.security"
    advertised = {**ports, "PROXIED": ports["PROXY"]}  # clients of this listener go through a proxy
    properties = {
        "listeners": ",".join(f"{name}://127.0.0.1:{ports[name]}" for name in LISTENERS),
        "advertised.listeners": ",".join(f"{name}://127.0.0.1:{advertised[name]}" for name in LISTENERS),
        "listener.security.protocol.map": ",".join(
            f"{name}:{'PLAINTEXT' if name in ('CONTROLLER', 'PROXIED') else name}"
            for name in ("CONTROLLER", *LISTENERS)
        ),
        "group.min.session.timeout.ms": "500",
        "message.max.bytes": str(32 << 20),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "server.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(folder / "ca.pem"),
        "listener.name.sasl_plaintext.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{module}.plain.PlainLoginModule required "
        f'user_{USER}="{PASSWORD}";',
        "listener.name.sasl_ssl.sasl.enabled.mechanisms": "SCRAM-SHA-256",
        "listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
    }
    settings = [part for name, value in properties.items() for part in ("--set", f"{name}={value}")]
    return ["--port", str(ports["PLAINTEXT"]), "--memory", "512", *settings]


def make_certificates(folder: Path) -> None:
    """A certificate authority (ca.pem), and key and certificate for localhost (server.pem)."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, text=True)

    new_key = ("-newkey", "rsa:2048", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=tests", "-days", "2")
    openssl("req", *new_key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.crt", *signing)
    (folder / "server.pem").write_text((folder / "server.key").read_text() + (folder / "server.crt").read_text())


def trusting(broker: Broker) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=broker.ca_file)


def _script(*arguments: str) -> str:
    done = subprocess.run([ROOT / "scripts" / "broker", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def free_ports(count: int) -> list[int]:
    """Distinct ones: all are held until the last is found."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in servers]
    for server in servers:
        server.close()
    return ports


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s for {what}"
        time.sleep(0.05)  # polls another process


def run_now(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)
