"""Environments: user code that talks to agents, and the exact token record of what they sampled.

`rollouts/` plays groups, `function_environment.py` their episodes, and `agent.py` is what a user's
coroutine talks to. `tools/` has its tools, `replay/` recorded episodes, and `adapters.py`
environments of other libraries.

Promise: earlier turns are never tokenised again, and every sampled token is trained exactly once.
This package is torch-free.
"""
