"""Seccomp: a filter of system calls for this process and all that it starts, written as BPF without a library.

Input: the permitted system calls with conditions on their arguments. Any other call fails with EPERM, one that is newer
than this table with ENOSYS, so that the C library falls back to an older one. Numbers differ by machine; other machines
than x86-64 and aarch64 get no filter, and `install` says so.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# name -> number on x86-64, on aarch64; None where the machine has no such call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "open": (2, None),
    "close": (3, 57),
    "fstat": (5, 80),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "ioctl": (16, 29),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "select": (23, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "dup": (32, 23),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "socket": (41, 198),
    "connect": (42, 203),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    "bind": (49, 200),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "setsockopt": (54, 208),
    "getsockopt": (55, 209),
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "exit": (60, 93),
    "uname": (63, 160),
    "fcntl": (72, 25),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "ptrace": (101, 117),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sigaltstack": (131, 132),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "prctl": (157, 167),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "set_tid_address": (218, 96),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "tgkill": (234, 131),
    "openat": (257, 56),
    "newfstatat": (262, 79),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "prlimit64": (302, 261),
    "getcpu": (309, 168),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "seccomp": (317, 277),
    "getrandom": (318, 278),
    "execveat": (322, 281),
    "membarrier": (324, 283),
    "statx": (332, 291),
    "rseq": (334, 293),
    "clone3": (435, 435),
    "pidfd_getfd": (438, 438),
    "faccessat2": (439, 439),
}
HIGHEST_NUMBER = 450  # calls beyond it are unknown here
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of NUMBERS, AUDIT_ARCH_*
X32_BIT = 0x40000000  # x86-64: calls of the x32 ABI, which would pass by their different numbers

# Constants of <linux/seccomp.h>, <linux/filter.h> and <sys/prctl.h>.
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SECCOMP_SET_MODE_FILTER = 1
TSYNC, SPEC_ALLOW = 1, 4  # all threads; and no slow-down of memory accesses, which old kernels couple with a filter
RET_KILL_PROCESS, RET_ERRNO, RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, AND, JUMP_EQUAL, JUMP_GREATER, JUMP_GREATER_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x06
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data


@dataclass(frozen=True, slots=True)
class Argument:
    """A condition on the lower 32 bits of an argument: `value & mask == equals`; `is_null` wants all 64 bits zero."""

    index: int
    equals: int = 0
    mask: int = 0xFFFFFFFF
    is_null: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One system call: permitted if all conditions of one alternative hold, else it fails with `otherwise`."""

    name: str
    alternatives: Sequence[Sequence[Argument]] = ((),)
    otherwise: int = errno.EPERM


def allow(*names: str) -> list[Rule]:
    return [Rule(name) for name in names]


def deny(*names: str, error: int = errno.EPERM) -> list[Rule]:
    return [Rule(name, (), error) for name in names]


def assemble(rules: Iterable[Rule], *, default_allow: bool = False, machine: str | None = None) -> bytes:
    """The BPF program. Raises OSError on a machine whose numbers are unknown."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, audit_machine = MACHINES[machine]
    program = [_op(LOAD, MACHINE_AT), _op(JUMP_EQUAL, audit_machine, 1, 0), _op(RETURN, RET_KILL_PROCESS)]
    program.append(_op(LOAD, NUMBER_AT))
    if machine == "x86_64":
        program += [_op(JUMP_GREATER_EQUAL, X32_BIT, 0, 1), _op(RETURN, RET_ERRNO | errno.EPERM)]
    for rule in rules:
        number = NUMBERS[rule.name][column]
        if number is not None:
            body = _body(rule)
            program += [_op(JUMP_EQUAL, number, 0, len(body)), *body]
    if default_allow:
        program.append(_op(RETURN, RET_ALLOW))
    else:
        program += [_op(JUMP_GREATER, HIGHEST_NUMBER, 0, 1), _op(RETURN, RET_ERRNO | errno.ENOSYS)]
        program.append(_op(RETURN, RET_ERRNO | errno.EPERM))
    return b"".join(program)


def install(program: bytes) -> None:
    """Applies the filter to this process for good. Raises OSError if the system has no seccomp or forbids it."""
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions)))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs is not available")
    number = NUMBERS["seccomp"][MACHINES[platform.machine()][0]]
    for flags in (TSYNC | SPEC_ALLOW, TSYNC):
        if libc.syscall(ctypes.c_long(number or 0), SECCOMP_SET_MODE_FILTER, flags, header) == 0:
            return
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel has no seccomp filters, or a container forbids them")


def _body(rule: Rule) -> list[bytes]:
    """The instructions for a call that is the rule's; each way through them returns."""
    body: list[bytes] = []
    for conditions in rule.alternatives:
        checks: list[list[bytes]] = []
        for argument in conditions:
            at = ARGUMENTS_AT + 8 * argument.index
            if argument.is_null:
                checks += [[_op(LOAD, at)], [_op(LOAD, at + 4)]]
            else:
                checks.append([_op(LOAD, at), _op(AND, argument.mask)])
        wanted = [(0, 0) if one.is_null else (one.equals,) for one in conditions]
        values = [value for group in wanted for value in group]
        length = sum(len(check) + 1 for check in checks) + 1  # with the final return
        for check, value in zip(checks, values, strict=True):
            body += check
            length -= len(check) + 1
            body.append(_op(JUMP_EQUAL, value, 0, length))
        body.append(_op(RETURN, RET_ALLOW))
    if () not in [tuple(conditions) for conditions in rule.alternatives]:
        body.append(_op(RETURN, RET_ERRNO | rule.otherwise))
    return body


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
