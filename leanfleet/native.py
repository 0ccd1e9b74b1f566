"""libleanfleet.so through ctypes. Standard library only: tensors are addresses, shapes and type names."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import metadata
from pathlib import Path

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int32": 3, "int64": 4, "int8": 5, "float8e4m3fn": 6, "uint8": 7}
MAX_RANK = 8  # LEANFLEET_MAX_RANK of csrc/capi/leanfleet.h
ABSENT = -1
Entry = tuple[int, Sequence[int], str]  # a tensor's address, shape and dtype name


class LeanfleetError(RuntimeError):
    """A CUDA call failed, another rank of a communicator did, or something went wrong inside the library."""


class UnsupportedError(LeanfleetError, NotImplementedError):
    """The call is right, but this build or machine has no kernel for it."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
    ]


class _Attr(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("s", ctypes.c_char_p),
        ("i", ctypes.c_int64),
        ("f", ctypes.c_float),
        ("kind", ctypes.c_int32),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_char_p),
        ("node", ctypes.c_char_p),
        ("inputs", ctypes.POINTER(_Tensor)),
        ("outputs", ctypes.POINTER(_Tensor)),
        ("attrs", ctypes.POINTER(_Attr)),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("num_attrs", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("sync", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_size_t),
        ("sync_bytes", ctypes.c_size_t),
    ]


def _library_folder():
    """Beside this file in an installed package. In a source tree, where the package that pip installed from it has them."""
    beside = Path(__file__).resolve().parent / "lib"
    if beside.exists():
        return beside
    try:
        return Path(metadata.distribution("leanfleet").locate_file("leanfleet/lib"))
    except metadata.PackageNotFoundError:
        return beside


def library_path(name: str) -> Path:
    """Path of a library of this package: "leanfleet", "leanfleet_ort" or "leanfleet_trt".

    LEANFLEET_LIBRARY_DIR, when set, is the only folder looked at. Raises FileNotFoundError.

    Example:
        from leanfleet.native import library_path

        print(library_path("leanfleet").name)  # libleanfleet.so
    """
    told = os.environ.get("LEANFLEET_LIBRARY_DIR")
    path = (Path(told) if told else _library_folder()) / f"lib{name}.so"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist. leanfleet's compiled libraries are missing: install the package with "
            "'pip install .' (it needs g++ and cmake), or set LEANFLEET_LIBRARY_DIR to the folder that holds them."
        )
    return path


@cache
def _library(path):
    library = ctypes.CDLL(path)
    library.leanfleet_run.argtypes = [ctypes.POINTER(_Call)]
    library.leanfleet_workspace.argtypes = [
        ctypes.POINTER(_Call),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.POINTER(ctypes.c_size_t),
    ]
    library.leanfleet_last_error.restype = ctypes.c_char_p
    library.leanfleet_op_name.restype = ctypes.c_char_p
    library.leanfleet_op_name.argtypes = [ctypes.c_int]
    library.leanfleet_build_info.restype = ctypes.c_char_p
    return library


def library() -> ctypes.CDLL:
    """The loaded library. Raises FileNotFoundError or OSError."""
    return _library(str(library_path("leanfleet")))


def build_info() -> str:
    """What kernels the library holds for this processor, such as "cpu avx512, cuda".

    Example:
        from leanfleet.native import build_info

        print(build_info())
    """
    return library().leanfleet_build_info().decode()


def op_names() -> list[str]:
    """The operators in the library.

    Example:
        from leanfleet import native, spec

        print(native.op_names() == list(spec.all_specs()))  # True
    """
    names, index = [], 0
    while (name := library().leanfleet_op_name(index)) is not None:
        names.append(name.decode())
        index += 1
    return names


def raise_for(library: ctypes.CDLL, code: int) -> None:
    """Raises what a code of a function of the library means, with the text of its last error; nothing for 0."""
    if code == 0:
        return
    message = library.leanfleet_last_error().decode(errors="replace")
    raise {1: ValueError, 2: UnsupportedError}.get(code, LeanfleetError)(message)


def _tensors(entries):
    array = (_Tensor * max(len(entries), 1))()
    for slot, entry in zip(array, entries):
        slot.rank = ABSENT
        if entry is None:
            continue
        address, shape, dtype = entry
        if len(shape) > MAX_RANK:
            raise ValueError(f"a tensor of shape {list(shape)} has rank {len(shape)}; no operator takes more than {MAX_RANK}")
        slot.data = address
        slot.rank = len(shape)
        slot.shape[: len(shape)] = shape
        slot.dtype = DTYPES.get(dtype, ABSENT)
    return array


def _attributes(attrs):
    array = (_Attr * max(len(attrs), 1))()
    for slot, (name, value) in zip(array, attrs.items()):
        slot.name = name.encode()
        if isinstance(value, str):
            slot.kind, slot.s = 2, value.encode()
        elif isinstance(value, float):
            slot.kind, slot.f = 1, value
        else:
            slot.kind, slot.i = 0, int(value)
    return array


class Call:
    """One call of an operator. Entries are (address, shape, dtype name) or None for an absent tensor.

    device: "cpu" or "cuda" (the current device). threads: 0 means all that the process may use. stream: the
    address of a cudaStream_t. Raises FileNotFoundError or OSError without the library, ValueError for a tensor of more than
    MAX_RANK axes.

    Example:
        import numpy as np
        from leanfleet.native import Call

        query, key, value = np.random.standard_normal((3, 1, 2, 5, 8)).astype(np.float32)   # [B,H,N,D] each
        output, normalizer = np.empty_like(value), np.empty((1, 2, 5), np.float32)
        inputs, outputs = (
            [(array.ctypes.data, array.shape, "float32") for array in arrays]
            for arrays in ((query, key, value), (output, normalizer))
        )
        call = Call("NormalizedLinearAttention", inputs, outputs, {"normalize_qk": True})
        scratch_bytes, sync_bytes = call.workspace()
        scratch, sync = np.empty(scratch_bytes + 256, np.uint8), np.zeros(sync_bytes + 256, np.uint8)
        aligned = [-(-array.ctypes.data // 256) * 256 for array in (scratch, sync)]     # to 256 bytes
        call.run(aligned[0], scratch_bytes, aligned[1], sync_bytes)
    """

    def __init__(
        self,
        op: str,
        inputs: Sequence[Entry | None],
        outputs: Sequence[Entry | None],
        attrs: Mapping[str, str | float | int],
        device: str = "cpu",
        threads: int = 0,
        stream: int = 0,
        node: str = "",
    ) -> None:
        self._library = library()
        self._inputs, self._outputs, self._attrs = _tensors(inputs), _tensors(outputs), _attributes(attrs)
        self._call = _Call(
            op=op.encode(),
            node=node.encode(),
            inputs=self._inputs,
            outputs=self._outputs,
            attrs=self._attrs,
            num_inputs=len(inputs),
            num_outputs=len(outputs),
            num_attrs=len(attrs),
            device=0 if device == "cpu" else 1,
            threads=threads,
            stream=stream,
        )
        self._run = partial(self._library.leanfleet_run, ctypes.pointer(self._call))

    def workspace(self) -> tuple[int, int]:
        """(scratch bytes, sync bytes) that run needs. Checks inputs and attributes; raises ValueError."""
        scratch, sync = ctypes.c_size_t(), ctypes.c_size_t()
        raise_for(self._library, self._library.leanfleet_workspace(self._call, scratch, sync))
        return scratch.value, sync.value

    def slots(self) -> list[_Tensor]:
        """The present inputs and then the present outputs, in order: setting .data moves one to another address."""
        return [
            slot
            for array, count in ((self._inputs, self._call.num_inputs), (self._outputs, self._call.num_outputs))
            for slot in array[:count]
            if slot.rank != ABSENT
        ]

    def run(
        self, scratch: int = 0, scratch_bytes: int = 0, sync: int = 0, sync_bytes: int = 0, stream: int | None = None
    ) -> None:
        """Runs it. stream: None leaves the one given to Call. Raises ValueError (wrong argument), UnsupportedError or
        LeanfleetError.
        """
        call = self._call
        call.scratch, call.scratch_bytes = scratch, scratch_bytes
        call.sync, call.sync_bytes = sync, sync_bytes
        if stream is not None:
            call.stream = stream
        code = self._run()
        if code:
            raise_for(self._library, code)
