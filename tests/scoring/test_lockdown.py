"""Hostile programs that run in the sandbox and report the outcome of each attempt."""

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from millrace.scoring.sandbox.calls import SandboxLimits, SandboxRun, run_programs, run_tests

LIMITS = SandboxLimits(time_s=30.0)
SHORT = SandboxLimits(time_s=1.2)
ATTEMPT = """
import sys
def attempt(name, action):
    try:
        print(name, "worked", action())
    except BaseException as error:
        print(name, type(error).__name__, getattr(error, "errno", None))
"""
REFUSED = "PermissionError"


@pytest.fixture(params=[True, False], ids=["landlock", "no-files"])
def run(request):
    """Run a program, with and without Landlock; return the outcome of each attempt."""

    def run(code: str, *, limits: SandboxLimits = LIMITS) -> dict[str, str]:
        (ran,) = run_programs(ATTEMPT + code, [""], limits=limits, can_read=request.param)
        assert ran.ok, ran
        return dict(line.split(" ", 2)[:2] for line in ran.output.splitlines())

    return run


@contextlib.contextmanager
def watching(parent: psutil.Process):
    """Collect the processes that `parent` starts: a runner and the code under test."""
    before = set(parent.children(recursive=True))
    seen: set[psutil.Process] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.update({*parent.children(recursive=True)} - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def all_end(seen: set[psutil.Process]) -> bool:
    """True if a runner and its code were started, and both have ended."""
    wait_until(lambda: not any(is_alive(process) for process in seen))
    return len(seen) >= 2


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_code_cannot_fork(run):
    before = len(psutil.pids())
    ended = run("""
import ctypes, os, platform, subprocess, multiprocessing
attempt("fork", os.fork)
attempt("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("system", lambda: subprocess.run(["/bin/true"]))
attempt("multiprocessing", lambda: multiprocessing.get_context("fork").Process().start())
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (57, 58, 56, 435), "aarch64": (220, 220, 220, 435)}[platform.machine()]
for number in numbers:
    print(f"raw{number}", libc.syscall(number, 17, 0, 0, 0, 0), flush=True)
while True:
    try:
        os.fork()
    except OSError:
        break
""")
    assert {
        name: end for name, end in ended.items() if not name.startswith("raw")
    } == dict.fromkeys(["fork", "spawn", "exec", "system", "multiprocessing"], REFUSED)
    assert {end for name, end in ended.items() if name.startswith("raw")} == {"-1"}
    assert len(psutil.pids()) < before + 50


THREADS = """
import ctypes, mmap, platform, threading
gate, started = threading.Event(), 0
def bomb():
    global started
    while started < 10_000:
        threading.Thread(target=gate.wait, daemon=True).start()
        started += 1
attempt("bomb", bomb)
print("some", started > 2)
print("few", started < 65)
gate.set()
# clone(flags, stack) until it fails; the new threads wait in a system call without their stack.
loop = bytes.fromhex({
    "x86_64": "5341544889d34d31e44939dc7d24b83800000031d24531d24531c00f054885c07407780e49ffc4ebe0"
    "b8220000000f05ebf74c89e0415c5bc3",
    "aarch64": "e90300aaea0301aaeb0302aa0c0080d29f010beb6a020054e00309aae1030aaa020080d2030080d2"
    "040080d2881b80d2010000d4800000b44001f8b78c050091f4ffff17000080d2010080d2020080d2030080d2"
    "280980d2010000d4faffff17e0030caac0035fd6",
}[platform.machine()])
memory = mmap.mmap(-1, 2**16, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(loop)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
clone = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_long)(start)
CLONE_VM_FS_FILES_SIGHAND_THREAD = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000
print("raw", clone(CLONE_VM_FS_FILES_SIGHAND_THREAD, start + 2**15, 5_000) < 65)
"""
# As the user who runs the tests; if that is root, also as one whose real user is another.
USERS = [None, 65_534] if os.getuid() == 0 else [None]


@pytest.mark.parametrize("user", USERS)
def test_threads_work_up_to_a_limit_that_the_kernel_enforces(user):
    script = (
        "import sys\nfrom millrace.scoring.sandbox.calls import SandboxLimits, run_programs\n"
        "limits = SandboxLimits(time_s=30.0)\n"
        "for can_thread in (True, False):\n"
        "    (ran,) = run_programs(sys.argv[1], [''], limits=limits, can_thread=can_thread)\n"
        "    print(ran.ok, *ran.output.split())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, ATTEMPT + THREADS],
        preexec_fn=None if user is None else lambda: os.setresuid(user, -1, -1),
        capture_output=True,
        text=True,
        check=True,
    )
    threads, no_threads = ran.stdout.splitlines()
    assert threads == "True bomb RuntimeError None some True few True raw True"
    assert no_threads == "True bomb RuntimeError None some False few True raw True"


SYSTEM_CALLS = """
import ctypes, errno, platform
libc, column = ctypes.CDLL(None, use_errno=True), platform.machine() == "aarch64"
def call(name, number, *arguments):
    ctypes.set_errno(0)
    failed = libc.syscall(number, *arguments) < 0
    print(name, errno.errorcode.get(ctypes.get_errno()) if failed else "worked")
numbers = dict(
    ptrace=(101, 117), process_vm_readv=(310, 270), process_vm_writev=(311, 271),
    unshare=(272, 97), setns=(308, 268), mount=(165, 40), pivot_root=(155, 41),
    keyctl=(250, 219), add_key=(248, 217),
    bpf=(321, 280), perf_event_open=(298, 241), userfaultfd=(323, 282), io_uring_setup=(425, 425),
    memfd_create=(319, 279), memfd_secret=(447, 447), pidfd_open=(434, 434), pidfd_getfd=(438, 438),
    pidfd_send_signal=(424, 424), tgkill=(234, 131), tkill=(200, 130), rt_sigqueueinfo=(129, 138),
    kcmp=(312, 272), prctl=(157, 167), setresuid=(117, 147), capset=(126, 91), sendmsg=(46, 211),
    recvmsg=(47, 212), socket=(41, 198), sched_setaffinity=(203, 122), ioprio_set=(251, 30),
    shmget=(29, 194), msgget=(68, 186), semget=(64, 190), timer_create=(222, 107),
    inotify_init1=(294, 26), fanotify_init=(300, 262), signalfd4=(289, 74), mlockall=(151, 230),
    remap_file_pages=(216, 234), move_pages=(279, 239), open_by_handle_at=(304, 265),
    personality=(135, 92), seccomp=(317, 277), execveat=(322, 281), fsopen=(430, 430),
    landlock_create_ruleset=(444, 444), splice=(275, 76), vmsplice=(278, 75), tee=(276, 77),
)
for name, known in numbers.items():
    call(name, known[column], 0, 0, 0, 0, 0, 0)
THREAD, clone = 0x10F00, (56, 220)[column]
VFORK, PARENT, NEW_USER, NEW_PID = 0x4000, 0x8000, 0x10000000, 0x20000000
call("clone_like_vfork", clone, VFORK | 0x100 | 17, 0, 0, 0, 0)
call("clone_beside", clone, PARENT | 17, 0, 0, 0, 0)
call("clone_alone", clone, 0x10000, 0, 0, 0, 0)
call("clone_user", clone, THREAD | NEW_USER, 0, 0, 0, 0)
call("clone_pid", clone, THREAD | NEW_PID, 0, 0, 0, 0)
call("clone3", 435, 0, 0)
"""


def test_system_calls_that_reach_other_processes_or_the_kernel_s_objects_fail(run):
    ended = run(SYSTEM_CALLS)
    assert ended.pop("clone3") == "ENOSYS"
    namespaces = {ended.pop(name) for name in ("clone_alone", "clone_user", "clone_pid")}
    assert namespaces <= {"EINVAL", "EPERM"}
    assert set(ended.values()) == {"EPERM"}
    assert len(ended) > 50


def test_code_and_tests_have_no_capability():
    code = "import time\ndef wait():\n    time.sleep(1000)"
    with watching(psutil.Process()) as seen:
        kwargs = {"limits": LIMITS}
        thread = threading.Thread(target=run_tests, args=(code, ["wait()"]), kwargs=kwargs)
        thread.start()
        wait_until(lambda: len(seen) == 2 and all(map(is_locked, seen)))
        statuses = [status_of(process) for process in seen]
        for process in seen:
            process.kill()
        thread.join()
    for status in statuses:
        held = {name: status[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")}
        assert set(held.values()) == {"0" * 16}
        assert status["NoNewPrivs"] == "1"


def test_code_cannot_raise_a_limit(run):
    ended = run("""
import resource
for name in ("CPU", "AS", "FSIZE", "NOFILE", "NPROC"):
    kind = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(kind)
    attempt(name, lambda: resource.setrlimit(kind, (soft, hard + 1)))
    attempt(f"p{name}", lambda: resource.prlimit(0, kind, (soft, hard + 1)))
""")
    assert len(ended) == 10
    assert set(ended.values()) <= {"ValueError", REFUSED}


def status_of(process: psutil.Process) -> dict[str, str]:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def is_locked(process: psutil.Process) -> bool:
    return status_of(process)["Seccomp"] == "2"


@pytest.mark.parametrize(
    "loop",
    [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "sum(range(10**15))",  # does not handle signals
    ],
)
def test_endless_loop_ends_at_the_time_limit(loop):
    code = f"def fine(): return 1\ndef spin():\n    {loop.replace(chr(10), chr(10) + '    ')}"
    tests = ["assert fine() == 1", "spin()", "assert fine() == 1"]
    with watching(psutil.Process()) as seen:
        assert run_tests(code, tests, limits=SHORT) == [True, False, False]
        assert [ran.ok for ran in run_programs(loop, ["", ""], limits=SHORT)] == [False, False]
    assert all_end(seen)


def test_cpu_time_is_limited_separately_from_wall_time(run):
    ended = run("import resource\nprint('limit', resource.getrlimit(resource.RLIMIT_CPU)[1])")
    assert ended == {"limit": "30"}


def test_code_cannot_allocate_ten_gigabytes(run):
    ended = run("""
import mmap
attempt("bytes", lambda: len(bytearray(10 * 2**30)))
attempt("map", lambda: len(mmap.mmap(-1, 10 * 2**30)))
def grow():
    parts = []
    while True:
        parts.append(bytearray(2**24))
attempt("slowly", grow)
import resource
attempt("raise", lambda: resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)))
""")
    assert ended["bytes"] == ended["slowly"] == "MemoryError"
    assert ended["map"] in ("OSError", "MemoryError")
    assert ended["raise"] in ("ValueError", REFUSED)


def test_code_cannot_delete_change_or_create_files(run, tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("sings")
    canary.chmod(0o644)
    ended = run(f"""
import os, shutil
path, folder = {str(canary)!r}, {str(tmp_path)!r}
attempt("remove", lambda: os.remove(path))
attempt("tree", lambda: shutil.rmtree(folder))
attempt("rename", lambda: os.rename(path, path + "2"))
attempt("truncate", lambda: os.truncate(path, 0))
attempt("write", lambda: open(path, "w"))
attempt("append", lambda: open(path, "a"))
attempt("clear", lambda: os.open(path, os.O_RDONLY | os.O_TRUNC))
attempt("mode", lambda: os.chmod(path, 0))
attempt("times", lambda: os.utime(path))
attempt("link", lambda: os.link(path, path + "2"))
attempt("symlink", lambda: os.symlink(path, path + "2"))
attempt("folder", lambda: os.mkdir(path + "2"))
attempt("temporary", lambda: open("/tmp/left_behind", "w"))
attempt("memory", lambda: os.memfd_create("m"))
attempt("mount", lambda: __import__("ctypes").CDLL(None).mount(None, b"/", None, 32, None) and 1/0)
""")
    assert ended.pop("mount") == "ZeroDivisionError"  # it returned -1
    assert set(ended.values()) == {REFUSED}
    assert len(ended) == 14
    assert canary.read_text() == "sings"
    assert canary.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [canary]


@pytest.mark.parametrize("program", ["unittest.__main__", "idlelib.idle"])
def test_imports_of_the_code_run_no_program_outside_the_sandbox(program):
    (ran,) = run_programs(f"import {program}", [""], limits=LIMITS, can_read=False)
    assert ran == SandboxRun(output="", ok=False)


def test_code_can_read_only_pythons_library(tmp_path):
    answers = tmp_path / "tasks.jsonl"
    answers.write_text("the answer")
    code = f"""
import os
attempt("answers", lambda: open({str(answers)!r}).read())
attempt("users", lambda: open("/etc/passwd").read())
attempt("folder", lambda: os.listdir({str(tmp_path)!r}))
attempt("library", lambda: __import__("colorsys").__name__)
"""
    (ran,) = run_programs(ATTEMPT + code, [""], limits=LIMITS)
    assert re.findall(r"^\w+ (\w+)", ran.output, re.M) == [REFUSED] * 3 + ["worked"]
    (ran,) = run_programs(ATTEMPT + code, [""], limits=LIMITS, can_read=False)
    assert [line.split()[1] for line in ran.output.splitlines()[:3]] == [REFUSED] * 3


def test_code_cannot_reach_the_network(run, tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "s"))
        listeners = [tcp, udp, unix]
        ended = run(f"""
import ctypes, platform, socket, urllib.request
tcp, udp = {tcp.getsockname()!r}, {udp.getsockname()!r}
attempt("tcp", lambda: socket.create_connection(tcp))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", udp))
attempt("unix", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
attempt("http", lambda: urllib.request.urlopen("http://127.0.0.1:%d" % tcp[1]))
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
attempt("detour", lambda: a.sendto(b"x", {str(tmp_path / "s")!r}))
attempt("inside", lambda: (a.send(b"x"), b.recv(1)))
number = dict(x86_64=41, aarch64=198)[platform.machine()]
print("raw", ctypes.CDLL(None).syscall(number, 2, 1, 0))
""")
        assert ended.pop("inside") == "worked"
        assert ended.pop("raw") == "-1"
        assert ended.pop("http") in ("URLError", REFUSED)
        assert ended == dict.fromkeys(["tcp", "udp", "unix", "detour"], REFUSED)
        assert select.select(listeners, [], [], 0)[0] == []
        # The servers can be reached from here.
        socket.create_connection(tcp.getsockname()).close()
        udp.sendto(b"x", udp.getsockname())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"x", str(tmp_path / "s"))
        assert select.select(listeners, [], [], 5)[0] == listeners


@pytest.mark.parametrize("can_read", [True, False])
def test_code_does_not_see_the_environment_of_the_run(monkeypatch, can_read):
    monkeypatch.setenv("API_KEY", "s3cret-of-the-parent")
    code = f"""
import os
print(dict(os.environ), flush=True)
for pid in ("self", os.getppid(), {os.getpid()}, {os.getppid()}):
    for name in ("environ", "cmdline", "mem", "maps"):
        attempt("read", lambda: open(f"/proc/{{pid}}/{{name}}", "rb").read())
import ctypes
environment = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
index = 0
while environment and environment[index]:
    print(environment[index])
    index += 1
"""
    (ran,) = run_programs(ATTEMPT + code, [""], limits=LIMITS, can_read=can_read)
    assert ran.ok
    assert ran.output.count(REFUSED) == 16
    assert "s3cret" not in ran.output
    assert "worked" not in ran.output


def test_code_cannot_signal_trace_or_renice_other_processes(run):
    ended = run(f"""
import ctypes, os, platform, resource, signal
for pid in ({os.getpid()}, os.getppid(), 0, -1):
    attempt(f"kill{{pid}}", lambda: os.kill(pid, 0))
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, {os.getpid()}, 19))
attempt("session", os.setsid)
attempt("limit", lambda: resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1)))
number = dict(x86_64=101, aarch64=117)[platform.machine()]
print("trace", ctypes.CDLL(None).syscall(number, 16, {os.getpid()}, 0, 0))
""")
    assert ended.pop("trace") == "-1"
    assert set(ended.values()) == {REFUSED}
    assert len(ended) == 7


def test_output_above_the_limit_fails_the_program():
    code = "import sys\nfor _ in range(1024): sys.stdout.write('x' * 2**20)"
    before = psutil.Process().memory_info().rss
    (ran,) = run_programs(code, [""], limits=LIMITS)
    assert (ran.output, ran.ok) == ("", False)
    assert psutil.Process().memory_info().rss - before < 2**27


def test_stderr_is_discarded():
    code = "import sys\nsys.stderr.write('x' * 2**26)\nprint('end')"
    (ran,) = run_programs(code, [""], limits=LIMITS)
    assert (ran.output, ran.ok) == ("end\n", True)


def test_output_up_to_the_limit_is_complete():
    limits = SandboxLimits(time_s=30.0, output_bytes=1000)
    ran = run_programs("print('x' * int(input()), end='')", ["1000", "1001"], limits=limits)
    assert [(len(one.output), one.ok) for one in ran] == [(1000, True), (0, False)]


def test_event_loops_and_common_library_modules_work(run):
    ended = run("""
import asyncio, random, re, time, decimal, itertools, json, heapq, threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
async def main():
    await asyncio.sleep(0.001)
    return await asyncio.to_thread(lambda: 1)
attempt("asyncio", lambda: asyncio.run(main()))
attempt("pool", lambda: list(ThreadPoolExecutor(2).map(abs, [-1, 2])))
attempt("strptime", lambda: datetime.strptime("2020-01-02", "%Y-%m-%d"))
attempt("random", lambda: random.SystemRandom().random())
attempt("sleep", lambda: time.sleep(0.001))
""")
    assert set(ended.values()) == {"worked"}


def test_code_dies_with_the_process_that_runs_it():
    script = (
        "from millrace.scoring.sandbox.calls import SandboxLimits, run_tests\n"
        "code = 'def spin():\\n    while True: pass'\n"
        "run_tests(code, ['spin()'], limits=SandboxLimits(time_s=600.0))"
    )
    runner = subprocess.Popen([sys.executable, "-c", script])
    with watching(psutil.Process(runner.pid)) as seen:
        wait_until(lambda: len(seen) == 2)
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    assert all_end(seen)


def test_background_threads_end_with_the_call():
    code = """
import threading
def forever():
    while True: pass
threading.Thread(target=forever).start()
def f(): return 1
"""
    tests = ["import time\ntime.sleep(0.1)\nassert f() == 1"]
    with watching(psutil.Process()) as seen:
        assert run_tests(code, tests, limits=LIMITS) == [True]
    assert all_end(seen)


def test_several_threads_may_call_at_once():
    outputs: dict[int, str] = {}

    def call(number: int) -> None:
        (ran,) = run_programs("print(input())", [str(number)], limits=LIMITS)
        outputs[number] = ran.output

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {number: f"{number}\n" for number in range(6)}
