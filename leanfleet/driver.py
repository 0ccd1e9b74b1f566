"""The NVIDIA driver through ctypes: which GPUs are here. Standard library only."""

import ctypes
from dataclasses import dataclass

_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str  # such as "9.0"


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


def why_no_gpu() -> str | None:
    """One phrase on why no GPU can be used here; None where one can."""
    try:
        gpus()
    except OSError:
        return "there is no NVIDIA driver here"
    except RuntimeError as error:
        return f"there is no GPU here ({error})"
    return None
