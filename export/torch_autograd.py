"""Autograd in C++ for torch.ops.leanfleet.*, built against the installed PyTorch. Without it Python records calls, which takes
several times as long.

PyTorch's stable interface has no autograd, so that csrc/torch/autograd.cpp must be compiled again for each version of it:
`python -m leanfleet.export.torch_autograd`, with g++. It needs PyTorch 2.11 or later.
"""

import ctypes
import functools
import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import torch

from leanfleet import __version__, native, spec

_INPUT, _OUTPUT, _GRADIENT = range(3)  # Source of autograd.cpp
_SAME, _WANTED, _DEFAULT = range(3)  # Value of autograd.cpp


def library_path() -> Path:
    """Where the library for the installed PyTorch is, or would be: beside leanfleet's other libraries.

    Raises FileNotFoundError without these.

    Example:
        from leanfleet.export.torch_autograd import library_path

        print(library_path().name.startswith("libleanfleet_autograd"))  # True
    """
    folder = native.library_path("leanfleet").parent
    source = hashlib.sha256((folder / "autograd.cpp").read_bytes()).hexdigest()[:8]
    return folder / f"libleanfleet_autograd_{__version__}_{source}_torch_{torch.__version__}.so"


def build() -> Path:
    """Compiles the library for the installed PyTorch, in 20 s or so, and returns its path. Processes that import
    leanfleet.export afterwards use it.

    Raises RuntimeError where g++ fails, FileNotFoundError where it or leanfleet's libraries are missing.
    """
    from torch.utils import cpp_extension

    path = library_path()
    unfinished = path.with_suffix(".unfinished")
    includes = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    command = ["g++", "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w", *includes]
    command += [str(path.parent / "autograd.cpp"), "-o", str(unfinished), *libraries, "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        wrong = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise RuntimeError(f"g++ could not compile leanfleet's autograd for PyTorch {torch.__version__}: {wrong}")
    unfinished.replace(path)
    return path


@functools.cache
def _library():
    """The compiled library, None where there is none for this PyTorch."""
    if os.environ.get("LEANFLEET_TORCH") == "stable":
        return None
    try:
        path = library_path()
        if not path.exists():
            return None
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    register = library.leanfleet_autograd_register
    register.restype = ctypes.c_char_p
    register.argtypes = [ctypes.c_char_p] * 5 + [ctypes.POINTER(ctypes.c_int32), ctypes.c_void_p]
    return library


def is_built() -> bool:
    """Whether this process has autograd in C++."""
    return _library() is not None


def _gradients_of(op):
    return spec.all_specs().get(f"{op.name}Grad")


def _tables(op, gradients):
    """What autograd.cpp's Table holds. Names tell: the gradients' operator takes inputs and outputs of the operator under their
    names, and grad_NAME is the gradient of NAME."""
    inputs, outputs = [t.name for t in op.inputs], [t.name for t in op.outputs]
    if gradients is None:
        return [], [], [], [-1] * len(inputs), [1] * len(outputs)
    arguments = []
    for t in gradients.inputs:
        of = t.name.removeprefix("grad_")
        if of != t.name:
            arguments.append((_GRADIENT, outputs.index(of), int(t.optional)))
        elif t.name in inputs:
            arguments.append((_INPUT, inputs.index(t.name), int(t.optional)))
        else:
            arguments.append((_OUTPUT, outputs.index(t.name), int(t.optional)))
    results = {t.name.removeprefix("grad_"): i for i, t in enumerate(gradients.outputs)}
    attrs = [a.name for a in op.attrs]
    refused = [attrs.index(a.name) for a in gradients.attrs if a.refuse and a.name in attrs]
    attributes = []
    for a in gradients.attrs:
        asked = [inputs.index(t.name.removeprefix("grad_")) for t in gradients.outputs if a.name in t.when]
        if asked:
            attributes.append((_WANTED, sum(1 << i for i in asked)))
        else:
            attributes.append((_SAME, attrs.index(a.name)) if a.name in attrs else (_DEFAULT, 0))
    differentiable = [any(t.name == f"grad_{name}" for t in gradients.inputs) for name in outputs]
    return refused, arguments, attributes, [results.get(name, -1) for name in inputs], differentiable


def register(op: spec.OpSpec, mutating: bool) -> bool:
    """Gives the operator's form the compiled kernel at PyTorch's Autograd key. False: there is none for this PyTorch."""
    library = _library()
    if library is None:
        return False
    gradients = None if mutating else _gradients_of(op)
    name = op.snake_name + ("_" if mutating else "")
    numbers = [len(op.inputs), len(op.outputs)]
    for entries in _tables(op, gradients):
        flat = itertools.chain.from_iterable(e if isinstance(e, tuple) else (e,) for e in entries)
        numbers += [len(entries), *map(int, flat)]
    texts = [
        spec.DOMAIN,
        name,
        name if mutating else op.name,
        gradients and f"{spec.DOMAIN}::{gradients.snake_name}",
        f"{spec.DOMAIN}_python::{name}",
    ]
    error = library.leanfleet_autograd_register(
        *(text.encode() if text else None for text in texts),
        (ctypes.c_int32 * len(numbers))(*numbers),
        ctypes.cast(native.library().leanfleet_torch_refused, ctypes.c_void_p),
    )
    return error is None


if __name__ == "__main__":
    try:
        print(build())
    except (RuntimeError, FileNotFoundError) as error:
        sys.exit(str(error))
