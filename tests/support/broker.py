"""The Kafka broker of the tests: Apache Kafka itself by scripts/broker, one for a whole run, on free ports.

`COPYWATCH_TEST_KAFKA=host:port` names one that runs already; it is used as it is, and tests that break a broker or want
its passwords and certificates leave it alone. `--no-kafka` leaves out every test that asks for a broker.
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

_WAITING: list[subprocess.Popen[bytes]] = []  # children that stop a broker when we are gone

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """What is written to a topic."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int | None = None


@dataclass
class Broker:
    """A broker that answers; its methods return when what they say is so."""

    address: str
    folder: Path | None = None  # none: it was named, and is not ours to break
    ports: dict[str, int] = field(default_factory=dict)

    # ---- breaking it

    def start(self) -> None:
        assert self.folder
        _script("start", "--data", str(self.folder), *_settings(self.folder, self.ports))
        # It answers before it leads anything again: who asks too early is told of topics without leaders.
        wait_for(lambda: run_now(self._with_admin(_has_leaders)), "the broker to lead its topics")

    def stop(self) -> None:
        """A clean end; what runs with it sees its connections closed."""
        self._ours()
        _script("stop", "--data", str(self.folder))

    def kill(self) -> None:
        """By SIGKILL."""
        self.send(signal.SIGKILL)
        wait_for(lambda: not is_alive(self._pid), "the broker to be gone")

    def move(self) -> None:
        """Restarts it at another address."""
        self.stop()
        self.ports["PLAINTEXT"] = free_ports(1)[0]
        self.address = f"127.0.0.1:{self.ports['PLAINTEXT']}"
        self.start()

    def send(self, number: int) -> None:
        """A signal; SIGSTOP and SIGCONT make it deaf for a while."""
        self._ours()
        os.kill(self._pid, number)

    @property
    def _pid(self) -> int:
        assert self.folder
        return int((self.folder / "broker.lock").read_text())

    def _ours(self) -> None:
        if self.folder is None:
            pytest.skip(f"the broker that {NAMED} names is not ours to break or to ask for certificates")

    # ---- its other doors

    def proxied(self) -> tuple[int, int]:
        """Ports for a proxy: where clients are told that the broker is, and where it is."""
        self._ours()
        return self.ports["PROXY"], self.ports["PROXIED"]

    def door(self, protocol: str) -> str:
        """Where it answers by SSL, SASL_PLAINTEXT (mechanism PLAIN) or SASL_SSL (SCRAM-SHA-256)."""
        self._ours()
        return f"localhost:{self.ports[protocol]}"

    @property
    def ca_file(self) -> Path:
        """The authority that signed its certificate."""
        self._ours()
        assert self.folder
        return self.folder / "ca.pem"

    def add_scram_user(self, name: str, password: str) -> None:
        """By Kafka's own tool, since no client of ours can."""
        self._ours()
        libs = f"{_script('fetch').partition(' is in ')[2].strip().rstrip('.')}/libs/*"
        tool = ["java", "-XX:TieredStopAtLevel=1", "-cp", libs, "kafka.admin.ConfigCommand", "--alter"]
        who = ["--bootstrap-server", self.address, "--entity-type", "users", "--entity-name", name]
        what = ["--add-config", f"SCRAM-SHA-256=[iterations=4096,password={password}]"]
        subprocess.run([*tool, *who, *what], check=True, capture_output=True, text=True)

    # ---- topics, for tests that do not run a loop of their own

    def create_topic(self, name: str, partitions: int = 1, **configs: str) -> None:
        run_now(self._create(name, partitions, configs))

    def topics(self) -> set[str]:
        return set(run_now(self._with_admin(lambda admin: admin.list_topics())))

    def write(self, topic: str, records: Iterable[Record]) -> None:
        run_now(self._write(topic, records))

    def read(self, topic: str) -> list[ConsumerRecord[bytes, bytes]]:
        """All that is in it now, by partition and offset; what a transaction left unfinished is not."""
        return run_now(self._read(topic))

    def end_offsets(self, topic: str) -> dict[int, int]:
        return run_now(self._end_offsets(topic))

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """What a consumer group says it has done."""
        offsets = run_now(self._with_admin(lambda admin: admin.list_consumer_group_offsets(group)))
        return {(at.topic, at.partition): found.offset for at, found in offsets.items()}

    async def _create(self, name: str, partitions: int, configs: Mapping[str, str]) -> None:
        named = {key.replace("_", "."): value for key, value in configs.items()}
        topic = NewTopic(name, partitions, 1, topic_configs=named)

        async def create(admin: AIOKafkaAdminClient) -> None:
            await admin.create_topics([topic])
            deadline = time.monotonic() + PATIENCE_S
            while not await _has_leaders(admin, [name]):  # they are chosen a moment later
                assert time.monotonic() < deadline, f"topic {name} has no leaders"
                await asyncio.sleep(0.02)  # between two questions to the broker

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
    """Whether these topics have, or all."""
    return all(
        found["error_code"] == 0 and all(one["error_code"] == 0 for one in found["partitions"])
        for found in await admin.describe_topics(topics)
    )


async def _ends(admin: AIOKafkaAdminClient, consumer: AIOKafkaConsumer, topic: str) -> dict[TopicPartition, int]:
    (found,) = await admin.describe_topics([topic])
    numbers = [one["partition"] for one in found["partitions"]]
    ends: dict[TopicPartition, int] = await consumer.end_offsets([TopicPartition(topic, n) for n in numbers])
    return ends


def begin(folder: Path) -> Broker:
    """A broker of our own in this folder, up."""
    folder.mkdir(parents=True, exist_ok=True)
    make_certificates(folder)
    ports = dict(zip((*LISTENERS, "PROXY"), free_ports(len(LISTENERS) + 1), strict=True))
    broker = Broker(f"127.0.0.1:{ports['PLAINTEXT']}", folder, ports)
    broker.start()
    _stop_when_we_are_gone(folder)
    return broker


def _stop_when_we_are_gone(folder: Path) -> None:
    """A child that waits for the end of our pipe, which comes even where we are killed."""
    words = [
        "sh",
        "-c",
        'cat; exec "$@" >/dev/null',
        "sh",
        str(ROOT / "scripts" / "broker"),
        "stop",
        "--data",
        str(folder),
    ]
    _WAITING.append(subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True))


def session_broker(folder: Path) -> Broker:
    """The one of this run; fails with what to do where none can be had."""
    if named := os.environ.get(NAMED):
        host, _, port = named.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            pytest.fail(f"{NAMED} is {named}, and nothing answers there ({error})", pytrace=False)
        return Broker(named)
    try:
        return begin(folder)
    except subprocess.CalledProcessError as error:
        advice = f"name a running one by {NAMED}=host:port, or leave the Kafka tests out by --no-kafka"
        pytest.fail(f"The Kafka tests need a broker. {error.stderr.strip()} Or {advice}.", pytrace=False)


def _settings(folder: Path, ports: Mapping[str, int]) -> list[str]:
    """Listeners, each on its port; sessions may be shorter than Kafka likes, so that tests need not wait."""
    module = "org.apache.kafka.common.security"
    told = {**ports, "PROXIED": ports["PROXY"]}  # a client of this door goes by way of a proxy there, if there is one
    properties = {
        "listeners": ",".join(f"{name}://127.0.0.1:{ports[name]}" for name in LISTENERS),
        "advertised.listeners": ",".join(f"{name}://127.0.0.1:{told[name]}" for name in LISTENERS),
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
    settings = [word for name, value in properties.items() for word in ("--set", f"{name}={value}")]
    return ["--port", str(ports["PLAINTEXT"]), "--memory", "512", *settings]


def make_certificates(folder: Path) -> None:
    """An authority (ca.pem) and what it signed for localhost (server.pem, key and certificate)."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, text=True)

    new_key = ("-newkey", "rsa:2048", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=tests", "-days", "2")
    openssl("req", *new_key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", "-out", "server.crt", *signing)
    (folder / "server.pem").write_text((folder / "server.key").read_text() + (folder / "server.crt").read_text())


def trusting(broker: Broker) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=broker.ca_file)


def _script(*words: str) -> str:
    done = subprocess.run([ROOT / "scripts" / "broker", *words], check=True, capture_output=True, text=True)
    return done.stdout


def free_ports(count: int) -> list[int]:
    """Different ones: all are held until the last is found."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in servers]
    for server in servers:
        server.close()
    return ports


def is_alive(pid: int) -> bool:
    """Whether it still runs; one that ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Returns as soon as it is so."""
    deadline = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s for {what}"
        time.sleep(0.05)  # between two looks: what is waited for is in another process


def run_now(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)
