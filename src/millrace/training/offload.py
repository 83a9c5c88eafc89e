"""Optimizer state in host memory.

The update of a parameter needs the state of that parameter alone. So parameters are updated bucket
by bucket: while one bucket is updated, the state of the next is copied to the device and that of
the one before to the host.

Promise: updates are bit for bit those of the same optimizer without offloading, and two buckets of
state are on the device at a time. Used by the trainer's thread.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from millrace.core.errors import ConfigError

_BUCKET_BYTES = 256 * 2**20  # of parameters; a larger parameter is a bucket of its own

Bucket = tuple[dict[str, Any], list[Tensor]]  # a parameter group, and some of its parameters
States = list[dict[str, Any]]  # what an optimizer keeps for each parameter of a bucket


class OffloadedOptimizer(torch.optim.Optimizer):
    def __init__(
        self, optimizer: torch.optim.Optimizer, *, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        """`optimizer` computes the updates; it keeps state per parameter only."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner = optimizer
        self._bucket_bytes = bucket_bytes
        self._device = self.param_groups[0]["params"][0].device
        self._is_cuda = self._device.type == "cuda"
        self._to_device = torch.cuda.Stream(self._device) if self._is_cuda else None
        self._to_host = torch.cuda.Stream(self._device) if self._is_cuda else None
        # Some optimizers make their state at once.
        self._store(list(optimizer.state), list(optimizer.state.values()))
        self._wait_for_copies()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        buckets = list(self._buckets())
        loaded = self._load(buckets[0]) if buckets else []
        for index, bucket in enumerate(buckets):
            self._wait_for_copies()
            states = loaded  # frees the state of the bucket before
            loaded = self._load(buckets[index + 1]) if index + 1 < len(buckets) else []
            states = self._update(bucket, states)
            self._store(bucket[1], states)
        self._wait_for_copies()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state into host memory; torch's own function would copy all of it to the device."""
        scalars = {
            key: {name: value for name, value in state.items() if not _is_offloaded(value)}
            for key, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": scalars})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if _is_offloaded(value):
                    self.state[parameter][name] = self._host_like(value)
                    _copy([value], [self.state[parameter][name]])

    def _buckets(self) -> Iterator[Bucket]:
        for group in self.param_groups:
            bucket: list[Tensor] = []
            num_bytes = 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                size = sum(leaf.nbytes for leaf in _leaves(parameter))
                if bucket and num_bytes + size > self._bucket_bytes:
                    yield group, bucket
                    bucket, num_bytes = [], 0
                bucket.append(parameter)
                num_bytes += size
            if bucket:
                yield group, bucket

    def _load(self, bucket: Bucket) -> States:
        """Start to copy the state of a bucket to the device."""
        on_host = [self.state[parameter] for parameter in bucket[1]]
        states = [
            {
                name: _empty_like(v, self._device) if _is_offloaded(v) else v
                for name, v in state.items()
            }
            for state in on_host
        ]
        if self._to_device is not None:  # the memory may have had another use just now
            self._to_device.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_device) if self._is_cuda else nullcontext():
            for source, target in zip(on_host, states, strict=True):
                _copy(source.values(), target.values())
        return states

    def _update(self, bucket: Bucket, states: States) -> States:
        group, parameters = bucket
        part = {**group, "params": parameters}
        self.inner.param_groups = [part]
        self.inner.state = defaultdict(dict, zip(parameters, states, strict=True))
        self.inner.step()
        if any(part[key] is not group.get(key) for key in part.keys() - {"params", "lr"}):
            raise ConfigError(
                f"optimizer.offload = true does not fit {type(self.inner).__name__}, which"
                " keeps state for all parameters together; set optimizer.offload to false."
            )
        updated = [self.inner.state[parameter] for parameter in parameters]
        self.inner.state = defaultdict(dict)
        return updated

    def _store(self, parameters: list[Tensor], states: States) -> None:
        """Start to copy the state of these parameters to the host."""
        if self._to_host is not None:
            self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host) if self._is_cuda else nullcontext():
            for parameter, state in zip(parameters, states, strict=True):
                on_host = self.state[parameter]
                for name, value in state.items():
                    if not _is_offloaded(value):
                        on_host[name] = value
                    elif name not in on_host:
                        on_host[name] = self._host_like(value)
                _copy(state.values(), [on_host[name] for name in state])

    def _wait_for_copies(self) -> None:
        """Let the update wait for its state, and this thread for the state that goes to the host:
        the device has no room for a third bucket."""
        if self._to_device is not None and self._to_host is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._to_device)
            self._to_host.synchronize()

    def _host_like(self, tensor: Tensor) -> Tensor:
        return _empty_like(tensor, torch.device("cpu"), pin_memory=self._is_cuda)


def _is_offloaded(value: Any) -> bool:
    """Single numbers, such as step counters, stay where the optimizer keeps them."""
    return isinstance(value, Tensor) and value.numel() > 1


def _leaves(value: Any) -> Iterator[Tensor]:
    """The tensors that hold the memory of a sharded or quantized tensor on this rank."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _leaves(getattr(value, name))
    elif isinstance(value, Tensor):  # a sharded tensor also has a mesh
        yield value


def _empty_like(value: Any, device: torch.device, *, pin_memory: bool = False) -> Any:
    if is_traceable_wrapper_subclass(value):
        return transform_subclass(
            value, lambda _, inner: _empty_like(inner, device, pin_memory=pin_memory)
        )
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, device=device, pin_memory=pin_memory)


def _copy(sources: Iterable[Any], targets: Iterable[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if _is_offloaded(source):
            for part, place in zip(_leaves(source), _leaves(target), strict=True):
                place.copy_(part, non_blocking=True)
