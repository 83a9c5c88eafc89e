"""Ranks that do not find each other, or lose each other."""

import multiprocessing
import socket
from multiprocessing.connection import Connection

import pytest
import torch

from millrace.core.errors import RunFailed
from millrace.core.microbatch import MeshSizes
from millrace.training.parallel.ranks import Ranks, is_lost_connection


def free_rendezvous() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_cannot_reach_the_others_says_so(rank):
    rendezvous = free_rendezvous()
    with pytest.raises(RunFailed) as caught:
        Ranks.join(
            MeshSizes(dp_shard=2),
            rank=rank,
            rendezvous=rendezvous,
            device=torch.device("cpu"),
            timeout_s=1,
        )
    sentence = f"Rank {rank} of the trainer could not reach the others at {rendezvous} within 1 s"
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized()


def play_rank(rank: int, rendezvous: str, pipe: Connection) -> None:
    """Rank 1 ends before the second collective; rank 0 sends what becomes of it."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    ranks = Ranks.join(MeshSizes(dp_shard=2), rank=rank, rendezvous=rendezvous, device=device)
    try:
        ranks.sum([1.0])
        if rank == 0:
            ranks.sum([1.0])
    except RuntimeError as error:
        pipe.send(is_lost_connection(error))


def test_collective_with_a_dead_rank_fails_as_a_lost_connection():
    context, rendezvous = multiprocessing.get_context("fork"), free_rendezvous()
    ours, theirs = context.Pipe()
    ranks = [context.Process(target=play_rank, args=(i, rendezvous, theirs)) for i in range(2)]
    for rank in ranks:
        rank.start()
    theirs.close()
    assert ours.recv() is True
    for rank in ranks:
        rank.join()
    assert not is_lost_connection(RuntimeError("shapes do not match"))
