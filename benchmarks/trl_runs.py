"""Settings that all TRL runs of these benchmarks share.

Promise: TRL minimises Millrace's default objective with the same optimizer, and does nothing else:
no KL model, no gradient checkpointing, no reporting, and no saving unless it is asked for.
"""

import time
from typing import Any

BETAS = (0.9, 0.95)  # of AdamW, on both sides


def grpo_settings(**own: Any) -> Any:
    """A GRPOConfig with the shared settings and the `own` settings of one comparison."""
    from trl import GRPOConfig

    return GRPOConfig(
        epsilon=0.2,
        epsilon_high=0.28,
        delta=2.0,
        loss_type="dapo",
        beta=0.0,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", **own},
    )


def step_recorder() -> Any:
    """A trainer callback that records the log and the time of each step."""
    from transformers import TrainerCallback  # slow to import

    class StepRecorder(TrainerCallback):
        def __init__(self) -> None:
            self.times_s: list[float] = []  # by time.monotonic()
            self.logs: list[dict[str, float]] = []

        def on_log(self, args: Any, state: Any, control: Any, *, logs: dict, **_: Any) -> None:
            if "reward" in logs:  # the last log of a run is a summary without a reward
                self.times_s.append(time.monotonic())
                self.logs.append({name: float(value) for name, value in logs.items()})

    return StepRecorder()
