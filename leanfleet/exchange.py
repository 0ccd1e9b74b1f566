"""What a loop over a graph exchanges with it: memory that both see, copies between them, and when they are through.

Host is for graphs on the CPU, where a copy is made at once. CudaStream is for those on a GPU that run on its stream: copies
and calls are queued there, and nobody waits for them but who asks. Both keep their memory until they are deleted.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import numpy as np

from leanfleet import driver

_ALIGNMENT = 256  # bytes
Array = tuple[int, list[int], np.dtype]  # address, shape, type


class Host:
    """Memory of the host alone."""

    device, index = "cpu", 0

    def __init__(self) -> None:
        self._arrays: dict[int, np.ndarray] = {}

    def allocate(self, size: int) -> int:
        """The address of so many zero bytes that a graph reads and writes."""
        room = np.zeros(size + _ALIGNMENT, np.uint8)
        address = -(-room.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self._arrays[address] = room
        return address

    def host_bytes(self, size: int) -> np.ndarray:
        """Bytes of the host that copies go to or come from."""
        return np.zeros(size, np.uint8)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copies bytes, after what was queued before."""
        ctypes.memmove(target, source, size)

    def mark(self) -> int:
        """A mark behind what is queued so far, for wait. As many as two are in use."""
        return 0

    def wait(self, mark: int) -> None:
        """Returns when what was queued before the mark is through."""

    def make_current(self) -> None:
        """Makes its device that of this thread."""


class CudaStream:
    """A stream of the GPU of number `index`, and memory on both sides. Raises RuntimeError with the driver's message, and
    OSError without one."""

    device = "cuda"

    def __init__(self, index: int = 0) -> None:
        self._cuda, self.index = driver.load(), index
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)  # the one that runtimes use
        self._device, self._context = device, context
        self.make_current()
        self._call("cuStreamCreate", ctypes.byref(stream), 1)  # CU_STREAM_NON_BLOCKING
        self._stream, self._turn = stream, 0
        self._events = [ctypes.c_void_p() for _ in range(4)]
        for event in self._events:
            self._call("cuEventCreate", ctypes.byref(event), 2)  # CU_EVENT_DISABLE_TIMING
        self._here: list[ctypes.c_void_p] = []
        self._there: list[ctypes.c_uint64] = []

    def _call(self, function: str, *arguments: object) -> None:
        driver.call(self._cuda, function, *arguments)

    def make_current(self) -> None:
        """Makes its GPU that of this thread."""
        self._call("cuCtxSetCurrent", self._context)

    @property
    def address(self) -> int:
        """The cudaStream_t, as runtimes take it."""
        return self._stream.value or 0

    def allocate(self, size: int) -> int:
        """As Host.allocate, on the GPU."""
        self.make_current()
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
        self._there.append(pointer)
        self._call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(max(size, 1)))
        self._call("cuCtxSynchronize")  # the zeros come on a stream that ours does not wait for
        return pointer.value

    def host_bytes(self, size: int) -> np.ndarray:
        """As Host.host_bytes: pinned memory, from which a GPU copies on its own."""
        self.make_current()
        pointer = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
        self._here.append(pointer)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer.value or 0))

    def copy(self, target: int, source: int, size: int) -> None:
        """As Host.copy. It is queued: the bytes are to stay as they are until it is through."""
        self.make_current()
        self._call("cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), self._stream)

    def mark(self) -> int:
        """As Host.mark."""
        self.make_current()
        self._turn = (self._turn + 1) % len(self._events)
        self._call("cuEventRecord", self._events[self._turn], self._stream)
        return self._turn

    def wait(self, mark: int) -> None:
        """As Host.wait."""
        self.make_current()
        self._call("cuEventSynchronize", self._events[mark])

    def __del__(self) -> None:
        if not hasattr(self, "_there"):
            return
        try:  # the stream stays: the runtime that runs on it may outlive this
            self.make_current()
            with suppress(RuntimeError):  # what failed on it before says so once more
                self._call("cuStreamSynchronize", self._stream)
            for pointer in self._there:
                self._call("cuMemFree_v2", pointer)
            for host in self._here:
                self._call("cuMemFreeHost", host)
            for event in self._events:
                self._call("cuEventDestroy_v2", event)
        except Exception:  # noqa: S110  at the end of the process the driver is gone, and the memory with it
            pass


class Block:
    """Arrays behind one another in memory of an exchange: {name: (offset, shape, dtype)}."""

    def __init__(self, exchange: Host | CudaStream, arrays: dict[str, tuple[list[int], np.dtype]]) -> None:
        self.places: dict[str, tuple[int, list[int], np.dtype]] = {}
        self.size = 0
        for name, (shape, dtype) in arrays.items():
            self.places[name] = self.size, shape, dtype
            self.size += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.address = exchange.allocate(self.size)

    def end(self, name: str) -> int:
        """The offset behind an array."""
        offset, shape, dtype = self.places[name]
        return offset + int(np.prod(shape)) * dtype.itemsize

    def view(self, host: np.ndarray, name: str) -> np.ndarray:
        """An array's place in bytes of the host that are a copy of the block."""
        offset, shape, dtype = self.places[name]
        return host[offset : self.end(name)].view(dtype).reshape(shape)
