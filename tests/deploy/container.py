"""What a container engine would do with our image, by namespaces alone: its user, its variables, its read-only root.

The root is a tmpfs into which the system, Python and the virtual environment are bound read-only; only /data and /tmp
can be written. Processes, mounts and network are apart from the machine's, and the command is process 1.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.serving import until

NEEDED = Path("/opt/needed")  # where the container has the libraries, wherever the tests' environment lies
LOOPBACK_UP = (  # what `ip link set lo up` does: SIOCSIFFLAGS with IFF_UP and IFF_RUNNING
    "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 0x41))"
)


class Recipe:
    """The last stage of a Dockerfile: what it sets for whoever runs the image."""

    def __init__(self, dockerfile: Path) -> None:
        text = "\n".join(line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#"))
        lines = text.replace("\\\n", " ").splitlines()
        last = max(n for n, line in enumerate(lines) if line.startswith("FROM "))
        self.said = [tuple(line.split(None, 1)) for line in lines[last:] if line.strip()]

    def word(self, name: str) -> str:
        (found,) = [rest for word, rest in self.said if word == name]
        return found

    def command(self, name: str) -> list[str]:
        words: list[str] = json.loads(self.word(name)[self.word(name).index("[") :])
        return words

    @property
    def environment(self) -> dict[str, str]:
        pairs = dict(pair.split("=", 1) for pair in shlex.split(self.word("ENV")))
        return {name: value.replace("$PATH", "/usr/local/bin:/usr/bin:/bin") for name, value in pairs.items()}


@dataclass(frozen=True)
class Box:
    """Where the image's commands are run."""

    recipe: Recipe
    root: Path  # an empty folder, on which the container's root is mounted
    venv: Path  # what the image has in /opt/copywatch
    data: Path
    config: Path

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """The command as process 1 of a new container."""
        script = self.root.with_suffix(".sh")
        script.write_text("\n".join(["set -e", *self._mounts(), f"exec {self._inside(command)}"]) + "\n")
        unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "sh", str(script)]
        return subprocess.Popen(
            [*_as_root(), *unshare],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": os.environ["PATH"]},
        )

    def join(self, container: subprocess.Popen[str], command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """The command inside a running container, as `docker exec` and health checks run it."""
        enter = ["nsenter", f"--target={first_process(container)}", "--mount", "--net", "--pid", "sh", "-c"]
        return subprocess.run(
            [*_as_root(), *enter, f"exec {self._inside(command)}"],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ["PATH"]},
        )

    def _mounts(self) -> list[str]:
        lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 none {self.root}"]
        system = [Path(name) for name in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev", "/sys")]
        libraries = Path(np.__file__).parent.parent  # the tests' own environment, which the venv builds upon
        for place in [*(one for one in system if one.exists()), Path(sys.base_prefix).resolve()]:
            lines += self._bound(place, place)
        lines += self._bound(libraries.resolve(), NEEDED)
        lines += [*self._bound(self.venv, Path("/opt/copywatch")), *self._bound(self.config, Path("/config"))]
        lines += [f"mkdir -p {self.root}/data {self.root}/tmp {self.root}/proc"]
        lines += [f"mount --bind {self.data} {self.root}/data", f"mount -t tmpfs -o mode=1777 none {self.root}/tmp"]
        lines += [f"mount -t proc proc {self.root}/proc", f"mount -o remount,ro {self.root}"]
        return [*lines, f'{sys.executable} -c "{LOOPBACK_UP}"']

    def _bound(self, place: Path, inside: Path) -> list[str]:
        there = f"{self.root}{inside}"
        return [f"mkdir -p {there}", f"mount --bind {place} {there}", f"mount -o remount,bind,ro {there}"]

    def _inside(self, command: Sequence[str]) -> str:
        user, group = self.recipe.word("USER").split(":")
        drop = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs"]
        drop += ["--bounding-set=-all", "--inh-caps=-all"]
        variables = [f"{name}={value}" for name, value in self.recipe.environment.items()]
        place = ["env", "-i", f"--chdir={self.recipe.word('WORKDIR')}", *variables]
        return shlex.join(
            ["chroot", str(self.root), "/usr/bin/env", "-i", "PATH=/usr/bin:/bin", *drop, *place, *command]
        )


def first_process(container: subprocess.Popen[str]) -> int:
    """Process 1 of the container, by its number outside; waits until it runs the command."""
    found = 0

    def is_there() -> bool:
        nonlocal found
        assert container.poll() is None, container.communicate()
        pids = [container.pid]
        while children := Path(f"/proc/{pids[-1]}/task/{pids[-1]}/children").read_text().split():
            pids.append(int(children[0]))
            if Path(f"/proc/{pids[-1]}/comm").read_text().strip() == "copywatch":
                found = pids[-1]
                return True
        return False

    until(is_there, lambda: "it does not start")
    return found


def _as_root() -> list[str]:
    return [] if os.geteuid() == 0 else ["sudo", "-n"]
