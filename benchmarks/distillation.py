"""The same run with three scorers: a reward function, a teacher, and a self-teacher with a hint.

    python benchmarks/distillation.py --json distillation.json

The task is the demo's: write the digits of a number in ascending order. The policy is warm-started
on careless examples, so it mostly copies the number. If the answer precedes the prompt, the policy
repeats the answer. The runs differ only in their [[scorers]]:

    function       1 for the correct answer, otherwise 0
    teacher        a model of the same size that was trained on correct answers only
    self_teacher   a moving average of the policy's versions, which reads the answer as a hint

For each run the script reports, before and after: greedy accuracy on held-out tasks, and the mean
KL(policy || teacher) at the tokens that the policy samples there, over the whole vocabulary. For
self_teacher, the KL compares with the policy before the run, with the hint.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import millrace as mr
from millrace.demo.model import build_model, build_tokenizer, careless_examples, warm_start
from millrace.demo.task import make_tasks
from millrace.models.loading import without_progress_bars

TEMPLATE = "{hint}={prompt}"
SETTINGS: dict[str, Any] = {
    "tasks": {"generator": "millrace.demo.task:train_tasks"},
    "sampling": {"max_new_tokens": 10},
    "rollout": {"group_size": 4, "max_running_groups": 64},
    "buffer": {"max_staleness": 2, "capacity": 64},
    "engine": {"max_sequences": 128},
    "cluster": {"threads": 1},
    "trainer": {"groups_per_step": 32, "microbatch_tokens": 2048},
    "optimizer": {"learning_rate": 3e-4, "schedule": "linear", "min_lr_ratio": 0.1},
    "scoring": {"workers": 1},
    "monitoring": {"progress": "off"},
}


def scorer_tables(teacher: Path) -> dict[str, list[dict[str, Any]]]:
    """The [[scorers]] of each run."""
    return {
        "function": [{"function": "millrace.demo.task:exact"}],
        "teacher": [{"type": "teacher", "model": str(teacher), "loss": "jsd", "top_k": 8}],
        "self_teacher": [
            {
                "type": "self_teacher",
                "ema": 0.95,
                "loss": "forward_kl",
                "top_k": 8,
                "hint": "answer",
                "template": TEMPLATE,
            }
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", default=["function", "teacher", "self_teacher"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--examples", type=int, default=6_400, help="careless and hinted ones, each (6400)"
    )
    parser.add_argument("--teacher-examples", type=int, default=25_600)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=Path, help="folder to keep and reuse the models")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, without_progress_bars():
        rows = compare(Path(folder), args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def compare(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    models = args.models or folder
    policy, teacher = models / "policy", models / "teacher"
    if not policy.exists():
        make_policy(policy, num_examples=args.examples, seed=args.seed)
    if not teacher.exists():
        make_teacher(teacher, num_examples=args.teacher_examples, seed=args.seed + 1)
    exam = HeldOutExam(policy, num_tasks=args.held_out, seed=args.seed)
    rows: list[dict[str, Any]] = [
        {"run": "teacher alone", "accuracy": exam.accuracy(load(teacher))}
    ]
    print(json.dumps(rows[0]), flush=True)
    for name in args.runs:
        start_s = time.monotonic()
        settings = {
            **SETTINGS,
            "model": str(policy),
            "run_dir": str(folder / name),
            "seed": args.seed,
            "scorers": scorer_tables(teacher)[name],
            "trainer": {**SETTINGS["trainer"], "steps": args.steps},
        }
        result = mr.train(settings)
        is_self = name == "self_teacher"
        target = load(policy if is_self else teacher)
        before, after = load(policy), load(result.checkpoint)
        rows.append(
            {
                "run": name,
                "accuracy_before": exam.accuracy(before),
                "accuracy": exam.accuracy(after),
                "kl_before": exam.divergence(before, target, hinted=is_self),
                "kl": exam.divergence(after, target, hinted=is_self),
                "episodes": result.episodes,
                "seconds": round(time.monotonic() - start_s, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def make_policy(path: Path, *, num_examples: int, seed: int) -> None:
    """Half of its examples are careless. The others have the answer before the prompt."""
    hinted = [
        (TEMPLATE.format(hint=task["answer"], prompt=task["prompt"]), task["answer"])
        for task in make_tasks(num_examples, seed=seed + 100)
    ]
    careless = careless_examples(num_examples, seed=seed)
    both = [example for pair in zip(careless, hinted, strict=True) for example in pair]
    _warm_up(path, both, seed=seed)


def make_teacher(path: Path, *, num_examples: int, seed: int) -> None:
    tasks = make_tasks(num_examples, seed=seed)
    _warm_up(path, [(task["prompt"], task["answer"]) for task in tasks], seed=seed)


def _warm_up(path: Path, examples: list[tuple[str, str]], *, seed: int) -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed)
    warm_start(model, tokenizer, examples=examples)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path).eval()


class HeldOutExam:
    """Measures a model on held-out tasks."""

    def __init__(self, tokenizer: Path, *, num_tasks: int, seed: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self._tasks = make_tasks(num_tasks, seed=seed, held_out=True)

    def accuracy(self, model: PreTrainedModel) -> float:
        texts = [self._decoded(tokens) for tokens in self._complete(model, do_sample=False)]
        right = [t == task["answer"] for t, task in zip(texts, self._tasks, strict=True)]
        return round(sum(right) / len(right), 4)

    def divergence(
        self, policy: PreTrainedModel, teacher: PreTrainedModel, *, hinted: bool
    ) -> float:
        """Mean KL(policy || teacher) per token that the policy samples. `hinted`: the teacher reads
        the answer before the prompt."""
        torch.manual_seed(0)
        total, count = 0.0, 0
        for task, completion in zip(
            self._tasks, self._complete(policy, do_sample=True), strict=True
        ):
            prompt = task["prompt"]
            hint = TEMPLATE.format(hint=task["answer"], prompt=prompt)
            q_TV = self._logprobs(policy, prompt, completion)
            p_TV = self._logprobs(teacher, hint if hinted else prompt, completion)
            total += (q_TV.exp() * (q_TV - p_TV)).sum().item()
            count += len(completion)
        return round(total / count, 5)

    @torch.no_grad()
    def _logprobs(self, model: PreTrainedModel, prompt: str, completion: Tensor) -> Tensor:
        before = torch.tensor(self._tokenizer.encode(prompt))
        logits = model(input_ids=torch.cat([before, completion])[None]).logits[0]
        return logits[len(before) - 1 : -1].log_softmax(-1)

    @torch.no_grad()
    def _complete(self, model: PreTrainedModel, *, do_sample: bool) -> list[Tensor]:
        """Completions of all tasks, including the end token if there is one."""
        batch = self._tokenizer([task["prompt"] for task in self._tasks], padding=True)
        inputs = {name: torch.tensor(batch[name]) for name in ("input_ids", "attention_mask")}
        generate: Any = model.generate
        generated = generate(**inputs, max_new_tokens=10, do_sample=do_sample, top_k=0)
        rows = generated[:, inputs["input_ids"].shape[1] :]
        end = self._tokenizer.eos_token_id
        lengths = [(row == end).nonzero()[:1].flatten().tolist() for row in rows]
        return [row[: n[0] + 1] if n else row for row, n in zip(rows, lengths, strict=True)]

    def _decoded(self, tokens: Tensor) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


if __name__ == "__main__":
    main()
