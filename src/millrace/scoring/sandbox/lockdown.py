"""Confines the current process for good: capabilities, resource limits, Landlock, seccomp.

isolate() drops all capabilities, so that even root cannot raise a limit, and limits the number of
threads. lock() bounds CPU time, memory and open files by resource limits, restricts reading to
Python's library by Landlock, and system calls to those of _ALLOWED by seccomp: others fail with
EPERM, or with ENOSYS if libc then falls back to an older call. The listed calls compute, read, and
use pipes that are already open. None of this needs privileges, and none can be undone.

Promise: both return with all of it in force, or raise OSError. Without Landlock (Linux before 5.13,
or disabled) the process cannot open any file. The kernel counts threads by user, so a process needs
a user of its own to be limited: root takes an unused one, and other users a user namespace (Linux
5.14). Where neither is possible, the process cannot start threads.
"""

import contextlib
import ctypes
import errno
import os
import platform
import re
import resource
import signal
import struct
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_GET_SECCOMP, PR_SET_SECCOMP = 1, 4, 21, 22
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 38, 47, 4
CAPABILITY_VERSION_3 = 0x20080522
CLONE_NEWUSER = 0x10000000
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_RULE_PATH_BENEATH = 1
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
ALL_ACCESS = (1 << 13) - 1  # all rights of the first version of Landlock
OPEN_FILES = 64
MAX_THREADS = 64  # of a runner and the code together
# Where no user ids are assigned, and where containers that have 65536 of them assign none.
UNUSED_IDS = ((1_900_000_000, 2**22), (61_184, 4_336))  # first, how many


def unsupported() -> str | None:
    """Return why code cannot be confined on this machine, or None if it can."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return (
            f"{sys.platform} on {platform.machine()} has no sandbox; use Linux on x86_64 or aarch64"
        )
    if ctypes.CDLL(None).prctl(PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        return "this Linux kernel has no seccomp"
    return None


def die_with(parent: int) -> None:
    """Kill this process when the thread that started it ends. `parent` is that thread's process."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def hide_memory() -> None:
    """Forbid unprivileged processes to trace this process or read its memory."""
    _prctl(PR_SET_DUMPABLE, 0)


def isolate() -> bool:
    """Limit the threads of this process and its children, and drop all capabilities. Returns False
    if the threads cannot be limited here."""
    is_limited = _count_separately()
    if is_limited:
        _limit(resource.RLIMIT_NPROC, MAX_THREADS)
    with contextlib.suppress(OSError):  # there is no such capability, or no right to drop it
        for capability in range(64):
            _prctl(PR_CAPBSET_DROP, capability)
    with contextlib.suppress(OSError):  # Linux before 4.3 has none
        _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header, none = struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    _checked(ctypes.CDLL(None, use_errno=True).capset(header, none))
    os.close(os.open(os.__file__, os.O_RDONLY))  # root may have read it by a capability alone
    return is_limited


def lock(*, cpu_s: int, memory_bytes: int, can_read: bool = True, can_thread: bool = False) -> None:
    """Confine this process. `can_read`: it may read Python's library, if Landlock is available.
    `can_thread`: it may start threads, which isolate() has limited."""
    _limit(resource.RLIMIT_CPU, cpu_s)
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    is_landlocked = can_read and _landlock(_library())
    steps = ctypes.create_string_buffer(
        seccomp_filter(can_open=is_landlocked, can_thread=can_thread)
    )
    program = struct.pack("HxxxxxxP", (len(steps) - 1) // 8, ctypes.addressof(steps))
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program))


def _count_separately() -> bool:
    """Let the kernel count the threads of this process apart from those of other processes."""
    if os.getuid() == 0:
        for first, how_many in UNUSED_IDS:
            with contextlib.suppress(OSError):
                # The effective user stays: it can read what it could read.
                os.setresuid(first + os.getpid() % how_many, -1, -1)
                return True
        return False
    release = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    unshare = ctypes.CDLL(None).unshare
    return release >= (5, 14) and unshare(CLONE_NEWUSER) == 0


def has_landlock() -> bool:
    asks_version = ctypes.c_ulong(1)
    call = ctypes.CDLL(None).syscall
    size = ctypes.c_ulong(0)
    return call(ctypes.c_long(LANDLOCK_CREATE_RULESET), None, size, asks_version) > 0


def _library() -> list[Path]:
    """Return the paths that importing and running the standard library needs."""
    standard_library = Path(os.__file__).parent
    shared = [Path(sys.base_prefix, "lib"), *map(Path, ("/lib", "/lib64", "/usr/lib"))]
    data = map(Path, ("/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime"))
    return [standard_library, *shared, *data, Path("/dev/urandom"), Path("/dev/null")]


def _landlock(paths: list[Path]) -> bool:
    """Restrict reading to these paths; returns False if the kernel has no Landlock."""
    if not has_landlock():
        return False
    rules = struct.pack("Q", ALL_ACCESS)
    ruleset = _syscall(LANDLOCK_CREATE_RULESET, rules, len(rules), 0)
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # not every system has all of them
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            access = READ_FILE | EXECUTE | (READ_DIR if path.is_dir() else 0)
            rule = struct.pack("=Qi", access, folder)
            _syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0)
            os.close(folder)
    _syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return True


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _prctl(option: int, *arguments: object) -> None:
    padded = [*arguments, 0, 0, 0][:4]
    _checked(ctypes.CDLL(None, use_errno=True).prctl(option, *map(_word, padded)))


def _syscall(number: int, *arguments: object) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    return _checked(call(ctypes.c_long(number), *map(_word, arguments)))


def _word(argument: object) -> object:
    """Widen integers to a register: variadic C functions do not know their width."""
    return ctypes.c_ulong(argument) if isinstance(argument, int) else argument


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


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
