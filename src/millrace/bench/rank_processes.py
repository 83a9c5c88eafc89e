"""Runs a function on every rank of a mesh, each in a process of its own."""

import contextlib
import gc
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from millrace.cluster.address import free_port
from millrace.core.errors import RunFailed
from millrace.core.microbatch import MeshSizes
from millrace.models.devices import use_threads
from millrace.training.parallel.ranks import Ranks


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    sizes: MeshSizes,
    device: str = "cpu",
    threads: int = 1,
    sharded: bool = False,
) -> Any:
    """What function(ranks, *args) returns on rank 0. Ranks on "cuda" share one GPU. With `sharded`,
    a single rank uses the code of several."""
    context = _context(function, device=device)
    is_alone = sizes.num_ranks == 1 and not sharded
    rendezvous = "" if is_alone else f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    receiver, sender = context.Pipe(duplex=False)
    settings = (sizes, rendezvous, device, threads)
    processes = [
        context.Process(
            target=_run_rank, args=(function, args, rank, settings, sender if rank == 0 else None)
        )
        for rank in range(sizes.num_ranks)
    ]
    return _result_of(processes, receiver, sender)


def run_before_ranks(function: Callable[..., Any], *args: Any, device: str) -> Any:
    """What function(*args) returns. On CPUs, it runs in a process that forks the ranks of its calls
    of run_ranks(), so they need not repeat what it has imported and cached. It must not start
    threads, as a backward pass may."""
    if device == "cuda":
        return function(*args)
    context = _context(function, device=device)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_before_ranks, args=(function, args, sender))
    return _result_of([process], receiver, sender)


def _context(function: Callable[..., Any], *, device: str) -> Any:
    """How processes that call the function are started."""
    # Some packages, such as torchao, look for a GPU when they are imported, and a process that is
    # forked after that cannot use one.
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    if multiprocessing.parent_process() is not None:  # in run_before_ranks()
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, function.__module__])
    return context


def _result_of(processes: list[Any], receiver: Any, sender: Any) -> Any:
    for process in processes:
        process.start()
    sender.close()
    result = None
    with contextlib.suppress(EOFError):
        result = receiver.recv()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RunFailed("A rank failed; its error is above.")
    return result


def compare_in_float64(features: list[str], meshes: list[str]) -> dict[str, dict[str, float]]:
    """ranks.compare() on CPUs, by names, in a process where float32 means float64."""
    code = "from millrace.bench import float64; float64.main()"
    command = [sys.executable, "-c", code, json.dumps([features, meshes])]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _run_before_ranks(function: Callable[..., Any], args: tuple[Any, ...], sender: Any) -> None:
    use_threads(1)
    gc.freeze()  # otherwise collections in the ranks copy the memory of all that was imported
    sender.send(function(*args))


def _run_rank(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, settings: Any, sender: Any
) -> None:
    sizes, rendezvous, device, threads = settings
    use_threads(threads)
    ranks = Ranks.join(
        sizes,
        rank=rank,
        rendezvous=rendezvous,
        device=torch.device(device),
        backend="gloo" if sizes.num_ranks > 1 else None,  # NCCL does not share a GPU
        timeout_s=120,
    )
    result = function(ranks, *args)
    if sender is not None:
        sender.send(result)
