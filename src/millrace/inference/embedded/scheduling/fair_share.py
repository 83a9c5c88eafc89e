"""Decides which flows compute in the next pass. A flow is what one client asked for at once.

Usually all flows compute together. A flow is heavy if it has more tokens to compute than the
geometric mean of all flows: many sequences, or prompts. While heavy flows make passes more than
twice as long as the others need without them, some passes leave them out, until these have taken
the time that was lost.

Promise: heavy flows take about half of the time, so the others compute at least half as fast as
they would without them. A flow that arrives has to wait for a pass of others, so it gets as much
time first; while flows arrive, long passes prefill less, so that the wait is short.
The engine's thread calls everything.
"""

import numpy as np

_HEAVY = 1.01  # times the mean; more than rounding errors
_NO_FLOWS = np.zeros(0, dtype=np.int64)
_MAX_PASSES = 16  # with heavy flows, until a pass without them is measured again
_MAX_GROWTH = 1.5  # of a measured time, as the machine may be busy with something else
_LONG_PASS = 4  # times as long as without heavy flows: the next one prefills less
_MIN_SHARE = 1 / 16  # of the tokens that a pass may prefill
_MAX_SINGLE = 64  # passes of a single flow, until they prefill as much as possible again


class FairShare:
    def __init__(self) -> None:
        self.left_out = _NO_FLOWS  # heavy flows that do not compute in this pass
        self._owed_s = 0.0  # seconds that the other flows compute before the heavy ones
        self._light_s = 0.0  # of one decode step without the heavy flows
        self._num_light = 0  # tokens of the pass that measured it; 0 = not measured
        self._num_passes = 0  # since then
        self._last_s = 0.0  # of the last pass
        self._is_shared = False  # there are several flows, and some are heavy
        self._num_tokens = 0  # of the flows that are not heavy, in this pass
        self._prefill_share = 1.0
        self._num_single = 0  # passes of a single flow in a row

    def begin_pass(self, flows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Choose `left_out`. `flows`: of each running sequence [R], which has `num_tokens` [R] to
        compute."""
        was_shared, self._is_shared = self._is_shared, False
        self.left_out = _NO_FLOWS
        if len(flows) == 0 or (flows == flows[0]).all():
            return
        found, places = np.unique(flows, return_inverse=True)
        totals = np.bincount(places, weights=num_tokens)
        is_heavy = totals > _HEAVY * np.exp(np.log(totals).mean())
        if not is_heavy.any():
            return
        self._is_shared = True
        self._num_tokens = int(totals[~is_heavy].sum())
        if not was_shared:
            self._owed_s, self._num_light = self._last_s, 0
        is_measured = self._num_light > 0 and self._num_passes < _MAX_PASSES
        # Fewer tokens than were measured need less time.
        if self._owed_s > 0 or not is_measured or 2 * self._num_tokens < self._num_light:
            self.left_out = found[is_heavy]

    def prefill_limit(self, num_tokens: int) -> int:
        """The tokens that this pass may prefill; at most `num_tokens`."""
        share = 1.0 if len(self.left_out) else self._prefill_share
        return max(1, int(share * num_tokens))

    def end_pass(self, seconds: float, *, num_steps: int) -> None:
        """`num_steps`: decode steps that the pass computed, at least 1."""
        self._last_s = seconds
        if not self._is_shared:
            self._num_single += 1
            if self._num_single >= _MAX_SINGLE:
                self._prefill_share = 1.0
            return
        self._num_single = 0
        if len(self.left_out):
            is_known = self._num_light > 0
            step_s = seconds / num_steps
            self._light_s = min(step_s, _MAX_GROWTH * self._light_s) if is_known else step_s
            self._num_light, self._num_passes = self._num_tokens, 0
            self._owed_s = max(0.0, self._owed_s - seconds)
        else:
            self._num_passes += 1
            light_s = self._light_s * num_steps
            self._owed_s += max(0.0, seconds - 2 * light_s)
            if seconds > _LONG_PASS * light_s:
                self._prefill_share = max(self._prefill_share / 2, _MIN_SHARE)
            elif seconds < _LONG_PASS / 2 * light_s:
                self._prefill_share = min(2 * self._prefill_share, 1.0)
