"""The seccomp filter of the code under test: allowed system calls by architecture.

Promise: a system call that is not listed fails with EPERM, or with ENOSYS if libc then falls back
to an older call. The listed calls compute, read, and use pipes that are already open.
"""

import errno
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*

# name: number on x86_64, number on aarch64; None if the call does not exist there
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "pipe": (22, None),
    "select": (23, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "dup": (32, 23),
    "dup2": (33, None),
    "pause": (34, None),
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "recvfrom": (45, 207),
    "exit": (60, 93),
    "wait4": (61, 260),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "readlink": (89, None),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "rt_sigpending": (127, 136),
    "sigaltstack": (131, 132),
    "arch_prctl": (158, None),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "set_tid_address": (218, 96),
    "restart_syscall": (219, 128),
    "fadvise64": (221, 223),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "epoll_wait": (232, None),
    "epoll_ctl": (233, 21),
    "waitid": (247, 95),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "set_robust_list": (273, 99),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20),
    "dup3": (292, 24),
    "pipe2": (293, 59),
    "getrandom": (318, 278),
    "membarrier": (324, 283),
    "statx": (332, 291),
    "rseq": (334, 293),
    "faccessat2": (439, 439),
}
_MISSING = {"clone3": (435, 435), "openat2": (437, 437)}  # seccomp cannot inspect their arguments
_CONDITIONAL = {
    "open": (2, None),
    "openat": (257, 56),
    "clone": (56, 220),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prlimit64": (302, 261),
    "sendto": (44, 206),
    "socketpair": (53, 199),
}

O_CHANGES = 0o3 | 0o100 | 0o1000  # access mode, O_CREAT, O_TRUNC; all zero for reading
CLONE_THREAD = 0x10000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; other commands can send signals
FCNTL = (0, 1, 2, 3, 4, 1030)
IOCTL = (0x5421, 0x5450, 0x5451)  # FIONBIO, FIONCLEX, FIOCLEX: they affect only the descriptor
AF_UNIX = 1

_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]  # code, steps if true, steps if false, operand


def seccomp_filter(*, can_open: bool) -> bytes:
    """Return an array of sock_filter for this machine. `can_open`: files, for reading."""
    machine = platform.machine()
    column = list(ARCHITECTURES).index(machine)
    steps: list[Instruction] = [
        _load(4),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        _return(_KILL),
        _load(0),
    ]
    for numbers in _ALLOWED.values():
        steps += _on(numbers[column], [_return(_ALLOW)])
    for numbers in _MISSING.values():
        steps += _on(numbers[column], [_return(_ERRNO | errno.ENOSYS)])
    for name, numbers in _CONDITIONAL.items():
        if can_open or not name.startswith("open"):
            steps += _on(numbers[column], _condition(name))
    steps.append(_return(_ERRNO | errno.EPERM))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _condition(name: str) -> list[Instruction]:
    """Return instructions that inspect the arguments, and allow or deny."""
    deny, allow = _return(_ERRNO | errno.EPERM), _return(_ALLOW)
    match name:
        case "open":
            return [_argument(1), (_JUMP_SET, 0, 1, O_CHANGES), deny, allow]
        case "openat":
            return [_argument(2), (_JUMP_SET, 0, 1, O_CHANGES), deny, allow]
        case "clone":  # threads, but no processes
            return [_argument(0), (_JUMP_SET, 1, 0, CLONE_THREAD), deny, allow]
        case "fcntl" | "ioctl":
            commands = FCNTL if name == "fcntl" else IOCTL
            checks = [step for known in commands for step in ((_JUMP_EQUAL, 0, 1, known), allow)]
            return [_argument(1), *checks, deny]
        case "prlimit64":  # the process's own limits, which it cannot raise
            return [_argument(0), (_JUMP_EQUAL, 1, 0, 0), deny, allow]
        case "sendto":  # only to the other end of a socketpair, without an address
            low, high = _argument(4), _load(16 + 8 * 4 + 4)
            return [low, (_JUMP_EQUAL, 0, 2, 0), high, (_JUMP_EQUAL, 1, 0, 0), deny, allow]
        case _:  # socketpair, which event loops use to wake up
            return [_argument(0), (_JUMP_EQUAL, 1, 0, AF_UNIX), deny, allow]


def _on(number: int | None, steps: list[Instruction]) -> list[Instruction]:
    return [] if number is None else [(_JUMP_EQUAL, 0, len(steps), number), *steps]


def _load(offset: int) -> Instruction:
    """Load from struct seccomp_data: number at 0, architecture at 4, arguments from 16 on."""
    return (_LOAD, 0, 0, offset)


def _argument(index: int) -> Instruction:
    return _load(16 + 8 * index)  # the lower half; both architectures are little-endian


def _return(value: int) -> Instruction:
    return (_RETURN, 0, 0, value)
