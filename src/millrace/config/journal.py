"""Settings of the journal. Torch-free."""

from millrace.config.section import NonNegativeFloat, PositiveInt, Section


class JournalConfig(Section):
    enabled: bool = True
    """Whether the run keeps a journal, from which `--resume` redoes the work since the newest
    checkpoint (docs/explanation/reliability.md). Without a journal that work is sampled again."""
    max_bytes: PositiveInt = 4 * 2**30
    """Size of the journal in bytes beyond which an extra checkpoint is made, so that the journal
    can shrink."""
    partial_every_s: NonNegativeFloat = 5.0
    """Seconds between two saves of the tokens of unfinished groups, which resume from them after a
    crash. 0 disables this: unfinished groups start again. weights.interrupt = "barrier" disables
    it, too, because its runs are reproducible."""
    fsync: bool = True
    """Whether the journal survives a loss of power (SQLite's synchronous = FULL). Without it, the
    journal survives the death of processes only."""
