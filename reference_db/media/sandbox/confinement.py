"""Confinement of the decoding child: what a process that reads hostile video may still do, and what is in force.

`confine_decoder` gives up everything that decoding does not need: other programs and processes, files, the network, new
executable memory, capabilities. Its network is the gateway, a process that is forked before and confined by
`confine_gateway`. Both return what is in force; what a system lacks is named with the reason and left out, since
decoding must work everywhere. README.md in this folder has the details.
"""

import ctypes
import errno
import os
import resource
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from reference_db.media.sandbox import landlock, seccomp
from reference_db.media.sandbox.seccomp import Argument, Rule, allow, deny

MEMORY_BYTES = 2 << 30  # address space; the decoder's buffers of an 8K stream fit
OPEN_FILES = 256  # sockets of an HLS channel and its relay are some twenty
PR_SET_NAME, PR_GET_NAME, PR_SET_VMA = 15, 16, 0x53564D41
PROT_EXEC = 4
CLONE_THREAD_FLAGS = 0x00010100  # CLONE_THREAD | CLONE_VM
AT_EMPTY_PATH = 0x1000
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
IOCTL_REQUESTS = (0x541B, 0x5421, 0x5401, 0x5451, 0x5450)  # FIONREAD, FIONBIO, TCGETS, FIOCLEX, FIONCLEX
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CAPABILITY_VERSION, CAPSET = 0x20080522, {"x86_64": 126, "aarch64": 91}

# Calls that touch nothing outside the process, or only files and sockets that are open already.
HARMLESS = (
    *("read", "write", "futex", "poll", "ppoll", "recvfrom", "lseek", "clock_gettime", "munmap", "brk", "madvise"),
    *("mremap", "readv", "writev", "pread64", "close", "fstat", "select", "pselect6", "sched_yield", "nanosleep"),
    *("clock_nanosleep", "clock_getres", "gettimeofday", "time", "getrandom", "rt_sigaction", "rt_sigprocmask"),
    *("rt_sigreturn", "sigaltstack", "restart_syscall", "exit", "exit_group", "set_tid_address", "set_robust_list"),
    *("get_robust_list", "rseq", "membarrier", "getcpu", "sched_getaffinity", "sched_getparam", "sched_getscheduler"),
    *("getpid", "getppid", "gettid", "getuid", "geteuid", "getgid", "getegid", "uname", "sysinfo", "getrlimit"),
    *("getrusage", "times", "dup", "recvmsg", "shutdown", "getsockname", "getpeername", "getsockopt", "setsockopt"),
)
# What lets a process become another program, or look into one.
TAKE_OVER = ("execve", "execveat", "fork", "vfork", "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd")


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One part of the sandbox: whether it is in force, and how, or why not."""

    name: str
    in_force: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Needs:
    """What the decoder of one address still needs after it was confined; nothing for most."""

    readable: tuple[str, ...] = ()  # files that FFmpeg opens by itself
    sockets: bool = False  # it opens its own sockets: its library could not be made to ask the gateway


def confine_decoder(needs: Needs) -> list[Mechanism]:
    """Confines this process, which must have one thread, for good."""
    executable_stacks = _has_executable_stack()
    return [
        _limits(),
        _attempt("no_new_privs", _no_new_privs),
        _attempt("capabilities", _drop_capabilities),
        _attempt("landlock", lambda: _landlock(landlock.restrict(needs.readable, has_network=needs.sockets))),
        _attempt("seccomp", lambda: _install_seccomp(needs, executable_stacks)),
    ]


def confine_gateway() -> list[Mechanism]:
    """Confines the process that opens the decoder's connections: no other program, no process, no file to write."""
    rules = [*deny(*TAKE_OVER), *deny("clone3", error=errno.ENOSYS), _threads_only()]

    def install() -> str:
        seccomp.install(seccomp.assemble(rules, default_allow=True))
        return "no other programs"

    return [
        _limits(),
        _attempt("no_new_privs", _no_new_privs),
        _attempt("landlock", lambda: _landlock(landlock.restrict(can_read=True, has_network=True))),
        _attempt("seccomp", install),
    ]


def decoder_rules(needs: Needs, pid: int, *, executable_stacks: bool) -> list[Rule]:
    """The system calls that decoding needs; the most frequent first, since the kernel tries them in this order."""
    writable = ((Argument(2, mask=PROT_EXEC),),)
    rules = allow(*HARMLESS)
    rules += allow("mmap", "mprotect") if executable_stacks else [Rule("mmap", writable), Rule("mprotect", writable)]
    rules += [
        _threads_only(),
        *deny("clone3", "statx", "faccessat2", error=errno.ENOSYS),  # the C library falls back to the calls above
        Rule("tgkill", ((Argument(0, pid),),)),  # abort()
        Rule("prlimit64", ((Argument(2, is_null=True),),)),  # read, not change
        Rule("newfstatat", ((Argument(3, AT_EMPTY_PATH),),)),  # fstat() of some C libraries
        Rule("fcntl", [[Argument(1, command)] for command in FCNTL_COMMANDS]),
        Rule("ioctl", [[Argument(1, request)] for request in IOCTL_REQUESTS]),
        Rule("prctl", [[Argument(0, option)] for option in (PR_SET_NAME, PR_GET_NAME, PR_SET_VMA)]),
    ]
    if needs.readable:
        rules.append(Rule("openat", ((Argument(2, mask=WRITING),),), errno.EACCES))
        rules.append(Rule("open", ((Argument(1, mask=WRITING),),), errno.EACCES))
    else:
        rules += deny("openat", "open", error=errno.EACCES)
    if needs.sockets:
        rules += allow("connect", "bind", "sendto")
        rules.append(Rule("socket", [[Argument(0, family)] for family in (socket.AF_INET, socket.AF_INET6)]))
    else:
        rules.append(Rule("sendto", ((Argument(4, is_null=True),),)))  # to where the socket is connected
        rules += deny("socket", "connect", "bind", error=errno.EACCES)
    return rules


def _install_seccomp(needs: Needs, executable_stacks: bool) -> str:
    rules = decoder_rules(needs, os.getpid(), executable_stacks=executable_stacks)
    seccomp.install(seccomp.assemble(rules))
    forbidden = ["no programs", "no processes"]
    forbidden += [] if needs.readable else ["no files"]
    forbidden += [] if needs.sockets else ["no sockets"]
    forbidden += [] if executable_stacks else ["no new code"]
    return ", ".join(forbidden)


def _threads_only() -> Rule:
    return Rule("clone", ((Argument(0, CLONE_THREAD_FLAGS, CLONE_THREAD_FLAGS),),))


def _limits() -> Mechanism:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain the address
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    return Mechanism("limits", True, f"{MEMORY_BYTES >> 30} GB of memory, {files} open files, no file to write")


def _no_new_privs() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "set"


def _drop_capabilities() -> str:
    """A process of root has them all; the decoder needs none."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = CAPSET.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"no table of system calls for {os.uname().machine}")
    header, none = struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24)
    if libc.syscall(ctypes.c_long(number), header, none) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "none left"


def _landlock(version: int) -> str:
    parts = ["files"]
    parts += ["TCP"] if version >= landlock.TCP_VERSION else []
    parts += ["signals"] if version >= landlock.SCOPE_VERSION else []
    return f"version {version}: {', '.join(parts)}"


def _has_executable_stack() -> bool:
    """Whether a library made the loader use executable stacks; then new threads need executable memory too."""
    try:
        with open("/proc/self/maps") as maps:
            return any(line.endswith("[stack]\n") and "x" in line.split()[1] for line in maps)
    except OSError:
        return True  # not known


def _attempt(name: str, apply: Callable[[], str]) -> Mechanism:
    try:
        return Mechanism(name, True, apply())
    except OSError as error:
        return Mechanism(name, False, error.strerror or str(error))
