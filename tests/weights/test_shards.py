import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.errors import WeightError
from millrace.weights.packing import lay_out
from millrace.weights.shards import Box, plan


def chunks(shape: tuple[int, ...], *, axis: int | None, num_ranks: int) -> list[Box]:
    """As Shard(axis) places a tensor; None = Replicate."""
    boxes = []
    for rank in range(num_ranks):
        offset, extent = [0] * len(shape), list(shape)
        if axis is not None:
            size = -(-shape[axis] // num_ranks)
            offset[axis] = min(rank * size, shape[axis])
            extent[axis] = min(size, shape[axis] - offset[axis])
        boxes.append(Box(offset=tuple(offset), shape=tuple(extent)))
    return boxes


sharded = st.lists(st.integers(0, 9), min_size=1, max_size=3).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)), st.none() | st.integers(0, len(shape) - 1), st.booleans()
    )
)


@settings(deadline=None)
@given(st.lists(sharded, max_size=4), st.integers(1, 4), st.integers(16, 200))
def test_plan_covers_every_value_once_in_bounded_buckets(
    parameters: list[tuple[tuple[int, ...], int | None, bool]], num_ranks: int, bucket_bytes: int
):
    tensors = {
        str(number): torch.zeros(shape, dtype=torch.float32 if is_float else torch.int64)
        for number, (shape, _, is_float) in enumerate(parameters)
    }
    specs, _ = lay_out(tensors, dtype=torch.bfloat16)
    of_tensor = [chunks(shape, axis=axis, num_ranks=num_ranks) for shape, axis, _ in parameters]
    boxes = [[of_rank[rank] for of_rank in of_tensor] for rank in range(num_ranks)]
    own, buckets = plan(specs, boxes, bucket_bytes=bucket_bytes)
    for bucket in buckets:
        assert 0 < sum(piece.room_bytes for piece in bucket) <= bucket_bytes
        assert all(piece.rank > 0 for piece in bucket)
    for piece in (*own, *(piece for bucket in buckets for piece in bucket)):
        piece.box.within(tensors[piece.spec.name]).add_(1)
        held = boxes[piece.rank][int(piece.spec.name)]
        assert all(
            h <= p and p + n <= h + m
            for h, m, p, n in zip(
                held.offset, held.shape, piece.box.offset, piece.box.shape, strict=True
            )
        )
    for tensor in tensors.values():
        assert torch.all(tensor == 1)


def test_shards_that_do_not_tile_their_tensor_are_refused():
    specs, _ = lay_out({"weight": torch.zeros(4)}, dtype=torch.float32)
    first, overlapping = Box(offset=(0,), shape=(2,)), Box(offset=(1,), shape=(2,))
    for other in (first, overlapping):
        with pytest.raises(WeightError, match="shards of 'weight' do not tile"):
            plan(specs, [[first], [other]], bucket_bytes=64)
