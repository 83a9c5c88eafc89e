"""HTTP server for models: the OpenAI API, and logprobs of given tokens.

| module | owns |
|---|---|
| `options.py`, `settings.py`, `command.py` | `millrace serve` |
| `server.py` | the listening socket, routes, errors |
| `clients.py` | API keys, Host headers, rate limits |
| `fair_queue.py` | which client's sequences the engines get next |
| `served_model.py` | a model behind its engines |
| `api/` | one module per endpoint, request bodies, replies, streaming, the OpenAPI description |
| `metrics.py` | counters for Prometheus |
| `tinker/` | the training API |
| `external.py` | external programs as environments: they fetch tasks and post groups |
| `programs/` | the OpenAI API for programs that play episodes, and programs as environments |

Promise: no request handler imports torch. Models compute in processes of their own.
"""
