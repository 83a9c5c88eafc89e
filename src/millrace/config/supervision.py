"""When a worker counts as hung, and how often one that died is started again. Torch-free."""

from typing import Annotated

from pydantic import Field

from millrace.config.sections import Float, NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class SupervisionConfig(Section):
    max_restarts: NonNegativeInt = 5
    """Of one engine or trainer within window_s; if it dies once more, the run ends."""
    window_s: PositiveFloat = 600.0
    backoff_s: NonNegativeFloat = 0.5
    """Wait before a worker is started again; doubled with each death within window_s, up to a
    minute."""
    hang_timeout_s: PositiveFloat = 300.0
    """An engine that has sequences or a trainer that has a batch, and makes no progress for this
    long, writes its stacks to its log and counts as dead. Until it has computed anything, it may
    also take cluster.start_timeout_s."""
    swap_timeout_s: PositiveFloat = 600.0
    """How long an engine may take until new weights are in use; with weights.interrupt = "drain" or
    "barrier" its sequences are finished meanwhile."""
    step_timeout_s: PositiveFloat = 3600.0
    """How long the trainer may take for one step."""
    save_timeout_s: PositiveFloat = 1800.0
    """How long it may take until a checkpoint is on the disk."""
    stall_warning_s: PositiveFloat = 120.0
    """If no step completes for this long, the run says which stage waits for which; again after
    twice that time, four times, and so on."""
    report_s: Annotated[Float, Field(ge=0.05)] = 2.0
    """How often engines tell what their sequences have sampled: if one dies, its sequences go on
    elsewhere from there."""
