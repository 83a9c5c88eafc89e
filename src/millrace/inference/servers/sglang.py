"""SGLang's HTTP API, as far as an engine needs it, and the command that starts SGLang.

Written against SGLang's documentation and sources of August 2026, and tested with a fake server
only: no Millrace run has used a real one.

SGLang labels a chunk with the weights that are served when it is sent, and a chunk may join tokens
from before and after an update. So an engine ends all requests before an update and sends them
again after it, with the tokens they have: each request at the server has one version. SGLang
prefills them again.

A server that Millrace starts listens on a port of this host, and answers only those who know its
key. The key is in a file that only this user can read.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any, Self

from millrace.cluster.address import free_port
from millrace.core.errors import ConfigError
from millrace.core.records import Sampling
from millrace.inference.servers import client
from millrace.inference.servers.process import ServerProcess, checked_python, server_environment

_HOST = "127.0.0.1"


class SglangClient(client.ServerClient):
    product = "SGLang"
    path = "/generate"
    lora_path = ""
    version_path = "/server_info"
    keeps_requests = False
    supported = "SGLang of August 2026 or newer (pip install -U sglang)"
    context_flag = "--context-length"
    ids_remedy = f"start {supported} with --skip-tokenizer-init"
    logprobs_remedy = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"

    @classmethod
    def launch(cls, launch: client.Launch) -> tuple[Self, ServerProcess]:
        python = checked_python(launch.options.python, module="sglang", product="SGLang")
        port, key = free_port(_HOST), secrets.token_urlsafe()
        settings = launch.folder / "sglang.yaml"  # JSON is YAML
        settings.touch(0o600)
        settings.write_text(json.dumps({"api-key": key}))
        spec, config = launch.spec, launch.spec.config
        lora = spec.lora and (
            *("--enable-lora", "--max-loras-per-batch", "1"),
            *("--max-lora-rank", str(spec.lora.rank)),
            *("--lora-target-modules", *launch.lora_layers),
        )
        command = [
            *(python, "-m", "sglang.launch_server", "--model-path", spec.model_path),
            *("--config", str(settings), "--host", _HOST, "--port", str(port)),
            *("--dtype", launch.dtype, "--context-length", str(launch.max_context)),
            *("--max-running-requests", str(config.max_sequences), "--tp-size", str(config.tp)),
            *("--skip-tokenizer-init", "--incremental-streaming-output"),
            *(("--device", "cpu") if launch.device == "cpu" else ()),
            *(("--trust-remote-code",) if spec.trust_remote_code else ()),
            *(lora or ()),
            *launch.options.arguments,
        ]
        env = server_environment(launch, SGLANG_RETURN_ORIGINAL_LOGPROB="0")
        process = ServerProcess(command, env=env)
        return cls(f"http://{_HOST}:{port}", headers={"Authorization": f"Bearer {key}"}), process

    def served_model(self) -> dict[str, Any]:
        """Sizes are not reported: weights of other sizes are refused when they are loaded."""
        model = self.call("/model_info", method="GET")
        dtype = self.call(self.version_path, method="GET")["dtype"]
        return {"architectures": model["architectures"], "dtype": dtype, "sizes": {}}

    def request_body(
        self, id: str, prompt: list[int], sampling: Sampling, *, cache_salt: str, **limits: Any
    ) -> dict[str, Any]:
        settings = {
            "max_new_tokens": limits["max_tokens"],
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop_token_ids": limits["stop_token_ids"],  # ignore_eos would ignore them, too
        }
        own = {"rid": _request_id(id), "extra_key": cache_salt, "sampling_params": settings}
        return self._body(prompt, stream=True, **own)

    def read_chunk(self, id: str, data: Any, *, num_received: int) -> client.ServedChunk:
        """Servers send all tokens so far, or the new ones only, and either at an abort."""
        meta = data["meta_info"]
        reason = meta["finish_reason"] or {"type": None}
        if reason["type"] == "abort" and reason.get("status_code"):
            raise ValueError(reason["message"])
        rows, total = meta["output_token_logprobs"], meta["output_token_logprobs_length"]
        new = rows[num_received - (total - len(rows)) :]
        version = int(meta["weight_version"])
        return client.ServedChunk(
            id=id,
            tokens=[token for _, token, _ in new],
            logprobs=[logprob for logprob, _, _ in new],
            version=version,
            finish=reason["type"],
            spans=[(0, total, version)] if reason["type"] and total else None,
        )

    def likeliest(self, prompt: Sequence[int], *, temperature: float, top: int) -> dict[int, float]:
        sampling = {"max_new_tokens": 1, "temperature": temperature}
        meta = self._sample_once(prompt, sampling_params=sampling, top_logprobs_num=top)
        rows = [*meta["output_top_logprobs"][0], *meta["output_token_logprobs"]]
        if meta.get("weight_version") != str(self.version):
            raise ConfigError(
                f"{self} does not report the weight version of each token; start {self.supported}."
            )
        return {token: logprob for logprob, token, _ in rows}

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        meta = self._sample_once(tokens, sampling_params=sampling, logprob_start_len=0)
        rows = zip(meta["input_token_logprobs"], tokens, strict=True)
        found = [logprob for (logprob, token, _), given in rows if token == given][1:]
        if len(found) != len(tokens) - 1 or None in found:
            raise ValueError(f"{len(found)} of {len(tokens) - 1}")
        return found

    def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.call("/abort_request", {"rid": _request_id(id)})

    def load_weights(self, folder: str) -> None:
        body = {"model_path": folder, "flush_cache": True}
        self.call("/update_weights_from_disk", body, timeout_s=client.LOAD_TIMEOUT_S)

    def version_body(self, version: int) -> dict[str, Any]:
        return {"new_version": str(version), "abort_all_requests": False}

    def lora_remedy(self, rank: int) -> str:
        return f"--enable-lora --max-lora-rank {rank} --lora-target-modules all"

    def _sample_once(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """The meta_info of an answer that is not streamed; the first may compile."""
        body = self._body(prompt, stream=False, extra_key=f"{self.version}-single", **more)
        return self.call(self.path, body, timeout_s=client.LOAD_TIMEOUT_S)["meta_info"]

    def _body(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        adapter = {"lora_path": client.ADAPTER} if self.model == client.ADAPTER else {}
        return {"input_ids": list(prompt), "return_logprob": True, **adapter, **more}


def _request_id(id: str) -> str:
    """SGLang aborts every request whose id begins with the given one."""
    return f"{id}/"
