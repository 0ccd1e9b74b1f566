"""Calls of every operator in every variant, for the tests of the TensorRT plugins."""

import functools
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from leanfleet import parity, spec, trial
from leanfleet.variants import (  # noqa: F401
    input_shape,
    input_shapes,
    layouts_of,
    node_model,
    profiles,
    scaled_variants,
    variants,
)
from support.paths import ROOT

DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "int32": 3, "int64": 4, "int8": 5, "float8_e4m3fn": 6}
CACHE_TYPES = "int8", "float8e4m3fn"  # of quantised caches, which TensorRT's plugins can have


def _line(*words):
    return (" ".join(map(str, words)) + "\n").encode()


def _content(array):
    array = np.ascontiguousarray(array)
    return array.tobytes(), DTYPE_CODES[str(array.dtype)]


def quantised_forms(ranks, number):
    """Types of the caches that have scales, one or the other of CACHE_TYPES by turns of two: an engine does not have both, and
    layouts take turns of one."""
    caches = [name for name in ("key_cache", "value_cache") if name.replace("_cache", "_scale") in ranks]
    return dict.fromkeys(caches, CACHE_TYPES[number // 2 % len(CACHE_TYPES)])


def write_case(file, op, ranks, attrs, dtype, seed, with_data=True, forms=None):
    """Appends a call in the form that trt_driver.cpp reads: lines of text, then the bytes of inputs and expected outputs.

    The expected outputs are the float64 reference's; their tolerance is that of leanfleet check.
    """
    model = node_model(op, input_shapes(op, ranks, attrs, 1), attrs, dtype, forms=forms)
    inputs = parity.make_inputs(model, seed=seed)
    low = dtype != "float32"
    expected = {}
    if with_data:
        outputs = parity.run_reference(op.name, attrs, [inputs.get(t.name) for t in op.inputs])
        expected = {t.name: array for t, array in zip(op.outputs, outputs) if t in op.active_outputs(attrs)}
    else:
        from support.kernels import output_shapes

        class Shape:  # as much of a tensor as output_shapes looks at
            def __init__(self, array):
                self.shape, self.dtype = array.shape, str(array.dtype)

            def dim(self):
                return len(self.shape)

        for name, kind, shape in output_shapes(op, {k: Shape(v) for k, v in inputs.items()}, attrs):
            kind = str(kind).removeprefix("torch.")
            special = {"bfloat16": parity.BFLOAT16, "float8_e4m3fn": trial.FLOAT8}
            expected[name] = np.zeros(shape, special.get(kind, kind))

    def sizes(name, kind):
        return input_shape(op, op.input(name), ranks, attrs, ranks[name], kind)

    extremes = {name: [n for kind in (0, 2) for n in sizes(name, kind)] for name in inputs}
    tolerances = {}
    for t in op.active_outputs(attrs):
        largest = np.abs(np.asarray(expected[t.name], np.float64))
        largest = float(largest[np.isfinite(largest)].max(initial=0.0))
        narrow = expected[t.name].dtype.itemsize == 1  # a rotated row may lie on the other side of a half
        lost = 1.0 if narrow else parity.TOLERANCE[op.name][low] * parity.EPSILON[dtype] * largest
        tolerances[t.name] = lost if t.type in "TFCS" else 0.0
    write_call(file, op, attrs, inputs, expected, tolerances, extremes, with_data)


def write_call(file, op, attrs, inputs, expected, tolerances, extremes, with_data=True):
    """Appends a call in the form that trt_driver.cpp reads. inputs, expected: arrays by name; tolerances: of the expected;
    extremes: the smallest and then the largest sizes of each input in the profile."""
    file.write(_line("case", op.name, len(attrs), len(inputs), len(expected)))
    for name, value in attrs.items():
        kind = {"int": "i", "float": "f", "str": "s"}[type(value).__name__]
        file.write(_line(name, kind, value))
    bodies = []
    for name in inputs:
        content, code = _content(inputs[name])
        file.write(_line(name, code, op.input(name).type, inputs[name].ndim, *inputs[name].shape, *extremes[name]))
        bodies.append(content)
    for t in op.active_outputs(attrs):
        content, code = _content(expected[t.name])
        shape = expected[t.name].shape
        file.write(_line(t.name, code, t.takes if t.takes in inputs else "-", repr(tolerances[t.name]), len(shape), *shape))
        bodies.append(content)
    file.write(_line("data", int(with_data)))
    if with_data:
        for content in bodies:
            file.write(content)


def cuda_root():
    """Where the CUDA toolkit is. Raises StopIteration where there is none."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    roots = [Path(nvcc).resolve().parents[1]] if nvcc else []
    roots += [Path(p) for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
    return next(root for root in roots if (root / "include" / "cuda_runtime_api.h").exists())


@functools.cache
def headers():
    """(where TensorRT's headers are, or None, and what was said in looking for them)."""
    found = subprocess.run([sys.executable, str(ROOT / "csrc" / "find_headers.py"), "tensorrt"], capture_output=True, text=True)
    return None if found.returncode else found.stdout.strip(), found.stderr


def build_driver(program):
    """Compiles trt_driver.cpp into `program`."""
    include, said = headers()
    assert include, said
    root = cuda_root()
    libraries = next(p for p in (root / "lib64", root / "lib") if (p / "libcudart_static.a").exists())
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-rdynamic"]
    command += ["-isystem", include, "-isystem", root / "include", "-I", ROOT / "csrc"]
    command += [ROOT / "tests" / "runtimes" / "trt_driver.cpp", "-o", program]
    command += ["-L", libraries, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    subprocess.run(command, check=True)


def write_cases(path, ops=None, dtypes=spec.TYPES["T"], layouts=("bhnd", "bnhd"), with_data=True, every=1):
    """Writes every variant of the operators (specs; None: all), or one of `every`; returns their number."""
    number = count = 0
    with open(path, "wb") as file:
        for op in ops or spec.all_specs().values():
            for (ranks, attrs), dtype, layout in itertools.product(variants(op), dtypes, layouts_of(op, layouts)):
                if number % every == 0:
                    write_case(file, op, ranks, attrs | layout, dtype, number, with_data)
                    count += 1
                number += 1
            for turn, (ranks, attrs) in enumerate(scaled_variants(op)):
                if number % every == 0:
                    # With numbers of int8 alone, whose tolerance is one of them.
                    forms = None if with_data else quantised_forms(ranks, turn)
                    layout, dtype = layouts_of(op, layouts)[turn % len(layouts)], dtypes[turn // 4 % len(dtypes)]
                    write_case(file, op, ranks, attrs | layout, dtype, number, with_data, forms)
                    count += 1
                number += 1
    return count


if __name__ == "__main__":
    print(write_cases(sys.argv[1], [spec.all_specs()[name] for name in sys.argv[2:]] or None), "cases")
