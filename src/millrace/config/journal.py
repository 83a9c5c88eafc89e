"""Settings of the journal. Torch-free."""

from typing import Self

from pydantic import model_validator

from millrace.config.sections import NonNegativeFloat, PositiveInt, Section


class JournalConfig(Section):
    enabled: bool = True
    """Write down what a crash must not lose; see docs/explanation/reliability.md.
    Without it, --resume plays
    again what was played since the newest checkpoint."""
    segment_bytes: PositiveInt = 64 * 2**20
    """A file of this size is followed by another; files are removed as a whole."""
    max_bytes: PositiveInt = 4 * 2**30
    """Beyond this, a checkpoint is made out of turn, which lets the journal shrink."""
    commit_interval_s: NonNegativeFloat = 0.005
    """How long a record may wait for others that reach the disk with it."""
    partial_every_s: NonNegativeFloat = 5.0
    """How often it is written down what groups in flight have sampled: after a crash they go on
    from there. 0 = never: they are played again from their beginning. So they always are with
    weights.interrupt = "barrier", or a run would not come out the same each time."""
    fsync: bool = True
    """Survive also a machine that loses power; without it, only the death of processes."""

    @model_validator(mode="after")
    def _can_shrink(self) -> Self:
        if self.max_bytes < 2 * self.segment_bytes:
            raise ValueError(
                f"max_bytes = {self.max_bytes} is less than two files of segment_bytes ="
                f" {self.segment_bytes}, of which the last always stays; raise max_bytes, or lower"
                " segment_bytes"
            )
        return self
