"""Every Python process of a server that Millrace has started dies with the one that started it.
vLLM's own processes would outlive a server that is killed.

Python imports this file when it starts, because its folder is in PYTHONPATH.
"""

import ctypes
import os
import signal
import sys

# multiprocessing's tracker ends by itself, after it has removed shared memory of the others.
_is_tracker = any("resource_tracker" in argument for argument in sys.orig_argv)
if sys.platform == "linux" and os.environ.get("MILLRACE_SERVER_CHILD") and not _is_tracker:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
