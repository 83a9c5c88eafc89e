"""Values and gradients agree with what TRL's own trainers compute on the same tokens."""

import dataclasses
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from loss_tokens import MAX_NEW_TOKENS, loss_of, random_tokens, segments_of

from millrace.training.losses.loss import TokenBatch

pytest.importorskip("trl")

LENGTHS = [3, 7, 1, 5, 6, 2]


class Rows:
    """Tokens of sequences [N] as TRL has them: one padded row each [B, T]."""

    def __init__(self, tokens: TokenBatch) -> None:
        lengths = tokens.sequences.lengths
        self.mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        self.firsts = lengths.cumsum(0) - lengths

    def padded(self, values: torch.Tensor, *, padding: float = 0.0) -> torch.Tensor:
        rows = torch.full(self.mask.shape, padding, dtype=values.dtype)
        return rows.masked_scatter(self.mask, values)


class OneProcess:
    num_processes = 1
    sync_gradients = True

    def gather(self, values):
        return values

    def reduce(self, values, reduction):
        return values


def trl_trainer(logprobs, entropies, **settings) -> SimpleNamespace:
    """What _compute_loss of TRL's trainers reads of `self`."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    attributes = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "entropy_coef": 0.0,
    }
    for name, value in settings.items():
        (args if name in args else attributes)[name] = value
    return SimpleNamespace(
        **attributes,
        args=SimpleNamespace(**args),
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_NEW_TOKENS,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=attributes["entropy_coef"] != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
    )


def trl_inputs(tokens: TokenBatch, rows: Rows, *, anchor: torch.Tensor) -> dict:
    nothing = torch.zeros(len(LENGTHS), 0, dtype=torch.int64)
    return {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros(rows.mask.shape, dtype=torch.int64),
        "completion_mask": rows.mask.to(torch.float64),
        "advantages": tokens.advantages[rows.firsts],
        "old_per_token_logps": rows.padded(anchor),
        "old_logps": rows.padded(anchor).sum(1),  # as RLOO names them
        "sampling_per_token_logps": rows.padded(tokens.engine_logprobs),
        "ref_per_token_logps": rows.padded(tokens.reference_logprobs),
        "num_items_in_batch": rows.mask.sum(),
    }


def check(ours, tokens, trl_loss, trainer_settings, inputs, rows):
    logprobs, entropies = tokens.trainer_logprobs, tokens.entropies
    trainer = trl_trainer(rows.padded(logprobs), rows.padded(entropies), **trainer_settings)
    expected = trl_loss(trainer, None, inputs)
    found, _ = ours(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    by = (logprobs, entropies)
    found_slopes = torch.autograd.grad(found, by, allow_unused=True, materialize_grads=True)
    slopes = torch.autograd.grad(expected, by, allow_unused=True, materialize_grads=True)
    assert slopes[0].any()
    for ours_, theirs in zip(found_slopes, slopes, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-6, atol=1e-9)


# Our [loss] table -> the settings of TRL's GRPOTrainer that mean the same.
SAME = [
    ({"type": "grpo"}, {"loss_type": "grpo"}),
    ({"type": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ({"type": "dapo"}, {"loss_type": "bnpo", "epsilon_high": 0.28}),
    ({"type": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    ({"type": "ppo", "dual": 1.3}, {"loss_type": "dapo", "delta": 1.3}),
    (
        {"type": "gspo", "low": 0.05, "high": 0.1},
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    ),
    (
        {"type": "luspo", "low": 0.05, "high": 0.1},
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.05,
            "epsilon_high": 0.1,
        },
    ),
    ({"type": "cispo", "cap": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    ({"type": "sapo"}, {"loss_type": "sapo"}),
    ({"type": "vespo"}, {"loss_type": "vespo"}),
    ({"type": "grpo", "kl": 0.2}, {"beta": 0.2}),
    ({"type": "dapo", "high": 0.2, "kl": 0.2}, {"loss_type": "dapo", "beta": 0.2}),
    (
        {"type": "grpo", "kl": 0.2, "kl_weighted": True},
        {"beta": 0.2, "use_bias_correction_kl": True},
    ),
    ({"type": "grpo", "off_policy_limit": 0.05}, {"off_policy_mask_threshold": 0.05}),
    ({"type": "grpo", "entropy_bonus": 0.3}, {"entropy_coef": 0.3}),
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("table", "trainer"), SAME)
def test_objectives_agree_with_grpo_trainer(table, trainer, seed):
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokens = random_tokens(LENGTHS, seed=seed)
    rows = Rows(tokens)
    inputs = trl_inputs(tokens, rows, anchor=tokens.engine_logprobs)
    check(loss_of(**table), tokens, GRPOTrainer._compute_loss, trainer, inputs, rows)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_proximal_anchor_with_correction_agrees_with_grpo_trainer(correction, level):
    """TRL computes the weights where it generates; they are put in here, and what it makes of them
    is compared."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokens = random_tokens(LENGTHS, seed=2)
    rows = Rows(tokens)
    difference = tokens.proximal_logprobs - tokens.engine_logprobs
    summed = difference if level == "token" else tokens.sequences.sum(difference)
    ratio = summed.exp()
    is_inside = (ratio >= 0.8) & (ratio <= 1.25)
    weights = ratio.clamp(0.8, 1.25) if correction == "truncate" else ratio * is_inside
    inputs = trl_inputs(tokens, rows, anchor=tokens.proximal_logprobs)
    inputs["importance_sampling_ratio"] = rows.padded(weights, padding=1.0)
    loss = loss_of(
        "grpo",
        anchor="proximal",
        correction=correction,
        correction_level=level,
        correction_low=0.8,
        correction_high=1.25,
    )
    check(loss, tokens, GRPOTrainer._compute_loss, {"use_vllm": True}, inputs, rows)


def test_rloo_agrees_with_rloo_trainer():
    from trl.trainer.rloo_trainer import RLOOTrainer

    tokens = random_tokens(LENGTHS, seed=3, spread=0.1)
    rows = Rows(tokens)
    inputs = trl_inputs(tokens, rows, anchor=tokens.engine_logprobs)
    check(loss_of("rloo"), tokens, RLOOTrainer._compute_loss, {}, inputs, rows)


def test_online_dpo_agrees_with_online_dpo_trainer(monkeypatch):
    """Sequences 0, 2, 4 are TRL's first completions of three prompts, 1, 3, 5 its second ones."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.online_dpo import OnlineDPOTrainer

    lengths = [3, 7, 1, 5, 6, 2]
    rewards = torch.tensor([1.0, 0.0, 2.0, 0.0, 3.0, 5.0])  # in TRL's order: 1 > 0, 0 < 3, 2 < 5
    order = [0, 2, 4, 1, 3, 5]
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    tokens = random_tokens(lengths, seed=4)
    tokens = dataclasses.replace(
        tokens,
        advantages=advantages[tokens.sequences.ids],
        groups=segments_of([a + b for a, b in zip(lengths[::2], lengths[1::2], strict=True)]),
        num_groups=3,
    )
    rows = Rows(tokens)
    logprobs = iter([tokens.trainer_logprobs, tokens.reference_logprobs])
    nothing = torch.zeros(6, 0, dtype=torch.int64)
    ids, mask = torch.zeros(rows.mask.shape, dtype=torch.int64), rows.mask[order].to(torch.int64)
    losses = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            use_vllm=False,
            missing_eos_penalty=None,
            loss_type="sigmoid",
            torch_empty_cache_steps=None,
            optim="adamw_torch",
            n_gpu=1,
            gradient_accumulation_steps=1,
        ),
        accelerator=SimpleNamespace(
            gather_for_metrics=lambda values: values, backward=lambda loss: losses.append(loss)
        ),
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        stats=defaultdict(list),
        eos_token_ids=[0],
        ref_model=object(),
        reward_funcs=None,
        beta=0.3,
        _generate=lambda *_: (nothing, nothing, ids, mask, None),
        _forward=lambda *_: rows.padded(next(logprobs))[order],
        _calculate_rewards_from_functions=lambda **_: rewards,
    )
    policy = SimpleNamespace(train=lambda: None)
    OnlineDPOTrainer.training_step(trainer, policy, {"prompt": ["a", "b", "c"]})
    (expected,) = losses
    found, _ = loss_of("online_dpo", beta=0.3, reference="reference")(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    slopes = [torch.autograd.grad(loss, tokens.trainer_logprobs)[0] for loss in (found, expected)]
    assert slopes[1].any()
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-9)
