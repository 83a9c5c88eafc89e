"""Completions cut and joined, with everything that belongs to their tokens.

What comes of it goes on: it has no text, and nothing is said of its end or its KV.

Routes as arrays: which experts each token went to in each layer of a mixture of experts.

An array of routes is [rows, layers, top_k], uint8 for up to 255 experts and uint16 for more. A row
of the largest number of its type says that nobody knows where that token went.
"""

from collections.abc import Sequence

import numpy as np

from millrace.core.records import Completion, CompletionChunk, Finish, Kept


def joined(parts: Sequence[Completion | CompletionChunk], *, truncates: bool) -> Completion:
    """One behind the other. `truncates`: whether kept ids belong to their tokens."""
    none = np.empty(0, dtype=np.int32)
    return Completion(
        tokens=np.concatenate([none, *(part.tokens for part in parts)]),
        logprobs=np.concatenate(
            [none.astype(np.float32), *(part.logprobs for part in parts)], dtype=np.float32
        ),
        versions=np.concatenate([none, *(part.versions for part in parts)]),
        kept=_joined_kept([part.kept for part in parts if part.kept]) if truncates else None,
        routes=_last_routes(parts),
        finish="interrupt",
        text="",
    )


def cut(completion: Completion, begin: int, end: int | None = None) -> Completion:
    """Its tokens from `begin` up to `end`, by default the last. Its routes are those of all that
    was fed before the last of these: they begin in the prompt."""
    stop = len(completion.tokens) if end is None else end
    return Completion(
        tokens=completion.tokens[begin:stop],
        logprobs=completion.logprobs[begin:stop],
        versions=completion.versions[begin:stop],
        kept=None if completion.kept is None else _cut_kept(completion.kept, begin, stop),
        routes=_cut_routes(completion, stop),
        finish="interrupt",
        text="",
    )


def chunk_of(
    completion: Completion, *, member: int, finish: Finish | None = None
) -> CompletionChunk:
    """All of its tokens, as who listens is told them."""
    return CompletionChunk(
        member=member,
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        kept=completion.kept,
        finish=finish,
    )


def _joined_kept(parts: Sequence[Kept]) -> Kept:
    no_ids, nothing = np.empty(0, dtype=np.int32), np.zeros(1, dtype=np.int64)
    sizes = np.concatenate([nothing, *(np.diff(part.offsets) for part in parts)])
    return Kept(
        ids=np.concatenate([no_ids, *(part.ids for part in parts)]),
        offsets=np.cumsum(sizes).astype(np.int64),
    )


def _cut_kept(kept: Kept, begin: int, end: int) -> Kept:
    offsets = kept.offsets[begin : end + 1]
    return Kept(ids=kept.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])


def _last_routes(parts: Sequence[Completion | CompletionChunk]) -> np.ndarray | None:
    """Those of the last part that has any: each has all that were known by then."""
    told = [part.routes for part in parts if isinstance(part, Completion)]
    return next((routes for routes in reversed(told) if routes is not None), None)


def _cut_routes(completion: Completion, end: int) -> np.ndarray | None:
    if completion.routes is None:
        return None
    num_cut = len(completion.tokens) - end
    return completion.routes[: max(0, len(completion.routes) - num_cut)]


def unknown_id(dtype: np.dtype) -> int:
    """What stands in every place of a row that is not known."""
    return int(np.iinfo(dtype).max)


def unknown_routes(num_rows: int, *, like: np.ndarray) -> np.ndarray:  # [num_rows, layers, top_k]
    return np.full((num_rows, *like.shape[1:]), unknown_id(like.dtype), like.dtype)


def padded(routes: np.ndarray, num_rows: int) -> np.ndarray:  # [num_rows, layers, top_k]
    """With rows that are not known behind those there are."""
    return np.concatenate([routes, unknown_routes(num_rows - len(routes), like=routes)])
