"""The Tinker training API, beside the OpenAI API: `millrace serve MODEL --train`.

| module | owns |
|---|---|
| `routes.py` | the paths under /api/v1, and the start of everything below |
| `service.py` | what each request does: models, passes, steps, saved states, samples |
| `execution.py`, `request_log.py` | requests on disk, their order, snapshots, and recovery |
| `tenants.py` | sessions, models, samplers, futures and folders of one API key |
| `computing.py` | the thread that trains |
| `adapter_slots.py` | the adapters that engines hold |
| `wire.py`, `protobuf.py` | request bodies and results |

Promise: a tenant, which is one API key, sees no model, path, future or cached prompt of another.
Tenants take turns by the tokens that they train. A request that is sent again with the same ids is
executed once, and the requests of a model run in the order of their seq_id. A restarted server has
every session, model, sampler and future that the killed one had. No handler computes: the model is
trained in one thread, and engines sample.
"""
