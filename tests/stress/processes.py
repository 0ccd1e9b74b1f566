"""Processes that call in unusual ways: forks, spawned ones, threads that come and go, limits, memory that is refused, signals,
sessions by thousands. A case is a drawn call and one of stress.act, which a process of its own does; every result must have the
bits that the same call has in a quiet process.
"""

import dataclasses
import functools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from leanfleet import native, spec
from stress import act, files, values
from stress import draw as calls
from support import ort_models
from support.kernels import DTYPE_NAMES, output_shapes, run_kernel

SECONDS = 100
MOST_BYTES = 400_000  # of a call's inputs: calls are many
ORDER = ("memory", "fork", "come_and_go", "limits", "signals", "sessions", "memory", "ended", "spawn", "session_memory")


class Wrong(Exception):
    """A process did not do what it should."""


@dataclasses.dataclass(frozen=True)
class Case:
    """act: of stress.act. call: JSON of a calls.Case. numbers: the act's own."""

    act: str
    call: dict
    numbers: dict

    op = property(lambda self: self.act)
    runtime = "processes"

    def to_json(self):
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text):
        return Case(**json.loads(text))


def missing():
    """Acts that this machine cannot do: a library that has the C++ runtime inside asks nobody else for memory."""
    dynamic = b"GLIBCXX_" in native.library_path("leanfleet").read_bytes()
    return set() if dynamic else {"memory", "session_memory"}


def place(index):
    return ORDER[index % len(ORDER)], Case.runtime


def draw(seed, index):
    source = random.Random(f"{seed}:processes:{index}")
    # Operators that a communicator carries out need one in every process: tests/operators/test_collectives.py.
    local = [n for n, op in calls.OPS.items() if not calls.exchanges(op)]
    op, act_name = local[index % len(local)], place(index)[0]
    # NumPy, in which sessions are fed, has no fp8.
    fed = {"int8", "uint8"} if act_name.startswith("session") else set(spec.TYPES["C"])
    while True:
        call = calls._drawn(source, calls.OPS[op], "avx512")
        if call is not None and call.wrong is None:
            call = dataclasses.replace(call, exponents={}, in_place=False, strided=False, fill="zero", checked=False)
            if size_of(call) < MOST_BYTES and fed.issuperset(call.forms.values()):
                break
    if act_name.startswith("session"):
        call = dataclasses.replace(call, dtype="float32")
    numbers = {
        "threads": [source.choice((1, 2, 3, 4, 8)) for _ in range(source.choice((1, 2, 3)))],
        "used": source.random() < 0.7,
        "busy": source.choice((0, 1, 2)),
        "rounds": source.choice((3, 10, 20)),
        "row": source.choice((1, 1, 2, 1000)),
        "spare": source.choice((1 << 21, 1 << 23, 1 << 25)),
        "signal": source.choice(("SIGINT", "SIGALRM", "SIGTERM")),
        "raises": source.random() < 0.5,
        "sessions": source.choice((300, 1000, 2000)),
    }
    used = {name: numbers[name] for name in NUMBERS[act_name]}
    return Case(act_name, json.loads(call.to_json()), used)


NUMBERS = {
    "memory": ("threads", "row"),
    "fork": ("threads", "used", "busy", "rounds"),
    "spawn": ("threads", "used"),
    "come_and_go": ("threads", "busy", "rounds"),
    "limits": ("threads", "spare"),
    "signals": ("threads", "signal", "raises", "rounds"),
    "ended": ("threads",),
    "sessions": ("threads", "sessions"),
    "session_memory": ("threads", "row"),
}


def size_of(call):
    shapes = calls.shapes_of(calls.OPS[call.op], call.ranks, call.attrs, call.sizes)
    return sum(4 * int(np.prod(shape)) for shape in shapes.values())


def simpler(case):
    """With fewer threads, and a simpler call."""
    threads = case.numbers["threads"]
    if len(threads) > 1:
        for number in threads:
            yield dataclasses.replace(case, numbers=case.numbers | {"threads": [number]})
    for call in calls.simpler(calls.Case.from_json(json.dumps(case.call))):
        yield dataclasses.replace(case, call=json.loads(call.to_json()))


# Plans


def plan_of(case):
    """What stress.act needs to know, with the bits that are right."""
    torch.set_num_threads(1)
    call = calls.Case.from_json(json.dumps(case.call))
    op = calls.OPS[call.op]
    clean, inputs = values.make(call)
    inputs = {name: t.contiguous() for name, t in inputs.items()}
    active = {t.name for t in op.active_outputs(call.attrs)}
    names = [t.name for t in op.outputs]
    outputs = {name: (shape, DTYPE_NAMES[dtype_of(dtype)]) for name, dtype, shape in output_shapes(op, inputs, call.attrs)}
    expected = {}
    for threads in {1, *case.numbers["threads"]}:
        found = run_kernel(call.op, inputs, call.attrs, threads)
        expected[threads] = [bits(found[n]) if n in active else None for n in names]
    plan = {
        "act": case.act,
        "op": call.op,
        "attrs": call.attrs,
        "names": names,
        "inputs": [
            (bits(inputs[t.name]), tuple(inputs[t.name].shape), DTYPE_NAMES[inputs[t.name].dtype]) if t.name in inputs else None
            for t in op.inputs
        ],
        "outputs": [(len(bits(found[n])), tuple(outputs[n][0]), outputs[n][1]) if n in active else None for n in names],
        "expected": expected,
    }
    if case.act.startswith("session"):
        shapes = {name: list(t.shape) for name, t in inputs.items()}
        forms = ort_models.forms_of(inputs)
        plan["model"] = ort_models.node_model(op, shapes, call.attrs, call.dtype, forms=forms).SerializeToString()
        plan["feed"] = {n: (bits(t), str(t.numpy().dtype), tuple(t.shape)) for n, t in inputs.items()}
    return plan | case.numbers


def dtype_of(dtype):
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


def bits(tensor):
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@functools.cache
def refusing_memory():
    """The library that refuses memory, compiled once a run."""
    path = files.store() / "refuse_memory.so"
    if not path.exists():
        source = Path(__file__).with_name("refuse_memory.cpp")
        part = path.with_name(f"{os.getpid()}.so")
        command = [
            os.environ.get("CXX", "c++"),
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-shared",
            "-Wall",
            "-Wextra",
            source,
            "-o",
            part,
        ]
        subprocess.run(command, check=True)
        part.rename(path)
    return path


def check(case):
    """Raises Wrong."""
    assert native
    with tempfile.NamedTemporaryFile(prefix="leanfleet-") as file:
        file.write(pickle.dumps(plan_of(case)))
        file.flush()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LEANFLEET_CHECK": "0"}
        if case.act.endswith("memory"):
            environment["LD_PRELOAD"] = str(refusing_memory())
        command = [sys.executable, act.__file__, file.name]
        try:
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise Wrong(f"no end in {SECONDS} s") from None
    said = f"{result.stdout[-1500:]} {result.stderr[-1500:]}".strip()
    if result.returncode < 0:
        raise Wrong(f"the process ended with {signal.Signals(-result.returncode).name}: {said}")
    if result.returncode or not result.stdout.endswith("RIGHT\n"):
        raise Wrong(said or f"the process ended with {result.returncode}")
