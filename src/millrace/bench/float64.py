"""Makes float32 mean float64, in a process that `millrace bench ranks` starts.

Names of float32 become names of float64 before the model code is imported, which is otherwise
unchanged. Ranks that differ from one rank by rounding alone then differ by about 1e-15.
"""

import json
import sys
from multiprocessing import forkserver
from typing import Any

import numpy as np
import torch

_torch: Any = torch
_numpy: Any = np
_torch.float32 = _torch.float = torch.float64
_torch.Tensor.float = torch.Tensor.double
_numpy.float32 = np.float64
torch.set_default_dtype(torch.float64)


def main() -> None:
    from millrace.bench.ranks import FEATURES, MESHES, compare

    forkserver.set_forkserver_preload([__name__, compare.__module__])  # in this order
    forkserver.ensure_running()
    features, meshes = json.loads(sys.argv[1])
    table = compare({f: FEATURES[f] for f in features}, {m: MESHES[m] for m in meshes})
    print(json.dumps(table))
