"""How matrix products of few rows are divided into programs."""

import pytest

from millrace.inference.embedded.decode.tilings import tiling_of

SHAPES = {
    "SmolLM2-135M": [(960, 576, 1, False), (576, 576, 8, False), (1536, 576, 1, True)],
    "Qwen3-1.7B": [(4096, 2048, 1, False), (6144, 2048, 1, True), (2048, 6144, 8, False)],
    "Qwen3-8B": [(6144, 4096, 1, False), (12288, 4096, 1, True), (4096, 12288, 8, False)],
}
HOPPER, ADA = 232448, 101376  # bytes of shared memory of a program


@pytest.mark.parametrize("shared_bytes", [HOPPER, ADA])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64])
@pytest.mark.parametrize("model", SHAPES)
def test_tilings_fit_into_shared_memory_and_cover_their_product(
    model: str, num_rows: int, itemsize: int, shared_bytes: int
):
    for num_out, num_in, max_parts, is_gated in SHAPES[model]:
        kind = {"itemsize": itemsize, "is_gated": is_gated}
        shape = (num_rows, num_out, num_in)
        tiling = tiling_of(shape, **kind, max_parts=max_parts, shared_bytes=shared_bytes)
        assert tiling is not None
        assert tiling.shared_bytes(**kind) <= shared_bytes
        assert num_in % (tiling.num_parts * tiling.depth) == 0
        assert tiling.num_parts <= max_parts
        assert tiling.rows >= num_rows


def test_products_of_many_rows_are_left_to_cublas():
    options = {"itemsize": 2, "shared_bytes": HOPPER}
    assert tiling_of((65, 4096, 4096), **options) is None
    assert tiling_of((128, 4096, 4096), **options, max_parts=8) is not None
    assert tiling_of((129, 4096, 4096), **options, max_parts=8) is None


def test_products_whose_inputs_have_an_odd_size_are_left_to_cublas():
    assert tiling_of((8, 4096, 4096 + 8), itemsize=2, shared_bytes=HOPPER) is None
