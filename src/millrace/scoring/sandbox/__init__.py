"""Runs Python code that nobody has read, and says what it printed or which tests it passed.

A call starts one fresh interpreter, the judge (judge.py). The judge forks the code under test into
a process of its own that gives up what it could do harm with (lockdown.py) before its first line
runs. Tests run in the judge and reach the code by messages (objects.py), so that the code sees no
test, holds no way to the result, and can answer only with data.

Promise: the code starts no process, opens no socket, writes no file, signals nobody, reads nothing
but Python's own library, and ends within its limits together with the call. Where the kernel cannot
hold this, nothing is run. Everything here imports the standard library alone and, but for
calls.py, runs inside the judge.
"""
