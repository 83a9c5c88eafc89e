"""What a job of `millrace launch` consists of: its nodes, the GPUs of its roles, its commands.

The controller and the trainer run on one node; each of the others brings the same number of
engines. Promise: a plan that cannot run is refused in one sentence before anything is written.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.config import RunConfig, load_config, parse_override
from millrace.core.errors import ConfigError, suggestion
from millrace.run.checks import check_settings

ROLES = ("controller", "engines")
# Between checkpoint.grace_s and the kill by the scheduler: workers stop, and signals may be late.
KILL_MARGIN_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    name: str  # of the job
    file: Path  # the settings, absolute
    config: RunConfig  # as the job has it
    num_nodes: int
    gpus: Mapping[str, int]  # by role, per node
    settings: Mapping[str, str]  # as given on the command line

    @property
    def num_engine_nodes(self) -> int:
        return self.num_nodes - 1

    @property
    def engines_per_node(self) -> int:
        return self.config.engine.remote // self.num_engine_nodes

    @property
    def kill_after_s(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        return math.ceil(self.config.checkpoint.grace_s) + KILL_MARGIN_S

    def train(self, file: str, *more: str) -> str:
        """Arguments of `millrace` for the controller, for a shell; `more` are quoted already."""
        given = [f"--{key} {shlex.quote(value)}" for key, value in self.settings.items()]
        return " ".join(["train", shlex.quote(file), "--auto-resume", *given, *more])


def plan_launch(
    file: Path,
    *,
    num_nodes: int,
    gpus: Sequence[str],
    settings: Mapping[str, str],
    joins: bool = True,
) -> LaunchPlan:
    """`joins`: the engines of the other nodes come with `millrace join`."""
    config = load_config(file, overrides={k: parse_override(k, v) for k, v in settings.items()})
    cluster = {"ticket": f"{config.run_dir}.ticket"}
    if config.cluster.address == "auto":
        cluster["address"] = "tcp://*:0"  # any free port; the ticket says which
    config = load_config(config, overrides={"cluster": cluster})
    check_settings(config)
    if num_nodes < 1:
        raise ConfigError(f"--nodes {num_nodes} leaves no node for the controller; give 1 or more.")
    # Of workers on other nodes, jobs start engines only.
    others = {"trainer": config.trainer.remote, "environment": config.environment.remote}
    for role, count in others.items():
        if count > 0:
            raise ConfigError(
                f"{role}.remote = {count} needs `millrace join --role {role}` on other nodes, which"
                " `millrace launch` does not start; set it to 0, or use cluster.launcher = 'ray'."
            )
    if joins:
        _check_engines(num_nodes=num_nodes, remote=config.engine.remote)
    elif config.engine.remote > 0:
        raise ConfigError(
            f"engine.remote = {config.engine.remote} is for hosts that join, and Ray places the"
            " engines of a RayJob; set engine.count instead."
        )
    # The folder of the settings, as Kubernetes allows names.
    name = re.sub(r"[^a-z0-9]+", "-", file.resolve().parent.name.lower())[:40].strip("-")
    return LaunchPlan(
        name=name or "run",
        file=file.resolve(),
        config=config,
        num_nodes=num_nodes,
        gpus=read_gpus(gpus),
        settings=settings,
    )


def read_gpus(given: Sequence[str]) -> dict[str, int]:
    """GPUs per node by role, from words such as "8" (all roles) and "engines=4"."""
    gpus: dict[str, int] = {}
    for word in given:
        role, equals, count = word.rpartition("=")
        if not count.isdecimal():
            raise ConfigError(f"--gpus {word!r} has no number; write --gpus 8 or --gpus engines=8.")
        if equals and role not in ROLES:
            hint = suggestion(role, ROLES, otherwise="roles")
            raise ConfigError(f"--gpus {word!r} names an unknown role; {hint}")
        gpus |= dict.fromkeys([role] if equals else ROLES, int(count))
    return gpus


def _check_engines(*, num_nodes: int, remote: int) -> None:
    others = num_nodes - 1
    if remote > 0 and others == 0:
        raise ConfigError(
            f"engine.remote = {remote} needs nodes beside the controller's, and --nodes is 1; give"
            " --nodes 2 or more."
        )
    if others > 0 and (remote < others or remote % others):
        nodes = "1 node" if others == 1 else f"{others} nodes"
        raise ConfigError(
            f"engine.remote = {remote} cannot be shared equally by the {nodes} that --nodes"
            f" {num_nodes} leaves for engines; set engine.remote to"
            f" {others * max(1, round(remote / others))}, or change --nodes."
        )
