"""Calls of every operator in every variant, for the tests of the TensorRT plugins."""

import itertools
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from leanfleet import native, parity, spec
from support.ort_models import node_model
from support.paths import ROOT

# Smallest, usual and largest size of open dimensions; the others are fixed.
OPEN = {
    "B": (1, 3, 4),
    "N": (1, 65, 130),
    "Nq": (1, 5, 130),
    "S": (64, 130, 1030),
    "P": (4, 9, 40),
    "M": (1, 2, 9),
    "total": (1, 65, 1030),
    "Q": (1, 3, 4),
}
FIXED = {"H": 6, "Hkv": 2, "Hq": 2, "Hk": 2, "Hv": 4, "D": 32, "R": 32, "Dv": 16, "block": 16, "positions": 1100, "half": 12}
FIXED |= {"V": 130, "W": 5, "F": 24, "C": 24, "K": 3}
STEP = {"N": (1, 1, 1), "Nq": (1, 1, 1)}  # a second profile, for decode steps
MOST_VARIANTS = 64  # tried of an operator that has more combinations: both ends, and others drawn at random
DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "int32": 3, "int64": 4}


def input_shape(op, tensor, present, attrs, rank, kind):
    """Sizes of an input; kind: 0 smallest, 1 usual, 2 largest, "open": names in place of open sizes. present: the names of
    all present inputs. None where no variant of the operator gives the input this rank."""
    given = op.given(present, attrs)
    shape, fixed = op.shape_of(tensor, given, rank), op.equal_sizes(FIXED, given)
    if shape is None:
        return None
    sizes = []
    for axis in shape.ordered(attrs.get("layout", "bhnd")):
        if axis.symbol == "B" and "cu_seqlens" in present and "Q" in op.symbols:
            sizes.append(1)
        elif axis.symbol in FIXED or not axis.symbol:
            sizes.append(axis.size(fixed))
        else:
            sizes.append(str(axis) if kind == "open" else OPEN[axis.symbol][kind] + axis.offset)
    return sizes


def input_shapes(op, ranks, attrs, kind):
    """{input: shape} for ranks, {input: rank or None}."""
    return {t.name: input_shape(op, t, ranks, attrs, ranks[t.name], kind) for t in op.inputs if t.name in ranks}


def profiles(op):
    """Two profiles by dimension name: whole prompts, and steps of one token."""
    whole = {symbol: sizes for symbol, sizes in OPEN.items() if symbol in op.symbols}
    result = []
    for entry in (whole, whole | {symbol: sizes for symbol, sizes in STEP.items() if symbol in whole}):
        axes = {axis for t in op.inputs for shape in t.shapes for axis in shape.axes if axis.offset and axis.symbol in entry}
        result.append(entry | {str(a): tuple(size + a.offset for size in entry[a.symbol]) for a in axes})
    return result


def _combinations(choices, first):
    """Of one of each of the lists, as (of the first lists, of the others); a part of them where there are very many."""
    every = math.prod(map(len, choices))
    if every <= 4096:
        drawn = itertools.product(*choices)
    else:
        random = np.random.default_rng(0)
        drawn = [[c[0] for c in choices], [c[-1] for c in choices]]
        drawn += [[c[random.integers(len(c))] for c in choices] for _ in range(20 * MOST_VARIANTS)]
    for combination in drawn:
        yield tuple(combination[:first]), tuple(combination[first:])


OF_INT8_CACHES = ("key_scale", "value_scale", "key_per_token", "value_per_token")  # which the layers refuse


def variants(op):
    """({input: rank or None}, attributes) of every combination of optional inputs, their ranks and boolean attributes that
    are off by default which the operator takes; the C interface says which those are. Attributes that ask for outputs
    by their number are 3."""
    required = {t.name: None for t in op.inputs if not t.optional}
    optional = [t for t in op.inputs if t.optional and t.name not in OF_INT8_CACHES]
    choices = [[None, *sorted({len(s.axes) for s in t.shapes})] for t in optional]
    switches = [a.name for a in op.attrs if a.type == "bool" and not a.refuse and not a.default]
    switches = [name for name in switches if name not in OF_INT8_CACHES]
    counts = {a.name for a in op.attrs if a.type == "int"} & {name for t in op.outputs for name in t.when}
    switches += sorted(counts)
    found = 0
    for choice, on in _combinations([*choices, *[(0, 1)] * len(switches)], len(choices)):
        ranks = required | {t.name: rank for t, rank in zip(optional, choice) if rank}
        attrs = {name: 3 if name in counts else 1 for name, value in zip(switches, on) if value}
        shapes = input_shapes(op, ranks, attrs, 1)
        if None in shapes.values():
            continue
        entries = [(0, shapes[t.name], input_type(t, "float32")) if t.name in shapes else None for t in op.inputs]
        try:
            native.Call(op.name, entries, [], attrs).workspace()
        except ValueError:
            continue
        yield ranks, attrs
        found += 1
        if found == MOST_VARIANTS and len(optional) > 12:
            return


def layouts_of(op, layouts):
    """The attribute for each of the layouts, or none where the operator has no such attribute."""
    return [{"layout": layout} for layout in layouts] if any(a.name == "layout" for a in op.attrs) else [{}]


def input_type(tensor, dtype):
    return tensor.dtype(dtype, {"F": "float32", "I": "int32", "L": "int64"}, {})


def _line(*words):
    return (" ".join(map(str, words)) + "\n").encode()


def _content(array):
    array = np.ascontiguousarray(array)
    return array.tobytes(), DTYPE_CODES[str(array.dtype)]


def write_case(file, op, ranks, attrs, dtype, seed, with_data=True):
    """Appends a call in the form that trt_driver.cpp reads: lines of text, then the bytes of inputs and expected outputs.

    The expected outputs are the float64 reference's; their tolerance is that of leanfleet check.
    """
    model = node_model(op, input_shapes(op, ranks, attrs, 1), attrs, dtype)
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
            names = {"torch.float32": "float32", "torch.int32": "int32", "torch.int64": "int64"}
            expected[name] = np.zeros(shape, parity.BFLOAT16 if kind == "bfloat16" else names.get(str(kind), str(kind)))

    def sizes(name, kind):
        return input_shape(op, op.input(name), ranks, attrs, ranks[name], kind)

    extremes = {name: [n for kind in (0, 2) for n in sizes(name, kind)] for name in inputs}
    tolerances = {}
    for t in op.active_outputs(attrs):
        largest = np.abs(np.asarray(expected[t.name], np.float64))
        largest = float(largest[np.isfinite(largest)].max(initial=0.0))
        tolerances[t.name] = parity.TOLERANCE[op.name][low] * parity.EPSILON[dtype] * largest if t.type in "TFC" else 0.0
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


def build_driver(program):
    """Compiles trt_driver.cpp into `program`."""
    found = subprocess.run([sys.executable, str(ROOT / "csrc" / "find_headers.py"), "tensorrt"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    root = cuda_root()
    libraries = next(p for p in (root / "lib64", root / "lib") if (p / "libcudart_static.a").exists())
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-rdynamic"]
    command += ["-isystem", found.stdout.strip(), "-isystem", root / "include"]
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
    return count


if __name__ == "__main__":
    print(write_cases(sys.argv[1], [spec.all_specs()[name] for name in sys.argv[2:]] or None), "cases")
