"""Exact mode replaces or refuses every function of PyTorch whose rounding depends on the batch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_exact import weight
from torch import Tensor
from torch.overrides import get_overridable_functions

from millrace.core.errors import ConfigError
from millrace.models.exact.mode import ExactMode

ROWS, SIZE = 33, 75
BATCHES = ([3], [*range(5, 22)], [30, 2, 9, 4, 4, 1, 31])
NAN = -1234.0

X, MATRIX, GAINS = weight(ROWS, SIZE), weight(SIZE, SIZE), weight(SIZE)
Y = X.flip(0)
POSITIVE = X.abs() + 0.1
CUBES = weight(ROWS, 7, 30), weight(ROWS, 30, 7)
# How functions are called; those that take no such arguments are not called so.
ARGUMENTS: tuple[Callable[[list[int]], tuple[Any, ...]], ...] = (
    lambda rows: (X[rows],),
    lambda rows: (POSITIVE[rows],),
    lambda rows: (POSITIVE[rows] / 10,),
    lambda rows: (X[rows], -1),
    lambda rows: (POSITIVE[rows], 1.7),
    lambda rows: (X[rows], Y[rows]),
    lambda rows: (POSITIVE[rows], X[rows]),
    lambda rows: (X[rows], Y[rows], POSITIVE[rows]),
    lambda rows: (X[rows], MATRIX),
    lambda rows: (X[rows], GAINS),
    lambda rows: (X[rows], MATRIX, 1),
    lambda rows: (X[rows], 2, -1),
    lambda rows: (GAINS, X[rows], MATRIX),
    lambda rows: (X[rows, 0], X[rows], GAINS),
    lambda rows: (X[rows], Y[rows], MATRIX.expand(8, SIZE, SIZE)),
    lambda rows: (CUBES[0][rows], CUBES[1][rows]),
    lambda rows: (CUBES[1][rows, :7], CUBES[0][rows][:, :, :7], CUBES[1][rows, :7]),
    lambda rows: ([X[rows], MATRIX],),
    lambda rows: (X[rows], (SIZE,), GAINS, GAINS),
    lambda rows: ("ij,jk->ik", X[rows], MATRIX),
)
# They draw, share or convert storage, or combine rows by definition, whatever they round.
OTHERS = (
    *("rand", "dropout", "bernoulli", "normal", "poisson", "multinomial", "gumbel", "rrelu"),
    *("exponential", "cauchy", "geometric", "uniform", "binomial", "empty", "resize", "storage"),
    *("mkldnn", "sparse", "share_memory", "data_ptr", "new_", "quant", "embedding", "squeeze"),
    *("roll", "tril", "triu", "flip", "rot90", "diag", "corrcoef", "cov", "gradient", "unique"),
    *("lu", "svd", "eig", "inv", "solve", "qr", "cholesky", "det", "rank", "householder", "pca"),
    *("matrix_exp", "lobpcg", "istft", "stft", "hist", "unfold", "attention", "pool", "msort"),
    "batch_norm",
)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Those of all names once, and no methods that work in place."""
    known, table = set[str](), get_overridable_functions()
    for home in (torch, F, torch.linalg, torch.special, Tensor):
        for function in table[home]:
            name = getattr(function, "__name__", "_")
            is_other = name.startswith("_") or any(part in name for part in OTHERS)
            if not (is_other or name in known or (home is Tensor and name.endswith("_"))):
                yield name, function
            known.add(name)


def result(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Tensor | None:
    """Of rows; None if the function takes no such arguments, is refused, or rounds nothing."""
    try:
        with ExactMode(torch.float32):
            found = function(*arguments)
    except (ConfigError, RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None
    except (AssertionError, NotImplementedError, KeyError):
        return None
    found = found[0] if isinstance(found, tuple) and found else found
    rounds = isinstance(found, Tensor) and found.dtype in (torch.float32, torch.float64)
    return found.nan_to_num(NAN) if rounds else None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_other_function_of_pytorch_depends_on_the_batch():
    different = set[str]()
    num_compared = 0
    for name, function in functions():
        for arguments in ARGUMENTS:
            whole = result(function, arguments([*range(ROWS)]))
            if whole is None or whole.shape[:1] != (ROWS,) or whole.shape[1:] == (ROWS,):
                continue  # no rows, or a product of two batches
            num_compared += 1
            for rows in BATCHES:
                own = result(function, arguments(rows))
                if own is None or not torch.equal(own, whole[rows]):
                    different.add(name)
                    break
    assert num_compared > 500
    assert not different


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("inner", lambda x: torch.inner(x, MATRIX)),
        ("tensordot", lambda x: torch.tensordot(x, MATRIX, 1)),
        ("mv", lambda x: torch.mv(x, GAINS)),
        ("addmv", lambda x: x[:, 0].addmv(x, GAINS)),
        ("addbmm", lambda x: torch.addbmm(x, x[None], MATRIX[None])),
        ("matmul", lambda x: torch.linalg.matmul(x, MATRIX)),
        ("multi_dot", lambda x: torch.linalg.multi_dot([x, MATRIX])),
        ("cdist", lambda x: torch.cdist(x, MATRIX)),
        ("cumsum", lambda x: x.cumsum(0)),
        ("sigmoid_", lambda x: x.clone().sigmoid_()),
    ],
)
def test_functions_that_add_in_an_order_of_their_own_are_refused_by_name(name, call):
    with ExactMode(torch.float32), pytest.raises(ConfigError, match=f"uses '{name}'"):
        call(X)
