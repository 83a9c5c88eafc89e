"""The training loops of tinker-cookbook, unmodified, against `millrace serve --train`: supervised,
GRPO-like and on-policy distillation, with a local tokenizer and local data.

`make test-tinker` installs the cookbook and runs the recipes on a tiny model. COOKBOOK_MODEL is the
directory of a pretrained model to use instead, such as SmolLM2.
"""

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chat_model import make_chat_model

pytest.importorskip("tinker_cookbook", reason="make test-tinker installs it")
import chz
import tinker
from test_tinker_client import KEYS, training_server
from tinker_cookbook import renderers
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDataset,
    TeacherConfig,
)
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised import train as supervised_train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

pytestmark = pytest.mark.slow
RENDERER = "role_colon"
PRETRAINED = os.environ.get("COOKBOOK_MODEL")
SHRINK = 10 if PRETRAINED else 1  # of learning rates
ANSWER = "a mill turns"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a server, and the path of its model."""
    folder = tmp_path_factory.mktemp("server")
    model = folder / "model"
    if PRETRAINED:
        model.symlink_to(Path(PRETRAINED).absolute())
    else:
        make_chat_model(model, initializer_range=0.3)
    with training_server(folder) as (url, _):
        yield url, str(model)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEYS[0])


def column(folder: Path, name: str) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line[name] for line in map(json.loads, lines) if name in line]


async def fine_tune(served: tuple[str, str], folder: Path) -> str:
    """Train on one sentence. Returns the path of weights to sample from."""
    url, model = served
    question = {"role": "user", "content": "say it"}
    messages = [question, {"role": "assistant", "content": ANSWER}]
    data = folder / "data.jsonl"
    data.write_text(f"{json.dumps({'messages': messages})}\n" * 16)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=128, batch_size=4
    )
    builder = FromConversationFileBuilder(common_config=common, file_path=str(data))
    config = supervised_train.Config(
        log_path=str(folder / "log"),
        model_name=model,
        recipe_name="recipe_sl_basic",
        renderer_name=RENDERER,
        dataset_builder=builder,
        learning_rate=0.02 / SHRINK,
        num_epochs=4,
        lora_rank=8,
        base_url=url,
        save_every=8,
        eval_every=0,
    )
    await supervised_train.main(config)
    (*_, last) = (folder / "log/checkpoints.jsonl").read_text().splitlines()
    return json.loads(last)["sampler_path"]


async def test_supervised_training(served: tuple[str, str], tmp_path: Path):
    path = await fine_tune(served, tmp_path)
    losses = column(tmp_path / "log", "train_mean_nll")
    assert len(losses) == 16
    assert losses[-1] < losses[0] / 2, losses
    rest = tinker.RestClient(base_url=served[0])
    states = (await rest.list_user_checkpoints_async()).checkpoints
    assert path in {state.tinker_path for state in states}
    assert any(state.expires_at for state in states)  # the periodic ones


class CharacterEnv(ProblemEnv):
    """Rewards completions that have many lower-case letters; of a pretrained model, digits."""

    def get_question(self) -> str:
        return "Say a number." if PRETRAINED else "write"

    def check_answer(self, sample_str: str) -> bool:
        if PRETRAINED:
            return sum(each.isdigit() for each in sample_str) >= 2
        return sum(each.islower() for each in sample_str) >= 3

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "abc"


class CharacterDataset(RLDataset):
    def __init__(self, renderer: renderers.Renderer) -> None:
        self._renderer = renderer

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        env = partial(CharacterEnv, self._renderer)
        return [ProblemGroupBuilder(env_thunk=env, num_envs=16) for _ in range(2)]

    def __len__(self) -> int:
        return 10


def renderer_of(model: str) -> Any:
    return renderers.get_renderer(RENDERER, get_tokenizer(model))


@chz.chz
class CharacterBuilder(RLDatasetBuilder):
    model: str

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return CharacterDataset(renderer_of(self.model)), None


async def test_group_relative_policy_optimization(served: tuple[str, str], tmp_path: Path):
    url, model = served
    config = rl_train.Config(
        learning_rate=0.01 / SHRINK,
        dataset_builder=CharacterBuilder(model=model),
        model_name=model,
        recipe_name="recipe_rl_basic",
        renderer_name=RENDERER,
        max_tokens=8,
        log_path=str(tmp_path),
        lora_rank=8,
        base_url=url,
        eval_every=0,
        save_every=5,
    )
    await rl_train.main(config)
    rewards = column(tmp_path, "env/all/reward/total")
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6, rewards
    assert max(column(tmp_path, "grad_norm")) > 0
    # Every sample comes from the weights of the step before, with the trainer's logprobs.
    distances = column(tmp_path, "optim/kl_sample_train_v2")
    assert len(distances) == 10
    assert max(distances) < 1e-6, distances


@chz.chz
class PromptBuilder(RLDatasetBuilder):
    model: str

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        dataset = PromptOnlyDataset(
            prompts=["say it"] * 20,
            batch_size=2,
            group_size=8,
            renderer=renderer_of(self.model),
            tokenizer=get_tokenizer(self.model),
        )
        return dataset, None


async def test_on_policy_distillation(served: tuple[str, str], tmp_path: Path):
    url, model = served
    teacher = await fine_tune(served, tmp_path)
    config = train_on_policy.Config(
        learning_rate=3e-4 if PRETRAINED else 0.02,
        dataset_configs=[
            DistillationDatasetConfig(
                dataset_builder=PromptBuilder(model=model),
                teacher_config=TeacherConfig(base_model=model, load_checkpoint_path=teacher),
                groups_per_batch=2,
            )
        ],
        model_name=model,
        recipe_name="recipe_on_policy_distillation",
        renderer_name=RENDERER,
        max_tokens=12,
        lora_rank=8,
        log_path=str(tmp_path / "student"),
        base_url=url,
        eval_every=0,
        save_every=0,
    )
    await train_on_policy.main(config)
    distances = column(tmp_path / "student", "teacher_kl")
    assert len(distances) == 10
    # They are those of 16 samples each.
    assert sum(distances[-3:]) < 0.95 * sum(distances[:3]), distances
