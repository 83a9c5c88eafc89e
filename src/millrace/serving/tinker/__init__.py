"""The Tinker training API, beside the OpenAI API: `millrace serve MODEL --train`.

| module | owns |
|---|---|
| `routes.py` | the paths under /api/v1, and the start of everything below |
| `service.py` | what each request does: models, passes, steps, saved states, samples |
| `tenants.py` | sessions, models, samplers, futures and folders of one API key |
| `computing.py` | the thread that trains, and the adapters that engines hold |
| `wire.py`, `protobuf.py` | request bodies and results |

Promise: a tenant, which is one API key, sees no model, path, future or cached prompt of another.
Tenants take turns by the tokens that they train. A request that is sent again with the same ids is
executed once, and the requests of a model run in the order of their seq_id. A saved state is on
disk before its future is ready; models that were not saved are lost with the server. No handler
computes: the model is trained in one thread, and engines sample.
"""
