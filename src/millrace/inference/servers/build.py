"""Starts an engine at a vLLM or SGLang server, and refuses a server that would give wrong numbers.

Promise: every refusal is one sentence, and no server that was started here is left running.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from millrace.config import LoraConfig
from millrace.core.errors import ConfigError, EngineLost
from millrace.core.files import private_folder
from millrace.core.secrets import Secrets
from millrace.inference.backend import EngineSpec, VllmBackend
from millrace.inference.embedded.scheduling.outputs import StopRules
from millrace.inference.servers.client import Launch, ServerClient, ServerRefused
from millrace.inference.servers.engine import ServerEngine
from millrace.inference.servers.process import ServerProcess
from millrace.inference.servers.sglang import SglangClient
from millrace.inference.servers.staging import WeightStaging, lora_layers, weight_folder
from millrace.inference.servers.vllm import VllmClient
from millrace.models.devices import resolve_device, resolve_dtype
from millrace.models.directory import context_length, load_tokenizer, read_config, text_config
from millrace.models.loading import generation_stop_ids

_SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.2
_TOP = 5  # likeliest tokens that are compared
_CHECKED_PROMPT = (1, 2, 3, 4)
_DIALECTS: dict[str, type[ServerClient]] = {"vllm": VllmClient, "sglang": SglangClient}


def build_server_engine(spec: EngineSpec, *, options: VllmBackend) -> ServerEngine:
    dialect = _DIALECTS[options.dialect]
    path, trust = spec.model_path, spec.trust_remote_code
    device = resolve_device(spec.device)
    dtype = str(resolve_dtype(spec.config.dtype, device)).removeprefix("torch.")
    max_context = context_length(
        path, wanted=spec.config.max_context, setting="engine.max_context", trust_remote_code=trust
    )
    parent = Path(options.directory) if options.directory else _SHARED_MEMORY
    if options.directory:
        parent.mkdir(parents=True, exist_ok=True)
    resources = contextlib.ExitStack()
    # Of processes that were killed, the next engine in the same directory removes it.
    folder = resources.enter_context(private_folder(parent if parent.is_dir() else None))
    staging = WeightStaging(
        path, folder, trust_remote_code=trust, lora=spec.lora, engine_type=options.dialect
    )
    tokenizer = load_tokenizer(path, trust_remote_code=trust)
    stop_ids = generation_stop_ids(path, tokenizer, trust_remote_code=trust)
    server = None
    if options.attach:
        client = _attached(dialect, options)
    else:
        launch = Launch(
            spec=spec,
            options=options,
            folder=folder,
            dtype=dtype,
            device=spec.device if device.type == "cuda" else "cpu",
            max_context=max_context,
            lora_layers=lora_layers(staging.shapes) if spec.lora else (),
            threads=torch.get_num_threads(),
        )
        client, server = dialect.launch(launch)
    engine = ServerEngine(
        client=client,
        staging=staging,
        rules=StopRules(tokenizer, eos_ids=stop_ids),
        stop_ids=stop_ids,
        max_context=max_context,
        vocab_size=text_config(path, trust_remote_code=trust).vocab_size,
        kv=spec.config.kv,
        server=server,
        resources=resources,
    )
    try:
        _await(client, server)
        with _refusing(client, is_attached=server is None):
            _check_server(client, has_key=options.api_key is not None, max_context=max_context)
            _check_model(client, spec, dtype=dtype)
            _serve_version(client, spec, staging=staging, is_attached=server is None)
            _check_logprobs(client)
    except BaseException:
        engine.close()
        raise
    engine.version = spec.version
    return engine


def _attached(dialect: type[ServerClient], options: VllmBackend) -> ServerClient:
    header = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    secrets = Secrets(header, owner="engine.options.api_key")
    filled = {name: secrets.filled(value) for name, value in header.items()}
    return dialect(options.attach[0], headers=filled)


@contextlib.contextmanager
def _refusing(client: ServerClient, *, is_attached: bool) -> Iterator[None]:
    """A server of another kind or version lacks paths, or answers in another form."""
    try:
        yield
    except EngineLost as error:
        where = "engine.options.attach" if is_attached else "engine.options.python"
        raise ConfigError(
            f"{str(error).rstrip('.')}{_named_version(client)}; start {client.supported}, or"
            f" correct {where}."
        ) from error


@contextlib.contextmanager
def _reading(client: ServerClient) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineLost(f"{client} answered {client.last_answer}, in another form.") from error


def _named_version(client: ServerClient) -> str:
    """The version of the server's program, for people."""
    try:
        version = client.product_version()
    except (EngineLost, AttributeError):  # no such path, or another kind of server
        version = None
    return f" (it is {client.product} {version})" if version else ""


def _await(client: ServerClient, server: ServerProcess | None) -> None:
    """Wait for a server that was started here; the controller limits the time."""
    while True:
        try:
            client.call("/health", method="GET")
            return
        except EngineLost as error:
            if isinstance(error, ServerRefused) and error.status == 401:
                return  # _check_server() says what is wrong with the key
            if server is None:
                reason = str(error).partition("/health: ")[2].rstrip(".")
                raise ConfigError(
                    f"No {client.product} server can be reached at {client.url} ({reason}); start"
                    " it, or correct engine.options.attach."
                ) from None
        if server.end is not None:
            raise ConfigError(
                f"The {client.product} server {server.end} before it served; its reason is in the"
                " log of this engine: correct the model or engine.options, or install"
                f" {client.supported}."
            )
        time.sleep(_POLL_S)


def _check_server(client: ServerClient, *, has_key: bool, max_context: int) -> None:
    try:
        with _reading(client):
            (model, *_) = client.call("/v1/models", method="GET")["data"]
            name, limit = str(model["id"]), model.get("max_model_len")
    except ServerRefused as error:
        if error.status != 401:
            raise
        fault = "refuses that of engine.options.api_key" if has_key else "has got none"
        raise ConfigError(
            f"{client} wants a key, and {fault}; set engine.options.api_key to 'env:NAME', where"
            " the variable NAME holds the key."
        ) from None
    client.model = name
    if limit is not None and limit < max_context:
        raise ConfigError(
            f"{client} serves sequences of {limit} tokens, and engine.max_context is {max_context};"
            f" lower it, or start the server with a larger {client.context_flag}."
        )


def _check_model(client: ServerClient, spec: EngineSpec, *, dtype: str) -> None:
    with _reading(client):
        found = client.served_model()
        sizes = dict(found["sizes"])
    config = read_config(spec.model_path, trust_remote_code=spec.trust_remote_code)
    text = config.get_text_config()
    wanted = {"architectures": list(config.architectures or ()), "dtype": dtype}
    wanted |= {name: getattr(text, name, None) for name in sizes}
    for name, value in wanted.items():
        served = sizes.get(name, found.get(name))
        if served != value:
            raise ConfigError(
                f"{client} serves another model than {spec.model_path!r}: its {name} is {served},"
                f" not {value}; serve that model there."
            )


def _serve_version(
    client: ServerClient, spec: EngineSpec, *, staging: WeightStaging, is_attached: bool
) -> None:
    """A server that was started elsewhere may hold the weights of an earlier run."""
    client.pause(forget_kv=True)
    try:
        if spec.lora is not None:
            _serve_adapter(client, spec, spec.lora, staging=staging)
        elif is_attached:
            _serve_weights(client, weight_folder(spec.model_path))
        client.set_version(spec.version)
    except BaseException:
        with contextlib.suppress(EngineLost):  # the first error says what is wrong
            client.resume()  # or the server would stay paused for whoever uses it next
        raise
    client.resume()


def _serve_adapter(
    client: ServerClient, spec: EngineSpec, lora: LoraConfig, *, staging: WeightStaging
) -> None:
    first = staging.write_first(spec.adapter_path, version=spec.version)
    try:
        client.add_adapter(first.folder.name)
    except ServerRefused as error:
        raise ConfigError(
            f"{client} cannot load the adapter of [lora] ({error}); start it with"
            f" {client.lora_remedy(lora.rank)}."
        ) from None


def _serve_weights(client: ServerClient, folder: str) -> None:
    try:
        client.load_weights(folder)
    except ServerRefused as error:
        raise ConfigError(
            f"{client} cannot load the weights in {folder!r} ({str(error).rstrip('.')}); give it"
            " that folder under the same path, with the model that it serves."
        ) from None


def _check_logprobs(client: ServerClient) -> None:
    """At half the temperature, differences of logprobs are twice as large."""
    cold, warm = (_likeliest(client, temperature) for temperature in (0.5, 1.0))
    shared = sorted(warm.keys() & cold.keys(), key=warm.__getitem__)  # the sampled one may differ
    gaps = [rows[shared[-1]] - rows[shared[0]] for rows in (cold, warm)]
    if abs(gaps[0] - 2 * gaps[1]) > 0.05 * max(1.0, gaps[0]):
        raise ConfigError(
            f"{client} does not apply the temperature to its logprobs: they differ by"
            f" {gaps[1]:.3f} at temperature 1 and by {gaps[0]:.3f} at 0.5, not {2 * gaps[1]:.3f};"
            f" {client.logprobs_remedy}."
        )


def _likeliest(client: ServerClient, temperature: float) -> dict[int, float]:
    """Logprobs of the next token after a short prompt, of the likeliest ids and of one sampled."""
    try:
        with _reading(client):
            rows = client.likeliest(_CHECKED_PROMPT, temperature=temperature, top=_TOP)
    except EngineLost as error:
        raise ConfigError(
            f"{client} does not take and return token ids with logprobs"
            f" ({str(error).rstrip('.')}){_named_version(client)}; {client.ids_remedy}."
        ) from None
    if (total := sum(map(math.exp, rows.values()))) > 1.01:
        raise ConfigError(
            f"{client} reports logprobs whose probabilities add up to {total:.3g};"
            f" {client.logprobs_remedy}."
        )
    return rows
