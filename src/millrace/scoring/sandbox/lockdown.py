"""Confines the current process for good: capabilities, resource limits, Landlock, seccomp.

isolate() drops all capabilities, so that even root cannot raise a limit, and limits the number of
threads. lock() bounds CPU time, memory and open files by resource limits, restricts reading to
Python's library by Landlock, and system calls to those of syscalls.py by seccomp. None of this
needs privileges, and none can be undone.

Promise: both return with all of it in force, or raise OSError. Without Landlock (Linux before 5.13,
or disabled) the process cannot open any file. The kernel counts threads by user, so a process needs
a user of its own to be limited: root takes an unused one, and other users a user namespace (Linux
5.14). Where neither is possible, the process cannot start threads.
"""

import contextlib
import ctypes
import os
import platform
import re
import resource
import signal
import struct
import sys
from pathlib import Path

from millrace.scoring.sandbox.syscalls import ARCHITECTURES, seccomp_filter

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
