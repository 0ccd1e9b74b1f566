"""Does a model with leanfleet nodes compute the same everywhere? Polygraphy runners and comparisons.

Needs polygraphy, onnx, onnxruntime and numpy; the reference runner and references also torch.
"""

import ctypes
import json
import tempfile
import time
from collections import Counter, OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from google.protobuf.message import DecodeError
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnx import util as onnx_util
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.comparator import IterationResult, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from leanfleet import model_file, spec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Distance of 1 to the next number of the type.
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# How far a node's outputs may be from the judge's, in float32 models and in those with float16 or bfloat16 tensors. The
# unit is the type's epsilon times the output's largest magnitude. Each number is a power of two, 2 to 8 times what the
# plain reference loses at worst against float64 when it computes in float32, or in bfloat16, on inputs of make_inputs
# with up to 130 tokens: two sides that round differently lose twice what one does. tests/test_parity.py measures it.
TOLERANCE = {
    "LeanAttention": (16, 4),
    "CausalLinearDecay": (8, 4),
    "CausalLinearDecayGrad": (32, 8),
    "NormalizedLinearAttention": (16, 4),
    "NormalizedLinearAttentionGrad": (16, 8),
}

# Sizes of make_inputs for open dimensions that stand for a symbol of ops.toml; any other open dimension is 2.
SIZES = {"H": 6, "N": 7, "Nq": 7, "D": 16, "R": 16, "Dv": 16, "S": 64, "total": 64, "P": 16, "block": 16, "M": 4,
         "positions": 64, "half": 8}


def leanfleet_nodes(model):
    """The leanfleet nodes of a model's main graph."""
    return [node for node in model.graph.node if node.domain == spec.DOMAIN]


def _attributes(node):
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def _widened(array):
    """bfloat16 as float32, exactly; Polygraphy knows no bfloat16 in numpy."""
    return array.astype(np.float32) if array.dtype == BFLOAT16 else array


class EditedNodeError(ValueError):
    """A node's attributes or inputs are no longer those of the function body that the model carries for it."""


# Runners


class SessionRunner(OnnxrtRunner):
    """An OnnxrtRunner on a session of ours that afterwards knows which leanfleet kernels ran.

    library: with leanfleet's kernels registered; without, the model's function bodies run.
    kernels: {(operator, provider): runs} of leanfleet's kernels, once the runner is deactivated.
    bfloat16 outputs come as float32.
    """

    def __init__(self, path, provider="CPUExecutionProvider", library=True, name=None):
        super().__init__(self._open, name=name)
        self.path, self.provider, self.library = str(path), provider, library
        self.kernels = Counter()

    def _open(self):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors come as exceptions
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._folder.name) / "profile")
        if self.library:
            from leanfleet.ort_ops import make_session

            return make_session(self.path, providers=[self.provider], session_options=options)
        return onnxruntime.InferenceSession(self.path, sess_options=options, providers=[self.provider])

    def activate_impl(self):
        self._folder = tempfile.TemporaryDirectory()
        try:
            super().activate_impl()
        except BaseException:
            self._folder.cleanup()
            raise

    def infer_impl(self, feed_dict):
        from onnxruntime import OrtValue

        feed = {}
        for name, array in feed_dict.items():
            array = np.ascontiguousarray(array)
            feed[name] = (OrtValue.ortvalue_from_numpy(array) if array.dtype != BFLOAT16 else
                          OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16))
        start = time.perf_counter()
        outputs = self.sess.run_with_ort_values(None, feed)
        self.inference_time = time.perf_counter() - start
        return OrderedDict((o.name, _array(value)) for o, value in zip(self.sess.get_outputs(), outputs, strict=True))

    def deactivate_impl(self):
        self.kernels = kernels_in_profile(self.sess.end_profiling())
        super().deactivate_impl()
        self._folder.cleanup()


def _array(value):
    """An OrtValue on the CPU as a numpy array; bfloat16, which onnxruntime does not hand to numpy, as float32."""
    if value.element_type() != onnx.TensorProto.BFLOAT16:
        return value.numpy()
    shape = value.shape()
    content = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape)))
    return np.frombuffer(content, BFLOAT16).reshape(shape).astype(np.float32)


def kernels_in_profile(path):
    """Counter {(operator, provider): runs} of leanfleet's kernels in an ONNX Runtime profile."""
    return Counter((e["args"]["op_name"], e["args"]["provider"]) for e in json.loads(Path(path).read_text())
                   if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")
                   and e["args"].get("op_name") in spec.all_specs())


class ReferenceRunner(BaseRunner):
    """Runs a model with onnx's reference evaluator, and leanfleet nodes with the PyTorch reference in float64."""

    def __init__(self, path, name=None):
        super().__init__(name=name, prefix="leanfleet-reference")
        self.path = str(path)

    def activate_impl(self):
        from onnx.reference import ReferenceEvaluator
        from onnx.reference.op_run import OpRun

        def implementation(op):
            def run(self, *inputs, **attributes):
                return tuple(run_reference(op.name, _attributes(self.onnx_node), inputs))

            return type(op.name, (OpRun,), {"op_domain": spec.DOMAIN, "_run": run})

        self.model = onnx.load(self.path)
        bodies = [f for f in self.model.functions if f.domain == spec.DOMAIN]
        for body in bodies:
            self.model.functions.remove(body)
        self.evaluator = ReferenceEvaluator(self.model, new_ops=list(map(implementation, spec.all_specs().values())))

    def get_input_metadata_impl(self):
        return onnx_util.get_input_metadata(self.model.graph)

    def infer_impl(self, feed_dict):
        start = time.perf_counter()
        outputs = self.evaluator.run(None, dict(feed_dict))
        self.inference_time = time.perf_counter() - start
        return OrderedDict((o.name, _widened(array)) for o, array in zip(self.model.graph.output, outputs, strict=True))

    def deactivate_impl(self):
        del self.evaluator, self.model


def run_reference(op_type, attributes, inputs):
    """The PyTorch reference on numpy arrays (None for absent ones): a list of numpy arrays.

    Computes in float64 and returns T outputs in the inputs' type, F outputs in float32. Raises ValueError for
    arguments that the reference refuses.
    """
    import torch

    from leanfleet.export import reference

    op = spec.all_specs()[op_type]
    attrs = {a.name: attributes.get(a.name, a.default) for a in op.attrs if not a.refuse}
    tensors = {}
    for t, array in zip(op.inputs, inputs, strict=False):  # a node may leave trailing inputs out
        if array is not None:
            tensors[t.name] = torch.from_numpy(np.array(array, dtype=np.int64 if t.type == "I" else np.float64))
    outputs = getattr(reference, op.snake_name)(**tensors, **attrs)
    dtype = {"T": inputs[0].dtype, "F": np.float32, "I": np.int32}
    active = dict(zip((t.name for t in op.active_outputs(attrs)), outputs, strict=True))
    listed = op.outputs[:1 + max(i for i, t in enumerate(op.outputs) if t.name in active)]
    empty = torch.zeros(0)  # outputs are positional: it stands for one before the last that is not asked for
    return [active.get(t.name, empty).numpy().astype(dtype[t.type]) for t in listed]


def register_references():
    """Makes Polygraphy's --pluginref know our operators; returns its table of them, OP_REGISTRY."""
    from polygraphy.backend.pluginref.references import OP_REGISTRY, register

    def reference_of(name):
        return lambda attributes, *inputs: run_reference(name, attributes, inputs)

    for name in spec.all_specs():
        register(name)(reference_of(name))
    return OP_REGISTRY


RUNNERS = {
    "body": "onnxruntime's CPU provider without the library: the function bodies run",
    "ort-cpu": "onnxruntime's CPU provider with leanfleet's kernels",
    "ort-cuda": "onnxruntime's CUDA provider with leanfleet's kernels",
    "trt": "TensorRT or TensorRT-RTX with leanfleet's plugins, the engine built for the inputs' sizes",
    "reference": "onnx's reference evaluator, leanfleet nodes in PyTorch and float64 (slow)",
}


def make_runner(kind, path):
    """A Polygraphy runner of one of RUNNERS. Raises ValueError for another name."""
    if kind not in RUNNERS:
        raise ValueError(f"runner '{kind}' is unknown; choose from {', '.join(RUNNERS)}")
    if kind == "reference":
        return ReferenceRunner(path, name=kind)
    if kind == "trt":
        from leanfleet.trt_plugins.polygraphy_runner import TrtRunner

        return TrtRunner(path, name=kind)
    provider = "CUDAExecutionProvider" if kind == "ort-cuda" else "CPUExecutionProvider"
    return SessionRunner(path, provider, library=kind != "body", name=kind)


# Inputs


def make_inputs(model, sizes=None, seed=0):
    """Random inputs that mean something for a model with leanfleet nodes: an ordered dict of numpy arrays.

    Lengths lie within the caches, page tables and state indices hold valid distinct rows, decays are not positive,
    what makes up a denominator is positive, token ids lie in their embedding; other floats are standard normal.
    sizes: of open dimensions by name; the others get SIZES. Raises ValueError for a size of no open dimension, and
    for inputs of other types than floats and integers.
    """
    random = np.random.default_rng(seed)
    uses, rows = _uses(model.graph)
    shapes = _shapes(model.graph, sizes or {})
    initializers = {i.name for i in model.graph.initializer}
    values = [v for v in model.graph.input if v.name not in initializers]
    # Offsets come first: lengths depend on them.
    offsets_first = sorted(values, key=lambda v: v.name not in uses or uses[v.name][1].name != "cu_seqlens")
    made = {}
    for value in offsets_first:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        node, argument = uses.get(value.name, (None, None))
        shape = shapes[value.name]
        if dtype.kind in "iu":
            array = (random.integers(0, rows.get(value.name, 2), shape) if node is None else
                     _integers(node, argument.name, shape, _dims(node, shapes), made, random))
        elif dtype.kind == "f" or dtype == BFLOAT16:
            array = random.standard_normal(shape)
            if node is not None:
                array = _meaningful(node, argument.name, array, _dims(node, shapes))
        else:
            raise ValueError(f"input {value.name} has type {dtype}: no values can be made up; give all inputs yourself")
        made[value.name] = array.astype(dtype)
    return OrderedDict((v.name, made[v.name]) for v in values)


def _uses(graph):
    """({graph input: (leanfleet node, its spec.Tensor)}, {graph input: rows of the table it picks from})."""
    makers = {output: node for node in graph.node for output in node.output}
    rows = {i.name: i.dims[0] for i in graph.initializer if i.dims}

    def origin(name):
        while name in makers and makers[name].op_type in ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze"):
            name = makers[name].input[0]
        return name

    uses, picks = {}, {}
    for node in graph.node:
        if node.domain == spec.DOMAIN:
            for argument, name in zip(spec.all_specs()[node.op_type].inputs, node.input, strict=False):
                uses.setdefault(origin(name), (node, argument))
        elif node.op_type == "Gather" and node.input[0] in rows:
            picks[origin(node.input[1])] = rows[node.input[0]]
    return uses, picks


def _axes(node, shapes):
    """(tensor name, spec.Axis of each axis) of a node's inputs whose rank is known."""
    op, attributes = spec.all_specs()[node.op_type], _attributes(node)
    names = {t.name: name for t, name in zip(op.inputs, node.input, strict=False) if name}
    layout, given = attributes.get("layout", "bhnd"), op.given(names, attributes)
    for t in op.inputs:
        shape = shapes.get(names.get(t.name))
        alternative = None if shape is None else op.shape_of(t, given, len(shape))
        if alternative:
            yield names[t.name], alternative.ordered(layout)


def _dims(node, shapes):
    """Sizes of the schema's symbols in this node, as far as its inputs' shapes tell."""
    pairs = [pair for name, axes in _axes(node, shapes) for pair in zip(axes, shapes[name], strict=True)]
    return spec.sizes_of(pair for pair in pairs if isinstance(pair[1], int))


def _shapes(graph, sizes):
    """{tensor: its shape} of inputs, initializers and annotated values; all sizes of inputs are numbers."""

    def size(d):
        return d.dim_value if d.HasField("dim_value") else d.dim_param or None

    nodes = [node for node in graph.node if node.domain == spec.DOMAIN]
    shapes = {v.name: [size(d) for d in v.type.tensor_type.shape.dim] for v in [*graph.value_info, *graph.input]
              if v.type.tensor_type.HasField("shape")}
    shapes |= {i.name: list(i.dims) for i in graph.initializer}
    for value in graph.input:
        if value.name not in shapes:
            raise ValueError(f"input {value.name} has no shape: no values can be made up; give all inputs yourself")
    inputs = {v.name for v in graph.input}
    names = list(dict.fromkeys(d for v in graph.input for d in shapes[v.name] if isinstance(d, str)))
    if unknown := set(sizes) - set(names):
        raise ValueError(f"size {', '.join(sorted(unknown))}: no such open dimension in the model's inputs, which have "
                         f"{', '.join(names) or 'none'}")

    known = dict(sizes)
    for node in nodes:
        for name, axes in _axes(node, shapes):
            for d, axis in zip(shapes[name], axes, strict=True):
                if d in names and not axis.offset and not axis.plus:
                    known.setdefault(d, SIZES.get(axis.symbol, 2))
    shapes = {name: [known.get(d, d) for d in shape] for name, shape in shapes.items()}
    for node in nodes:
        for name, axes in _axes(node, shapes):
            if name in inputs:
                op = spec.all_specs()[node.op_type]
                dims = dict.fromkeys(op.symbols, 2) | SIZES | _dims(node, shapes)
                dims = op.equal_sizes(dims, op.given((), _attributes(node)))
                shapes[name] = [d if isinstance(d, int) else axis.size(dims)
                                for d, axis in zip(shapes[name], axes, strict=True)]
    for name in inputs:
        shapes[name] = [d if isinstance(d, int) else 2 for d in shapes[name]]
    return shapes


def _meaningful(node, role, array, dims):
    """Standard normal values made into ones of a node's floating point argument `role`."""
    if role == "log_decay":
        return -np.abs(array) / 8
    if role in ("cos_cache", "sin_cache"):
        return {"cos_cache": np.cos, "sin_cache": np.sin}[role](array)
    if role == "normalizer":  # a sum over up to N tokens
        return (1 + np.abs(array)) * dims.get("N", 1)
    positive = set()
    if node.op_type.startswith("Normalized") or _attributes(node).get("normalize"):
        positive = {"query", "key", "coefficients", "initial_norm", "initial_key_sum"}  # make up the denominator
    if node.op_type == "NormalizedLinearAttentionGrad":
        positive |= {"value", "grad_output"}  # or else grad_coefficients is a sum that cancels to nearly nothing
    return np.abs(array) if role in positive else array


def _integers(node, role, shape, dims, made, random):
    """Values of a node's integer argument `role`; dims: the node's sizes, made: the inputs that have values already."""
    if role == "cu_seqlens":
        total = dims.get("total", dims.get("N", 0))
        return np.concatenate([[0], np.sort(random.integers(0, total + 1, shape[0] - 2)), [total]])
    if role in ("block_table", "state_index"):
        count, rows = int(np.prod(shape)), dims.get("P", 1)
        return (random.permutation(max(rows, count))[:count] % rows).reshape(shape)
    if role == "initial_count":
        return random.integers(1, 9, shape)
    arguments = [t.name for t in spec.all_specs()[node.op_type].inputs]
    offsets = made.get(dict(zip(arguments, node.input, strict=False)).get("cu_seqlens"))
    if offsets is not None:
        capacity = np.diff(offsets)
    elif "M" in dims:
        capacity = np.full(shape, dims["M"] * dims["block"])
    else:
        capacity = np.full(shape, dims.get("S", 1))
    tokens = np.minimum(dims.get("Nq", 1), capacity)
    low, high = (tokens, capacity) if role == "seq_lens" else (np.minimum(1, tokens), tokens)
    return random.integers(low, high + 1)


# Comparison


def _tolerances(model, judge):
    """{output: absolute tolerance}. An output's is the sum of what the n leanfleet nodes that it depends on may lose.

    Later layers amplify what earlier ones lose. Models in float16 and bfloat16 round most of that away again; in
    float32 the sum counts n times. Seen in SmolLM2-135M, n = 30, between function bodies and CPU kernels over random
    inputs: differences of up to 7 times the plain sum in float32, up to half of it in float16.
    """
    graph = model.graph
    types = {t.data_type for t in graph.initializer}
    types |= {v.type.tensor_type.elem_type for v in [*graph.input, *graph.value_info]}
    dtype = ("bfloat16" if onnx.TensorProto.BFLOAT16 in types else "float16" if onnx.TensorProto.FLOAT16 in types
             else "float32")
    low = dtype != "float32"
    losses = []  # of each leanfleet node, in the units of TOLERANCE
    upstream = {}  # tensor -> the nodes it depends on: bit i stands for losses[i]
    for node in graph.node:
        bits = 0
        for name in node.input:
            bits |= upstream.get(name, 0)
        if node.domain == spec.DOMAIN:
            bits |= 1 << len(losses)
            losses.append(TOLERANCE[node.op_type][low])
        upstream.update(dict.fromkeys(node.output, bits))
    tolerances = {}
    for name, array in judge.items():
        # An output of standard operators alone may differ as much as a node of the closest operator.
        added = [loss for i, loss in enumerate(losses) if upstream.get(name, 0) >> i & 1] or [min(losses)]
        largest = float(np.abs(array[np.isfinite(array)].astype(np.float64)).max(initial=0.0))
        units = sum(added) * (1 if low else len(added))
        tolerances[name] = units * EPSILON[dtype] * largest if array.dtype.kind == "f" else 0.0
    return tolerances


def check(path, runners=("body", "ort-cpu"), inputs=None, sizes=None, seed=0, rtol=None, atol=None):
    """Runs a model with several runners and compares each with the first.

    inputs: dict of numpy arrays (bfloat16 ones may come as float32); default make_inputs(sizes, seed).
    rtol, atol: given either, an element passes within atol or within rtol of the judge's, in place of TOLERANCE.
    Returns a list of dicts (runner, judge, output, error: largest absolute difference, tolerance: absolute, passed),
    and {runner: Counter {(operator, provider): runs} of the leanfleet kernels that ran}.
    Raises ValueError for wrong arguments; EditedNodeError where a node was edited after its function body was made, whatever
    the runners; RuntimeError where a runner fails, or has leanfleet's kernels and did not run them on its provider.
    """
    if len(runners) < 2 or len(set(runners)) < len(runners):
        raise ValueError(f"runners are {', '.join(runners) or 'none'}; expected two or more different ones")
    built = [make_runner(kind, path) for kind in runners]
    model = _load(path)
    _check_edits(model)
    if "body" in runners:
        _check_bodies(model)
    feed = make_inputs(model, sizes, seed) if inputs is None else _typed(model, inputs)
    results = [_run(runner, model, feed) for runner in built]
    judge = results[0]
    if rtol is None and atol is None:
        tolerances = _tolerances(model, judge)
    else:
        tolerances = dict.fromkeys(judge.keys(), atol or 0.0)
    compare = SimpleCompareFunc(atol=tolerances, rtol=rtol or 0.0, infinities_compare_equal=True)
    rows = []
    for kind, result in zip(runners[1:], results[1:], strict=True):
        # A relative error is one of the second's. Equal infinities are subtracted and then called equal.
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1), np.errstate(invalid="ignore"):
            compared = compare(result, judge)
        for name, verdict in compared.items():
            # Polygraphy gives a bare False where shapes differ.
            error = float("nan") if isinstance(verdict, bool) else verdict.max_absdiff
            rows.append({"runner": kind, "judge": runners[0], "output": name, "error": error,
                         "tolerance": tolerances[name], "passed": bool(verdict)})
    return rows, {r.name: r.kernels for r in built if hasattr(r, "kernels")}


def _load(path):
    """The model without its external weights. Raises ValueError where the file is no model with leanfleet nodes."""
    try:
        model = onnx.load(str(path), load_external_data=False)
    except DecodeError as error:
        raise ValueError(f"{path} is no ONNX model: {error}") from error
    model_file.check(path)
    if not leanfleet_nodes(model):
        raise ValueError(f"{path} has no leanfleet nodes: there is nothing to check. Export with leanfleet.export")
    return model


def _check_edits(model):
    if not any(f.domain == spec.DOMAIN for f in model.functions):
        return
    import onnx_ir

    from leanfleet.export import function_bodies

    if lines := function_bodies.edited_nodes(onnx_ir.from_proto(model)):
        raise EditedNodeError(lines[0] + (f" ({len(lines) - 1} more nodes likewise)" if len(lines) > 1 else ""))


def _check_bodies(model):
    """Raises ValueError where a leanfleet node has no function to run as its body."""
    have = {(f.name, f.overload) for f in model.functions if f.domain == spec.DOMAIN}
    lacking = {node.op_type for node in leanfleet_nodes(model) if (node.op_type, node.overload) not in have}
    if lacking:
        raise ValueError(f"runner 'body': the model holds no function for its {', '.join(sorted(lacking))} nodes; "
                         "export it with leanfleet.export, or leave this runner out")


def _typed(model, inputs):
    """The inputs that the model takes, bfloat16 where it wants that."""
    initializers = {i.name for i in model.graph.initializer}
    wanted = {v.name: v.type.tensor_type.elem_type for v in model.graph.input if v.name not in initializers}
    if set(inputs) != set(wanted):
        raise ValueError(f"inputs are {', '.join(sorted(inputs)) or 'none'}; the model takes {', '.join(wanted)}")
    return OrderedDict((name, np.asarray(inputs[name], BFLOAT16 if t == onnx.TensorProto.BFLOAT16 else None))
                       for name, t in wanted.items())


def _run(runner, model, feed):
    """One runner's outputs, as an IterationResult. Raises RuntimeError."""
    needed = {node.op_type for node in leanfleet_nodes(model)}
    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1), runner:
            result = IterationResult(runner.infer(feed, check_inputs=False), runner_name=runner.name)
    except (ImportError, FileNotFoundError):
        raise
    except Exception as error:
        raise RuntimeError(f"runner '{runner.name}' failed: {error}") from error
    if getattr(runner, "library", False):
        ran = {op for op, provider in runner.kernels if provider == runner.provider}
        if missing := needed - ran:
            raise RuntimeError(f"runner '{runner.name}': the model has {', '.join(sorted(missing))} nodes, but no such "
                               f"kernel of leanfleet's ran on {runner.provider}; these ran: {dict(runner.kernels)}")
    return result
