"""Does a model with leanfleet nodes compute the same everywhere? Polygraphy runners and comparisons.

Needs polygraphy, onnx, onnxruntime and numpy; the reference runner and references also torch.
"""

import itertools
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnx import util as onnx_util
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.comparator import IterationResult, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from leanfleet import model_file, progress, spec, trial
from leanfleet.ort_library import kernels_in_profile
from leanfleet.tables import print_table
from leanfleet.trial import BFLOAT16, EPSILON, SIZES, TOLERANCE, attributes_of, leanfleet_nodes, make_inputs  # noqa: F401
from leanfleet.variants import run_reference


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

    Example:
        from polygraphy.comparator import Comparator
        from leanfleet.parity import SessionRunner

        runners = [SessionRunner("layer.onnx", library=False, name="body"), SessionRunner("layer.onnx", name="kernels")]
        print(bool(Comparator.compare_accuracy(Comparator.run(runners))))
    """

    def __init__(
        self, path: str | Path, provider: str = "CPUExecutionProvider", library: bool = True, name: str | None = None
    ) -> None:
        super().__init__(self._open, name=name)
        self.path, self.provider, self.library = str(path), provider, library
        self.kernels: Counter[tuple[str, str]] = Counter()

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

    def activate_impl(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        try:
            super().activate_impl()
        except BaseException:
            self._folder.cleanup()
            raise

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> OrderedDict[str, np.ndarray]:
        start = time.perf_counter()
        outputs = trial.run_session(self.sess, feed_dict)
        self.inference_time = time.perf_counter() - start
        return outputs

    def deactivate_impl(self) -> None:
        self.kernels = kernels_in_profile(self.sess.end_profiling())
        super().deactivate_impl()
        self._folder.cleanup()


class ReferenceRunner(BaseRunner):
    """Runs a model with onnx's reference evaluator, and leanfleet nodes with the PyTorch reference in float64.

    Example:
        import numpy as np
        from leanfleet.parity import ReferenceRunner

        with ReferenceRunner("layer.onnx") as runner:
            outputs = runner.infer({"hidden": np.zeros((1, 10, 64), np.float32)})
    """

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        super().__init__(name=name, prefix="leanfleet-reference")
        self.path = str(path)

    def activate_impl(self) -> None:
        from onnx.reference import ReferenceEvaluator
        from onnx.reference.op_run import OpRun

        def implementation(op):
            def run(self, *inputs, **attributes):
                return tuple(run_reference(op.name, attributes_of(self.onnx_node), inputs))

            return type(op.name, (OpRun,), {"op_domain": spec.DOMAIN, "_run": run})

        self.model = onnx.load(self.path)
        bodies = [f for f in self.model.functions if f.domain == spec.DOMAIN]
        for body in bodies:
            self.model.functions.remove(body)
        for part in (self.model.graph, *self.model.functions):
            _name_unread_outputs(part)
        self.evaluator = ReferenceEvaluator(self.model, new_ops=list(map(implementation, spec.all_specs().values())))

    def get_input_metadata_impl(self) -> Any:
        return onnx_util.get_input_metadata(self.model.graph)

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> OrderedDict[str, np.ndarray]:
        start = time.perf_counter()
        outputs = self.evaluator.run(None, dict(feed_dict))
        self.inference_time = time.perf_counter() - start
        return OrderedDict((o.name, _widened(array)) for o, array in zip(self.model.graph.output, outputs, strict=True))

    def deactivate_impl(self) -> None:
        del self.evaluator, self.model


def _name_unread_outputs(graph):
    """Gives outputs of a graph's or function's nodes that are left out a name. onnx's evaluator keeps values by name, and
    takes "" among later inputs, which stands for an absent one, for an output that had no name."""
    taken, numbers = {name for node in graph.node for name in node.output}, itertools.count()
    for node in graph.node:
        for i, name in enumerate(node.output):
            if not name:
                node.output[i] = next(n for n in map("unread_{}".format, numbers) if n not in taken)
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _name_unread_outputs(inner)


def register_references() -> dict[str, Any]:
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


def make_runner(kind: str, path: str | Path) -> BaseRunner:
    """A Polygraphy runner of one of RUNNERS. Raises ValueError for another name.

    Example:
        import numpy as np
        from leanfleet.parity import make_runner

        with make_runner("ort-cpu", "layer.onnx") as runner:
            outputs = runner.infer({"hidden": np.zeros((1, 10, 64), np.float32)})
        print(dict(runner.kernels))                         # {('NormalizedLinearAttention', 'CPUExecutionProvider'): 1}
    """
    if kind not in RUNNERS:
        raise ValueError(f"runner '{kind}' is unknown; choose from {', '.join(RUNNERS)}")
    if kind == "reference":
        return ReferenceRunner(path, name=kind)
    if kind == "trt":
        from leanfleet.trt_plugins.polygraphy_runner import TrtRunner

        return TrtRunner(path, name=kind)
    provider = "CUDAExecutionProvider" if kind == "ort-cuda" else "CPUExecutionProvider"
    return SessionRunner(path, provider, library=kind != "body", name=kind)


# Comparison


def check(
    path: str | Path,
    runners: Sequence[str] = ("body", "ort-cpu"),
    inputs: Mapping[str, np.ndarray] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Counter[tuple[str, str]]]]:
    """Runs a model with several runners and compares each with the first.

    inputs: dict of numpy arrays (bfloat16 ones may come as float32); default make_inputs(sizes, seed).
    rtol, atol: given either, an element passes within atol or within rtol of the judge's, in place of TOLERANCE.
    Returns a list of dicts (runner, judge, output, error: largest absolute difference, tolerance: absolute, passed),
    and {runner: Counter {(operator, provider): runs} of the leanfleet kernels that ran}.
    Raises ValueError for wrong arguments; EditedNodeError where a node was edited after its function body was made, whatever
    the runners; RuntimeError where a runner fails, or has leanfleet's kernels and did not run them on its provider.

    Example:
        from leanfleet.parity import check, print_check

        rows, kernels = check("layer.onnx", ("body", "ort-cpu"), sizes={"batch": 2, "tokens": 7})
        print_check(rows, kernels)
    """
    if len(runners) < 2 or len(set(runners)) < len(runners):
        raise ValueError(f"runners are {', '.join(runners) or 'none'}; expected two or more different ones")
    built = [make_runner(kind, path) for kind in runners]
    model = _load(path)
    _check_edits(model)
    if "body" in runners:
        _check_bodies(model)
    feed = make_inputs(model, sizes, seed) if inputs is None else _typed(model, inputs)
    results = []
    with progress.stage("running the model with") as stage:
        for number, runner in enumerate(built):
            stage.at(runner.name, number, len(built))
            results.append(_run(runner, model, feed))
    judge = results[0]
    if rtol is None and atol is None:
        tolerances = trial.tolerances(model, judge)
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
            rows.append(
                {
                    "runner": kind,
                    "judge": runners[0],
                    "output": name,
                    "error": error,
                    "tolerance": tolerances[name],
                    "passed": bool(verdict),
                }
            )
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
        raise ValueError(
            f"runner 'body': the model holds no function for its {', '.join(sorted(lacking))} nodes; "
            "export it with leanfleet.export, or leave this runner out"
        )


def _typed(model, inputs):
    """The inputs that the model takes, bfloat16 where it wants that."""
    initializers = {i.name for i in model.graph.initializer}
    wanted = {v.name: v.type.tensor_type.elem_type for v in model.graph.input if v.name not in initializers}
    if set(inputs) != set(wanted):
        raise ValueError(f"inputs are {', '.join(sorted(inputs)) or 'none'}; the model takes {', '.join(wanted)}")
    return OrderedDict(
        (name, np.asarray(inputs[name], BFLOAT16 if t == onnx.TensorProto.BFLOAT16 else None)) for name, t in wanted.items()
    )


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
            raise RuntimeError(
                f"runner '{runner.name}': the model has {', '.join(sorted(missing))} nodes, but no such "
                f"kernel of leanfleet's ran on {runner.provider}; these ran: {dict(runner.kernels)}"
            )
    return result


def print_check(rows: list[dict[str, Any]], kernels: dict[str, Counter[tuple[str, str]]]) -> None:
    """Prints what check returned."""
    table = [("runner", "output", "largest error", "tolerance", "")]
    table += [
        (r["runner"], r["output"], f"{r['error']:.2e}", f"{r['tolerance']:.2e}", "ok" if r["passed"] else "MISMATCH")
        for r in rows
    ]
    print(f"compared with {rows[0]['judge']}")
    print_table(table, right=(2, 3))
    print("kernels of leanfleet that ran")
    print_table(
        [
            (
                runner,
                ", ".join(f"{op} x{runs} ({provider})" for (op, provider), runs in sorted(counts.items()))
                or "none: the function bodies ran",
            )
            for runner, counts in kernels.items()
        ]
    )
