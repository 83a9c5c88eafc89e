"""Copies between a GPU and memory of the host."""

import pytest
import torch

from millrace.weights.host_copies import PIECE_BYTES, pieces
from millrace.weights.packing import copy_all


@pytest.mark.parametrize("piece_bytes", [4, 12, 1000])
def test_pieces_cover_every_element_once_and_stay_small(piece_bytes: int):
    sources = [torch.arange(10.0).view(2, 5), torch.empty(0), torch.tensor(7.0)]
    targets = [torch.full_like(source, -1, dtype=torch.bfloat16) for source in sources]
    for target, source in pieces(zip(targets, sources, strict=True), piece_bytes=piece_bytes):
        assert max(target.nbytes, source.nbytes) <= piece_bytes
        assert (target == -1).all()
        target.copy_(source)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.float(), source)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_tensors_of_a_gpu_are_copied_to_the_host_and_back_in_pieces():
    length = PIECE_BYTES // 4
    on_gpu = [torch.randn(size, device="cuda") for size in (3 * length + 17, 5, 0, length)]
    on_gpu.append(torch.arange(7, device="cuda"))
    on_host = [torch.empty(t.shape, dtype=_sent_as(t)) for t in on_gpu]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copy_all(on_host, on_gpu)
    assert torch.cuda.max_memory_allocated() - before <= 4 * PIECE_BYTES
    for own, there in zip(on_host, on_gpu, strict=True):
        assert torch.equal(own, there.to(own.dtype).cpu())
    back = [torch.empty_like(tensor) for tensor in on_gpu]
    copy_all(back, on_host)
    torch.cuda.synchronize()
    for own, there in zip(on_host, back, strict=True):
        assert torch.equal(own.to(there.dtype), there.cpu())


def _sent_as(tensor: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
