"""A custom loss is a frozen dataclass whose fields are its TOML keys."""

from dataclasses import dataclass

from millrace.training.losses.loss import TokenBatch, aggregate


@dataclass(frozen=True, kw_only=True)
class TruncatedReinforce:
    """-min(r, cap) * A * log pi, where the importance weight r = pi / pi_engine is constant."""

    cap: float = 2.0

    def __call__(self, tokens: TokenBatch):
        log_ratio = (tokens.trainer_logprobs - tokens.engine_logprobs).detach()
        weight = log_ratio.exp().clamp(max=self.cap)
        objective = weight * tokens.advantages * tokens.trainer_logprobs
        metrics = {"capped_share": (log_ratio.exp() > self.cap).float()}
        return -aggregate(objective, tokens, by="token"), metrics
