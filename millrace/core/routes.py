"""Routes as arrays: which experts each token went to in each layer of a mixture of experts.

An array of routes is [rows, layers, top_k], uint8 for up to 255 experts and uint16 for more. A row
of the largest number of its type says that nobody knows where that token went.
"""

import numpy as np


def unknown_id(dtype: np.dtype) -> int:
    """What stands in every place of a row that is not known."""
    return int(np.iinfo(dtype).max)


def unknown_routes(num_rows: int, *, like: np.ndarray) -> np.ndarray:  # [num_rows, layers, top_k]
    return np.full((num_rows, *like.shape[1:]), unknown_id(like.dtype), like.dtype)


def padded(routes: np.ndarray, num_rows: int) -> np.ndarray:  # [num_rows, layers, top_k]
    """With rows that are not known behind those there are."""
    return np.concatenate([routes, unknown_routes(num_rows - len(routes), like=routes)])
