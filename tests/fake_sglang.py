"""A stand-in for an SGLang server, over the model and the decode loop of the fake vLLM server.

Its answers have the form that SGLang's documentation and sources give them (August 2026); no answer
was recorded. What an engine must cope with is imitated: a chunk joins all tokens that have arrived
and carries the version that is served when it is sent; an abort ends every request whose id begins
with the given one; an update of weights fails while requests run. Faults, beside those of vLLM's:

- "cumulative": each chunk has all tokens so far, as without --incremental-streaming-output
- "wrong_model": another architecture; "auto_dtype": a dtype that is not known

Run as a program, it takes the arguments of `python -m sglang.launch_server`.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from fake_vllm import FakeVllm, _Job, _json

_CHUNK_S = 0.01  # between two chunks of a stream: several tokens


class FakeSglang(FakeVllm):
    guarded = ("/",)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/update_weight_version", self._set_version)
        app.router.add_post("/load_lora_adapter", self._add_adapter)
        app.router.add_post("/unload_lora_adapter", self._remove_adapter)
        app.cleanup_ctx.append(self._running)
        return app

    async def _model_info(self, _request: web.Request) -> web.Response:
        names = ["Other"] if "wrong_model" in self.faults else self._model.config.architectures
        info = {"model_path": "m", "weight_version": self._version, "architectures": names}
        return _json(info)

    async def _server_info(self, _request: web.Request) -> web.Response:
        dtype = "auto" if "auto_dtype" in self.faults else "float32"
        return _json({"dtype": dtype, "tp_size": 1, "internal_states": [{}]})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if rid in self._jobs:
            for id, job in self._jobs.items():
                if id.startswith(rid) and job.finish is None:
                    self._end(job, "abort")
        return _json(None)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert not self._busy, "the cache is not flushed"
        try:
            self._load(Path(body["model_path"]))
        except FileNotFoundError as error:
            answer = {"success": False, "message": str(error), "num_paused_requests": 0}
            return _json(answer, status=400)
        self.cleared.append(body["flush_cache"])
        if body["flush_cache"]:
            self._prefixes.clear()
        return _json({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _set_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["abort_all_requests"] is False
        self._version = body["new_version"]
        message = f"Weight version updated to {self._version}"
        return _json({"success": True, "message": message, "new_version": self._version})

    async def _add_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "no_lora" in self.faults or self.adapter:
            reason = "LoRA is not enabled." if not self.adapter else "already loaded"
            return _json({"success": False, "error_message": reason}, status=400)
        self.adapter = body["lora_name"]
        if "stale_adapter" not in self.faults or self._version == "default":
            self._merge(Path(body["lora_path"]))
        return _json({"success": True, "error_message": None, "loaded_adapters": {}})

    async def _remove_adapter(self, request: web.Request) -> web.Response:
        assert not self._busy, "waits for requests that use it"
        if (await request.json())["lora_name"] != self.adapter:
            return _json({"success": False, "error_message": "not loaded"}, status=400)
        self.adapter = ""
        return _json({"success": True, "error_message": None, "loaded_adapters": {}})

    @property
    def _busy(self) -> bool:
        return any(job.finish is None for job in self._jobs.values())

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body.get("lora_path", "") == self.adapter
        asked = body["sampling_params"]
        assert body["return_logprob"]
        assert asked.get("top_k", -1) != 0
        given = {"max_tokens": asked["max_new_tokens"], "temperature": asked["temperature"]}
        given |= {"stop_token_ids": asked.get("stop_token_ids", ())}
        given |= {"logprobs": body.get("top_logprobs_num", 0)}
        salted = {"token_ids": body["input_ids"], "cache_salt": body["extra_key"]}
        job = _Job(body={**salted, "sampling_params": given})
        rid = body.get("rid", f"single-{len(self.calls)}")
        assert rid not in self._jobs
        self._jobs[rid] = job
        self._arrived.set()
        rows: list[dict[str, Any]] = []
        if not body["stream"]:
            while (choice := await job.new.get())["finish_reason"] is None:
                rows += choice["logprobs"]["content"]
            rows += choice["logprobs"]["content"]
            return _json(self._answer(job, body, rid, choice, rows, num_sent=0))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        finish, num_sent = None, 0
        while finish is None:
            choices = [await job.new.get()]
            await asyncio.sleep(_CHUNK_S)
            while not job.new.empty():
                choices.append(job.new.get_nowait())
            for choice in choices:
                rows += choice["logprobs"]["content"]
            finish = choices[-1]["finish_reason"]
            data = self._answer(job, body, rid, choices[-1], rows, num_sent=num_sent)
            if "cumulative" not in self.faults:
                num_sent = len(rows)
            if "broken_stream" in self.faults and len(rows) > 3:
                data = {"error": {"message": "Internal server error", "code": 400}}
            await stream.write(f"data: {json.dumps(data)}\n\n".encode())
            if "error" in data:
                break
        await stream.write(b"data: [DONE]\n\n")
        return stream

    def _answer(
        self, job: _Job, body: Any, rid: str, choice: Any, rows: list[Any], *, num_sent: int
    ) -> dict[str, Any]:
        finish = choice["finish_reason"]
        ids = [row["token_id"] for row in rows]
        reasons = {
            None: None,
            "stop": {"type": "stop", "matched": ids[-1] if ids else None},
            "length": {"type": "length", "length": len(ids)},
            "abort": {"type": "abort", "message": "Aborted", "status_code": None},
        }
        # An abort of a waiting request sends all logprobs again.
        first = num_sent if finish != "abort" else 0
        meta = {
            "id": rid,
            "finish_reason": reasons[finish],
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self._version,
            "completion_tokens": len(ids),
            "input_token_logprobs": [],
            "output_token_logprobs": [[row["logprob"], row["token_id"], None] for row in rows],
            "output_token_logprobs_length": len(rows),
        }
        meta["output_token_logprobs"] = meta["output_token_logprobs"][first:]
        if body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [
                [[top["logprob"], top["token_id"], None] for top in row["top_logprobs"]]
                for row in rows
            ]
        if body.get("logprob_start_len") == 0:
            scored = zip(self._score(body["input_ids"]), body["input_ids"], strict=True)
            meta["input_token_logprobs"] = [
                [None if row is None else row[str(id)]["logprob"], id, None] for row, id in scored
            ]
        if "no_versions" in self.faults:
            del meta["weight_version"]
        return {"output_ids": ids[first:], "meta_info": meta}


def write_python(folder: Path) -> Path:
    """An "interpreter" of an environment with SGLang, for engine.options.python."""
    program = folder / "python"
    program.write_text(
        "#!/bin/sh\nif [ $1 = -c ]; then exit; fi\nshift 2\n"
        f'exec {sys.executable} {__file__} "$@"\n'
    )
    program.chmod(0o700)
    return program


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options, _others = parser.parse_known_args()
    torch.set_num_threads(1)
    key = json.loads(options.config.read_text())["api-key"]
    fake = FakeSglang(options.model_path, api_key=key)
    web.run_app(fake.app(), host=options.host, port=options.port, print=None)


if __name__ == "__main__":
    main()
