"""The seccomp filter of the code under test: allowed system calls by architecture.

Promise: a system call that is not listed fails with EPERM, or with ENOSYS if libc then falls back
to an older call. The listed calls compute, read, and use pipes that are already open.
"""

import errno
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*

# By purpose: name, number on x86_64, number on aarch64; "-" if the call does not exist there.
_ALLOWED = {
    "files": (
        "read 0 63, write 1 64, close 3 57, lseek 8 62, pread64 17 67, readv 19 65, "
        "writev 20 66, fadvise64 221 223, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, "
        "pipe2 293 59, eventfd2 290 19, recvfrom 45 207"
    ),
    "paths": (
        "stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, "
        "faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, "
        "getdents64 217 61, getcwd 79 17, chdir 80 49"
    ),
    "waiting": (
        "poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create1 291 20, "
        "epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22"
    ),
    "memory": (
        "brk 12 214, mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233"
    ),
    "signals": (
        "rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, "
        "rt_sigpending 127 136, sigaltstack 131 132, pause 34 -, alarm 37 -, "
        "getitimer 36 102, setitimer 38 103, restart_syscall 219 128"
    ),
    "time": (
        "time 201 -, times 100 153, gettimeofday 96 169, nanosleep 35 101, "
        "clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115"
    ),
    "processes": (
        "getpid 39 172, getppid 110 173, getuid 102 174, getgid 104 176, geteuid 107 175, "
        "getegid 108 177, uname 63 160, sysinfo 99 179, getrlimit 97 163, getrusage 98 165, "
        "wait4 61 260, waitid 247 95, exit 60 93, exit_group 231 94"
    ),
    "threads": (
        "gettid 186 178, futex 202 98, sched_yield 24 124, sched_getaffinity 204 123, "
        "set_tid_address 218 96, set_robust_list 273 99, arch_prctl 158 -, rseq 334 293, "
        "membarrier 324 283"
    ),
    "random": "getrandom 318 278",
}
_MISSING = {"clone3": (435, 435), "openat2": (437, 437)}  # seccomp cannot inspect their arguments

O_CHANGES = 0o3 | 0o100 | 0o1000  # access mode, O_CREAT, O_TRUNC; all zero for reading
CLONE_THREAD = 0x10000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; other commands can send signals
FCNTL = (0, 1, 2, 3, 4, 1030)
IOCTL = (0x5421, 0x5450, 0x5451)  # FIONBIO, FIONCLEX, FIOCLEX: they affect only the descriptor
AF_UNIX = 1

_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

Instruction = tuple[int, int, int, int]  # code, steps if true, steps if false, operand


def seccomp_filter(*, can_open: bool, can_thread: bool) -> bytes:
    """Return an array of sock_filter for this machine. `can_open`: files, for reading."""
    machine = platform.machine()
    column = list(ARCHITECTURES).index(machine)
    steps: list[Instruction] = [
        _load(4),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        _return(_KILL),
        _load(0),
    ]
    for row in ", ".join(_ALLOWED.values()).split(", "):
        number = row.split()[1 + column]
        steps += _on(None if number == "-" else int(number), [_return(_ALLOW)])
    for numbers in _MISSING.values():
        steps += _on(numbers[column], [_return(_ERRNO | errno.ENOSYS)])
    for name, (*numbers, decision) in _conditional().items():
        if (can_open or not name.startswith("open")) and (can_thread or name != "clone"):
            steps += _on(numbers[column], decision)
    steps.append(_return(_ERRNO | errno.EPERM))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _conditional() -> dict[str, tuple[int | None, int | None, list[Instruction]]]:
    """Calls that depend on their arguments: their numbers, and the instructions that decide."""
    deny, allow = _return(_ERRNO | errno.EPERM), _return(_ALLOW)
    only_reads = [(_JUMP_SET, 0, 1, O_CHANGES), deny, allow]

    def known(commands: tuple[int, ...]) -> list[Instruction]:
        checks = [step for command in commands for step in ((_JUMP_EQUAL, 0, 1, command), allow)]
        return [_argument(1), *checks, deny]

    low, high = _argument(4), _load(16 + 8 * 4 + 4)
    no_address = [low, (_JUMP_EQUAL, 0, 2, 0), high, (_JUMP_EQUAL, 1, 0, 0), deny, allow]
    return {
        "open": (2, None, [_argument(1), *only_reads]),
        "openat": (257, 56, [_argument(2), *only_reads]),
        # Threads, but no processes.
        "clone": (56, 220, [_argument(0), (_JUMP_SET, 1, 0, CLONE_THREAD), deny, allow]),
        "fcntl": (72, 25, known(FCNTL)),
        "ioctl": (16, 29, known(IOCTL)),
        # The process's own limits, which it cannot raise.
        "prlimit64": (302, 261, [_argument(0), (_JUMP_EQUAL, 1, 0, 0), deny, allow]),
        # Only to the other end of a socketpair.
        "sendto": (44, 206, no_address),
        # Event loops use it to wake up.
        "socketpair": (53, 199, [_argument(0), (_JUMP_EQUAL, 1, 0, AF_UNIX), deny, allow]),
    }


def _on(number: int | None, steps: list[Instruction]) -> list[Instruction]:
    return [] if number is None else [(_JUMP_EQUAL, 0, len(steps), number), *steps]


def _load(offset: int) -> Instruction:
    """Load from struct seccomp_data: number at 0, architecture at 4, arguments from 16 on."""
    return (_LOAD, 0, 0, offset)


def _argument(index: int) -> Instruction:
    return _load(16 + 8 * index)  # the lower half; both architectures are little-endian


def _return(value: int) -> Instruction:
    return (_RETURN, 0, 0, value)
