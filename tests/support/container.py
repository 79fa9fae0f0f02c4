"""What a container engine would do with our Dockerfile, by namespaces alone: builds it, then runs it as its user.

The root is a tmpfs into which the system and its Python are bound read-only, in place of the base image. What the
Dockerfile's own lines make (/opt/copywatch, the user in /etc, /data) is made by these very lines; then all of it is
read-only but /data and /tmp. Processes, mounts and network of what runs are apart from the machine's, and the command
is process 1.
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

from tests.support.serve_process import dies_with_us, until

PYTHON = Path("/opt/python/bin")  # `python` of the base image
LOOPBACK_UP = (  # what `ip link set lo up` does: SIOCSIFFLAGS with IFF_UP and IFF_RUNNING
    "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 0x41))"
)
OURS = ("COPYWATCH_", "PYTHON", "VIRTUAL_ENV", "TMPDIR")  # what the tests have set for themselves


class Recipe:
    """A Dockerfile: what its first stage makes, and what its last sets for whoever runs the image."""

    def __init__(self, dockerfile: Path) -> None:
        text = "\n".join(line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#"))
        lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
        first, last = (n for n, line in enumerate(lines) if line.startswith("FROM "))
        self.build = [tuple(line.split(None, 1)) for line in lines[first:last]]
        self.said = [tuple(line.split(None, 1)) for line in lines[last:]]

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
    """Where the image is made and its commands are run; all that it has of its own is in `folder`."""

    recipe: Recipe
    folder: Path

    def __post_init__(self) -> None:
        for name in ("root", "venv", "source", "data", "config", "tmp"):
            (self.folder / name).mkdir(parents=True)
        subprocess.run(["cp", "--archive", "/etc", self.folder / "etc"], check=True)
        (self.folder / "etc/resolv.conf").unlink(missing_ok=True)  # often a link to elsewhere
        shutil.copy("/etc/resolv.conf", self.folder / "etc/resolv.conf")

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def config(self) -> Path:
        return self.folder / "config"

    @property
    def packages(self) -> Path:
        """Where the image's environment has its packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "venv/lib" / version / "site-packages"

    def build(self, repository: Path, arguments: Mapping[str, str]) -> None:
        """Does every COPY and RUN of the Dockerfile, one after another, as `docker build` does."""
        for word, rest in self.recipe.build:
            if word == "COPY":
                *sources, target = rest.split()
                for source in sources:
                    to = self.folder / "source" / target / (Path(source).name if target.endswith("/") else "")
                    to.parent.mkdir(parents=True, exist_ok=True)
                    subprocess.run(["cp", "--recursive", repository / source, to], check=True)
            elif word == "RUN":
                self._run(rest, arguments)
        self._run(self.recipe.word("RUN"), {})

    def _run(self, command: str, arguments: Mapping[str, str]) -> None:
        (workdir,) = [rest for word, rest in self.recipe.build if word == "WORKDIR"]
        own = {Path("/opt/copywatch"): "venv", Path(workdir): "source", Path("/data"): "data"}
        own |= {Path("/tmp"): "tmp", Path("/etc"): "etc"}
        lines = self._base()
        for inside, name in own.items():
            lines += [f"mkdir -p {self._there(inside)}", f"mount --bind {self.folder / name} {self._there(inside)}"]
        lines.append(f"chroot {self.folder / 'root'} sh -c {shlex.quote(f'cd {workdir} && {command}')}")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        path = f"{PYTHON}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        with self._begun(lines, ["--mount"], inherited | {"HOME": "/tmp", "PATH": path} | dict(arguments)) as making:
            said, _ = making.communicate()
        assert making.returncode == 0, f"{command}\n{said}"

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """The command as process 1 of a new container."""
        lines = self._base()
        for inside, name in ((Path("/etc"), "etc"), (Path("/opt/copywatch"), "venv"), (Path("/config"), "config")):
            lines += self._bound(self.folder / name, inside)
        lines += [f"mkdir -p {self._there(Path(place))}" for place in ("/data", "/tmp")]
        lines += [f"mount --bind {self.data} {self._there(Path('/data'))}"]
        lines += [f"mount -t tmpfs -o mode=1777 none {self._there(Path('/tmp'))}"]
        lines += [f"mount -o remount,ro {self.folder / 'root'}", f'{sys.executable} -c "{LOOPBACK_UP}"']
        apart = ["--mount", "--net", "--pid", "--fork", "--kill-child"]
        return self._begun([*lines, f"exec {self._inside(command)}"], apart, {})

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

    def _begun(self, lines: Sequence[str], apart: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
        script = self.folder / "begin.sh"
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items() if name.isidentifier()]
        script.write_text("\n".join(["set -e", *lines[:-1], *exports, lines[-1]]) + "\n")
        return subprocess.Popen(
            [*_as_root(), "unshare", *apart, "sh", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=dies_with_us,
            env={"PATH": os.environ["PATH"]},
        )

    def _base(self) -> list[str]:
        """The base image: this machine's system, and the Python that the tests run on as `python`."""
        lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 none {self.folder / 'root'}"]
        system = [Path(name) for name in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/dev", "/sys")]
        for place in [*(one for one in system if one.exists()), Path(sys.base_prefix).resolve()]:
            lines += self._bound(place, place)
        lines += [f"mkdir -p {self._there(PYTHON)} {self._there(Path('/proc'))}"]
        lines += [f"ln -s {Path(sys.executable).resolve()} {self._there(PYTHON / 'python')}"]
        return [*lines, f"mount -t proc proc {self._there(Path('/proc'))}"]

    def _there(self, inside: Path) -> str:
        return f"{self.folder / 'root'}{inside}"

    def _bound(self, place: Path, inside: Path) -> list[str]:
        there = self._there(inside)
        return [f"mkdir -p {there}", f"mount --bind {place} {there}", f"mount -o remount,bind,ro {there}"]

    def _inside(self, command: Sequence[str]) -> str:
        user, group = self.recipe.word("USER").split(":")
        drop = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs"]
        drop += ["--bounding-set=-all", "--inh-caps=-all", "--pdeathsig", "KILL"]  # unshare's own ends with the user
        variables = [f"{name}={value}" for name, value in self.recipe.environment.items()]
        place = ["env", "-i", f"--chdir={self.recipe.word('WORKDIR')}", *variables]
        root = str(self.folder / "root")
        return shlex.join(["chroot", root, "/usr/bin/env", "-i", "PATH=/usr/bin:/bin", *drop, *place, *command])


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
