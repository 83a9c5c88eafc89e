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
    report_s: Annotated[Float, Field(ge=0.05)] = 2.0
    """How often engines tell what their sequences have sampled: if one dies, its sequences go on
    elsewhere from there."""
