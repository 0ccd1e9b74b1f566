"""Communicators: groups of processes whose nodes AllReduce, AllGather and LeanAttention exchange tensors.

Each process is a rank, and creates its end under the name that nodes give. Engines: "shared_memory" for tensors of the CPU,
ranks on one host; "nccl" for tensors of CUDA. Standard library only; NCCL is loaded where it is asked for.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from leanfleet import native

ENGINES = ("shared_memory", "nccl")
MAX_RANKS = 64
_NCCL_ID_BYTES = 128
_POLL_S = 0.02


class _Setup(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("rank", ctypes.c_int32),
        ("world", ctypes.c_int32),
        ("engine", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("id", ctypes.c_char_p),
        ("id_bytes", ctypes.c_size_t),
        ("library", ctypes.c_char_p),
        ("timeout_s", ctypes.c_double),
    ]


class _Lent(ctypes.Structure):
    _fields_ = [
        ("self", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("world", ctypes.c_int32),
        ("engine", ctypes.c_int32),
        ("sum", ctypes.c_void_p),
        ("gather", ctypes.c_void_p),
        ("merge", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
    ]


@functools.cache
def _loaded(path):
    library = ctypes.CDLL(path)
    library.leanfleet_last_error.restype = ctypes.c_char_p
    return library


def _borrowers():
    """The libraries of ONNX Runtime and TensorRT, where they are installed: each looks nodes' communicators up in its own
    registry, and gets those of libleanfleet.so."""
    found = []
    for name in ("leanfleet_ort", "leanfleet_trt"):
        with contextlib.suppress(FileNotFoundError):
            found.append(_loaded(str(native.library_path(name))))
    return found


_owner = native.library


def nccl_path() -> str:
    """What is loaded as NCCL: the one of PyTorch's wheel nvidia-nccl-cu13 or -cu12, else what the loader finds."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
        if path.exists():
            return str(path)
    return "libnccl.so.2"


def _engine(engine):
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; expected {' or '.join(map(repr, ENGINES))}")
    return ENGINES.index(engine)


def unique_id(engine: str = "shared_memory", library: str | None = None) -> bytes:
    """A fresh id for one communicator: one rank makes it and hands it to the others (exchange_id).

    Raises ValueError for another engine, leanfleet.native.UnsupportedError where NCCL cannot be loaded.

    Example:
        from leanfleet import communicators

        print(len(communicators.unique_id()))  # 16
    """
    if _engine(engine) == 0:
        return secrets.token_bytes(16)
    made = ctypes.create_string_buffer(_NCCL_ID_BYTES)
    native.raise_for(_owner(), _owner().leanfleet_nccl_id((library or nccl_path()).encode(), made))
    return made.raw


def exchange_id(path: str | Path, rank: int, engine: str = "shared_memory", timeout: float = 60.0) -> bytes:
    """The id that rank 0 makes and writes to a file, for all ranks; the file must not be there before.

    Rank 0 raises FileExistsError where it is; others TimeoutError where it does not come within `timeout` seconds.
    """
    path = Path(path)
    if rank == 0:
        if path.exists():
            raise FileExistsError(f"{path} is there already, maybe of an earlier run; expected a path that is not")
        made = unique_id(engine)
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(made)
        partial.rename(path)
        return made
    deadline = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: rank 0 has not written {path} within {timeout:g} s")
        time.sleep(_POLL_S)
    return path.read_bytes()


class Communicator:
    """A rank's end of a communicator; create makes it. A context manager that destroys it at its end."""

    def __init__(self, name: str, rank: int, world: int, engine: str) -> None:
        self.name, self.rank, self.world, self.engine = name, rank, world, engine

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Destroys it; a second time does nothing. CUDA graphs with its exchanges keep what they need until they are gone."""
        if _open.get((self.name, self.engine)) is self:
            destroy(self.name)

    @property
    def direct(self) -> int:
        """How many of its exchanges went straight through the memory of the other GPUs, in one kernel each: those of up to
        512 KiB a rank between GPUs of one host that reach each other. The others, and with LEANFLEET_DIRECT=0 all, go through
        NCCL. A captured exchange counts once, when it is captured."""
        count = ctypes.c_int64()
        code = _owner().leanfleet_communicator_direct(self.name.encode(), _engine(self.engine), ctypes.byref(count))
        native.raise_for(_owner(), code)
        return count.value

    def check(self) -> None:
        """Raises leanfleet.native.LeanfleetError where it is known to have failed, without waiting: for programs that replay
        CUDA graphs, after each wait for the stream."""
        native.raise_for(_owner(), _owner().leanfleet_communicator_check(self.name.encode(), _engine(self.engine), None, None))

    def wait(self, done: Callable[[], bool], timeout: float = 60.0) -> None:
        """Waits until done() is true, such as torch.cuda.Event.query or a stream's: for replays of CUDA graphs, whose
        exchanges nothing else watches. Raises leanfleet.native.LeanfleetError where a rank of the host ends, or after
        `timeout` seconds; the communicator is aborted then, so that its kernels return.
        """
        deadline = time.monotonic() + timeout
        nap = 0.0
        while not done():
            self.check()
            if time.monotonic() > deadline:
                reason = f"a step has waited {timeout:g} s for the other ranks".encode()
                _owner().leanfleet_communicator_abort(self.name.encode(), _engine(self.engine), reason)
                self.check()
            time.sleep(nap)
            nap = min(nap + 1e-5, 1e-3)
        self.check()


_open: dict[tuple[str, str], Communicator] = {}


def create(
    name: str = "world",
    rank: int = 0,
    world: int = 1,
    *,
    id: bytes | None = None,
    engine: str = "shared_memory",
    device: int | None = None,
    timeout: float = 60.0,
    library: str | None = None,
) -> Communicator:
    """Creates this process's end of a communicator, for PyTorch, ONNX Runtime and TensorRT alike; waits for the other ranks.

    name: what nodes give as `communicator`. rank, world: this process's number, 0 to world - 1, of up to 64. id: the same
    bytes on all ranks, made by unique_id for this communicator alone; a world of one needs none, and serves CPU and CUDA.
    device: with "nccl" the index of the CUDA device, by default the current one. timeout: seconds that a rank waits for
    others, here and in a node. library: path of libnccl.so.2, by default nccl_path().
    Raises ValueError for wrong arguments, leanfleet.native.UnsupportedError without NCCL, leanfleet.native.LeanfleetError,
    which names the rank, where another rank does not come or has ended.

    Example:
        import torch
        from leanfleet import communicators
        from leanfleet.export import all_reduce

        with communicators.create():      # a world of one
            print(all_reduce(torch.ones(3)).tolist())  # [1.0, 1.0, 1.0]
    """
    number = _engine(engine)
    path = (library or nccl_path()).encode() if engine == "nccl" and world > 1 else None
    setup = _Setup(
        name=name.encode(),
        rank=rank,
        world=world,
        engine=number,
        device=-1 if device is None else device,
        id=ctypes.cast(ctypes.create_string_buffer(id or b"", len(id or b"") + 1), ctypes.c_char_p),
        id_bytes=len(id or b""),
        library=path,
        timeout_s=timeout,
    )
    owner = _owner()
    native.raise_for(owner, owner.leanfleet_communicator_create(ctypes.byref(setup)))
    made = _open[name, engine] = Communicator(name, rank, world, engine)
    for library_of_runtime in _borrowers():
        lent = _Lent()
        native.raise_for(owner, owner.leanfleet_communicator_lend(name.encode(), number, ctypes.byref(lent)))
        native.raise_for(library_of_runtime, library_of_runtime.leanfleet_communicator_adopt(name.encode(), ctypes.byref(lent)))
    return made


def destroy(name: str = "world") -> None:
    """Ends this process's part in the communicators of the name, of all engines. Raises ValueError where there is none.

    Synchronise CUDA first: kernels of other ranks may wait for this one's.
    """
    for library in (*_borrowers(), _owner()):
        code = library.leanfleet_communicator_destroy(name.encode())
        if library is _owner():
            native.raise_for(library, code)
    for engine in ENGINES:
        _open.pop((name, engine), None)


def names() -> list[str]:
    """The names of this process's communicators."""
    return sorted({name for name, _ in _open})


def world_of(name: str) -> int:
    """How many ranks the communicator has; 0 where there is none."""
    return max((one.world for (known, _), one in _open.items() if known == name), default=0)


def rank_of(name: str) -> int:
    """This process's rank in the communicator; 0 where there is none."""
    return max((one.rank for (known, _), one in _open.items() if known == name), default=0)


def _destroy_all():
    for name in names():
        with contextlib.suppress(ValueError, native.LeanfleetError):
            destroy(name)


atexit.register(_destroy_all)


def world_from_torchrun(
    name: str = "world", *, engine: str | None = None, timeout: float = 60.0, device: int | None = None
) -> Communicator:
    """Creates the communicator of all processes that torchrun started.

    Reads RANK, WORLD_SIZE and LOCAL_RANK; torch's store at MASTER_ADDR and MASTER_PORT hands the id round. engine: "nccl" where
    torch sees a CUDA device, else "shared_memory". device: with "nccl" the CUDA device, by default LOCAL_RANK, which becomes
    the current one. Raises ValueError outside of torchrun, ImportError without torch, else as create.

    Example:
        # torchrun --nproc-per-node 2 program.py
        from leanfleet import communicators

        world = communicators.world_from_torchrun(engine="shared_memory")
        print(f"rank {world.rank} of {world.world}")
    """
    if missing := [v for v in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]:
        raise ValueError(f"{', '.join(missing)} is not set; start the program with torchrun, or call create with an id")
    import torch
    import torch.distributed

    if engine is None:
        engine = "nccl" if torch.cuda.is_available() else "shared_memory"
    if engine == "nccl":
        device = int(os.environ["LOCAL_RANK"]) if device is None else device
        torch.cuda.set_device(device)
    store, rank, world = next(torch.distributed.rendezvous("env://"))
    key = f"leanfleet/{name}/{_uses(name)}"
    if rank == 0:
        store.set(key, unique_id(engine).hex())
    made = create(name, rank, world, id=bytes.fromhex(store.get(key).decode()), engine=engine, device=device, timeout=timeout)
    _stores.append(store)  # rank 0's may be the server that the others still read from
    return made


def check() -> None:
    """Raises leanfleet.native.LeanfleetError where one of this process's communicators is known to have failed."""
    for one in list(_open.values()):
        one.check()


def torchrun_store() -> Any:
    """The torch.distributed.Store of the processes that torchrun started. Raises ValueError before world_from_torchrun."""
    if not _stores:
        raise ValueError("this process has not joined the world of torchrun: call world_from_torchrun before")
    return _stores[-1]


_stores: list = []
_counts: dict[str, int] = {}


def _uses(name):
    """How often this process has made a world of the name: each has its own id in the store."""
    _counts[name] = _counts.get(name, -1) + 1
    return _counts[name]
