"""A vLLM server that an engine process starts for itself.

Promise: the server dies with the engine process, and its worker processes die with it. Nobody else
can reach it: it listens on a Unix socket in a folder of the user's own.
"""

import os
import subprocess
import sys
from pathlib import Path

from millrace.cluster.parent_death import with_parent_death_signal
from millrace.cluster.process import describe_exit
from millrace.core.errors import ConfigError
from millrace.inference.backend import EngineSpec, VllmBackend

EXTENSION = "millrace_extension.MillraceWorker"
EXTENSION_FOLDER = Path(__file__).parent / "worker_extension"
_MODULE = "vllm.entrypoints.cli.main"
_FIND_VLLM = "import sys, importlib.util; sys.exit(importlib.util.find_spec('vllm') is None)"
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_STOP_S = 5.0


class VllmServer:
    def __init__(
        self,
        spec: EngineSpec,
        options: VllmBackend,
        *,
        socket: Path,
        dtype: str,
        device: str,
        max_context: int,
        threads: int,
    ) -> None:
        """Start it; the caller waits until it answers."""
        self._python = options.python or sys.executable
        _check_python(self._python)
        config = spec.config
        command = [
            *(self._python, "-m", _MODULE, "serve", spec.model_path),
            *("--uds", str(socket), "--served-model-name", "policy"),
            *("--dtype", dtype, "--max-model-len", str(max_context)),
            *("--max-num-seqs", str(config.max_sequences)),
            *("--tensor-parallel-size", str(config.tp)),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--worker-extension-cls", EXTENSION, "--enable-scale-out", "--skip-tokenizer-init"),
            *(("--enforce-eager",) if device == "cpu" else ()),
            *(("--trust-remote-code",) if spec.trust_remote_code else ()),
            *(lora_arguments(spec.lora.rank) if spec.lora else ()),
            *options.arguments,
        ]
        self._process = subprocess.Popen(
            with_parent_death_signal(command),
            env=_environment(device=device, tp=config.tp, threads=threads),
            stdin=subprocess.DEVNULL,
        )

    @property
    def end(self) -> str | None:
        """How it has ended; None while it runs."""
        code = self._process.poll()
        return None if code is None else describe_exit(code)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def lora_arguments(rank: int) -> tuple[str, ...]:
    """Arguments of `vllm serve` for an adapter of this rank; vLLM knows a few largest ranks."""
    allowed = next((known for known in _LORA_RANKS if known >= rank), rank)
    return ("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(allowed))


def _check_python(python: str) -> None:
    try:
        found = subprocess.run(
            [python, "-c", _FIND_VLLM], capture_output=True, text=True, env=_without_path()
        )
    except OSError as error:
        raise ConfigError(
            f"engine.options.python = {python!r} cannot be run: {error.strerror}; name the"
            " interpreter of an environment that has vLLM."
        ) from None
    if found.returncode:
        raise ConfigError(
            f"The environment of engine.options.python = {python!r} has no vLLM; install it there,"
            " or name another interpreter."
        )


def _without_path() -> dict[str, str]:
    """This environment, without the modules of this interpreter: vLLM's has others."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in own}


def _environment(*, device: str, tp: int, threads: int) -> dict[str, str]:
    env = {
        **_without_path(),
        "PYTHONPATH": str(EXTENSION_FOLDER),
        "MILLRACE_VLLM_CHILD": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, versions and the extension
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # needs --enable-lora, too
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device == "cpu":
        defaults = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other workers share the cores
            "OMP_NUM_THREADS": str(threads),
        }
        return {**defaults, **env}
    first = int(device.partition(":")[2] or 0)
    visible = env.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(first + tp)))
    return {**env, "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[first : first + tp])}
