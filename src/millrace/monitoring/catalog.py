"""Names and meanings of all metrics; docs/reference/metrics.md is written from this table.

Words in capitals stand for names that the run supplies. A user's loss may add metrics of its own.
"""

import re
from collections.abc import Iterable

CATALOG: dict[str, dict[str, str]] = {
    "Time": {
        "step": "Step that this row describes; the first step is 1.",
        "version": "Policy version that the step produced.",
        "time_s": "Seconds since the start of the run, including start-up.",
    },
    "Rewards": {
        "reward/mean": "Mean reward of the episodes of this step.",
        "reward/std": "Standard deviation of the rewards of this step.",
        "reward/source/NAME": "Mean reward of one task source; only with several sources.",
        "rewards/NAME/mean": "Mean score of one scorer, penalty or agent role, before its weight.",
        "rewards/NAME/share": "Share of episodes that this scorer scored; left out if it is 1.",
    },
    "Evaluation (in the first row after an evaluation)": {
        "eval/accuracy": "Share of held-out episodes that are solved.",
        "eval/mean@K": "The same as eval/accuracy, with K samples per task.",
        "eval/pass@K": "Unbiased probability that one of K samples solves its task.",
        "eval/step": "Step after which the evaluation was due.",
        "eval/version_min": "Oldest policy version that generated a token of the evaluation.",
        "eval/version_max": "Newest policy version that generated a token of the evaluation.",
        "eval/unscored": "Tasks without a score, counted as not solved; left out if it is 0.",
    },
    "Optimization": {
        "loss": "Value of the loss, averaged over the updates of the step.",
        "grad_norm": "Gradient norm before clipping, averaged over the updates of the step.",
        "learning_rate": "Learning rate of this step.",
        "entropy": "Mean entropy of the policy over the trained tokens, in nats.",
        "kl": "KL divergence from the reference model; only with loss.kl above 0.",
        "clip_ratio": "Share of tokens that clipping leaves without a gradient.",
        "truncation_ratio": "Share of tokens whose ratio was cut to max_ratio.",
        "mask_ratio": "Share of tokens with loss weight 0.",
        "loss_weight/mean": "Mean loss weight of a token.",
        "loss_scale": "Factor of the loss; differs from 1 with float16 only.",
        "skipped/updates": "Updates of this step skipped because they were not finite.",
        "skipped/steps": "Steps so far with at least one skipped update.",
        "preference/margin": "Mean log-ratio margin between the two completions of a pair.",
        "preference/accuracy": "Share of tokens in pairs with a positive margin.",
        "routing/replayed_share": "Share of rows that reuse the engine's expert routes.",
    },
    "Trainer against engine": {
        "ratio/mean": "Mean of p(trainer) / p(engine) over the trained tokens.",
        "ratio/min": "Smallest ratio of a token.",
        "ratio/max": "Largest ratio of a token.",
        "ratio/p01": "1st percentile of the ratio, to within 1 %.",
        "ratio/p99": "99th percentile of the ratio, to within 1 %.",
        "ratio/effective_sample_size": "Effective sample size, as a share of the tokens.",
        "mismatch/kl_k1": "KL(engine, trainer), estimator k1: mean of -log ratio.",
        "mismatch/kl_k2": "KL(engine, trainer), estimator k2: mean of (log ratio)^2 / 2.",
        "mismatch/kl_k3": "KL(engine, trainer), estimator k3: mean of ratio - 1 - log ratio.",
        "mismatch/logprob": "Mean absolute difference between trainer and engine logprobs.",
    },
    "Critic and teachers": {
        "critic/loss": "Mean squared error of the critic, averaged over its updates.",
        "critic/grad_norm": "Gradient norm of the critic.",
        "critic/value_mean": "Mean value estimate over the trained tokens, before the step.",
        "critic/return_mean": "Mean return over the trained tokens.",
        "critic/explained_variance": "1 - var(return - value) / var(return); 0 if all are equal.",
        "teacher/kl": "KL(policy, teacher), estimated from the sampled tokens.",
        "teacher/divergence": "Divergence of distillation (forward KL or JSD), without its weight.",
        "teacher/version": "Mean policy version of a teacher that is an earlier policy.",
    },
    "Staleness": {
        "staleness/mean": "Mean staleness of the trained tokens, in policy versions.",
        "staleness/max": "Largest staleness of a trained token.",
        "staleness/share/N": "Share of the trained tokens with staleness N.",
        "version_spread/rollout_mean": "Newest minus oldest version within a rollout, on average.",
        "version_spread/rollout_max": "Largest version spread within a rollout.",
        "version_spread/group_mean": "Newest minus oldest version within a group, on average.",
        "version_spread/group_max": "Largest version spread within a group.",
    },
    "Throughput": {
        "throughput/samples_per_s": "Trained episodes per second, over at least 10 s.",
        "throughput/tokens_per_s": "Generated tokens per second, over at least 10 s.",
        "throughput/samples": "Episodes trained so far; replayed groups count once.",
        "throughput/tokens": "Tokens generated by the rollout engines so far.",
        "throughput/time_s": "Seconds of training so far, without start-up and first evaluation.",
        "busy/ROLE": "Share of the last 15 s that engines or the trainer were busy.",
        "waiting/WORKER/REASON": "Share of the last 15 s that a worker waited, by reason.",
    },
    "Batches and episodes": {
        "batch/trained_tokens": "Tokens trained in this step, summed over its updates.",
        "batch/microbatches": "Microbatches of this step.",
        "batch/microbatch_splits": "Microbatches that were split because memory ran out.",
        "batch/proximal_microbatches": "Forward passes that only computed proximal logprobs.",
        "completion_length/mean": "Mean number of generated tokens per rollout.",
        "completion_length/max": "Largest number of generated tokens of a rollout.",
        "turns/mean": "Mean number of model replies per episode.",
        "episode/NAME": "Events counted in the episodes of this step, such as tool_calls.",
        "episode/cut/REASON": "Episodes of this step that a limit ended, by limit.",
    },
    "Flow": {
        "buffer/depth": "Groups that wait for the trainer.",
        "buffer/wait_s": "Mean seconds that the groups taken last have waited in the buffer.",
        "buffer/admission_held_s": "Seconds so far in which admission started no group.",
        "groups/running": "Groups that are being generated or scored.",
        "groups/replayed": "Groups of this step that an earlier step has trained on.",
        "dropped/REASON": "Groups dropped so far, by reason.",
        "cancelled/ACTIVITY": "Groups cancelled so far because they became too stale, by activity.",
        "failed/REASON": "Groups failed so far, by reason.",
        "tokens/saved": "Estimate of tokens so far that cancelled groups did not generate.",
        "tokens/wasted/REASON": "Tokens so far that are never trained, by reason.",
        "tokens/wasted_staleness/REASON": "Mean staleness of the wasted tokens, by reason.",
        "tokens/resumed": "Journaled tokens so far that a resumed run reused.",
        "sequences/resumed": "Sequences so far that resumed on another engine after a crash.",
        "restarts/WORKER": "Restarts so far of a worker.",
        "weights/notify_failures": "Failed posts to weights.notify so far.",
    },
    "Scorers": {
        "scorer/NAME/waiting": "Episodes that wait for a call.",
        "scorer/NAME/in_flight": "Calls in flight.",
        "scorer/NAME/concurrency": "Calls that may be in flight.",
        "scorer/NAME/busy": "Share of the allowed calls in flight, since the last row.",
        "scorer/NAME/wait_s": "Mean seconds that an episode waited, since the last row.",
        "scorer/NAME/episodes": "Episodes scored so far.",
        "scorer/NAME/calls": "Calls so far, including retries.",
        "scorer/NAME/retries": "Retries so far.",
        "scorer/NAME/failures": "Calls so far that failed finally; each costs its group.",
        "scorer/NAME/skipped": "Episodes so far that did not pass the scorer's gate.",
        "scorer/NAME/breaker_opened": "Times so far that the scorer was unreachable.",
        "scorer/NAME/lost": "Processes of the scorer so far that hung or died and were replaced.",
    },
}


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """Names that the catalog does not have."""
    patterns = [_pattern(name) for section in CATALOG.values() for name in section]
    return [name for name in names if not any(p.fullmatch(name) for p in patterns)]


def _pattern(name: str) -> re.Pattern[str]:
    """Capitals stand for any text; names of scorers may contain slashes."""
    parts = re.split(r"\b([A-Z]+)\b", name)
    return re.compile("".join(".+" if i % 2 else re.escape(p) for i, p in enumerate(parts)))
