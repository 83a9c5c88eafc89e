"""With weights.interrupt = "barrier", the seed determines a run, which equals a plain loop."""

import asyncio
import hashlib
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from digits import TASKS, share_of_digits
from engine_rig import Collected
from safetensors.torch import load_file

import millrace as mr
from millrace.config import load_config
from millrace.core.records import Episode, Group, Request, Sampling, Score
from millrace.environments.rollouts.player import group_seed
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.token_record import rollout_of
from millrace.inference.backend import EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.models.directory import load_tokenizer
from millrace.monitoring.files.metrics import read_metrics
from millrace.tasks.loading import load_tasks
from millrace.tasks.streams import Epochs
from millrace.training.build import build_trainer
from millrace.training.packing.packer import pack

STEPS, GROUPS = 4, 6
LEARNED = ("loss", "grad_norm", "entropy", "mismatch/kl_k3", "ratio/max", "batch/trained_tokens")


def settings_of(model: Path, run_dir: Path) -> dict:
    return {
        "model": str(model),
        "run_dir": str(run_dir),
        "seed": 5,
        "sampling": {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95},
        "rollout": {"group_size": 4},
        "buffer": {"max_staleness": 0},
        "weights": {"interrupt": "barrier"},
        "trainer": {"steps": STEPS, "groups_per_step": GROUPS},
        "optimizer": {"learning_rate": 3e-3},
        # Fewer slots than sequences, so the order of waiting sequences must be reproducible too.
        "engine": {"max_sequences": 16},
        "cluster": {"threads": 1},
        "placement": {"engines": "cpu"},
        "scoring": {"workers": 2},
        "monitoring": {"progress": "off"},
    }


def weights_in(checkpoint: Path) -> str:
    """A hash of all weights."""
    digest = hashlib.sha256()
    for name, weight in sorted(load_file(checkpoint / "model.safetensors").items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> mr.RunResult:
    settings = settings_of(model, tmp_path_factory.mktemp("runs") / "run")
    return mr.train(settings, tasks=TASKS, scorers=[share_of_digits])


@pytest.mark.slow  # follows from the test below
def test_two_runs_with_one_seed_are_bitwise_equal(finished, model, tmp_path):
    another = mr.train(settings_of(model, tmp_path), tasks=TASKS, scorers=[share_of_digits])
    results = (finished, another)
    first, second = (read_metrics(result.run_dir / "metrics.jsonl") for result in results)
    assert len(first) == STEPS
    for row, again in zip(first, second, strict=True):
        for name in (*LEARNED, "reward/mean", "reward/std", "completion_length/mean"):
            assert row[name] == again[name], (row["step"], name)
    assert weights_in(results[0].checkpoint) == weights_in(results[1].checkpoint)


def test_run_equals_a_loop_in_one_process(finished, model, tmp_path):
    rows, weights = plain_loop(settings_of(model, tmp_path))
    found = read_metrics(finished.run_dir / "metrics.jsonl")
    for row, expected in zip(found, rows, strict=True):
        for name in (*LEARNED, "reward/mean"):
            assert row[name] == expected[name], (row["step"], name)
    trained = load_file(finished.checkpoint / "model.safetensors")
    for name, weight in trained.items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.slow
def test_runs_with_failing_groups_and_evaluations_are_reproducible(model, tmp_path):
    outcomes = []
    for i in range(2):
        result = mr.train(
            settings_of(model, tmp_path / str(i)),
            tasks=TASKS,
            eval_tasks=TASKS[:20],
            evaluate={"every_steps": 1},
            rollout={"max_running_groups": 4},
            scorers=[fails_at_some],
        )
        row = read_metrics(result.run_dir / "metrics.jsonl")[-1]
        assert row["failed/score"] > 0
        outcomes.append((weights_in(result.checkpoint), result.accuracy_after, row["loss"]))
    assert outcomes[0] == outcomes[1]


async def delayed_turns(task: mr.Task, agent: mr.Agent) -> float:
    """Turns of other episodes run beside these in every run."""
    first = await agent.complete(task.prompt)
    await asyncio.sleep(0.05 * random.random())
    second = await agent.complete(f"{task.prompt}{first.text}+1=")
    return sum(map(str.isdigit, first.text + second.text)) / 24


@pytest.mark.slow
def test_runs_of_several_turns_are_reproducible_whatever_the_timing(model, tmp_path):
    """Rounding depends on the batch here, so turns of all episodes start in rounds."""
    outcomes = []
    for i in range(2):
        result = mr.train(
            settings_of(model, tmp_path / str(i)),
            tasks=TASKS,
            eval_tasks=TASKS[:6],
            evaluate={"every_steps": 1},
            environment={"function": delayed_turns, "max_turns": 2},
            engine={"count": 2},
            trainer={"steps": 2, "groups_per_step": 3},
            sampling={"max_new_tokens": 12},
        )
        rows = read_metrics(result.run_dir / "metrics.jsonl")
        outcomes.append((weights_in(result.checkpoint), result.accuracy_after, rows[-1]["loss"]))
    assert outcomes[0] == outcomes[1]


@pytest.mark.slow
def test_exact_runs_of_several_turns_are_reproducible_whatever_the_timing(model, tmp_path):
    """The seed determines each sequence, because its bits do not depend on its batch."""
    weights = set()
    for i in range(2):
        result = mr.train(
            {**settings_of(model, tmp_path / str(i)), "fidelity": {"mode": "exact"}},
            tasks=TASKS,
            environment={"function": delayed_turns, "max_turns": 2},
            engine={"count": 1 + i},
            trainer={"steps": 2, "groups_per_step": 3},
            sampling={"max_new_tokens": 12},
        )
        rows = read_metrics(result.run_dir / "metrics.jsonl")
        assert all(row["ratio/min"] == row["ratio/max"] == 1 for row in rows)
        assert all(row["mismatch/compared_logprobs"] > 0 for row in rows)
        assert all(row["mismatch/differing_logprobs"] == 0 for row in rows)
        weights.add(weights_in(result.checkpoint))
    assert len(weights) == 1


def fails_at_some(completions, answer, **columns):
    if answer[0] in ("3", "5"):
        raise ValueError("no idea")
    return share_of_digits(completions)


def plain_loop(settings: dict) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Sample, score, train and swap, one after the other."""
    config = load_config(settings)
    path = config.model.path
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec = EngineSpec(config=config.engine, model_path=path, version=0, reproducible=True)
    engine = build_engine(spec)
    trainer = build_trainer(config, path=path)
    renderer = Renderer(load_tokenizer(path, trust_remote_code=False))
    tasks = Epochs(load_tasks(TASKS), seed=config.seed, shuffle=True)
    sampling = Sampling(**config.sampling.model_dump())
    numbers = itertools.count()
    rows = []
    for version in range(STEPS):
        prompts = {}
        for number in itertools.islice(numbers, GROUPS):
            prompts[number] = renderer.render(tasks.task(number).prompt)
            engine.add_request(
                Request(
                    id=str(number),
                    prompt=prompts[number],
                    sampling=sampling,
                    n=config.rollout.group_size,
                    seed=group_seed(config.seed, number),
                )
            )
        collected = Collected()
        while engine.has_work:
            collected.add(engine.step())
        done = collected.by_request()
        groups, rewards = [], []
        for number, prompt in prompts.items():
            completions = done[str(number)]
            rollouts = [rollout_of(prompt, c, sampling) for c in completions]
            totals = np.array(share_of_digits([c.text for c in completions]))
            rewards += totals.tolist()
            advantages = (totals - totals.mean()) / (totals.std(ddof=1) + 1e-4)
            groups.append(
                Group(
                    number=number,
                    task=tasks.task(number),
                    episodes=tuple(Episode(turns=(), rollouts=(r,)) for r in rollouts),
                    scores=tuple(Score(total=total, parts={}) for total in totals),
                    advantages=advantages.astype(np.float32),
                )
            )
        batch = pack(groups, microbatch_tokens=config.trainer.microbatch_tokens)
        rows.append({**trainer.step(batch), "reward/mean": float(np.mean(rewards))})
        engine.swap(trainer.policy.weights(), version=version + 1)
    torch.set_num_threads(threads)
    return rows, trainer.policy.weights()
