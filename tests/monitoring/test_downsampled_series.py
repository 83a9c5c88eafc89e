import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millrace.monitoring.terminal.snapshot import DownsampledSeries


def downsampled(values, *, most):
    curve = DownsampledSeries(max_points=most)
    for value in values:
        curve.add(value)
    return curve.values


def test_few_values_are_kept():
    assert downsampled([], most=8) == ()
    assert downsampled([3.0], most=8) == (3.0,)
    assert downsampled(range(8), most=8) == tuple(range(8))


@given(st.integers(0, 500), st.sampled_from([2, 4, 8]))
def test_many_values_are_downsampled_and_keep_order_and_ends(length, most):
    values = [float(n) for n in range(length)]
    curve = downsampled(values, most=most)
    assert len(curve) <= most + 2
    assert list(curve) == sorted(curve)
    assert curve[:1] == tuple(values[:1])
    assert curve[-1:] == tuple(values[-1:])


def test_neighbours_are_replaced_by_their_mean():
    assert downsampled([0, 1, 3, 5, 7, 9], most=4) == (0, 2.0, 6.0, 9)
    assert np.mean(downsampled([1.0] * 1000, most=4)) == 1.0
