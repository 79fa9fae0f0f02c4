"""Builds our Dockerfile and runs it as its user with namespaces only, without a container engine.

The root is a tmpfs with the system and its Python bound read-only, in place of the base image. The lines of the
Dockerfile run as they are and create /opt/copywatch, the user in /etc and /data; then everything is read-only except
/data and /tmp. The command is process 1, with its own process, mount and network namespaces.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.serve_process import die_with_parent, wait_until

PYTHON = Path("/opt/python/bin")  # `python` of the base image
LOOPBACK_UP = (  # what `ip link set lo up` does: SIOCSIFFLAGS with IFF_UP and IFF_RUNNING
    "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 0x41))"
)
OURS = ("COPYWATCH_", "PYTHON", "VIRTUAL_ENV", "TMPDIR")  # variables of the tests


class Dockerfile:
    """A parsed Dockerfile: the instructions of its first stage, and those of its last."""

    def __init__(self, path: Path) -> None:
        text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
        lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
        first, last = (n for n, line in enumerate(lines) if line.startswith("FROM "))
        self.build = [tuple(line.split(None, 1)) for line in lines[first:last]]
        self.final = [tuple(line.split(None, 1)) for line in lines[last:]]

    def word(self, name: str) -> str:
        (found,) = [rest for word, rest in self.final if word == name]
        return found

    def command(self, name: str) -> list[str]:
        words: list[str] = json.loads(self.word(name)[self.word(name).index("[") :])
        return words

    @property
    def environment(self) -> dict[str, str]:
        pairs = dict(pair.split("=", 1) for pair in shlex.split(self.word("ENV")))
        return {name: value.replace("$PATH", "/usr/local/bin:/usr/bin:/bin") for name, value in pairs.items()}


@dataclass(frozen=True)
class Container:
    """Builds the image and runs its commands; all files that it creates are in `folder`."""

    dockerfile: Dockerfile
    folder: Path

    def __post_init__(self) -> None:
        for name in ("root", "venv", "source", "data", "config", "tmp"):
            (self.folder / name).mkdir(parents=True)
        subprocess.run(["cp", "--archive", "/etc", self.folder / "etc"], check=True)
        (self.folder / "etc/resolv.conf").unlink(missing_ok=True)  # often a symbolic link
        shutil.copy("/etc/resolv.conf", self.folder / "etc/resolv.conf")

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def config(self) -> Path:
        return self.folder / "config"

    @property
    def packages(self) -> Path:
        """site-packages of the image's environment."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "venv/lib" / version / "site-packages"

    def build(self, repository: Path, arguments: Mapping[str, str]) -> None:
        """Runs every COPY and RUN of the Dockerfile in order, as `docker build` does."""
        for word, rest in self.dockerfile.build:
            if word == "COPY":
                *sources, target = rest.split()
                for source in sources:
                    to = self.folder / "source" / target / (Path(source).name if target.endswith("/") else "")
                    to.parent.mkdir(parents=True, exist_ok=True)
                    subprocess.run(["cp", "--recursive", repository / source, to], check=True)
            elif word == "RUN":
                self._run(rest, arguments)
        self._run(self.dockerfile.word("RUN"), {})

    def _run(self, command: str, arguments: Mapping[str, str]) -> None:
        (workdir,) = [rest for word, rest in self.dockerfile.build if word == "WORKDIR"]
        own = {Path("/opt/copywatch"): "venv", Path(workdir): "source", Path("/data"): "data"}
        own |= {Path("/tmp"): "tmp", Path("/etc"): "etc"}
        lines = self._base()
        for inside, name in own.items():
            lines += [f"mkdir -p {self._path(inside)}", f"mount --bind {self.folder / name} {self._path(inside)}"]
        lines.append(f"chroot {self.folder / 'root'} sh -c {shlex.quote(f'cd {workdir} && {command}')}")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        path = f"{PYTHON}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        with self._start(lines, ["--mount"], inherited | {"HOME": "/tmp", "PATH": path} | dict(arguments)) as process:
            output, _ = process.communicate()
        assert process.returncode == 0, f"{command}\n{output}"

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Runs the command as process 1 of a new container."""
        lines = self._base()
        for inside, name in ((Path("/etc"), "etc"), (Path("/opt/copywatch"), "venv"), (Path("/config"), "config")):
            lines += self._bind(self.folder / name, inside)
        lines += [f"mkdir -p {self._path(Path(place))}" for place in ("/data", "/tmp")]
        lines += [f"mount --bind {self.data} {self._path(Path('/data'))}"]
        lines += [f"mount -t tmpfs -o mode=1777 none {self._path(Path('/tmp'))}"]
        lines += [f"mount -o remount,ro {self.folder / 'root'}", f'{sys.executable} -c "{LOOPBACK_UP}"']
        namespaces = ["--mount", "--net", "--pid", "--fork", "--kill-child"]
        return self._start([*lines, f"exec {self._inside(command)}"], namespaces, {})

    def join(self, container: subprocess.Popen[str], command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Runs the command inside a running container, as `docker exec` and health checks do."""
        enter = ["nsenter", f"--target={first_process(container)}", "--mount", "--net", "--pid", "sh", "-c"]
        return subprocess.run(
            [*_as_root(), *enter, f"exec {self._inside(command)}"],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ["PATH"]},
        )

    def _start(
        self, lines: Sequence[str], namespaces: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        script = self.folder / "begin.sh"
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items() if name.isidentifier()]
        script.write_text("\n".join(["set -e", *lines[:-1], *exports, lines[-1]]) + "\n")
        return subprocess.Popen(
            [*_as_root(), "unshare", *namespaces, "sh", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
            env={"PATH": os.environ["PATH"]},
        )

    def _base(self) -> list[str]:
        """The base image: the system of this machine, and the Python of the tests as `python`."""
        lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 none {self.folder / 'root'}"]
        system = [Path(name) for name in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/dev", "/sys")]
        for place in [*(one for one in system if one.exists()), Path(sys.base_prefix).resolve()]:
            lines += self._bind(place, place)
        lines += [f"mkdir -p {self._path(PYTHON)} {self._path(Path('/proc'))}"]
        lines += [f"ln -s {Path(sys.executable).resolve()} {self._path(PYTHON / 'python')}"]
        return [*lines, f"mount -t proc proc {self._path(Path('/proc'))}"]

    def _path(self, inside: Path) -> str:
        return f"{self.folder / 'root'}{inside}"

    def _bind(self, place: Path, inside: Path) -> list[str]:
        target = self._path(inside)
        return [f"mkdir -p {target}", f"mount --bind {place} {target}", f"mount -o remount,bind,ro {target}"]

    def _inside(self, command: Sequence[str]) -> str:
        user, group = self.dockerfile.word("USER").split(":")
        drop = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs"]
        drop += [
            "--bounding-set=-all",
            "--inh-caps=-all",
            "--pdeathsig",
            "KILL",
        ]  # unshare's own signal is cleared with the user
        variables = [f"{name}={value}" for name, value in self.dockerfile.environment.items()]
        place = ["env", "-i", f"--chdir={self.dockerfile.word('WORKDIR')}", *variables]
        root = str(self.folder / "root")
        return shlex.join(["chroot", root, "/usr/bin/env", "-i", "PATH=/usr/bin:/bin", *drop, *place, *command])


def first_process(container: subprocess.Popen[str]) -> int:
    """The outside pid of the container's process 1; waits until it runs the command."""
    found = 0

    def is_running() -> bool:
        nonlocal found
        assert container.poll() is None, container.communicate()
        pids = [container.pid]
        while children := Path(f"/proc/{pids[-1]}/task/{pids[-1]}/children").read_text().split():
            pids.append(int(children[0]))
            if Path(f"/proc/{pids[-1]}/comm").read_text().strip() == "copywatch":
                found = pids[-1]
                return True
        return False

    wait_until(is_running, lambda: "the container does not start")
    return found


def _as_root() -> list[str]:
    return [] if os.geteuid() == 0 else ["sudo", "-n"]
