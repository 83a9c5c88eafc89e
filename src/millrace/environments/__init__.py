"""Environments: user code that talks to agents, and the exact token record of what they sampled.

| module | owns |
|---|---|
| `function_environment.py` | a user's coroutine, run n times concurrently per group; single turns |
| `episode_runner.py` | one episode from the coroutine's start to its reward; branches of episodes |
| `agent.py` | what an environment talks to, one agent per role |
| `conversation.py` | messages and texts as incremental prompt tokens |
| `token_record.py` | the tokens of an agent, as a tree; a branch becomes a Rollout |
| `episode_state.py` | the agents, limits and event log of a running episode |
| `role_models.py`, `limits.py` | the models of an episode; its limits |
| `tools/` | Python functions and MCP servers as tools; tool calls by model family |
| `rollouts/` | groups: the player, prompt rendering, partial rollouts |
| `branching/` | groups whose episodes form trees |
| `replay/` | recorded episodes: files, reruns without an engine, edits |
| `adapters/` | environments of other libraries |

Promise: earlier turns are never tokenised again, and every sampled token is trained exactly once.
This package is torch-free.
"""
