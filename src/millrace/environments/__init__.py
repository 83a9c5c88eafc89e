"""Episodes of many turns: what agents are, and the tools they are given.

| module | owns |
|---|---|
| `record.py` | the tokens an agent saw and sampled, as a tree; a branch becomes a Rollout |
| `conversation.py` | which messages those tokens are; the tokens of what is new |
| `tool_calls.py` | calls in the text of a model, by model family |
| `tools.py` | Python functions as tools: schema, execution |
| `limits.py` | what an episode may use |
| `play.py` | one episode while it is played: what it has used, what happened in it |
| `tape.py` | that, in order: turns and tool results |
| `agent.py` | what an environment talks to: chat, complete, tools, forks |
| `cast.py` | the agents of one episode, by role |
| `performing.py` | one episode from a user's coroutine to its reward |
| `stage.py` | the episodes of a group, whole or as branches of one another |
| `recipes/` | groups that are trees: pivots, levels |
| `rules.py` | how episodes of a run are played |
| `replay/` | recorded episodes: files, played again, edited |
| `environment.py` | a user's coroutine, played n times side by side |
| `loop_thread.py` | the thread on which users' coroutines run |

Promise: earlier turns are never tokenised again, and every token that was sampled is trained once.
Layer: above the stages; torch-free.
"""
