"""A stand-in for a vLLM server: its wire format, and a tiny transformers model behind it.

The answers have the form of those of vLLM 0.32.0 (tests/inference/servers/recorded.json). Faults
are switched on by name, each as it was seen on a real server or at one that was started wrongly:

- "torn": new weights arrive in one layer only; "stale_head": a tied head keeps its old weights;
  "stale_adapter": so does an adapter
- "raw_logprobs", "no_versions", "no_dev_mode", "no_extension", "no_lora", "wrong_model": a wrong
  start
- "broken_stream": a stream ends with an error; "short_stream": it ends without one, too early

`answers` replace those of whole paths: another program behind the port, or another version.

Run as a program, it takes the arguments of `python -m vllm.entrypoints.cli.main serve`.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import xxhash
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

STEP_S = 0.003  # of one token of every request: time for what a test does meanwhile
_logits: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}  # of weights and tokens, last row


@dataclass(kw_only=True, eq=False)
class _Job:
    """One request in progress."""

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    new: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None


class FakeVllm:
    guarded: ClassVar = ("/v1", "/inference")  # paths that want the key

    def __init__(
        self,
        path: str,
        *,
        faults: Sequence[str] = (),
        api_key: str | None = None,
        max_running: int | None = None,
        answers: Mapping[str, tuple[int, str]] | None = None,
    ):
        """`answers`: status and text by path. `max_running`: requests that are sampled at the same
        time; the others wait."""
        self.faults = set(faults)
        self.num_sampled = 0  # tokens
        self.calls: list[str] = []  # paths, in order
        self.cleared: list[bool] = []  # for each pause, whether it forgot all KV
        self.answers = dict(answers or {})
        self._api_key = api_key
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._head = self._model.get_output_embeddings().weight.detach().clone()
        self._weights = self._checksum()
        self._base = {name: w.clone() for name, w in self._model.state_dict().items()}
        self.adapter = ""  # its name
        self._can_score = False  # prompts, with an adapter
        self._version = "default"
        self._jobs: dict[str, _Job] = {}
        self._max_running = max_running
        # The weights that each prompt in the cache was computed with, by salt and tokens.
        self._prefixes: dict[tuple[str, tuple[int, ...]], str] = {}
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._arrived = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._show_version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        if "no_lora" not in self.faults:
            app.router.add_post("/v1/load_lora_adapter", self._add_adapter)
            app.router.add_post("/v1/unload_lora_adapter", self._remove_adapter)
        if "no_dev_mode" not in self.faults:
            app.router.add_post("/abort_requests", self._abort)
            app.router.add_post("/pause", self._pause)
            app.router.add_post("/resume", self._resume)
            app.router.add_post("/update_weight_version", self._set_version)
            app.router.add_post("/collective_rpc", self._rpc)
        app.cleanup_ctx.append(self._running)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        is_guarded = request.path.startswith(self.guarded)
        given = request.headers.get("Authorization")
        if self._api_key and is_guarded and given != f"Bearer {self._api_key}":
            return _json({"error": "Unauthorized"}, status=401)
        if request.path in self.answers:
            status, text = self.answers[request.path]
            return web.Response(status=status, text=text)
        return await handler(request)

    async def _health(self, _request: web.Request) -> web.Response:
        return _json(None)

    async def _show_version(self, _request: web.Request) -> web.Response:
        return _json({"version": "0.32.0"})

    async def _models(self, _request: web.Request) -> web.Response:
        limit = self._model.config.max_position_embeddings
        return _json({"object": "list", "data": [{"id": "policy", "max_model_len": limit}]})

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "keep"
        self.cleared.append(request.query["clear_cache"] == "true")
        if self.cleared[-1]:
            self._prefixes.clear()
        self._may_run.clear()
        await asyncio.sleep(0.001)  # the step in progress ends
        return _json({"status": "paused"})

    async def _resume(self, _request: web.Request) -> web.Response:
        self._may_run.set()
        return _json({"status": "resumed"})

    async def _set_version(self, request: web.Request) -> web.Response:
        assert not self._may_run.is_set(), "versions change in a pause"
        self._version = (await request.json())["new_version"]
        return _json({"success": True, "new_version": self._version})

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await request.json())["request_ids"]
        for id in ids:
            job = self._jobs.get(id.removeprefix("generate-tokens-"))
            if job is not None and id.startswith("generate-tokens-") and job.finish is None:
                self._end(job, "abort")
        return _json({"status": "aborted", "aborted": len(ids)})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "no_extension" in self.faults:
            return _json({"error": {"message": f"no method {body['method']!r}"}}, status=500)
        if body["method"] == "millrace_load":
            assert not self._may_run.is_set(), "weights change in a pause"
            self._load(Path(body["args"][0]))
            return _json({"results": [None]})
        if body["method"] == "millrace_unwrap_head":
            self._can_score = True
            return _json({"results": [None]})
        if body["method"] == "millrace_load_adapter":
            assert not self._may_run.is_set(), "weights change in a pause"
            name, folder = body["args"]
            assert name == self.adapter
            if "stale_adapter" not in self.faults:
                self._merge(Path(folder))
            return _json({"results": [None]})
        assert body["method"] == "millrace_model"
        config = self._model.config
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        found = {
            "architectures": config.architectures,
            "sizes": {name: getattr(config, name) for name in names},
            "dtype": "float32",
            "logprobs_mode": "processed_logprobs",
        }
        if "wrong_model" in self.faults:
            found["sizes"]["hidden_size"] *= 2
        return _json({"results": [found]})

    def _load(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        if "torn" in self.faults:
            weights = {name: value for name, value in weights.items() if ".layers.0." in name}
        self._model.load_state_dict(weights, strict=False)
        self._model.tie_weights()
        if "stale_head" not in self.faults:
            self._head = self._model.get_output_embeddings().weight.detach().clone()
        self._weights = self._checksum()

    async def _add_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert not self.adapter, "vLLM refuses a name that it has, unless it loads in place"
        self.adapter = body["lora_name"]
        self._merge(Path(body["lora_path"]))
        return web.Response(text=f"Success: LoRA adapter '{self.adapter}' added successfully.")

    async def _remove_adapter(self, request: web.Request) -> web.Response:
        if (await request.json())["lora_name"] != self.adapter:
            return _json({"error": {"message": "The lora adapter cannot be found."}}, status=404)
        self.adapter = ""
        return web.Response(text="Success: LoRA adapter removed successfully.")

    def _merge(self, folder: Path) -> None:
        """Every request names the adapter here, so it is merged into the weights."""
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert settings["peft_type"] == "LORA"
        tensors = load_file(folder / "adapter_model.safetensors")
        weights = dict(self._base)
        for name, a in tensors.items():
            layer, is_a, _ = name.partition(".lora_A")
            if is_a:
                own = layer.removeprefix("base_model.model.") + ".weight"
                update = tensors[f"{layer}.lora_B.weight"] @ a
                weights[own] = weights[own] + settings["lora_alpha"] / settings["r"] * update
        self._model.load_state_dict(weights)
        self._weights = self._checksum()

    def _checksum(self) -> str:
        tensors = [*self._model.parameters(), self._head]
        return xxhash.xxh3_64_hexdigest(torch.cat([t.detach().flatten() for t in tensors]).numpy())

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["model"] == (self.adapter or "policy")
        assert len(body["cache_salt"]) <= 128
        assert not set(body["cache_salt"]) & set("@/\\")
        job = _Job(body=body)
        sampling = body["sampling_params"]
        self._jobs[body["request_id"]] = job
        self._arrived.set()
        if not body["stream"]:
            choices = [job.new.get() for _ in range(sampling["max_tokens"])]
            choices = [await choice for choice in choices]
            answer = {"request_id": body["request_id"], "choices": choices, "prompt_logprobs": None}
            if sampling.get("prompt_logprobs") is not None:
                assert self._can_score or not self.adapter, "vLLM dies of this on a CPU"
                answer["prompt_logprobs"] = self._score(body["token_ids"])
            return _json(answer)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        while True:
            choice = self.shown(await job.new.get())
            if "short_stream" in self.faults and len(job.tokens) > 3:
                break
            data = {"request_id": body["request_id"], "choices": [choice]}
            if "broken_stream" in self.faults and len(job.tokens) > 3:
                data = {"error": {"message": "Internal server error", "code": 500}}
            await stream.write(f"data: {json.dumps(data)}\n\n".encode())
            if choice["finish_reason"] is not None or "error" in data:
                break
        await stream.write(b"data: [DONE]\n\n")
        return stream

    def shown(self, choice: dict[str, Any]) -> dict[str, Any]:
        """What a stream shows of new tokens; a test may change it."""
        return choice

    async def _running(self, _app: web.Application) -> Any:
        task = asyncio.create_task(self._decode())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _decode(self) -> None:
        while True:
            await self._may_run.wait()
            unfinished = [job for job in self._jobs.values() if job.finish is None]
            for job in unfinished[: self._max_running]:
                self._sample(job)
            self._jobs = {id: job for id, job in self._jobs.items() if job.finish is None}
            if not self._jobs:
                self._arrived.clear()
                await self._arrived.wait()
            await asyncio.sleep(STEP_S)

    @torch.inference_mode()
    def _rows(self, tokens: Sequence[int]) -> torch.Tensor:  # [L, V]
        output = self._model.model(torch.tensor([tokens]), use_cache=False)
        return output.last_hidden_state[0] @ self._head.T

    def _score(self, tokens: Sequence[int]) -> list[dict[str, Any] | None]:
        logprobs = self._rows(tokens).log_softmax(-1)
        rows = [
            {str(token): {"logprob": float(row[token]), "rank": 1, "decoded_token": None}}
            for row, token in zip(logprobs[:-1], tokens[1:], strict=True)
        ]
        return [None, *rows]

    def _sample(self, job: _Job) -> None:
        sampling = job.body["sampling_params"]
        prompt, weights = (*job.body["token_ids"],), self._weights
        if not job.tokens:  # as a cached prompt makes it; the KV of later tokens is always new
            weights = self._prefixes.setdefault((job.body["cache_salt"], prompt), weights)
        known = (weights, (*prompt, *job.tokens))
        if known not in _logits:
            _logits[known] = self._rows(known[1])[-1]
        logits = _logits[known]
        heat = sampling["temperature"]
        processed = (logits / (heat or 1.0)).log_softmax(-1)
        token = int(logits.argmax() if heat == 0 else torch.multinomial(processed.exp(), 1))
        job.tokens.append(token)
        self.num_sampled += 1
        if not job.spans or job.spans[-1]["version"] != self._version:
            start = len(job.tokens) - 1
            job.spans.append({"version": self._version, "start": start, "end": start})
        job.spans[-1]["end"] = len(job.tokens)
        reported = logits.log_softmax(-1) if "raw_logprobs" in self.faults else processed
        # The sampled token comes first, and counts.
        num_top = max(1, sampling.get("logprobs") or 0)
        ids = dict.fromkeys([token, *reported.topk(num_top).indices.tolist()])
        top = [{"token_id": id, "logprob": float(reported[id]), "rank": 1} for id in ids]
        row = {**top[0], "top_logprobs": top[:num_top]}
        if token in sampling.get("stop_token_ids", ()):
            self._end(job, "stop", token, row)
        elif len(job.tokens) == sampling["max_tokens"]:
            self._end(job, "length", token, row)
        else:
            job.new.put_nowait(_choice([token], [row]))

    def _end(self, job: _Job, finish: str, *last: Any) -> None:
        job.finish = finish
        rows = [last[1]] if last else []
        has_rows = "logprobs" in job.body["sampling_params"]
        choice = _choice([*last[:1]], rows if has_rows else None, finish_reason=finish)
        if "no_versions" not in self.faults:
            choice["weight_versions"] = job.spans or None
        job.new.put_nowait(choice)


def _choice(tokens: list[int], rows: list[Any] | None, **more: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "logprobs": {"content": rows} if rows is not None else None,
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": tokens,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        **more,
    }


def _json(data: Any, *, status: int = 200) -> web.Response:
    return web.json_response(data, status=status) if data is not None else web.Response()


Fake = TypeVar("Fake", bound=FakeVllm)


@contextlib.contextmanager
def serving(
    path: Path, *, port: int = 0, kind: type[Fake] = FakeVllm, **settings: Any
) -> Iterator[tuple[str, Fake]]:
    """A fake server in a thread of this process, and its URL."""
    started = threading.Event()
    found: dict[str, Any] = {}

    async def run() -> None:
        fake = kind(str(path), **settings)
        runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, chosen = runner.addresses[0][:2]
        stop = asyncio.Event()
        found.update(
            url=f"http://{host}:{chosen}", fake=fake, stop=stop, loop=asyncio.get_running_loop()
        )
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(30)
    yield found["url"], found["fake"]
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join()


def write_python(folder: Path, *, faults: Sequence[str] = ()) -> Path:
    """An "interpreter" of an environment with vLLM, for engine.options.python."""
    program = folder / "python"
    options = " ".join(f"--fault {fault}" for fault in faults)
    program.write_text(
        f"#!/bin/sh\nif [ $1 = -c ]; then exit; fi\nshift 3\n"
        f'exec {sys.executable} {__file__} {options} "$@"\n'
    )
    program.chmod(0o700)
    return program


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--uds", required=True)
    parser.add_argument("--fault", action="append", default=[])
    options, _others = parser.parse_known_args()
    torch.set_num_threads(1)
    web.run_app(FakeVllm(options.model, faults=options.fault).app(), path=options.uds, print=None)


if __name__ == "__main__":
    main()
