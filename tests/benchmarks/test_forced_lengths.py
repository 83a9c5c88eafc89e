"""Lengths that benchmarks/grpo_on_gpu.py forces on Millrace and on TRL with vLLM."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import grpo_on_gpu
import pytest
from forced_lengths import (
    force_lengths,
    long_tailed_lengths,
    make_environment,
    make_tasks,
    vowel_share,
)

from millrace.core.records import Task

PROMPTS, GROUP, LONGEST = 2, 2, 16


def test_lengths_have_a_long_tail_and_groups_are_alike():
    lengths = long_tailed_lengths(32, 8, longest=1024)
    assert lengths == long_tailed_lengths(32, 8, longest=1024)
    assert len(lengths) == 256
    assert min(lengths) >= 1
    assert max(lengths) == 1024
    assert sum(lengths) / 256 == pytest.approx(376, abs=1)
    assert sorted(lengths)[128] < 300
    for first in range(0, 256, 8):
        assert sum(lengths[first : first + 8]) / 8 == pytest.approx(376, rel=0.12)
        assert max(lengths[first : first + 8]) > 800


class FakeAgent:
    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def complete(self, prompt: str, *, max_new_tokens: int) -> None:
        self.lengths.append(max_new_tokens)


class FakeVllm:
    def generate(self, prompts, *, sampling_params, use_tqdm):
        return [(each.max_tokens, each.ignore_eos, each.temperature) for each in sampling_params]


def test_both_sides_generate_the_same_lengths():
    lengths = long_tailed_lengths(4, 3, longest=100)
    tasks = make_tasks(8, lengths=lengths, group=3)
    assert len({task["prompt"] for task in tasks}) == 8
    agent, play = FakeAgent(), make_environment()
    for row in tasks:
        for _ in range(3):
            asyncio.run(play(Task(prompt=row["prompt"], columns=row), agent))
    llm, settings = FakeVllm(), SimpleNamespace(max_tokens=100, ignore_eos=False, temperature=0.7)
    force_lengths(llm, lengths)
    steps = [llm.generate(["ids"] * 12, sampling_params=settings, use_tqdm=False) for _ in range(2)]
    assert [length for step in steps for length, _, _ in step] == agent.lengths == lengths * 2
    assert all(row[1:] == (True, 0.7) for step in steps for row in step)
    assert settings.max_tokens == 100, "TRL may use its settings again"
    with pytest.raises(ValueError, match="5 prompts are no multiple of 12 lengths"):
        llm.generate(["ids"] * 5, sampling_params=settings, use_tqdm=False)


def test_reward_differs_between_texts():
    assert vowel_share(["aei", "xyz", ""]) == [0.75, 0, 0]


def arguments_of(folder: Path, *more: str) -> list[str]:
    sizes = ["--steps", "2", "--prompts", str(PROMPTS), "--group", str(GROUP), "--lora", "2"]
    sizes += ["--max-new-tokens", str(LONGEST), "--lengths", "forced", "--device", "cpu"]
    return ["tiny", *sizes, "--keep", str(folder), *more]


@pytest.mark.slow
def test_script_trains_an_adapter_on_the_forced_lengths(tmp_path):
    file = tmp_path / "rows.json"
    kv = "engine.options.kv_bytes=100000000"
    grpo_on_gpu.main(arguments_of(tmp_path, "--sync", "--set", kv, "--json", str(file)))
    rows = {row["measure"]: row["ours"] for row in json.loads(file.read_text())}
    lengths = long_tailed_lengths(PROMPTS, GROUP, longest=LONGEST)
    assert rows["completion_tokens_mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert rows["ended_share"] == 0
    assert rows["reward of the first 8 samples"] > 0
    assert (tmp_path / "run" / "checkpoints" / "step_2" / "adapter_config.json").is_file()
    with pytest.raises(SystemExit, match="needs a GPU and vLLM"):
        grpo_on_gpu.main(arguments_of(tmp_path, "--peer"))


def test_shapes_are_refused_without_forced_lengths(tmp_path, capsys):
    with pytest.raises(SystemExit):
        grpo_on_gpu.main(["qwen3-8b"])
    assert "use --lengths forced with one of qwen3-1.7b" in capsys.readouterr().err
