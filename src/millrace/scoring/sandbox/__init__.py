"""Runs untrusted Python code in a sandbox, and reports its output or the tests it passed.

A call starts a fresh interpreter, the runner (runner.py). The runner forks the code under test into
a process of its own, which is confined (lockdown.py) before its first line runs. Tests run in the
runner and reach the code by messages (objects.py). So the code sees no test, has no access to the
results, and can answer only with data.

Confined: the code cannot start a process, open a socket, write or delete a file, send a signal,
trace a process, use a capability of root, or exceed its limits on CPU time, memory, threads, output
and open files. It can read only Python's library and a few system files (lockdown.py lists them),
or no file at all on kernels without Landlock. All its processes end with the call.

Not confined: the code can use CPU and memory up to its limits, read the clock and random numbers,
and see the kernel version, the user id and the load of the machine. The sandbox relies on seccomp
and Landlock: a bug in the Linux kernel breaks it. It is no virtual machine.

Where the kernel cannot enforce this, nothing is run. Everything here imports the standard library
alone and, except for calls.py, runs inside the runner.
"""
