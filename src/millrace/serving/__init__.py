"""HTTP server for models: the OpenAI API, and raw tokens in and out.

| module | owns |
|---|---|
| `options.py`, `settings.py`, `command.py` | `millrace serve` |
| `server.py`, `listener.py` | routes, API keys, errors; the socket and rate limits |
| `served_model.py`, `engines.py` | a model behind its engines |
| `api/` | one module per endpoint, request bodies, replies, streaming, the OpenAPI description |
| `metrics.py` | counters for Prometheus |
| `programs/` | the same API for programs that play episodes, and programs as environments |

Promise: no request handler imports torch. Models compute in processes of their own.
"""
