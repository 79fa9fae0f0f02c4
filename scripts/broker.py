"""Runs one Apache Kafka broker, a single KRaft node on loopback; called by scripts/broker, needs only Python.

Kafka comes from COPYWATCH_KAFKA_HOME (a folder with `libs/*.jar`, such as an unpacked release), else from the user's
cache folder, into which Maven downloads it, as Maven's settings say. Missing Java and Maven are installed as Debian
packages. A broker is identified by its data folder, whose lock it holds while it runs.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from pathlib import Path

KAFKA = "4.1.0"
LOG4J = "2.24.3"  # the version of this Kafka; this part writes Kafka's log and is not among its dependencies
LEAST_JAVA = 17
START_S = 120.0  # three seconds on an idle machine
STOP_S = 60.0
MEMORY_MB = 512
LOOPBACK = "127.0.0.1"
QUICK_TO_START = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]  # half the CPU time, and fast enough for one node

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>copywatch</groupId> <artifactId>broker</artifactId> <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId> <artifactId>kafka_2.13</artifactId> <version>{KAFKA}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId> <artifactId>log4j-slf4j-impl</artifactId> <version>{LOG4J}</version>
    </dependency>
  </dependencies>
</project>
"""
COPY_JARS = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"

# A single node, so nothing is replicated; clients create topics with the settings that they need.
PROPERTIES = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,"
    "SASL_SSL:SASL_SSL",
    "auto.create.topics.enable": "false",
    "broker.session.timeout.ms": "2000",  # after a crash it waits for its own old session
    "broker.heartbeat.interval.ms": "500",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.dedupe.buffer.size": str(8 << 20),
}


class BrokerError(Exception):
    """An error message for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/broker", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser("start", help="start the broker; returns when it responds")
    starting.add_argument("--port", type=_port, help="port for clients; by default the last one, else a free one")
    starting.add_argument("--memory", type=int, default=MEMORY_MB, help="megabytes for Java's heap")
    starting.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a Kafka property")
    stopping = commands.add_parser("stop", help="stop the broker and wait until it has exited")
    asking = commands.add_parser("status", help="print whether it responds; exit code 0 if it does")
    for command in (starting, stopping, asking):
        command.add_argument("--data", type=Path, default=default_data(), help="data folder (default: %(default)s)")
    commands.add_parser("fetch", help="only download Kafka, and install Java and Maven")
    args = parser.parse_args(arguments)
    try:
        if args.command == "fetch":
            print(f"Apache Kafka is in {kafka_libs().parent}.")
            return 0
        node = Node(args.data.expanduser().absolute())
        if args.command == "start":
            address = node.start(args.port, args.memory, dict(_pair(one) for one in args.set))
            print(f"The broker is running at {address}.")
            return 0
        if args.command == "stop":
            print("The broker is stopped." if node.stop() else f"No broker is running in {node.folder}.")
            return 0
        running = node.answers()
        print(f"The broker is running at {node.address}." if running else f"No broker responds in {node.folder}.")
        return 0 if running else 1
    except BrokerError as error:
        print(f"broker: {error}", file=sys.stderr)
        return 1


class Node:
    """The broker of one data folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "broker.log"
        self._properties = folder / "server.properties"
        self._lock = folder / "broker.lock"  # held by the broker; contains its process id

    @property
    def address(self) -> str:
        """Address for clients, as of the last start."""
        found = re.search(r"^advertised\.listeners=(?:.*,)?PLAINTEXT://([^,\s]+)", self._written(), re.MULTILINE)
        return found[1] if found else ""

    @property
    def pid(self) -> int | None:
        """Process id of the running broker, or None."""
        try:
            with self._lock.open("r") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(lock.read())
        except (FileNotFoundError, ValueError):
            pass
        return None

    def answers(self) -> bool:
        return self.pid is not None and _answers(self.address)

    def start(self, port: int | None, memory_mb: int, more: dict[str, str]) -> str:
        """Starts the broker; returns its address once it responds."""
        if memory_mb < 128:
            raise BrokerError(f"--memory {memory_mb} is too little for Kafka; use 128 or more.")
        libs, java = kafka_libs(), find_java()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self._lock.open("a+")
        except OSError as error:
            raise BrokerError(
                f"{self.folder} cannot be written ({error.strerror}); choose another by --data."
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BrokerError(f"a broker is already running in {self.folder}, at {self.address}.") from None
            self._configure(port, more)
            java_call = [java, *QUICK_TO_START, "-Dorg.apache.logging.log4j.level=WARN", "-cp", f"{libs}/*"]
            self._format(java_call)
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    [*java_call[:1], f"-Xmx{memory_mb}m", *java_call[1:], "kafka.Kafka", str(self._properties)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C in this terminal must not stop it
                    pass_fds=[lock.fileno()],
                )
            lock.truncate(0)
            lock.write(f"{process.pid}\n")
        self._await(process)
        return self.address

    def stop(self) -> bool:
        """Stops the broker; False if none is running."""
        pid = self.pid
        if pid is None:
            return False
        os.kill(pid, signal.SIGTERM)
        if not _wait_until(lambda: self.pid is None, STOP_S):
            os.kill(pid, signal.SIGKILL)
            if not _wait_until(lambda: self.pid is None, STOP_S):
                raise BrokerError(f"process {pid} cannot be stopped.")
        return True

    def _written(self) -> str:
        return self._properties.read_text() if self._properties.exists() else ""

    def _configure(self, port: int | None, more: dict[str, str]) -> None:
        """Writes the properties that Kafka reads; the port is the last one unless given."""
        before = int(self.address.rpartition(":")[2] or 0)
        port = port or (before if before and _is_free(before) else _free_port())
        if not _is_free(port):
            raise BrokerError(f"port {port} is in use; choose another by --port, or omit it for a free one.")
        controller, clients = f"{LOOPBACK}:{_free_port()}", f"PLAINTEXT://{LOOPBACK}:{port}"
        properties = {
            **PROPERTIES,
            "listeners": clients,
            "log.dirs": str(self.folder / "topics"),
            "controller.quorum.voters": f"1@{controller}",
            **more,
        }
        properties.setdefault("advertised.listeners", properties["listeners"])
        properties["listeners"] += f",CONTROLLER://{controller}"
        self._properties.touch(mode=0o600)  # may contain passwords
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))

    def _format(self, java_call: list[str]) -> None:
        if (self.folder / "topics" / "meta.properties").exists():
            return
        cluster = (
            urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        )  # "-" is not allowed at the start
        tool = [*java_call, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(self._properties)]
        formatted = subprocess.run(tool, capture_output=True, text=True)
        if formatted.returncode != 0:
            raise BrokerError(f"Kafka cannot use {self.folder}: {_last_line(formatted.stderr or formatted.stdout)}")

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        if not _wait_until(lambda: process.poll() is not None or _answers(self.address), START_S):
            process.kill()
            raise BrokerError(f"Kafka did not respond within {START_S:.0f} s; see {self.log}.")
        if process.returncode is not None:
            last = _last_line(self.log.read_text(errors="replace"))
            raise BrokerError(f"Kafka exited during start-up: {last} (see {self.log})")


def kafka_libs() -> Path:
    """The folder of Kafka's jars, downloaded if necessary."""
    named = os.environ.get("COPYWATCH_KAFKA_HOME")
    if named:
        libs = Path(named).expanduser().absolute() / "libs"
        if not list(libs.glob("kafka_*.jar")):
            raise BrokerError(f"COPYWATCH_KAFKA_HOME is {named}, but {libs} has no kafka_*.jar.")
        return libs
    libs = _cache() / "copywatch" / f"kafka-{KAFKA}" / "libs"
    if not libs.exists():
        _fetch(libs)
    return libs


def _fetch(libs: Path) -> None:
    """Downloads all jars or none: into a temporary folder, then renamed."""
    if shutil.which("mvn") is None:
        _install("Maven", "maven")
    try:
        libs.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix="fetching-", dir=libs.parent))
    except OSError as error:
        raise BrokerError(
            f"{libs.parent} cannot be written ({error.strerror}); set COPYWATCH_KAFKA_HOME to a folder with Kafka."
        ) from None
    try:
        (aside / "pom.xml").write_text(POM)
        problem = _maven(aside)
        if not list((aside / "libs").glob("kafka_*.jar")):
            raise BrokerError(
                f"Maven could not download Apache Kafka {KAFKA}: {problem}; set COPYWATCH_KAFKA_HOME to a folder "
                "with Kafka instead."
            )
        if not libs.exists():  # unless another process was first
            (aside / "libs").rename(libs)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _maven(folder: Path) -> str:
    """Runs Maven with progress on stderr; returns its first error."""
    jars, problem = folder / "libs", ""
    call = [
        "mvn",
        "-B",
        "-f",
        str(folder / "pom.xml"),
        COPY_JARS,
        "-DincludeScope=runtime",
        f"-DoutputDirectory={jars}",
    ]
    print(f"Downloading Apache Kafka {KAFKA} with Maven: about 45 files, 43 MB.", file=sys.stderr)
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        n_files = 0
        for line in process.stdout:
            if "Downloaded" in line:
                n_files += 1
                if sys.stderr.isatty():
                    print(f"\r  {n_files} files downloaded", end="", file=sys.stderr, flush=True)
            elif "ERROR" in line and not problem:
                problem = re.sub(r"\x1b\[[0-9;]*m|\[ERROR\]", "", line.replace("[\x1b[1;31mERROR\x1b[m]", "")).strip()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"  {len(list(jars.glob('*.jar')))} jars; {n_files} files downloaded.", file=sys.stderr)
    return problem or "no jars were copied"


def find_java() -> str:
    """A java that is new enough for Kafka; that of JAVA_HOME comes first."""
    home = os.environ.get("JAVA_HOME")
    if _java_version(java := f"{home}/bin/java" if home else "java") >= LEAST_JAVA:
        return java
    if home:
        raise BrokerError(f"JAVA_HOME is {home}, which has no Java {LEAST_JAVA} or newer.")
    _install(f"Java {LEAST_JAVA} or newer", "default-jre-headless")
    if (found := _java_version(java)) < LEAST_JAVA:
        raise BrokerError(f"Kafka needs Java {LEAST_JAVA} or newer and found {found}; install one and set JAVA_HOME.")
    return java


def _java_version(java: str) -> int:
    try:
        output = subprocess.run([java, "-version"], capture_output=True, text=True).stderr
    except OSError:
        return 0
    found = re.search(r'version "(\d+)', output)
    return int(found[1]) if found else 0


def _install(what: str, package: str) -> None:
    """Uses install_debian of scripts/venv.sh, which prints its own error."""
    script = 'source "$0"; install_debian "$1"'
    print(f"{what} is missing: installing the Debian package {package}.", file=sys.stderr)
    if subprocess.run(["bash", "-c", script, str(Path(__file__).with_name("venv.sh")), package]).returncode != 0:
        raise BrokerError(f"{what} is needed; on Debian: apt-get install {package}.")


def _answers(address: str) -> bool:
    """Whether a broker responds to an ApiVersions request."""
    host, _, port = address.rpartition(":")
    header = struct.pack(">hhih", 18, 0, 1, -1)  # ApiVersions 0, correlation 1, no client id
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(struct.pack(">i", len(header)) + header)
            reply = connection.recv(10, socket.MSG_WAITALL)
    except (OSError, ValueError):
        return False
    return len(reply) == 10 and struct.unpack(">iih", reply)[1:] == (1, 0)


def _wait_until(is_so: Callable[[], bool], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def _is_free(port: int) -> bool:
    try:
        socket.create_server((LOOPBACK, port)).close()
    except OSError:
        return False
    return True


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 65535, got {text!r}")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not mark or not name or "\n" in text:
        raise BrokerError("--set needs KEY=VALUE on one line, such as --set log.retention.hours=1.")
    return name, value


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\tat ")]
    return lines[-1] if lines else "no output"


def _folder(variable: str, fallback: str) -> Path:
    base = Path(os.environ.get(variable, ""))
    return base if base.is_absolute() else Path.home() / fallback


def _cache() -> Path:
    return _folder("XDG_CACHE_HOME", ".cache")


def default_data() -> Path:
    return _folder("XDG_DATA_HOME", ".local/share") / "copywatch-broker"


if __name__ == "__main__":
    sys.exit(main())
