"""Episodes of many turns: what agents are, and the tools they are given.

| module | owns |
|---|---|
| `record.py` | the tokens an agent saw and sampled, as a tree; a branch becomes a Rollout |
| `conversation.py` | which messages those tokens are; the tokens of what is new |
| `tool_calls.py` | calls in the text of a model, by model family |
| `tools.py` | Python functions as tools: schema, execution |
| `play.py` | one episode while it is played: its limits, what happened in it |
| `agent.py` | what an environment talks to: chat, complete, tools, forks |
| `cast.py` | the agents of one episode, by role |
| `environment.py` | a user's coroutine, played n times side by side |
| `loop_thread.py` | the thread on which users' coroutines run |

Promise: earlier turns are never tokenised again, and every token that was sampled is trained once.
Layer: above the stages; torch-free.
"""
