"""The sandbox of the decoding child: what a child that is taken over can do, and that decoding goes on in it."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from reference_db.errors import MediaError
from reference_db.media.decoding import DecodingChild, sandbox_report
from reference_db.media.frames import RECORD
from reference_db.media.sandbox import landlock, seccomp
from reference_db.media.sandbox.confinement import HARMLESS, Needs, decoder_rules
from tests.support import taken_over_decoder
from tests.support.live_stream import WebServer
from tests.support.media import turn_mp4, write_film, write_numbered

HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
# What succeeds in a child without the sandbox and shows that the attempts are real; others would end it.
HARMFUL_BUT_SAFE_TO_TRY = (
    *("read the data folder", "read it by system call", "list the data folder", "write a file", "connect"),
    *("open a socket by system call", "fork", "fork by system call", "load new code", "kill the parent"),
)


class Victim:
    """A data folder with a secret, a listening server and a process, for the taken-over child to attack."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "tokens.json"
        self.secret.write_text("secret")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.process = subprocess.Popen(["sleep", "300"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.close()

    def attack(
        self, url: str, *, live: bool = False, only: tuple[str, ...] = (), old_kernel: bool = False
    ) -> tuple[dict[str, str], bytes]:
        """What a taken-over child of this address could do, and the kinds of its records."""
        request = {"url": url, "live": live, "mode": "exact", "allow": [], "private": False, "no_video_s": 20.0}
        attack = {
            "secret": str(self.secret),
            "folder": str(self.secret.parent),
            "port": self.listener.getsockname()[1],
            "victim": self.process.pid,
            "only": only,
            "old_kernel": old_kernel,
        }
        done = subprocess.run(
            [sys.executable, taken_over_decoder.__file__, json.dumps(attack)],
            input=json.dumps({**request, "parent": os.getpid()}).encode(),
            capture_output=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        records = list(split(done.stdout))
        reports = [json.loads(body) for kind, body in records if kind == b"W" and body.startswith(b"{")]
        assert reports, (done.stdout, done.stderr)
        return reports[0], b"".join(kind for kind, _ in records)


def split(stream: bytes) -> Iterator[tuple[bytes, bytes]]:
    while stream:
        kind, length = RECORD.unpack_from(stream)
        yield kind, stream[RECORD.size : RECORD.size + length]
        stream = stream[RECORD.size + length :]


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    (tmp_path / "data").mkdir()
    one = Victim(tmp_path / "data")
    yield one
    one.close()


@pytest.fixture
def film(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "film.ts", [n / 10 for n in range(30)])


def check_harmless(victim: Victim, results: dict[str, str]) -> None:
    assert {name: result for name, result in results.items() if result == "done"} == {}
    assert len(results) > 30
    assert [path.name for path in victim.secret.parent.iterdir()] == ["tokens.json"]
    assert victim.secret.read_text() == "secret"
    assert victim.process.poll() is None
    victim.listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        victim.listener.accept()


@pytest.mark.parametrize("old_kernel", [False, True])
def test_a_taken_over_decoder_of_a_file_can_do_nothing_but_decode(victim: Victim, film: Path, old_kernel: bool) -> None:
    results, kinds = victim.attack(str(film), old_kernel=old_kernel)
    check_harmless(victim, results)
    assert kinds == b"WIPPPZ"


def test_a_taken_over_decoder_of_a_stream_reaches_its_relay_only(victim: Victim, film: Path) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write(film.read_bytes())

    with WebServer(answer) as web:
        results, kinds = victim.attack(f"http://127.0.0.1:{web.port}/live.ts", live=True)
    check_harmless(victim, results)
    assert kinds.count(b"P") >= 3


def test_a_taken_over_decoder_of_a_camera_reaches_no_other_private_host(victim: Victim) -> None:
    with socket.create_server(("127.0.0.1", 0)) as camera:
        results, _ = victim.attack(f"rtsp://127.0.0.1:{camera.getsockname()[1]}/live", live=True)
    results.pop("send by the gateway")  # datagrams of the own host may use any port, since RTSP negotiates them
    check_harmless(victim, results)


def test_the_attempts_succeed_without_the_sandbox(victim: Victim, film: Path) -> None:
    results, _ = victim.attack(str(film), only=HARMFUL_BUT_SAFE_TO_TRY)
    assert results == dict.fromkeys(HARMFUL_BUT_SAFE_TO_TRY, "done")


def has_landlock() -> bool:
    try:
        return landlock.version() > 0
    except OSError:
        return False


def test_everything_is_in_force_on_this_machine() -> None:
    """On a kernel with Landlock; elsewhere `doctor` names what is missing."""
    found = {mechanism.name: mechanism for mechanism in sandbox_report()}
    assert set(found) == {"limits", "no_new_privs", "capabilities", "landlock", "seccomp", "gateway", "files"}
    if not has_landlock():
        assert not found.pop("landlock").in_force
    assert all(mechanism.in_force for mechanism in found.values()), found
    assert found["seccomp"].detail == "no programs, no processes, no files, no sockets, no new code"


def test_the_child_of_a_file_has_none_of_our_environment(film: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:s3cret@proxy.example:3128")
    monkeypatch.setenv("COPYWATCH_KAFKA__SASL_PASSWORD", "s3cret")
    with DecodingChild(str(film)) as child:
        assert b"s3cret" not in Path(f"/proc/{child.pid}/environ").read_bytes()


def test_a_rotated_video_needs_no_library_that_is_not_loaded(tmp_path: Path) -> None:
    upright, turned = write_film(tmp_path / "upright.mp4", 1, 2), write_film(tmp_path / "turned.mp4", 1, 2)
    turn_mp4(turned, 1)
    with DecodingChild(str(upright)) as one, DecodingChild(str(turned)) as other:
        before, after = next(one.frames()).picture, next(other.frames()).picture
    assert before.shape[:2] == after.shape[1::-1]


@pytest.mark.parametrize("machine", list(HEADERS))
def test_the_numbers_of_system_calls_are_those_of_the_kernel_headers(machine: str) -> None:
    if not Path(HEADERS[machine]).exists():
        pytest.skip("the kernel headers are not installed")
    text = Path(HEADERS[machine]).read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    known.setdefault("newfstatat", known.get("fstatat", -1))
    column = seccomp.MACHINES[machine][0]
    for name, numbers in seccomp.NUMBERS.items():
        assert numbers[column] == known.get(name), name
    assert known["seccomp"] == seccomp.NUMBERS["seccomp"][column]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_as_its_rules_say(machine: str) -> None:
    """Runs the BPF program in a small interpreter, for a machine that is not this one too."""
    program = seccomp.assemble(decoder_rules(Needs(), 77, executable_stacks=False), machine=machine)
    column, audit = seccomp.MACHINES[machine]

    def verdict(name: str, *arguments: int, number: int | None = None, on: int = audit) -> int:
        called = seccomp.NUMBERS[name][column] if number is None else number
        assert called is not None
        return interpret(program, called, on, [*arguments, 0, 0, 0, 0, 0, 0][:6])

    allowed, refused = seccomp.RET_ALLOW, seccomp.RET_ERRNO
    for name in HARMLESS:
        if seccomp.NUMBERS[name][column] is not None:
            assert verdict(name) == allowed, name
    for name in ("execve", "execveat", "ptrace", "process_vm_readv", "pidfd_getfd", "seccomp"):
        assert verdict(name) == refused | 1, name
    for name in ("openat", "socket", "connect", "bind"):
        assert verdict(name) == refused | 13, name
    assert verdict("mmap", 0, 4096, 3) == verdict("mprotect", 0, 4096, 1) == allowed
    assert verdict("mmap", 0, 4096, 7) == verdict("mprotect", 0, 4096, 5) == refused | 1
    assert verdict("sendto", 3, 1, 1, 0, 0, 0) == allowed
    assert verdict("sendto", 3, 1, 1, 0, 1 << 40, 16) == refused | 1
    assert verdict("clone", 0x003D0F00) == allowed
    assert verdict("clone", 17) == verdict("clone", 0x100) == refused | 1
    assert verdict("tgkill", 77, 78, 6) == allowed
    assert verdict("tgkill", 76, 76, 9) == refused | 1
    assert verdict("fcntl", 3, 4) == allowed
    assert verdict("fcntl", 3, 8) == refused | 1
    assert verdict("read", number=451) == refused | 38
    assert verdict("read", on=0x40000003) == seccomp.RET_KILL_PROCESS


def interpret(program: bytes, number: int, machine: int, arguments: list[int]) -> int:
    """The value that a seccomp program returns for a system call."""
    data = struct.pack("=iIQ6Q", number, machine, 0, *arguments)
    operations = list(struct.iter_unpack("=HBBI", program))
    at, value = 0, 0
    while True:
        code, if_true, if_false, operand = operations[at]
        at += 1
        match code:
            case seccomp.LOAD:
                (value,) = struct.unpack_from("=I", data, operand)
            case seccomp.AND:
                value &= operand
            case seccomp.JUMP_EQUAL:
                at += if_true if value == operand else if_false
            case seccomp.JUMP_GREATER:
                at += if_true if value > operand else if_false
            case seccomp.JUMP_GREATER_EQUAL:
                at += if_true if value >= operand else if_false
            case seccomp.RETURN:
                return int(operand)


def test_an_unknown_machine_gets_no_filter_and_says_so() -> None:
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        seccomp.assemble([], machine="riscv64")


def test_a_codec_that_is_not_of_broadcasts_is_refused(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "game.avi", [n / 10 for n in range(20)], codec="asv1", b_frames=0)
    with pytest.raises(MediaError, match="format that is not supported"), DecodingChild(str(path)) as child:
        list(child.frames())


AS_FIRST_PROCESS = """
import os, time
from pathlib import Path
from reference_db.media.decoding import DecodingChild
for _ in range(3):
    with DecodingChild("udp://127.0.0.1:0", live=True) as child:
        gateway = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        while not gateway.read_text():
            time.sleep(0.01)
try:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
    print("children are left")
except ChildProcessError:
    print("none is left")
"""


@pytest.mark.system
def test_no_zombie_of_a_gateway_stays_in_a_container_without_init() -> None:
    """The first process of a container inherits orphans, and a gateway is one when its decoder was killed."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    process = subprocess.run(
        [*unshare, sys.executable, "-c", AS_FIRST_PROCESS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout == "none is left\n", process.stderr
