"""Does a model with leanfleet nodes compute the same everywhere? Polygraphy runners and comparisons.

Needs polygraphy, onnx, onnxruntime and numpy; the reference runner and references also torch.
"""

import json
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import onnx
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.comparator.compare import SimpleCompareFunc
from polygraphy.datatype import DataType
from polygraphy.logger import G_LOGGER

from leanfleet import spec

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# How far an output may be from the judge's, in units of (type's epsilon x largest magnitude of the output). The plain
# float32 reference itself loses up to a quarter of this against float64 on standard normal inputs of 130 tokens
# (tests/test_parity.py measures it); operators that divide by a sum of either sign lose more.
TOLERANCE = {
    "LeanAttention": 16,
    "CausalLinearDecay": 64,
    "CausalLinearDecayGrad": 128,
    "NormalizedLinearAttention": 512,
    "NormalizedLinearAttentionGrad": 4096,
}


def count_nodes(model):
    """Number of leanfleet nodes in a model's graph and its subgraphs, by operator."""
    counts = {}

    def visit(graph):
        for node in graph.node:
            if node.domain == spec.DOMAIN:
                counts[node.op_type] = counts.get(node.op_type, 0) + 1
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    visit(attribute.g)

    visit(model.graph)
    return counts


class SessionRunner(OnnxrtRunner):
    """An OnnxrtRunner on a session of ours that afterwards knows which leanfleet kernels ran.

    library: with leanfleet's kernels registered; without, the model's function bodies run.
    """

    def __init__(self, path, provider="CPUExecutionProvider", library=True, name=None):
        self.path, self.provider, self.library = str(path), provider, library
        self.kernels_run = {}
        self._folder = None
        super().__init__(self._open, name=name)

    def _open(self):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._folder = tempfile.TemporaryDirectory()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._folder.name) / "profile")
        if self.library:
            from leanfleet.ort_ops import make_session

            return make_session(self.path, providers=[self.provider], session_options=options)
        return onnxruntime.InferenceSession(self.path, sess_options=options, providers=[self.provider])

    def deactivate_impl(self):
        self.kernels_run = kernels_in_profile(self.sess.end_profiling())
        super().deactivate_impl()
        self._folder.cleanup()


def kernels_in_profile(path):
    """{(operator, provider): runs} of leanfleet's kernels in an ONNX Runtime profile."""
    counts = {}
    for event in json.loads(Path(path).read_text()):
        args = event.get("args", {})
        if event.get("cat") == "Node" and args.get("op_name") in spec.all_specs() and event["name"].endswith("_kernel_time"):
            key = args["op_name"], args.get("provider", "")
            counts[key] = counts.get(key, 0) + 1
    return counts


def run_reference(op_type, attributes, inputs):
    """The PyTorch reference on numpy arrays (None for absent ones): a list of numpy arrays.

    Computes in float64 and returns T outputs in the inputs' type, F outputs in float32.
    """
    import torch

    from leanfleet.export import reference

    op = spec.all_specs()[op_type]
    attrs = {a.name: attributes.get(a.name, a.default) for a in op.attrs if not a.refuse}
    attrs = {k: v.decode() if isinstance(v, bytes) else v for k, v in attrs.items()}
    if attrs.get("algorithm") is not None:
        attrs["algorithm"] = "auto"
    tensors = []
    for t, array in zip(op.inputs, list(inputs) + [None] * (len(op.inputs) - len(inputs)), strict=True):
        tensor = None if array is None else torch.from_numpy(np.array(array))
        tensors.append(tensor.double() if tensor is not None and t.type != "I" else tensor)
    outputs = getattr(reference, op.snake_name)(*tensors, **attrs)
    dtype = {"T": np.asarray(inputs[0]).dtype, "F": np.float32, "I": np.int32}
    return [output.numpy().astype(dtype[t.type]) for t, output in zip(op.active_outputs(attrs), outputs, strict=True)]


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
                given = {a.name: a for a in self.onnx_node.attribute}
                values = {name: onnx.helper.get_attribute_value(a) for name, a in given.items()}
                return tuple(run_reference(op.name, values, inputs))

            return type(op.name, (OpRun,), {"op_domain": spec.DOMAIN, "_run": run})

        self.model = onnx.load(self.path)
        self.evaluator = ReferenceEvaluator(self.model, new_ops=[implementation(op) for op in spec.all_specs().values()])

    def get_input_metadata_impl(self):
        metadata = TensorMetadata()
        for value in self.model.graph.input:
            tensor = value.type.tensor_type
            shape = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim]
            metadata.add(value.name, dtype=DataType.from_dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)),
                         shape=shape)
        return metadata

    def infer_impl(self, feed_dict):
        start = time.perf_counter()
        outputs = self.evaluator.run(None, dict(feed_dict))
        self.inference_time = time.perf_counter() - start
        return OrderedDict(zip((o.name for o in self.model.graph.output), outputs, strict=True))

    def deactivate_impl(self):
        del self.evaluator, self.model


def register_references():
    """Makes Polygraphy's --pluginref know our operators (polygraphy.backend.pluginref.references.OP_REGISTRY)."""
    from polygraphy.backend.pluginref.references import OP_REGISTRY, register

    for name in spec.all_specs():
        if name not in OP_REGISTRY:
            register(name)(lambda attributes, *inputs, name=name: run_reference(name, attributes, inputs))


def make_inputs(model, sizes=None, seed=0):
    """Random inputs that mean something for a model with leanfleet nodes: an ordered dict of numpy arrays.

    Lengths lie within the caches, tables hold valid distinct pages, decays are not positive, token ids lie in their
    embedding. sizes: values of symbolic dimensions; others are 2, or 7 where the name suggests tokens, 64 for a
    cache's slots. Raises ValueError for types that it cannot make.
    """
    random = np.random.default_rng(seed)
    sizes = dict(sizes or {})
    roles, limits = _roles(model)

    def size_of(dim):
        if dim.HasField("dim_value"):
            return dim.dim_value
        name = dim.dim_param
        if name not in sizes:
            lowered = name.lower()
            sizes[name] = (64 if any(w in lowered for w in ("capacity", "slots", "cache")) else
                           7 if any(w in lowered for w in ("token", "seq", "len", "n")) and "batch" not in lowered else 2)
        return sizes[name]

    initializers = {i.name for i in model.graph.initializer}
    inputs, late = OrderedDict(), []
    for value in model.graph.input:
        if value.name in initializers:
            continue
        tensor = value.type.tensor_type
        shape = [size_of(d) for d in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        inputs[value.name] = None
        if np.issubdtype(dtype, np.integer):
            late.append((value.name, shape, dtype))
        elif np.issubdtype(dtype, np.floating):
            data = random.standard_normal(shape)
            if roles.get(value.name, ("", "", None))[1] == "log_decay":
                data = -np.abs(data) / 8
            inputs[value.name] = data.astype(dtype)
        else:
            raise ValueError(f"input {value.name} has type {dtype}; give inputs with --inputs FILE.npz")
    shapes = {name: array.shape for name, array in inputs.items() if array is not None}
    shapes |= {name: tuple(shape) for name, shape, _ in late} | {i.name: tuple(i.dims) for i in model.graph.initializer}
    for name, shape, dtype in late:
        op_type, role, node = roles.get(name, ("", "", None))
        inputs[name] = _integers(role, node, shape, shapes, inputs, limits.get(name, 8), random).astype(dtype)
    return inputs


def _roles(model):
    """({graph input: (operator, argument, node)}, {graph input: number of rows of the table it indexes})."""
    producers = {output: node for node in model.graph.node for output in node.output}
    rows = {i.name: i.dims[0] for i in model.graph.initializer if i.dims}

    def origin(name):
        while name in producers and producers[name].op_type in ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze"):
            name = producers[name].input[0]
        return name

    roles, limits = {}, {}
    for node in model.graph.node:
        if node.domain == spec.DOMAIN:
            for t, name in zip(spec.all_specs()[node.op_type].inputs, node.input):
                if name:
                    roles.setdefault(origin(name), (node.op_type, t.name, node))
        elif node.op_type == "Gather" and node.input[0] in rows:
            limits[origin(node.input[1])] = rows[node.input[0]]
    return roles, limits


def _integers(role, node, shape, shapes, inputs, limit, random):
    """Values for an integer input that a leanfleet node uses as `role`, or random ones below `limit`."""
    names = {}
    if node is not None:
        names = {t.name: name for t, name in zip(spec.all_specs()[node.op_type].inputs, node.input) if name}

    def shape_of(argument):
        return shapes.get(names.get(argument), None)

    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} if node is not None else {}
    token_axis = 1 if attributes.get("layout") == b"bnhd" else 2
    query = shape_of("query")
    if role == "cu_seqlens":
        total = (shape_of("key_cache") or (0, 7))[1] if "key_cache" in names else (query or (1, 1, 7, 7))[token_axis]
        inner = np.sort(random.integers(0, total + 1, shape[0] - 2))
        return np.concatenate([[0], inner, [total]])
    if role in ("block_table", "state_index"):
        pool = (shape_of("key_cache") or shape_of("initial_state") or (int(np.prod(shape)),))[0]
        count = int(np.prod(shape))
        return (random.permutation(max(pool, count))[:count] % pool).reshape(shape)
    if role in ("seq_lens", "query_lens"):
        tokens = query[token_axis] if query else next((s[1] for n, s in shapes.items() if "input_ids" in n), 1)
        cache = shape_of("key_cache") or (1, 1, tokens)
        capacity = cache[2]
        if "cu_seqlens" in names and inputs.get(names["cu_seqlens"]) is not None:
            capacity = np.diff(inputs[names["cu_seqlens"]])
        elif "block_table" in names:
            capacity = cache[1] * (shape_of("block_table") or (1, 1))[1]
        elif "cu_seqlens" in names:
            capacity = cache[1] // max(shape[0], 1)
        if role == "query_lens":
            return np.minimum(random.integers(1, tokens + 1, shape), capacity)
        return random.integers(np.minimum(tokens, capacity), np.maximum(capacity, 1) + 1, shape)
    if role == "initial_count":
        return random.integers(0, 9, shape)
    return random.integers(0, limit, shape)


RUNNERS = {
    "body": "onnxruntime's CPU provider without the library: the function bodies run",
    "ort-cpu": "onnxruntime's CPU provider with leanfleet's kernels",
    "ort-cuda": "onnxruntime's CUDA provider with leanfleet's kernels",
    "reference": "onnx's reference evaluator, leanfleet nodes in PyTorch and float64 (slow)",
}


def make_runner(kind, path):
    """A Polygraphy runner of one of RUNNERS. Raises ValueError for another name, RuntimeError where it cannot run."""
    if kind == "reference":
        return ReferenceRunner(path, name=kind)
    if kind not in RUNNERS:
        raise ValueError(f"runner '{kind}' is unknown; choose from {', '.join(RUNNERS)}")
    provider = "CUDAExecutionProvider" if kind == "ort-cuda" else "CPUExecutionProvider"
    import onnxruntime

    if provider not in onnxruntime.get_available_providers():
        raise RuntimeError(f"runner '{kind}': this onnxruntime has no {provider}; install onnxruntime-gpu in its place")
    return SessionRunner(path, provider, library=kind != "body", name=kind)


def check(path, runners=("body", "ort-cpu"), inputs=None, sizes=None, seed=0, rtol=None, atol=None):
    """Runs a model with several runners and compares each with the first.

    inputs: dict of numpy arrays; default make_inputs(sizes, seed). rtol, atol: instead of TOLERANCE.
    Returns a list of dicts (runner, judge, output, error: largest absolute difference, tolerance, passed), and a dict of
    the kernels that ran by runner. Raises RuntimeError where a runner that has kernels did not run them all.
    """
    model = onnx.load(str(path), load_external_data=False)
    counts = count_nodes(model)
    feed = inputs if inputs is not None else make_inputs(model, sizes, seed)
    built = [make_runner(kind, path) for kind in runners]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        results = Comparator.run(built, data_loader=[feed])
    kernels = {r.name: r.kernels_run for r in built if isinstance(r, SessionRunner)}
    for runner in built:
        if isinstance(runner, SessionRunner) and sum(runner.kernels_run.values()) != (sum(counts.values()) if runner.library else 0):
            raise RuntimeError(f"runner '{runner.name}': the model has {counts} leanfleet nodes, but these kernels ran: "
                               f"{runner.kernels_run}")
    judge = results[runners[0]][0]
    low = {onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16"}
    types = [low[i.type.tensor_type.elem_type] for i in model.graph.input if i.type.tensor_type.elem_type in low]
    epsilon = max([EPSILON[t] for t in types], default=EPSILON["float32"])
    factor = max((TOLERANCE[op] for op in counts), default=16)
    tolerances = {}
    for name in judge:
        finite = np.abs(np.asarray(judge[name], dtype=np.float64))
        largest = float(finite[np.isfinite(finite)].max(initial=0.0))
        tolerances[name] = atol if atol is not None else factor * epsilon * max(largest, 1e-30)
    compare = SimpleCompareFunc(atol=tolerances, rtol=rtol or 0.0, check_error_stat="elemwise", infinities_compare_equal=True,
                                fail_fast=False)
    rows = []
    for kind in runners[1:]:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
            compared = compare(judge, results[kind][0])
        for name, result in compared.items():
            rows.append({"runner": kind, "judge": runners[0], "output": name, "error": result.max_absdiff,
                         "tolerance": tolerances[name], "passed": bool(result)})
    return rows, kernels
