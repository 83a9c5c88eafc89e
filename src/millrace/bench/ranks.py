"""`millrace bench ranks`: whether a trainer of several ranks computes what one rank computes.

Every feature trains a tiny model with random weights for two steps, on one rank and on each mesh,
from the same uneven batches. Compared are the metrics and the clipped gradient of every parameter
in the first step, and every parameter after the second. The table shows the worst of them:
max |difference| / max |value|. Equal losses alone would not show a wrong gradient. Ranks round to
16 bits where one rank does and add up in float32, so 16-bit compute has the same limit, unless
ranks share microbatches, or one rank that repeats its own work gets other numbers: on GPUs, some
kernels add in an order that varies, and 16-bit compute may round the sums differently.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from millrace.bench import bench_parser, write_result
from millrace.bench.rank_features import (
    FEATURES,
    LAST_ID,
    LAYERS,
    MESHES,
    NUM_EXPERTS,
    ONE_RANK,
    SGD,
    TOP_K,
    VOCAB,
    Feature,
)
from millrace.bench.rank_processes import compare_in_float64, run_before_ranks, run_ranks
from millrace.bench.workloads import completion_of, group_of, shape_of
from millrace.config import RunConfig
from millrace.core.completions import unknown_id
from millrace.core.microbatch import Batch, MeshSizes
from millrace.core.records import Group, Kept, Rollout, Sampling, TeacherLogprobs
from millrace.environments.token_record import rollout_of
from millrace.models.routing import policy_tensors
from millrace.models.sharding import whole
from millrace.run.mesh_checks import check_has_plans
from millrace.training.build import build_trainer, seed_everything
from millrace.training.losses.recipes import PREFERENCE
from millrace.training.packing.packer import minibatches_of, pack
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer

LIMIT, FLOAT64_LIMIT = 1e-6, 1e-12
# Ranks that share a microbatch or experts round parts of a sum to 16 bits: bfloat16 has 8.
HALF_LIMIT = 2e-2
STEPS = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("ranks")
    parser.add_argument("--mesh", nargs="+", choices=MESHES, default=[*MESHES])
    parser.add_argument("--feature", nargs="+", choices=FEATURES, default=[*FEATURES])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    args = parser.parse_args(argv)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    meshes = {name: MESHES[name] for name in args.mesh}
    if any(sizes.tp * sizes.ep > 1 for sizes in meshes.values()):
        check_has_plans()
    features = {name: FEATURES[name] for name in args.feature}
    if args.dtype == "float64":
        table = compare_in_float64([n for n, f in features.items() if f.has_float64], [*meshes])
        is_equal = all(worst < FLOAT64_LIMIT for row in table.values() for worst in row.values())
    else:
        table = compare(features, meshes, device=args.device)
        is_equal = are_rounding(exceeded(table))
    print(markdown(table, args.mesh))
    write_result({**versions, "device": args.device, "differences": table}, args.json)
    return 0 if is_equal else 1


def markdown(table: Mapping[str, Mapping[str, float]], meshes: Sequence[str]) -> str:
    """A table of docs/explanation/ranks.md; cells are empty where a mesh does not fit."""

    def line(*cells: str) -> str:
        return f"| {' | '.join(cells)} |"

    def shown(row: Mapping[str, float]) -> list[str]:
        return [f"{row[mesh]:.1e}" if row.get(mesh) else "0" * (mesh in row) for mesh in meshes]

    rows = [line(feature, *shown(row)) for feature, row in table.items()]
    return "\n".join([line("", *meshes), "|---" * (len(meshes) + 1) + "|", *rows])


def are_rounding(cells: Mapping[tuple[str, str], float]) -> bool:
    """Whether cells that are too large in float32 are not so in float64; prints both numbers."""
    again = [cell for cell in cells if FEATURES[cell[0]].has_float64]
    features, meshes = sorted({f for f, _ in again}), sorted({m for _, m in again})
    table = compare_in_float64(features, meshes) if again else {}
    for f, m in again:
        print(f"{f}, {m}: {cells[f, m]:.1e} in float32, {table[f][m]:.1e} in float64")
    return len(again) == len(cells) and all(table[f][m] < FLOAT64_LIMIT for f, m in again)


def exceeded(table: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, str], float]:
    """Differences that are too large, by feature and mesh."""

    def limit(feature: Feature, sizes: MeshSizes, *, repetition: float) -> float:
        is_shared = sizes.cp * sizes.tp * sizes.ep > 1
        rounds_sums = feature.is_half and (is_shared or repetition > 0)
        return HALF_LIMIT if rounds_sums or feature.rounds_updates else LIMIT

    return {
        (feature, mesh): worst
        for feature, row in table.items()
        for mesh, worst in row.items()
        # Also if it is NaN.
        if not worst < limit(FEATURES[feature], MESHES[mesh], repetition=row.get(ONE_RANK, 0.0))
    }


def compare(
    features: Mapping[str, Feature], meshes: Mapping[str, MeshSizes], *, device: str = "cpu"
) -> dict[str, dict[str, float]]:
    """The worst difference from one rank, by feature and mesh."""
    with tempfile.TemporaryDirectory(prefix="millrace-ranks-") as folder:
        for is_mixture in {feature.is_mixture for feature in features.values()}:
            _make_model(Path(folder), is_mixture=is_mixture)
        arguments = (features, meshes, Path(folder), device)
        return run_before_ranks(_compare, *arguments, device=device)


def _compare(
    features: Mapping[str, Feature], meshes: Mapping[str, MeshSizes], folder: Path, device: str
) -> dict[str, dict[str, float]]:
    if device == "cpu":  # what ranks would import and cache, one kind of model after the other
        for feature in {(f.is_mixture, *f.settings): f for f in features.values()}.values():
            make_trainer(feature, Ranks(), folder, device=device)
    alone, found = {}, {}
    run = partial(run_ranks, _run, device=device)
    for name, sizes in meshes.items():
        chosen = {key: feature for key, feature in features.items() if feature.fits(sizes)}
        settings = (folder, sizes.num_data_ranks, device)
        if sizes.num_data_ranks not in alone:
            alone[sizes.num_data_ranks] = run(features, *settings, sizes=MeshSizes())
        sharded = name != ONE_RANK
        found[name] = run(chosen, *settings, sizes=sizes, sharded=sharded) if chosen else {}
    return {
        feature: {
            name: _difference(found[name][feature], alone[sizes.num_data_ranks][feature])
            for name, sizes in meshes.items()
            if feature in found[name]
        }
        for feature in features
    }


Numbers = dict[str, np.ndarray]


def _difference(ours: Numbers, expected: Numbers) -> float:
    """The largest difference of any array, relative to its largest value."""
    assert ours.keys() == expected.keys(), "all ranks name the same parameters and metrics"
    found: list[float] = []
    for name, wanted in expected.items():
        assert ours[name].shape == wanted.shape, "gathered parameters are whole"
        # Metrics, which are single numbers, may be near 0 because larger ones cancel.
        scale = np.abs(wanted).max(initial=1.0 if wanted.ndim == 0 else 1e-30)
        found.append(np.abs(ours[name] - wanted).max(initial=0.0) / scale)
    return float(np.max(found))


def _run(
    ranks: Ranks, features: Mapping[str, Feature], folder: Path, num_shares: int, device: str
) -> dict[str, Numbers]:
    """The numbers of each feature. Batches are packed for `num_shares` ranks: a rank that is alone
    computes all shares."""
    more: dict[str, Any] = {"num_shares": num_shares, "device": device}
    return {name: train(feature, ranks, folder, **more) for name, feature in features.items()}


def make_trainer(
    feature: Feature, ranks: Ranks, folder: Path, *, device: str
) -> tuple[Trainer, RunConfig]:
    path = folder / _model_name(is_mixture=feature.is_mixture)
    config = RunConfig.model_validate(
        {
            "model": str(path),
            "run_dir": str(folder / "run"),
            "scorers": ["exact"],
            "tasks": {"path": str(folder / "tasks.jsonl")},
            "optimizer": SGD,
            "placement": {"trainer": device},
            **feature.settings,
            "trainer": {"dtype": "float32", **feature.settings.get("trainer", {})},
        }
    )
    seed_everything(config.seed)
    return build_trainer(config, path=str(path), ranks=ranks), config


def train(feature: Feature, ranks: Ranks, folder: Path, *, num_shares: int, device: str) -> Numbers:
    """What is compared, by name; whole on every rank."""
    trainer, config = make_trainer(feature, ranks, folder, device=device)
    numbers: Numbers = {}
    if feature.has_held_out:
        (batch,) = _shares(feature, config, ranks, step=STEPS, num_shares=num_shares)
        numbers["held-out loss"] = np.array(trainer.held_out_loss(batch))
    for step in range(STEPS):
        metrics = trainer.step(*_shares(feature, config, ranks, step=step, num_shares=num_shares))
        if step == 0:  # later ones start from weights that differ by rounding
            numbers |= {n: np.array(v) for n, v in metrics.items() if n not in _OF_THE_DIVISION}
            numbers |= _gradients(trainer)
    return numbers | _parameters(trainer)


def _shares(
    feature: Feature, config: RunConfig, ranks: Ranks, *, step: int, num_shares: int
) -> list[Batch]:
    """What this rank computes of the batches of a step."""
    batches = _batches(feature, config, step=step, num_ranks=num_shares)
    return batches if ranks.is_alone else [batch.of_rank(ranks.data_rank) for batch in batches]


# These say how a batch was divided, which depends on the number of ranks.
_OF_THE_DIVISION = ("batch/microbatches", "batch/microbatch_splits", "batch/proximal_microbatches")


def _parameters(trainer: Trainer) -> Numbers:
    models = filter(None, (trainer.policy, trainer.critic))
    named = [(type(m).__name__, *pair) for m in models for pair in policy_tensors(m.module).items()]
    return {f"{kind} {name}": _whole(parameter) for kind, name, parameter in named}


def _gradients(trainer: Trainer) -> Numbers:
    """The policy's gradients in its last update. The critic frees its own; SGD's momentum
    begins with them."""
    named = trainer.policy.module.named_parameters()
    found = {f"gradient {n}": _whole(p.grad) for n, p in named if p.grad is not None}
    assert any(gradient.any() for gradient in found.values()), "there is something to compare"
    if trainer.critic is not None:
        states = trainer.critic.optimizer_state()["state"]
        found |= {f"critic {n}": _whole(s["momentum_buffer"]) for n, s in states.items()}
        assert states, "the critic is compared"
    return found


def _whole(tensor: torch.Tensor) -> np.ndarray:
    return whole(tensor.detach()).to("cpu", torch.float32).numpy().copy()


def _model_name(*, is_mixture: bool) -> str:
    return "mixture" if is_mixture else "dense"


def _make_model(folder: Path, *, is_mixture: bool) -> None:
    torch.manual_seed(0)
    sizes = (VOCAB, 64, 128, LAYERS, 8, 4, 8, 256)
    experts = {"moe_intermediate_size": 32, "num_experts": NUM_EXPERTS}
    mixture = {**experts, "num_experts_per_tok": TOP_K, "tie_word_embeddings": False}
    dense = shape_of(Qwen3Config, *sizes)
    config = shape_of(Qwen3MoeConfig, *sizes, **mixture) if is_mixture else dense
    model = AutoModelForCausalLM.from_config(config)
    model.bfloat16().float()  # as models are stored, so that 16 bits hold them exactly
    model.save_pretrained(folder / _model_name(is_mixture=is_mixture))


def _batches(feature: Feature, config: RunConfig, *, step: int, num_ranks: int) -> list[Batch]:
    rng = np.random.default_rng(step)
    groups = [_group(rng, feature, number=number) for number in range(feature.num_groups)]
    return [
        pack(
            minibatch,
            microbatch_tokens=64,
            pairs=config.loss.get("type") == PREFERENCE,
            whole_groups=bool(config.loss.get("minimum_variance_baseline")),
            critic=config.critic is not None,
            scores=config.loss.get("good_by") == "score",
            num_ranks=num_ranks,
        )
        for minibatch in minibatches_of(groups, num_minibatches=feature.minibatches)
    ]


def _group(rng: np.random.Generator, feature: Feature, *, number: int) -> Group:
    prompt = rng.integers(3, LAST_ID + 1, rng.integers(6, 12))
    rollouts = [_rollout(rng, feature, prompt) for _ in range(rng.integers(2, 5))]
    # Of one sign: sums that nearly cancel would show rounding, which depends on their order.
    advantages = rng.uniform(0.2, 1.0, len(rollouts))
    if feature.has_both_signs or feature.settings.get("loss") == {"type": PREFERENCE}:
        advantages[0] *= -1
    group = group_of(number, rollouts, advantages)
    bad = tuple(replace(score, total=-1.0) for score in group.scores[:1])
    return replace(group, scores=bad + group.scores[1:]) if feature.has_bad_scores else group


def _rollout(rng: np.random.Generator, feature: Feature, prompt: np.ndarray) -> Rollout:
    sampled = rng.integers(3, LAST_ID + 1, rng.integers(2, 20))
    length = len(prompt) + len(sampled)
    mean = -np.log(feature.num_kept or VOCAB)  # near the policy's, so that no ratio is clipped
    logprobs = rng.normal(mean, 0.3, length)[len(prompt) :]
    kept = routes = None
    if feature.num_kept:
        rows = [rng.choice(VOCAB, feature.num_kept, replace=False) for _ in sampled]
        rows = [np.unique(np.append(*pair)) for pair in zip(rows, sampled, strict=True)]
        offsets = np.cumsum([0, *map(len, rows)])
        kept = Kept(ids=np.concatenate(rows).astype(np.int32), offsets=offsets)
    if feature.has_routes:
        experts = [rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(length * LAYERS)]
        routes = np.array(experts, np.uint8).reshape(length, LAYERS, TOP_K)
        if feature.has_gaps:
            routes[rng.random(length) < 0.2] = unknown_id(routes.dtype)
    top_ids = np.array([rng.choice(VOCAB, 4, replace=False) for _ in range(length)], np.int32)
    sampling = Sampling(temperature=float(rng.choice([0.7, 1.0, 1.3])))
    completion = completion_of(sampled, logprobs, kept=kept, routes=routes)
    if feature.has_gaps:
        completion.versions[len(sampled) // 2 :] = 1
    rollout = rollout_of(prompt, completion, sampling)
    references = rollout.engine_logprobs - np.float32(0.1)
    return replace(
        rollout,
        reference_logprobs=references if feature.has_reference else None,
        teacher=TeacherLogprobs(
            logprobs=rollout.engine_logprobs + np.float32(0.1),
            top_ids=top_ids,
            top_logprobs=np.full(top_ids.shape, -3.0, np.float32),
        ),
    )
