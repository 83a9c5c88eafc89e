"""Where the processes of a run compute: the GPUs of this host are shared out among them.

The trainer's ranks come first, then models besides the policy, with a GPU for each process as long
as one is left for engines. Engines get the rest. GPUs that the user names are given to no other
process. One GPU is shared by all processes; without a GPU, all of them compute on the CPU. Engines
whose servers run already only pass requests on, so they are on the CPU.

Promise: placed() leaves no number of processes open. A device that cannot hold the weights of its
processes is refused in one sentence before any of them starts. torch is imported by functions only.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millrace.cluster.launchers.launcher import HostDevice
from millrace.cluster.process import available_cores
from millrace.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.models.directory import num_weights
from millrace.run.policies import policy_config
from millrace.scoring.pool import ScorerSpec
from millrace.scoring.reward_models.reward_model import RewardModelSettings
from millrace.scoring.teachers.process import LogprobModelSettings
from millrace.scoring.teachers.teacher import Reference, SelfTeacher, Teacher

GIB = 2**30
_ROOM = 0.8  # share of a GPU for weights, gradients and optimizer state; the rest is activations
ELSEWHERE = "another host"  # instead of a device; that host chooses it
_BYTES = {"float32": 4}  # per weight; 2 for all other data types


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherModel:
    """A model besides the policy, which has processes of its own."""

    name: str  # in placement.models
    path: str
    dtype: str
    count: int = 1  # of its processes
    tp: int = 1  # GPUs of each


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedProcess:
    name: str
    device: str  # or ELSEWHERE
    min_bytes: int  # of weights, and of gradients and optimizer state where it trains
    more: str  # what else its memory is for
    step_bytes: int | None = None  # during a step, if engines sleep then
    idle_bytes: int | None = None  # between two steps


def host_devices() -> tuple[HostDevice, ...]:
    """The GPUs of this host that PyTorch sees, then its CPU."""
    import torch

    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    found = [
        HostDevice(name=f"cuda:{i}", kind=gpu.name, total_bytes=gpu.total_memory)
        for i, gpu in enumerate(gpus)
    ]
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind = f"{available_cores()} cores"
    return (*found, HostDevice(name="cpu", kind=kind, total_bytes=host_bytes))


def other_models(config: RunConfig, specs: Sequence[ScorerSpec]) -> list[OtherModel]:
    """The models besides the policy that have processes on this host."""
    roles = [
        OtherModel(
            name=name,
            path=role.path,
            dtype=role.engine.dtype,
            count=role.engine.num_local,
            tp=role.engine.tp,
        )
        for name, role in config.environment.models.items()
        if not role.engine.attached
    ]
    scorers = [
        OtherModel(name=spec.name, path=path, dtype=spec.type.dtype)
        for spec in specs
        if isinstance(spec.type, RewardModelSettings | LogprobModelSettings)
        and (path := _scorer_path(config, spec.type)) is not None
    ]
    return [*roles, *scorers]


def _scorer_path(
    config: RunConfig, settings: RewardModelSettings | LogprobModelSettings
) -> str | None:
    """The model that a scorer loads; None if it needs no process of its own."""
    if isinstance(settings, SelfTeacher):
        return config.model.path
    if isinstance(settings, Reference) and settings.model is None:
        return None if config.lora else config.model.path
    assert isinstance(settings, RewardModelSettings | Teacher | Reference)
    return settings.model  # None for a teacher on a server


def placed(
    config: RunConfig, *, devices: Sequence[HostDevice], models: Sequence[OtherModel] = ()
) -> RunConfig:
    """The settings with every number of processes, and a GPU for each process if there are
    several."""
    gpus = [device for device in devices if device.name != "cpu"]
    if config.engine.attached:
        own = ("cpu",) if _is_open(config.placement.engines) else config.placement.engines
        config = config.updated(engine={"tp": 1}, placement={"engines": own})
    placement, count, ranks = config.placement, config.engine.count, config.trainer.ranks
    named = {*placement.trainer, *placement.engines}.union(*placement.models.values())
    free = [gpu.name for gpu in gpus if gpu.name not in named]
    trainer, engines, others = placement.trainer, placement.engines, dict(placement.models)
    tp = config.engine.tp
    if ranks == "auto":
        num_engines = config.engine.num_local + config.evaluate.engines
        num_others = sum(model.count * model.tp for model in models)
        most = len(free) - num_others - (tp * num_engines if _is_open(engines) else 0)
        ranks = _num_ranks(config, gpus=gpus, most=most)
    num_here = ranks - config.trainer.remote
    if gpus and _is_open(trainer) and len(free) < num_here and ranks > 1:
        raise ConfigError(
            f"trainer.ranks = {ranks} need a GPU each, and {len(free)} of the {len(gpus)} GPUs that"
            " PyTorch sees are left for them; lower trainer.ranks, or list the GPU of each rank in"
            " placement.trainer to share some."
        )
    if len(gpus) > 1:
        if _is_open(trainer):
            here, free = free[:num_here] or [gpus[0].name], free[num_here:]
            trainer = tuple(here[rank % len(here)] for rank in range(num_here))
        for model in models:
            if _is_open(others.get(model.name, ("auto",))):
                own = [free.pop() for _ in range(model.count * model.tp) if len(free) > 1]
                others[model.name] = tuple(own) or (gpus[-1].name,)
        if _is_open(engines):
            wanted = len(free) if count == "auto" else tp * (count + config.evaluate.engines)
            num_whole = min(wanted, len(free)) // tp * tp
            engines = tuple(free[:num_whole]) or trainer
    elif gpus and _is_open(engines) and tp > 1:
        raise ConfigError(
            f"engine.tp = {tp} needs {tp} GPUs for each engine, and PyTorch sees {len(gpus)} here;"
            " lower it, or use a host with more GPUs."
        )
    if count == "auto":
        is_shared = _is_open(engines) or engines == trainer
        num_places = len(config.engine.attached) or (0 if is_shared else len(engines) // tp)
        count = max(1, num_places - config.evaluate.engines)
    return config.updated(
        engine={"count": count},
        trainer={"ranks": ranks},
        placement={"trainer": trainer, "engines": engines, "models": others},
    )


def _is_open(devices: tuple[str, ...]) -> bool:
    """Whether the choice of a GPU is left to the run."""
    return len(devices) == 1 and devices[0] in ("auto", "cuda")


def _num_ranks(config: RunConfig, *, gpus: Sequence[HostDevice], most: int) -> int:
    """Half of the GPUs, or more if the state of the model needs them; `most` are available. All of
    these if no engine is on this host."""
    mesh, devices = config.trainer.mesh, config.placement.trainer
    unit = mesh.dp_replicate * mesh.cp * mesh.tp
    if mesh.dp_shard != "auto":
        return unit * mesh.dp_shard
    if not _is_open(devices):
        return len(devices)
    if len(gpus) < 2:
        return unit
    from millrace.models.devices import ModelSize, rank_bytes

    size, room = ModelSize.read(config), int(_ROOM * gpus[0].total_bytes)
    found = ((n, config.updated(trainer={"ranks": n})) for n in range(unit, most + 1, unit))
    needed = next((n for n, tried in found if rank_bytes(tried, size) < room), most)
    num_engines = config.engine.num_local + config.evaluate.engines  # remote ones have other GPUs
    has_engines = not config.engine.attached and num_engines > 0
    share = len(gpus) // 2 if has_engines else most
    wanted = max(min(share, most), min(needed, most), 1)
    return max(unit, wanted - wanted % unit)


def placed_processes(
    config: RunConfig,
    *,
    devices: Sequence[HostDevice],
    models: Sequence[OtherModel] = (),
    trains: bool = True,
) -> list[PlacedProcess]:
    """The processes of a placed run that compute, on this host or after they have joined."""
    placement, ranks = config.placement, config.trainer.num_ranks
    found: list[PlacedProcess] = []

    def add(name: str, device: str, min_bytes: int, more: str = "", **own: int | None) -> None:
        if device == "auto" or (device == "cuda" and devices[0].is_gpu):
            device = devices[0].name
        found.append(PlacedProcess(name=name, device=device, min_bytes=min_bytes, more=more, **own))

    def add_rank(name: str, device: str, own: RunConfig) -> None:
        idle_bytes = _rank_bytes(own, in_step=False)
        add(name, device, _rank_bytes(own), "and activations", idle_bytes=idle_bytes)

    def weight_bytes(path: str, dtype: str, device: str) -> int:
        if dtype == "auto":
            on_cpu = device == "cpu" or (device == "auto" and not devices[0].is_gpu)
            dtype = "float32" if on_cpu else "bfloat16"
        return num_weights(path) * _BYTES.get(dtype, 2)

    for rank in range(ranks if trains else 0):
        name = "trainer" if ranks == 1 else f"trainer-{rank}"
        is_here = rank < ranks - config.trainer.remote
        add_rank(name, placement.rank(rank) if is_here else ELSEWHERE, config)
    for policy in list(config.policies)[1:] if config.lora is None else ():
        add_rank(f"trainer-{policy}", placement.rank(0), policy_config(config, policy))
    sleeps = config.cluster.share_gpu == "sleep" and devices[0].is_gpu
    step_bytes = 0 if sleeps else None
    num_local, tp = config.engine.num_local, config.engine.tp
    path, dtype = config.model.path, config.engine.dtype
    for i in range(num_local + config.evaluate.engines):
        name = f"engine-{i}" if i < num_local else f"evaluator-{i - num_local}"
        for device in placement.engine_devices(i, tp=tp):
            if config.engine.attached:
                add(name, device, 0, "passes requests to its server")
            else:
                size = weight_bytes(path, dtype, device) // tp
                add(name, device, size, "and the KV cache", step_bytes=step_bytes)
    for i in range(config.engine.remote):
        size = weight_bytes(path, dtype, ELSEWHERE) // tp
        add(f"engine-{num_local + i}", ELSEWHERE, size, "and the KV cache")
    for model in models:
        for i in range(model.count):
            for device in placement.model_devices(model.name, i, tp=model.tp):
                size = weight_bytes(model.path, model.dtype, device) // model.tp
                add(f"{model.name}-{i}", device, size)
    return found


def _rank_bytes(config: RunConfig, *, in_step: bool = True) -> int:
    from millrace.models.devices import ModelSize, rank_bytes

    return rank_bytes(config, ModelSize.read(config), in_step=in_step)


def engine_index(config: RunConfig, name: str) -> int | None:
    """The number of an engine among all of this host: those that a run starts with, evaluators,
    then engines that were added. None if another host brings it."""
    role, _, digits = name.rpartition("-")
    number, num_local, num_remote = int(digits), config.engine.num_local, config.engine.remote
    if role == "evaluator":
        return num_local + number
    if number < num_local:
        return number
    is_added = number >= num_local + num_remote
    return number - num_remote + config.evaluate.engines if is_added else None


def local_devices(config: RunConfig) -> list[str]:
    """The devices of the trainer's ranks and of all engines on this host, one for each process."""
    if not config.cluster.is_local:
        return []
    first = ("auto", "cuda")
    return ["cuda:0" if device in first else device for _, device in _places(config)]


def check_devices(config: RunConfig, resolve: Callable[[str], object]) -> None:
    """Every device of this host must exist; `resolve` raises ConfigError for one that does not.
    With another launcher, only models of scorers are on this host."""
    is_local, elsewhere = config.cluster.is_local, config.environment.models
    models = [
        (f"placement.models.{name}", device)
        for name, devices in config.placement.models.items()
        for device in devices
        if is_local or name not in elsewhere
    ]
    for setting, device in [*(_places(config) if is_local else ()), *models]:
        try:
            resolve(device)
        except ConfigError as error:
            raise ConfigError(f"{setting} = {device!r}: {error}") from None


def _places(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The setting and the device of each process on this host that computes."""
    placement, models = config.placement, config.environment.models
    num_trainers = 1 if config.lora else max(1, len(config.policies))  # on devices of the first
    for rank in range((config.trainer.num_ranks - config.trainer.remote) * num_trainers):
        yield "placement.trainer", placement.rank(rank)
    num_devices = (config.engine.num_local + config.evaluate.engines) * config.engine.tp
    yield from (("placement.engines", placement.engine(i)) for i in range(num_devices))
    for name, model in models.items():
        for i in range(model.engine.num_local):
            for device in placement.model_devices(name, i, tp=model.engine.tp):
                yield f"placement.models.{name}", device


def check_placed(
    config: RunConfig, processes: Sequence[PlacedProcess], devices: Sequence[HostDevice]
) -> None:
    """Raise ConfigError if processes cannot work where they are placed on this host."""
    check_broadcast(config, processes)
    check_memory(processes, devices)


def check_memory(processes: Sequence[PlacedProcess], devices: Sequence[HostDevice]) -> None:
    """Raise ConfigError if a device cannot hold the weights of its processes."""
    for device in devices:
        here = [process for process in processes if process.device == device.name]
        if (needed := needed_bytes(here)) > device.total_bytes:
            raise ConfigError(
                f"Device {device.name!r} has {device.total_bytes / GIB:.1f} GiB, and its processes"
                f" ({', '.join(process.name for process in here)}) need {needed / GIB:.1f} GiB for"
                " weights and optimizer state alone; use more devices or set optimizer.offload ="
                " true on a GPU, or train a smaller model or a LoRA adapter."
            )


def check_broadcast(config: RunConfig, processes: Sequence[PlacedProcess]) -> None:
    """Raise ConfigError if NCCL, which needs a GPU per member, would broadcast new weights between
    processes that share one. Rank 0 sends to all engines, and to all evaluators separately."""
    transport, spans_hosts = config.weights.transport, config.spans_hosts
    is_broadcast = transport == "collective" or (transport == "auto" and spans_hosts)
    senders = [p for p in processes if p.name in ("trainer", "trainer-0")]  # none in an evaluation
    if not is_broadcast or not senders or config.engine.has_servers:
        return
    for role in ("engine", "evaluator"):
        first: dict[str, str] = {}  # process by GPU
        for process in (*senders, *(p for p in processes if p.name.startswith(f"{role}-"))):
            if process.device in first and process.device.startswith("cuda"):
                own = (
                    "'auto' (with other hosts a broadcast)"
                    if transport == "auto"
                    else "'collective'"
                )
                remedy = "'disk'" if spans_hosts else "'auto'"
                raise ConfigError(
                    f"weights.transport = {own} needs a GPU for each process, but"
                    f" {first[process.device]} and {process.name} share {process.device}; set"
                    f" weights.transport to {remedy}, or give them different GPUs in [placement]."
                )
            first[process.device] = process.name


def needed_bytes(processes: Sequence[PlacedProcess]) -> int:
    """The memory of processes on one device, when they need most."""
    in_step = sum(p.min_bytes if p.step_bytes is None else p.step_bytes for p in processes)
    idle = sum(p.min_bytes if p.idle_bytes is None else p.idle_bytes for p in processes)
    return max(in_step, idle)


def idle_gpus(
    config: RunConfig, processes: Sequence[PlacedProcess], devices: Sequence[HostDevice]
) -> tuple[str, ...]:
    """A sentence about GPUs of this host that no process of the run uses, if there are any."""
    if not config.cluster.is_local:
        return ()
    used = {process.device for process in processes}
    idle = [device.name for device in devices if device.is_gpu and device.name not in used]
    if not idle:
        return ()
    which = f"{idle[0]} is" if len(idle) == 1 else f"{', '.join(idle)} are"
    return (
        f"{which} not used; raise engine.count or trainer.ranks, set them to 'auto', or list more"
        " GPUs in [placement].",
    )
