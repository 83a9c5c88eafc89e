"""Memory of a GPU that a sleeping engine gives back, at addresses that stay valid.

CUDA graphs and views hold addresses. The driver's virtual memory separates them from memory:
release() returns the memory, and restore() puts new memory there, with what was saved on the host.

Promise: between release() and restore() nothing of it is on the GPU, and nothing may be read or
written there. One thread uses a ReleasableMemory.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import Any

import torch

from millrace.core.errors import RunFailed

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # of the driver's enumerations
_ALLOCATE = ctypes.CFUNCTYPE(c_void_p, c_size_t, c_int, c_void_p)
_FREE = ctypes.CFUNCTYPE(None, c_void_p, c_size_t, c_int, c_void_p)
_GIB = 2**30


class _Properties(ctypes.Structure):
    """CUmemAllocationProp, without the names of its inner structures."""

    _fields_ = (
        *(("type", c_int), ("handle_types", c_int), ("location", c_int * 2)),
        *(("win32", c_void_p), ("flags", c_ubyte * 8)),
    )


class ReleasableMemory:
    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        location = (_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = (c_int * 3)(*location, _READ_WRITE)  # CUmemAccessDesc
        self._sizes: dict[int, int] = {}  # by address
        self._handles: dict[int, int] = {}  # of the memory behind an address
        self._saved: dict[int, torch.Tensor] = {}
        self._callbacks = _ALLOCATE(self._allocate), _FREE(self._free)
        addresses: list[Any] = [ctypes.cast(each, c_void_p).value for each in self._callbacks]
        self._allocator: Any = torch._C._cuda_customAllocator(*addresses)
        self._pool = torch.cuda.MemPool(self._allocator)
        # torch has only the addresses of the callbacks, and uses them until the process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Tensors that this thread makes inside are in this memory."""
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def release(self, *, save: bool) -> None:
        """Give the memory back; `save` its contents in host memory before."""
        torch.cuda.synchronize(self._device)
        for address, size in self._sizes.items():
            if save:
                host = self._saved.get(address)
                if host is None:  # allocating pinned memory is slow, so it is kept
                    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                    self._saved[address] = host
                self._call("cuMemcpyDtoH_v2", c_void_p(host.data_ptr()), c_uint64(address), size)
            self._unmap(address)

    def restore(self) -> None:
        """Take memory again, with the contents that were saved, or zeros."""
        for address, size in self._sizes.items():
            if not self._map(address, size):
                free, _ = torch.cuda.mem_get_info(self._device)
                raise RunFailed(
                    f"An engine cannot wake up: it needs {self.num_bytes / _GIB:.1f} GiB again, and"
                    f" {free / _GIB:.1f} GiB of {self._device} are free; lower"
                    " engine.options.kv_bytes."
                )
            if address in self._saved:
                host = c_void_p(self._saved[address].data_ptr())
                self._call("cuMemcpyHtoD_v2", c_uint64(address), host, size)
            else:
                self._call("cuMemsetD8_v2", c_uint64(address), c_ubyte(0), size)
        torch.cuda.synchronize(self._device)

    def _allocate(self, size: int, device: int, stream: int | None) -> int:
        """Called by torch; 0 = out of memory."""
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), 0)
        size += -size % granularity.value
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size, 0, c_uint64(0), c_uint64(0))
        if not self._map(address.value, size):
            self._call("cuMemAddressFree", address, size)
            return 0
        self._sizes[address.value] = size
        return address.value

    def _free(self, address: int, size: int, device: int, stream: int | None) -> None:
        """Called by torch."""
        self._unmap(address)
        self._call("cuMemAddressFree", c_uint64(address), c_size_t(self._sizes.pop(address)))
        self._saved.pop(address, None)

    def _map(self, address: int, size: int) -> bool:
        """Put memory behind an address; False if there is not enough."""
        handle = c_uint64()
        if self._driver.cuMemCreate(byref(handle), c_size_t(size), byref(self._properties), 0):
            return False
        self._handles[address] = handle.value
        self._call("cuMemMap", c_uint64(address), size, 0, handle, c_uint64(0))
        self._call("cuMemSetAccess", c_uint64(address), size, byref(self._access), 1)
        return True

    def _unmap(self, address: int) -> None:
        if (handle := self._handles.pop(address, None)) is not None:
            self._call("cuMemUnmap", c_uint64(address), self._sizes[address])
            self._call("cuMemRelease", c_uint64(handle))

    def _call(self, name: str, *args: Any) -> None:
        """Call a function of the driver. Plain integers are sizes."""
        sized = (c_size_t(arg) if isinstance(arg, int) else arg for arg in args)
        if code := getattr(self._driver, name)(*sized):
            raise RuntimeError(f"{name} failed with CUDA error {code}.")


class EngineMemory:
    """What an engine gives back while it sleeps: its weights and its KV cache."""

    def __init__(self, device: torch.device) -> None:
        self.weights, self.kv = ReleasableMemory(device), ReleasableMemory(device)

    def adopt(self, model: torch.nn.Module) -> None:
        """Move the parameters of a model there. Nothing may replace them later: what becomes unused
        there is not given back to torch's other memory, and is saved at every sleep."""
        move_storages(
            model.parameters(), allocating=self.weights.allocating, free=torch.cuda.empty_cache
        )


@torch.no_grad()
def move_storages(
    tensors: Iterable[torch.Tensor],
    *,
    allocating: Callable[[], AbstractContextManager[None]],
    free: Callable[[], None],
    free_every: int = _GIB,
) -> None:
    """Move the memory of tensors to what is allocated in a context. Views of one memory stay views
    of one memory. `free` is called at the end, and whenever that many bytes were moved: otherwise
    the device would hold everything twice."""
    storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
    num_moved = 0
    for storage in storages.values():
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        values, num_bytes = flat.clone(), storage.nbytes()
        storage.resize_(0)
        with allocating():
            storage.resize_(num_bytes)
        flat.copy_(values)
        del values
        num_moved += num_bytes
        if num_moved >= free_every:
            free()
            num_moved = 0
    free()
