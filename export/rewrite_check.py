"""Is a rewritten ONNX file right? Checks its structure, runs onnx's checker, and compares its results with the original's.

Needs onnx, and onnxruntime to compare results; without it they are not compared.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from leanfleet import ort_library, trial

LARGEST = 4 * 2**30  # bytes of weights up to which the numbers are compared: two sessions load them
# ONNX Runtime's own kernels sum in float16 here and there, where ours do not: their share is not in trial.TOLERANCE.
SLACK = 4


class Different(RuntimeError):
    """The rewritten model does not compute what the original does."""


@dataclass
class Verification:
    """runs: what was compared. error: the largest difference, bound: what it may be there. reason: why nothing was compared."""

    runs: tuple = ()
    error: float = 0.0
    bound: float = 0.0
    reason: str | None = None

    def __str__(self):
        if self.reason:
            return f"not verified: {self.reason}"
        return (
            f"verified on the CPU with {' and '.join(self.runs)}: largest difference {self.error:.2g} "
            f"(allowed {self.bound:.2g})"
        )


# Structure


def text_fault(message: Any) -> str | None:
    """Which text of a protobuf message, or of one inside it, is no UTF-8. onnx reads such files, and nothing can write them."""
    for field in message.DESCRIPTOR.fields:
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        try:
            found = getattr(message, field.name)
            values = list(found) if field.is_repeated else [found] if message.HasField(field.name) else []
        except UnicodeDecodeError:
            return f"{field.name} of a {message.DESCRIPTOR.name} is no UTF-8"
        for value in values:
            if isinstance(value, bytes):
                return f"{field.name} of a {message.DESCRIPTOR.name} is no UTF-8"
            if not isinstance(value, str) and (fault := text_fault(value)):
                return fault
    return None


def structural_fault(model: onnx.ModelProto, folder: str | Path) -> str | None:
    """What makes a ModelProto no valid model, in one line; None where nothing is found. onnx's checker and onnxruntime
    crash or hang on some of these, and accept others. folder: of the model's file and its external weights."""
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        return "it holds no graph"
    nodes = [*_nodes(model.graph.node), *(n for f in model.functions for n in _nodes(f.node))]
    tensors = [
        *model.graph.initializer,
        *(t for n in nodes for g in _subgraphs(n) for t in g.initializer),
        *(a.t for n in nodes for a in n.attribute if a.HasField("t")),
    ]
    if fault := next(filter(None, (_tensor_fault(t, Path(folder)) for t in tensors)), None):
        return fault
    calls = {_identity(f): {_identity(n) for n in _nodes(f.node)} for f in model.functions}
    if len(calls) < len(model.functions):
        return "two functions have one name"
    if ring := _cycle(calls):
        return f"function {ring[1]} calls itself"
    for f in model.functions:
        if fault := _fault(f, f.input, f.output, set()):
            return f"function {f.name}: {fault}"
    for node in _nodes(model.graph.node):
        if attribute := next((a for a in node.attribute if a.ref_attr_name), None):
            return f"node '{node.name or node.op_type}': attribute {attribute.name} refers to a function's, outside of any"
    return _graph_fault(model.graph, set())


def _tensor_fault(tensor, folder):
    """Sizes beyond the data: onnx's shape inference counts through all elements that integers are said to have."""
    if any(d < 0 for d in tensor.dims):
        return f"tensor '{tensor.name}' has sizes {list(tensor.dims)}"
    there = tensor.ByteSize()
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        where = {e.key: e.value for e in tensor.external_data}
        location = Path(where.get("location", ""))
        file = folder / location
        if location.is_absolute() or ".." in location.parts or not file.is_file():
            return f"the file '{location}' of tensor '{tensor.name}' is not beside the model"
        there = file.stat().st_size
    if math.prod(tensor.dims) > 4 * there:  # the smallest elements take 2 bits
        return f"tensor '{tensor.name}' of sizes {list(tensor.dims)} has {there} bytes of data"
    return None


def _identity(x):
    """Domain, name and overload of a function or of the function that a node calls."""
    return x.domain, x.name if isinstance(x, onnx.FunctionProto) else x.op_type, x.overload


def _subgraphs(node):
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def _nodes(nodes):
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from _nodes(graph.node)


def _cycle(edges):
    """A key from which a way leads back to itself, None where there is none. edges: {key: keys}."""
    left = {key: {target for target in targets if target in edges} for key, targets in edges.items()}
    while done := [key for key, targets in left.items() if not targets & left.keys()]:
        for key in done:
            del left[key]
    return min(left) if left else None


def _graph_fault(graph, outer):
    given = [v.name for v in graph.input]
    if twice := _twice(given) or _twice([t.name for t in graph.initializer]):
        return f"'{twice}' is declared twice"
    given += [t.name for t in graph.initializer] + [t.values.name for t in graph.sparse_initializer]
    return _fault(graph, given, [v.name for v in graph.output], outer)


def _fault(part, given, results, outer):
    """The fault of the nodes of a graph or function with these inputs and outputs, inside of a graph that knows `outer`."""
    makers = {}
    for i, node in enumerate(part.node):
        for name in filter(None, node.output):
            if name in makers or name in given:
                return f"'{name}' is made twice, which is no static single assignment form"
            makers[name] = i
    known = outer | set(given) | makers.keys()
    needs = {}
    for i, node in enumerate(part.node):
        what = f"node '{node.name or node.op_type}'"
        if not node.output:
            return f"{what} has no outputs"
        if unknown := next((name for name in node.input if name and name not in known), None):
            return f"{what} reads '{unknown}', which nothing makes"
        for graph in _subgraphs(node):
            if fault := _graph_fault(graph, known):
                return f"{what}: {fault}"
        read = set(node.input) | {name for graph in _subgraphs(node) for n in _nodes(graph.node) for name in n.input}
        needs[i] = {makers[name] for name in read if name in makers}
    ring = _cycle(needs)
    if ring is not None:
        return f"node '{part.node[ring].name or part.node[ring].op_type}' depends on itself"
    if unknown := next((name for name in results if name not in known), None):
        return f"output '{unknown}' is made by nothing"
    return None


def _twice(names):
    seen = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def checker_fault(path: str | Path) -> str | None:
    """What onnx's checker says of a file, None where it passes."""
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:  # its own, and protobuf's
        return " ".join(str(error).split())
    return None


# Numbers


def verify(original: str | Path, result: str | Path, inputs: Mapping[str, np.ndarray] | None = None) -> Verification:
    """Runs two files on the same inputs with onnxruntime's CPU provider; returns a Verification.

    inputs: {name: array}; None: made up, for a prompt and for a step with a past where the model has caches. The result may
    differ by SLACK times what `leanfleet check` allows. Raises Different where it differs by more, or fails where the
    original runs, and ValueError where the original does not run with the inputs given.
    """
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return Verification(reason="onnxruntime is not installed")
    if (size := _weight_bytes(original)) > LARGEST:
        return Verification(reason=f"the model has {size / 2**30:.1f} GiB of weights, more than {LARGEST / 2**30:.0f}")
    model = onnx.load(str(original), load_external_data=False)
    try:
        attempts = [[("the given inputs", inputs)]] if inputs is not None else trial.cases(model)
        expected = _results(original, attempts)
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        if inputs is not None:
            raise ValueError(f"the original does not run with the given inputs: {why}") from error
        return Verification(reason=f"onnxruntime does not run the original with made-up inputs: {why}")
    ours = max((model, onnx.load(str(result), load_external_data=False)), key=lambda m: len(list(trial.all_leanfleet_nodes(m))))
    try:
        session = _session(result)
        found = [trial.run_session(session, feed) for _, feed, _ in expected]
    except Exception as error:
        raise Different(f"the result fails where the original runs: {' '.join(str(error).split())[:300]}") from error
    runs, worst = tuple(what for what, _, _ in expected), (0.0, 0.0)
    for (what, _, judge), outputs in zip(expected, found, strict=True):
        allowed = trial.tolerances(ours, judge)
        for name, array in judge.items():
            difference, bound = _difference(outputs.get(name), array), SLACK * allowed[name]
            if not difference <= bound:
                raise Different(
                    f"with {what}, output {name} differs from the original's by {difference:.2g}; allowed is "
                    f"{bound:.2g}, for results up to {np.abs(array[np.isfinite(array)]).max(initial=0):.2g}"
                )
            worst = max(worst, (difference, bound))
    return Verification(runs, *worst)


def _difference(found, expected):
    """The largest difference; infinity where shapes, or the places of values that are no numbers, differ."""
    if found is None or found.shape != expected.shape:
        return np.inf
    if expected.dtype.kind != "f":
        return float((found != expected).any())
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return np.inf
    return float(np.abs(found[finite].astype(np.float64) - expected[finite]).max(initial=0.0))


def _results(path, attempts):
    """[(what, feed, outputs)] of those feeds that the original takes: all of the first attempt that has any.
    Raises what onnxruntime said last where it takes none."""
    session, failure = _session(path), None
    for feeds in attempts:
        taken = []
        for what, feed in feeds:
            try:
                taken.append((what, feed, trial.run_session(session, feed)))
            except Exception as error:  # sizes that the model does not take together
                failure = error
        if taken:
            return taken
    raise failure


def _session(path):
    """A session on the CPU; with leanfleet's kernels where the library is here, else function bodies run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    try:
        ort_library.register(options)
    except (FileNotFoundError, RuntimeError):
        pass
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _weight_bytes(path):
    """Bytes of a model's file and of its external weights."""
    path = Path(path)
    model = onnx.load(str(path), load_external_data=False)
    files = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    return path.stat().st_size + sum((path.parent / f).stat().st_size for f in files if (path.parent / f).is_file())
