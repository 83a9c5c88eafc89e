"""How busy one scorer is, and has been: what scoring knows, and the metrics tell."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerLoad:
    concurrency: int  # calls that may be in flight
    in_flight: int  # calls, now
    waiting: int  # episodes, now: for a place, before another try, or behind the breaker
    busy_s: float  # so far, as all of these: seconds times calls in flight
    waiting_s: float  # seconds times episodes waiting
    episodes: int  # judged
    calls: int  # made, with further tries
    retries: int  # of these
    failures: int  # calls given up: each cost its group
    skipped: int  # episodes that did not pass its gate
    breaker_opened: int
    is_held: bool  # now: its breaker is open
    lost: int = 0  # processes of its own that died or hung, and were replaced
