"""Estimates the memory of a rank before it loads the model.

The estimate counts weights, gradients and the state of a built-in optimizer unless it is offloaded.
It leaves out activations and the critic, so what exceeds it cannot fit.
"""

from millrace.config import RunConfig
from millrace.config.training import ADAMW, ADAMW_8BIT, MUON
from millrace.training.build import frozen_dtype

_STATE_BYTES = {ADAMW: 8, MUON: 4, ADAMW_8BIT: 2}  # of the optimizer per weight, at least


def rank_bytes(config: RunConfig, *, num_weights: int) -> int:
    """Bytes of the state of one rank, at least."""
    sizes = config.trainer.mesh_sizes
    num_shards = sizes.num_ranks // sizes.dp_replicate
    optimizer = config.optimizer
    if config.lora is not None:
        per_weight = frozen_dtype(config).itemsize
    else:
        per_weight = 8 + (0 if optimizer.offload else _STATE_BYTES.get(optimizer.type, 0))
    return num_weights * per_weight // num_shards
