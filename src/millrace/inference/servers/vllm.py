"""vLLM's HTTP API, as far as an engine needs it, and the command that starts vLLM.

Nobody else can reach a server that Millrace starts: it listens on a Unix socket in a folder of the
user's own.
"""

from collections.abc import Sequence
from typing import Any, Self

from millrace.core.errors import ConfigError
from millrace.core.records import Sampling
from millrace.inference.servers import client
from millrace.inference.servers.process import ServerProcess, checked_python, server_environment

EXTENSION = "millrace_extension.MillraceWorker"
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_LOGPROBS = "--logprobs-mode processed_logprobs"


class VllmClient(client.ServerClient):
    product = "vLLM"
    path = "/inference/v1/generate"
    lora_path = "/v1"
    version_path = "/version"
    keeps_requests = True
    supported = "vLLM 0.32 or newer (pip install 'vllm>=0.32')"
    context_flag = "--max-model-len"
    ids_remedy = f"start {supported} with --enable-scale-out"
    logprobs_remedy = f"start it with {_LOGPROBS}"

    @classmethod
    def launch(cls, launch: client.Launch) -> tuple[Self, ServerProcess]:
        python = checked_python(launch.options.python, module="vllm", product="vLLM")
        socket = launch.folder / "http.sock"
        spec, config = launch.spec, launch.spec.config
        command = [
            *(python, "-m", "vllm.entrypoints.cli.main", "serve", spec.model_path),
            *("--uds", str(socket), "--served-model-name", "policy"),
            *("--dtype", launch.dtype, "--max-model-len", str(launch.max_context)),
            *("--max-num-seqs", str(config.max_sequences)),
            *("--tensor-parallel-size", str(config.tp)),
            *(*_LOGPROBS.split(), "--generation-config", "vllm"),
            *("--worker-extension-cls", EXTENSION, "--enable-scale-out", "--skip-tokenizer-init"),
            *(("--enforce-eager",) if launch.device == "cpu" else ()),
            *(("--trust-remote-code",) if spec.trust_remote_code else ()),
            *(lora_arguments(spec.lora.rank) if spec.lora else ()),
            *launch.options.arguments,
        ]
        process = ServerProcess(command, env=_environment(launch))
        return cls("http://localhost", socket=str(socket)), process

    def served_model(self) -> dict[str, Any]:
        try:
            found = self.rpc("millrace_model")
        except client.ServerRefused as error:
            remedy = f"--worker-extension-cls {EXTENSION}, and its folder in PYTHONPATH"
            remedy = "VLLM_SERVER_DEV_MODE=1" if error.status == 404 else remedy
            raise ConfigError(
                f"{self} cannot receive weights ({error}); start it with {remedy}."
            ) from None
        if (mode := found["logprobs_mode"]) != "processed_logprobs":
            raise ConfigError(
                f"{self} reports {mode}, which are not those of the sampled distribution;"
                f" {self.logprobs_remedy}."
            )
        return found

    def request_body(
        self, id: str, prompt: list[int], sampling: Sampling, *, cache_salt: str, **limits: Any
    ) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p", "min_p")
        settings = {**limits, **{name: getattr(sampling, name) for name in names}}
        return self._body(id, prompt, cache_salt=cache_salt, stream=True, logprobs=0, **settings)

    def read_chunk(self, id: str, data: Any, *, num_received: int) -> client.ServedChunk:
        choice: dict[str, Any] = data["choices"][0] if data["choices"] else {"token_ids": []}
        if (spans := choice.get("weight_versions")) is not None:
            spans = [(s["start"], s["end"], int(s["version"])) for s in spans]
        content = (choice.get("logprobs") or {}).get("content") or []
        return client.ServedChunk(
            id=id,
            tokens=choice["token_ids"],
            logprobs=[row["logprob"] for row in content],
            version=self.version,
            finish=choice.get("finish_reason"),
            spans=spans,
        )

    def sample_once(self, prompt: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """The whole answer to a request that does not stream; the first may compile."""
        body = self._body("single", prompt, cache_salt="single", stream=False, **sampling)
        return self.call(self.path, body, timeout_s=client.LOAD_TIMEOUT_S)

    def likeliest(self, prompt: Sequence[int], *, temperature: float, top: int) -> dict[int, float]:
        answer = self.sample_once(prompt, max_tokens=1, temperature=temperature, logprobs=top)
        (choice,) = answer["choices"]
        rows = choice["logprobs"]["content"][0]["top_logprobs"]
        if not choice.get("weight_versions"):
            raise ConfigError(
                f"{self} does not report the weight version of each token; start {self.supported}."
            )
        return {row["token_id"]: row["logprob"] for row in rows}

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        answer = self.sample_once(tokens, max_tokens=1, temperature=1.0, prompt_logprobs=0)
        rows = answer["prompt_logprobs"][1:]
        return [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)]

    def abort(self, ids: Sequence[str]) -> None:
        """vLLM ignores ids without this prefix."""
        self.call("/abort_requests", {"request_ids": [f"generate-tokens-{id}" for id in ids]})

    def pause(self, *, forget_kv: bool = False) -> None:
        self.call("/pause", mode="keep", clear_cache=str(forget_kv).lower())

    def resume(self) -> None:
        self.call("/resume")

    def load_weights(self, folder: str) -> None:
        self.rpc("millrace_load", folder, timeout_s=client.LOAD_TIMEOUT_S)

    def add_adapter(self, folder: str) -> None:
        super().add_adapter(folder)
        self.rpc("millrace_unwrap_head")

    def load_adapter(self, folder: str) -> None:
        """vLLM's own load_inplace is stored with the adapter: with it, requests in progress would
        load the folder of their own start again, in each pass."""
        self.rpc("millrace_load_adapter", client.ADAPTER, folder, timeout_s=client.LOAD_TIMEOUT_S)

    def lora_remedy(self, rank: int) -> str:
        return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and {' '.join(lora_arguments(rank))}"

    def rpc(self, method: str, *arguments: str, timeout_s: float = client.CALL_TIMEOUT_S) -> Any:
        """The answer of vLLM's first worker to a method of the worker extension."""
        body = {"method": method, "args": list(arguments)}
        answer = self.call("/collective_rpc", body, timeout_s=timeout_s)
        return answer["results"][0] if answer else None

    def _body(
        self, id: str, prompt: Sequence[int], *, cache_salt: str, stream: bool, **sampling: Any
    ) -> dict[str, Any]:
        # The server's defaults come from the model's generation_config.json, and stop_token_ids
        # are the only tokens that may end a completion.
        plain = {"repetition_penalty": 1.0, "ignore_eos": True, "detokenize": False}
        return {
            "request_id": id,
            "model": self.model,
            "token_ids": list(prompt),
            "cache_salt": cache_salt,
            "stream": stream,
            "sampling_params": {**plain, **sampling},
        }


def lora_arguments(rank: int) -> tuple[str, ...]:
    """Arguments of `vllm serve` for an adapter of this rank; vLLM knows a few largest ranks."""
    allowed = next((known for known in _LORA_RANKS if known >= rank), rank)
    return ("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(allowed))


def _environment(launch: client.Launch) -> dict[str, str]:
    env = server_environment(
        launch,
        VLLM_SERVER_DEV_MODE="1",  # pause, resume, versions and the extension
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",  # needs --enable-lora, too
        VLLM_NO_USAGE_STATS="1",
    )
    if launch.device != "cpu":
        return env
    defaults = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other workers share the cores
        "OMP_NUM_THREADS": str(launch.threads),
    }
    return {**defaults, **env}
