"""Overlap of generation and training in the trace of a run."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from millrace.core.spans import Span


def steps_of(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.name == "step" and span.busy]


def first_halves(steps: Sequence[Span]) -> list[Span]:
    """The first half of each step, for runs that alternate. The trainer sends its reply before it
    records the end of the step, and on a busy machine much earlier."""
    return [replace(span, end_s=(span.start_s + span.end_s) / 2) for span in steps]


def generating_in(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.name == "generate" and span.busy]


def overlap(steps: Sequence[Span], generating: Sequence[Span]) -> float:
    """Share of the steps' time in which an engine generates, summed over engines."""
    pairs = itertools.product(steps, generating)
    both_s = sum(max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a, b in pairs)
    return both_s / sum(span.end_s - span.start_s for span in steps)
