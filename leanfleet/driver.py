"""The NVIDIA driver through ctypes: which GPUs are here, and how users name one. Standard library only."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str  # such as "9.0"


@dataclass(frozen=True)
class Device:
    """Where something runs: kind "cpu", or "cuda" and the number of a GPU, as the driver counts those that the process sees."""

    kind: str
    index: int = 0

    @classmethod
    def named(cls, name: str | Device) -> Device:
        """Of "cpu", "cuda" (the first GPU) or "cuda:1". Raises ValueError for another name, and for a GPU that is not here."""
        if isinstance(name, Device):
            return name
        found = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", name) if isinstance(name, str) else None
        if found is None:
            raise ValueError(
                f"device is {name!r}; it is cpu, cuda (the first GPU), or cuda: and a GPU's number, such as cuda:1"
            )
        device = cls(found[0].partition(":")[0], int(found[1] or 0))
        if device.index and (problem := _missing(device.index)):
            raise ValueError(f"device is {device}, and {problem}")
        return device

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def load() -> ctypes.CDLL:
    """The driver's library, initialized. Raises OSError without a driver, RuntimeError for one that does not start."""
    cuda = ctypes.CDLL("libcuda.so.1")
    call(cuda, "cuInit", 0)
    return cuda


def call(cuda: ctypes.CDLL, function: str, *arguments: object) -> None:
    """Calls a function of the driver. Raises RuntimeError with its message."""
    code = getattr(cuda, function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{function} failed: {(text.value or b'').decode()} ({code})")


def gpus(cuda: ctypes.CDLL | None = None) -> list[Gpu]:
    """The GPUs that this process may use, one or more. Raises what load raises, and RuntimeError where there is none."""
    cuda = cuda or load()
    count = ctypes.c_int()
    call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise RuntimeError("the driver is there and finds no GPU")
    found = []
    for device in range(count.value):
        name, numbers = ctypes.create_string_buffer(256), []
        call(cuda, "cuDeviceGetName", name, 256, device)
        for attribute in (_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR):
            number = ctypes.c_int()
            call(cuda, "cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
            numbers.append(str(number.value))
        found.append(Gpu(name.value.decode(errors="replace"), ".".join(numbers)))
    return found


@contextmanager
def current(device: Device | None) -> Iterator[None]:
    """While this lasts, a GPU is this thread's current one, for every library of the process. None: the one that is. Raises
    OSError without a driver, RuntimeError with its message."""
    if device is None:
        yield
        return
    cuda, number, context = load(), ctypes.c_int(), ctypes.c_void_p()
    call(cuda, "cuDeviceGet", ctypes.byref(number), device.index)
    call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), number)  # the one that CUDA's runtime uses
    try:
        call(cuda, "cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            call(cuda, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        call(cuda, "cuDevicePrimaryCtxRelease_v2", number)


def free_memory(device: Device) -> int:
    """Bytes of a GPU's memory that nobody has. Raises what `current` raises."""
    free, all_of_it = ctypes.c_size_t(), ctypes.c_size_t()
    with current(device):
        call(load(), "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(all_of_it))
    return free.value


def _missing(index: int) -> str | None:
    """One phrase on why there is no GPU of this number; None where there is one."""
    if problem := why_no_gpu():
        return problem
    count = len(gpus())
    return None if index < count else f"this process sees {count}: cuda:0" + (f" to cuda:{count - 1}" if count > 1 else "")


def why_no_gpu() -> str | None:
    """One phrase on why no GPU can be used here; None where one can."""
    try:
        gpus()
    except OSError:
        return "there is no NVIDIA driver here"
    except RuntimeError as error:
        return f"there is no GPU here ({error})"
    return None
