"""What grammars rule out of the logits, for the lanes that have one.

R = lanes of a step, V = vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from millrace.engines.embedded.lanes import Lanes


def guided(logits: Tensor, lanes: Lanes, chosen: np.ndarray) -> Tensor:
    """Logits [R, V] of these lanes [R], -inf where a grammar allows nothing."""
    allowed = np.ones(tuple(logits.shape), dtype=bool)
    for row in np.flatnonzero(lanes.is_guided[chosen]):
        sequence = lanes.sequence(chosen[row])
        assert sequence.guide is not None
        sampled, _, _ = lanes.sampled_by(sequence)
        allowed[row] = sequence.guide.allowed(sampled)
    return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)
