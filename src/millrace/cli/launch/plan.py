"""What a job of `millrace launch` consists of: its nodes, the GPUs of its roles, its commands.

The controller and the first ranks of the trainer run on one node. The next nodes bring as many
ranks each, until there are all, and each of the others brings the same number of engines. All nodes
but the controller's bring environment workers, too. Promise: a plan that cannot run is refused in
one sentence before anything is written.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.config import RunConfig, load_config, parse_overrides
from millrace.core.errors import ConfigError, suggestion
from millrace.run.checks import check_settings

ROLES = ("controller", "trainer", "engines")  # with GPUs
# Between checkpoint.grace_s and the kill by the scheduler: workers stop, and signals may be late.
KILL_MARGIN_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class JoiningNodes:
    """Nodes whose workers come with `millrace join`."""

    role: str  # "trainer", "engines" or "environments"
    first: int  # number of the first of these nodes
    num_nodes: int
    num_workers: int  # on each

    @property
    def options(self) -> str:
        """The options of `millrace join`."""
        role = {"trainer": "--role trainer ", "environments": "--role environment "}
        return f"{role.get(self.role, '')}--count {self.num_workers}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    name: str  # of the job
    file: Path  # the settings, absolute
    config: RunConfig  # as the job has it
    num_nodes: int
    gpus: Mapping[str, int]  # by role, per node
    settings: Mapping[str, str]  # as given on the command line
    joining: Sequence[JoiningNodes]

    @property
    def kill_after_s(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        return math.ceil(self.config.checkpoint.grace_s) + KILL_MARGIN_S

    @property
    def cpus(self) -> int:
        """CPUs of the fullest node: `cluster.threads` of each rank and engine, and one each of the
        controller and of environment workers."""
        config, threads = self.config, self.config.cluster.threads or 1
        roles = config.environment.models.values()
        ranks = config.trainer.num_ranks - config.trainer.remote
        engines = config.engine.num_local + config.evaluate.engines
        engines += sum(role.engine.num_local for role in roles)
        # A number that is "auto" depends on the GPUs of the node, and uses all of them.
        first = max(ranks + engines, self.gpus.get("controller", 0))
        environments = [nodes.num_workers for nodes in self.joining if nodes.role == "environments"]
        others = [nodes.num_workers for nodes in self.joining if nodes.role != "environments"]
        return max(
            1 + threads * first + config.environment.workers,
            threads * max(others, default=0) + sum(environments),
        )

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
    """`joins`: the workers of the other nodes come with `millrace join`."""
    config = load_config(file, overrides=parse_overrides(settings))
    cluster = {"ticket": f"{config.run_dir}.ticket"}
    if config.cluster.address == "auto":
        cluster["address"] = "tcp://*:0"  # any free port; the ticket says which
    config = load_config(config, overrides={"cluster": cluster})
    check_settings(config)
    if num_nodes < 1:
        raise ConfigError(f"--nodes {num_nodes} leaves no node for the controller; give 1 or more.")
    if not joins:
        for role, count in (("engine", config.engine.remote), ("trainer", config.trainer.remote)):
            if count > 0:
                raise ConfigError(
                    f"{role}.remote = {count} is for hosts that join, and Ray places the workers of"
                    " a RayJob; set it to 0."
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
        joining=_joining(config, num_nodes=num_nodes) if joins else (),
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


def _joining(config: RunConfig, *, num_nodes: int) -> list[JoiningNodes]:
    """The nodes beside the controller's: first those of the trainer, then those of engines. All of
    them have environment workers."""
    ranks, engines = config.trainer.remote, config.engine.remote
    environments = config.environment.remote
    ranks_here = config.trainer.num_ranks - ranks
    if ranks % ranks_here:
        raise ConfigError(
            f"trainer.remote = {ranks} cannot be shared by nodes with {ranks_here} ranks each, as"
            f" many as trainer.ranks = {config.trainer.num_ranks} leaves for the first; set it so"
            " that all nodes have equally many."
        )
    others = num_nodes - 1 - ranks // ranks_here
    if others < 0 or (engines > 0 and others == 0) or (environments > 0 and num_nodes == 1):
        needed = max(2, num_nodes - others + (engines > 0))
        setting = (
            f"engine.remote = {engines}" if engines else f"environment.remote = {environments}"
        )
        setting = f"trainer.remote = {ranks}" if others < 0 else setting
        beside = "the trainer's" if others >= 0 and ranks else "the controller's"
        raise ConfigError(
            f"{setting} needs nodes beside {beside}, and --nodes is {num_nodes}; give --nodes"
            f" {needed} or more."
        )
    joining = list[JoiningNodes]()
    if ranks > 0:
        own = {"num_nodes": ranks // ranks_here, "num_workers": ranks_here}
        joining.append(JoiningNodes(role="trainer", first=1, **own))
    if others > 0 and (engines > 0 or not environments):
        joining.append(_shared(engines, role="engines", nodes=others, of=num_nodes))
    if environments > 0:
        beside = num_nodes - 1
        joining.append(_shared(environments, role="environments", nodes=beside, of=num_nodes))
    return joining


def _shared(count: int, *, role: str, nodes: int, of: int) -> JoiningNodes:
    """Workers of the last nodes, equally many on each."""
    if count < nodes or count % nodes:
        them, setting = "1 node" if nodes == 1 else f"{nodes} nodes", f"{role[:-1]}.remote"
        raise ConfigError(
            f"{setting} = {count} cannot be shared equally by the {them} that --nodes {of} leaves"
            f" for {role}; set {setting} to {nodes * max(1, round(count / nodes))}, or change"
            " --nodes."
        )
    return JoiningNodes(role=role, first=of - nodes, num_nodes=nodes, num_workers=count // nodes)
