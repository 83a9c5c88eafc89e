"""HTTP server for models: the OpenAI API, and logprobs of given tokens.

| module | owns |
|---|---|
| `options.py`, `settings.py`, `command.py` | `millrace serve` |
| `server.py` | the listening socket, routes, API keys, rate limits, errors |
| `served_model.py` | a model behind its engines |
| `api/` | one module per endpoint, request bodies, replies, streaming, the OpenAPI description |
| `metrics.py` | counters for Prometheus |
| `programs/` | the same API for programs that play episodes, and programs as environments |

Promise: no request handler imports torch. Models compute in processes of their own.
"""
