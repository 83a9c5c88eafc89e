"""Models behind HTTP: the OpenAI API, and tokens in and out.

| module | owns |
|---|---|
| `options.py`, `settings.py`, `command.py` | `millrace serve`, from its options to its end |
| `server.py`, `rate.py`, `listening.py` | routes, keys, errors; how often; the socket |
| `openapi.py`, `replies.py` | the server's description of itself |
| `served.py` | a model behind engines: prompts in, completions or pieces out |
| `chat.py`, `completions.py`, `generate.py` | an endpoint each, whole and as a stream |
| `bodies.py`, `messages.py`, `errors.py`, `sse.py` | the API's forms |
| `text_stream.py` | text of tokens that come one by one |
| `metrics.py` | counters for Prometheus |
| `gateway.py` | the same API before the agents of a run's episodes |
| `blackbox.py`, `program.py` | programs as environments; their processes |

Promise: torch-free where requests pass; the models compute in processes of their own.
"""
