"""The simulated run: the arithmetic of the survey, and promises of the real controller."""

import sys
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import pytest

from millrace.config import RunConfig, load_config
from millrace.plan.lengths import Lengths
from millrace.plan.model_costs import GPUS, DeviceCosts, ModelShape
from millrace.plan.simulation import Prediction, simulate

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=128, vocab=256)


@dataclass(frozen=True, kw_only=True)
class FixedCosts(DeviceCosts):
    """An engine of a constant rate, or of a constant time per decode step; as on a CPU, it starts
    sequences between any two of them."""

    device = "cpu"
    tokens_per_s: float | None = None
    step_s: float = 0.01
    train_step_s: float = 0.0

    def decode_s(self, num_sequences: int, context_tokens: float) -> float:
        return self.step_s if self.tokens_per_s is None else num_sequences / self.tokens_per_s

    def prefill_s(self, tokens: float) -> float:
        return 0.0

    def train_s(self, tokens: float, pairs: float) -> float:
        return self.train_step_s

    publish_s = swap_s = 0.0


def costs(**values: Any) -> FixedCosts:
    return FixedCosts(shape=SHAPE, gpu=GPUS["h100"], score_s=0.0, **values)


def settings(**sections: Any) -> RunConfig:
    return load_config({"model": "m", **sections})


def run_of(
    *,
    limit: int = 2,
    engines: int = 2,
    order: str = "oldest",
    p90: int = 160,
    longest: int = 400,
    steps: int | None = None,
    **values: Any,
) -> Prediction:
    config = settings(
        engine={"count": engines, "max_sequences": 16},
        rollout={"group_size": 4},
        trainer={"groups_per_step": 4},
        buffer={"max_staleness": limit, "order": order, "capacity": 16},
    )
    lengths = Lengths(median=40, p90=p90, max=longest, prompt_tokens=10)
    return simulate(config, costs(**{"train_step_s": 0.3, **values}), lengths, steps=steps)


@pytest.mark.parametrize(
    ("engines", "tokens_per_s", "tokens", "survey_s"),
    [
        (1, 6000, 2000, 3 * 60),
        (1, 6000, 8000, 11 * 60),
        (1, 6000, 32000, 45 * 60),
        (1, 1200, 2000, 14 * 60),
        (1, 1200, 8000, 56 * 60),
        (1, 1200, 32000, 3.7 * 3600),
        (8, 1200, 32000, 3.7 * 3600),
    ],
)
def test_512_rollouts_take_as_long_as_the_survey_says(engines, tokens_per_s, tokens, survey_s):
    config = settings(
        engine={"count": engines, "max_sequences": 512 // engines},
        rollout={"group_size": 8},
        trainer={"groups_per_step": 64, "steps": 1},
        buffer={"max_staleness": 0},
    )
    lengths = Lengths(groups=(np.array([[tokens]]),), prompt_tokens=0)
    found = simulate(config, costs(tokens_per_s=tokens_per_s), lengths, steps=1, warm_up=0)
    assert found.ends_s[0] == pytest.approx(512 * tokens / tokens_per_s / engines)
    # The survey rounds 2.8 minutes up, and all others down: 45.5, 56.9 minutes, 3.79 hours.
    assert found.ends_s[0] * engines == pytest.approx(survey_s, rel=0.06)


@dataclass(frozen=True, kw_only=True)
class LaunchCosts(FixedCosts):
    """An engine that decodes 32 steps per launch."""

    device = "cuda"
    first_s = 0.75
    admit_s = 0.5
    start_s = 0.125


@pytest.mark.parametrize(
    ("slots", "decode_steps"),
    [
        (8, 16 + 32 + 32),  # a launch that starts sequences has half its steps
        (4, 10 * 8 + 16 + 32 + 32),  # or a quarter while others wait
    ],
)
def test_slots_of_a_gpu_are_filled_between_launches(slots, decode_steps):
    config = settings(
        engine={"count": 1, "max_sequences": slots},
        rollout={"group_size": 8},
        trainer={"groups_per_step": 1},
        buffer={"max_staleness": 0},
        weights={"interrupt": "barrier"},
    )
    shape = {"shape": SHAPE, "gpu": GPUS["h100"], "score_s": 0.0}
    lengths = Lengths(groups=(np.array([[75]]),), prompt_tokens=0)
    found = simulate(config, LaunchCosts(**shape), lengths, steps=1, warm_up=0)
    starts_s = 0.75 + (8 / slots - 1) * 0.5 + 8 * 0.125
    assert found.ends_s[0] == pytest.approx(starts_s + 0.01 * decode_steps)
    assert found.tokens_per_s * found.ends_s[0] == pytest.approx(8 * 75)


def test_a_synchronous_step_of_two_agents_waits_for_the_longest_chain():
    config = settings(
        engine={"count": 1, "max_sequences": 64},
        rollout={"group_size": 8},
        trainer={"groups_per_step": 8},
        buffer={"max_staleness": 0},
        weights={"interrupt": "barrier"},
    )
    lengths = Lengths(median=100, p90=500, turns=2, task_share=0.0)
    found = simulate(config, costs(step_s=0.01), lengths, steps=1, warm_up=0)
    rng = np.random.default_rng(config.seed)
    chains = np.array([turns.sum() for _ in range(8) for turns in lengths.draw(rng, 8)])
    assert found.ends_s[0] == pytest.approx(0.01 * chains.max())
    assert chains.max() > 5 * np.median(chains)


@pytest.mark.parametrize("limit", [0, 1, 4])
@pytest.mark.parametrize("order", ["oldest", "in_order", "ready"])
def test_no_token_is_trained_staler_than_the_limit(limit, order):
    found = run_of(limit=limit, order=order)
    assert found.staleness_max <= limit
    assert 0 <= found.staleness_mean <= limit


def test_a_batch_gives_up_waiting_for_stragglers():
    """A group that was waited for as long as it had run is left behind, and then too stale."""
    found = run_of(p90=800, longest=4000)
    assert found.tokens_wasted_share > 0
    assert found.staleness_max == 2


def test_no_part_of_the_controller_reads_the_clock_of_the_machine():
    clocks = (time.monotonic, time.perf_counter, time.process_time, time.time)
    readers, before = set[str](), sys.getprofile()

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function in clocks:
            readers.add(frame.f_globals["__name__"])

    sys.setprofile(profile)
    try:
        run_of(p90=800, steps=6)
    finally:
        sys.setprofile(before)
    assert not {name for name in readers if name.startswith("millrace.")}


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_every_issued_group_is_trained_or_open_or_lost(limit):
    found = run_of(limit=limit, train_step_s=0.05)
    num_trained = 4 * len(found.ends_s)
    assert found.issued_groups == num_trained + found.open_groups + sum(found.lost_groups.values())


def test_more_engines_are_not_slower():
    rates = [run_of(engines=n, p90=60, steps=40).samples_per_s for n in (1, 2, 8)]
    assert rates[0] < rates[1] <= rates[2] * 1.02


def test_a_slow_trainer_limits_the_run():
    slow = run_of(train_step_s=50.0)
    assert slow.step_s == pytest.approx(50.0, rel=0.01)
    assert slow.trainer_busy > 0.95
    assert slow.engine_busy < 0.5


def test_a_simulation_is_deterministic():
    first, second = run_of(), run_of()
    assert (first.ends_s, first.staleness_mean) == (second.ends_s, second.staleness_mean)


def test_workers_that_share_cores_slow_each_other_down():
    config = settings(
        engine={"count": 1},
        rollout={"group_size": 4},
        trainer={"groups_per_step": 4},
        buffer={"max_staleness": 4},
    )
    lengths, times = Lengths(groups=(np.array([[50]]),)), costs(train_step_s=0.5)
    alone = simulate(config, times, lengths)
    shared = simulate(config, times, lengths, speed_of=lambda worker, num_busy: 1 / num_busy)
    assert shared.step_s > 1.4 * alone.step_s


@pytest.mark.parametrize("interrupt", ["swap", "drain", "barrier", "abort"])
def test_every_interrupt_model_reaches_its_last_step(interrupt):
    config = settings(
        rollout={"group_size": 2},
        trainer={"groups_per_step": 2},
        weights={"interrupt": interrupt},
        buffer={"max_staleness": 0 if interrupt == "barrier" else 1},
    )
    lengths = Lengths(median=20, p90=60, max=200)
    assert len(simulate(config, costs(train_step_s=0.1), lengths, steps=6).ends_s) == 6


@dataclass(frozen=True, kw_only=True)
class SlowTransfer(FixedCosts):
    publish_s = 1.5


@pytest.mark.parametrize("interrupt", ["swap", "save"])
def test_save_stops_the_engines_while_weights_travel(interrupt):
    config = settings(
        rollout={"group_size": 2},
        trainer={"groups_per_step": 2},
        weights={"interrupt": interrupt},
    )
    times = SlowTransfer(shape=SHAPE, gpu=GPUS["h100"], score_s=0.0, train_step_s=2.0)
    found = simulate(config, times, Lengths(median=500, p90=600, max=900), steps=8)
    waits = [span for span in found.spans if span.name == "waiting for weights"]
    transfers = [end_s for end_s in found.ends_s if end_s + 1.5 < found.ends_s[-1]]
    waited_s = [pytest.approx(1.5)] * len(transfers) if interrupt == "save" else []
    assert [w.end_s - w.start_s for w in waits if w.end_s < found.ends_s[-1]] == waited_s
    assert [w.start_s for w in waits][: len(waited_s)] == transfers[: len(waited_s)]


def test_rates_and_busy_shares_leave_the_warm_up_out():
    """The engine is eight batches ahead after the warm-up, and then waits for the trainer."""
    config = settings(
        engine={"count": 1, "max_sequences": 16},
        rollout={"group_size": 4},
        trainer={"groups_per_step": 4},
        buffer={"max_staleness": 8},
    )
    lengths = Lengths(groups=(np.array([[50]]),), prompt_tokens=0)
    found = simulate(config, costs(train_step_s=5.0), lengths)
    assert found.step_s == pytest.approx(5.0)
    assert found.tokens_per_s == pytest.approx(16 * 50 / 5.0, rel=0.01)
    assert found.engine_busy == pytest.approx(50 * 0.01 / 5.0, rel=0.01)
    assert found.trainer_busy == pytest.approx(1.0)


@dataclass(frozen=True, kw_only=True)
class NotedPrefills(FixedCosts):
    tokens: list[float] = field(default_factory=list)

    def prefill_s(self, tokens: float) -> float:
        self.tokens.append(tokens)
        return 0.0


def test_sequences_are_computed_again_one_by_one_after_a_swap():
    """Attention within each grows with the square of its length, not with that of their sum."""
    config = settings(
        engine={"count": 1, "kv": "recompute"},
        rollout={"group_size": 8},
        trainer={"groups_per_step": 2},
    )
    times = NotedPrefills(shape=SHAPE, gpu=GPUS["h100"], score_s=0.0, train_step_s=0.2)
    lengths = Lengths(median=60, p90=90, max=100, prompt_tokens=10)
    simulate(config, times, lengths, steps=6)
    assert 10 < max(times.tokens) <= 110


def test_filtered_groups_are_replaced():
    config = settings(rollout={"group_size": 2}, trainer={"groups_per_step": 2})
    found = simulate(config, costs(), Lengths(filtered_share=0.5), steps=6)
    assert found.lost_groups["filtered"] > 0
    assert len(found.ends_s) == 6
