"""Parity: every operator in ONNX Runtime with kernels and without against the PyTorch reference, through Polygraphy."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points

import numpy as np
import onnx
import pytest
import torch
from polygraphy.backend.onnx import GsFromOnnx, OnnxFromPath
from polygraphy.backend.pluginref import PluginRefRunner
from polygraphy.comparator import Comparator, DataLoader, SimpleCompareFunc
from polygraphy.tools import main as polygraphy_main

from leanfleet import ort_ops, parity
from leanfleet.export import reference
from support import ort_models
from support.kernels import TORCH_DTYPES
from support.parity_models import OPS, VARIANTS, alter_body, chain_model, input_shapes, saved, variant_model

CASES = [pytest.param(name, i, id=f"{name}-{i}") for name, variants in VARIANTS.items() for i in range(len(variants))]
pytestmark = pytest.mark.usefixtures("one_torch_thread", "world_of_one")


# Comparisons


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name, index", CASES)
def test_same_everywhere(name, index, dtype, tmp_path, monkeypatch):
    """The reference, the function body and the CPU kernel agree; the kernel accepts the values of the inputs."""
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    path = saved(variant_model(name, index, dtype), tmp_path)
    rows, kernels = parity.check(path, ("reference", "body", "ort-cpu"))
    assert all(row["passed"] for row in rows), rows
    outputs = [t.name for t in OPS[name].active_outputs(VARIANTS[name][index][1])]
    assert [(row["runner"], row["output"]) for row in rows] == [(r, o) for r in ("body", "ort-cpu") for o in outputs]
    assert all(row["judge"] == "reference" for row in rows)
    assert kernels == {"body": {}, "ort-cpu": {(name, "CPUExecutionProvider"): 1}}


@pytest.mark.parametrize(
    "name, index, output",
    [
        pytest.param(name, 1, t.name, id=f"{name}-{t.name}")
        for name in VARIANTS
        for t in OPS[name].active_outputs(VARIANTS[name][1][1])
    ],
)
def test_wrong_body_is_found(name, index, output, tmp_path):
    path = saved(alter_body(variant_model(name, index), output), tmp_path)
    rows, _ = parity.check(path, ("reference", "body", "ort-cpu"))
    assert {(row["runner"], row["output"]) for row in rows if not row["passed"]} == {("body", output)}
    (wrong,) = (row for row in rows if not row["passed"])
    assert wrong["error"] > 10 * wrong["tolerance"]


def loss(name, index, dtype, compute, tokens, seed):
    """What the plain reference loses at worst when it computes in `compute`, in the units of TOLERANCE."""
    op, attrs = OPS[name], VARIANTS[name][index][1]
    shapes = input_shapes(name, index, {"B": 1, "N": tokens, "Nq": tokens, "D": 64, "R": 64, "Dv": 64, "S": 200})
    feed = parity.make_inputs(ort_models.node_model(op, shapes, attrs, dtype), seed=seed)
    tensors = {n: torch.from_numpy(a.astype(a.dtype if a.dtype.kind == "i" else np.float32)) for n, a in feed.items()}
    exact = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    tensors = {
        n: t.to(TORCH_DTYPES[dtype]) if op.input(n).type in "TC" and t.is_floating_point() else t for n, t in tensors.items()
    }
    function = getattr(reference, op.snake_name)
    worst = 0.0
    found_outputs, expected_outputs = function(**tensors, **attrs, compute_dtype=compute), function(**exact, **attrs)
    for found, expected in zip(found_outputs, expected_outputs, strict=True):
        finite = expected.isfinite()
        error = (found.double() - expected.double())[finite].abs().max() / expected[finite].abs().max()
        worst = max(worst, float(error) / parity.EPSILON[dtype])
    return worst


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("low, dtype", [(0, "float32"), (1, "bfloat16")])
def test_tolerance_is_two_to_eight_times_the_loss(name, low, dtype):
    """float16 is not measured: the reference's sums overflow in it."""
    worst = max(
        loss(name, index, dtype, TORCH_DTYPES[dtype], tokens, seed)
        for index in range(len(VARIANTS[name]))
        for tokens in (7, 130)
        for seed in range(2)
    )
    assert 2 * worst <= parity.TOLERANCE[name][low] <= 8 * worst, worst


def test_two_nodes_and_sizes(tmp_path):
    path = saved(chain_model(), tmp_path)
    rows, kernels = parity.check(path, ("body", "ort-cpu"), sizes={"batch": 3, "slots": 11})
    assert all(row["passed"] for row in rows) and kernels["ort-cpu"].total() == 2
    feed = parity.make_inputs(onnx.load(path), {"batch": 3, "slots": 11})
    between, output = (float(np.abs(ort_ops.make_session(path).run([n], feed)[0]).max()) for n in ("between", "output"))
    tolerance = {row["output"]: row["tolerance"] for row in rows}
    np.testing.assert_allclose(tolerance["between"], 16 * 2**-23 * between, rtol=1e-5)
    np.testing.assert_allclose(tolerance["output"], 2 * 32 * 2**-23 * output, rtol=1e-5)


def test_tolerances_of_the_caller(tmp_path):
    path = saved(alter_body(variant_model("LeanAttention", 0), "output"), tmp_path)  # a thousandth off
    for tolerances, passed in (
        ({}, False),
        ({"rtol": 2e-3}, True),
        ({"rtol": 5e-4}, False),
        ({"atol": 1.0}, True),
        ({"atol": 1e-9}, False),
        ({"atol": 1e-9, "rtol": 2e-3}, True),
    ):
        rows, _ = parity.check(path, ("ort-cpu", "body"), **tolerances)
        assert next(row for row in rows if row["output"] == "output")["passed"] == passed, tolerances
        assert all(row["tolerance"] == tolerances.get("atol", 0.0) for row in rows if tolerances)


def test_nan_and_shape_are_mismatches(tmp_path):
    inputs = parity.make_inputs(variant_model("LeanAttention", 0))
    model = alter_body(variant_model("LeanAttention", 0), "output")
    for node in model.functions[0].node:
        if node.output[0] == "factor":
            node.attribute[0].f = float("nan")
    rows, _ = parity.check(saved(model, tmp_path), ("ort-cpu", "body"), inputs=inputs)
    assert [row["passed"] for row in rows] == [False, True]
    model.functions[0].node[-1].op_type = "Concat"
    model.functions[0].node[-1].attribute.append(onnx.helper.make_attribute("axis", 0))
    model.functions[0].node[-1].input[1] = "output_right"
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    rows, _ = parity.check(saved(model, tmp_path), ("ort-cpu", "body"), inputs=inputs)
    assert [row["passed"] for row in rows] == [False, True] and np.isnan(rows[0]["error"])


def test_kernels_that_do_not_run_are_an_error(tmp_path, monkeypatch):
    """A runner that runs the function bodies where it should run kernels would agree with them and prove nothing."""
    import onnxruntime

    monkeypatch.setattr(
        ort_ops,
        "make_session",
        lambda path, providers, session_options: onnxruntime.InferenceSession(path, session_options, providers=providers),
    )
    path = saved(variant_model("LeanAttention", 0), tmp_path)
    with pytest.raises(RuntimeError, match="'ort-cpu': the model has LeanAttention nodes, but no such kernel"):
        parity.check(path)


def test_wrong_inputs_name_the_runner(tmp_path):
    path = saved(variant_model("LeanAttention", 0), tmp_path)
    inputs = parity.make_inputs(onnx.load(path))
    with pytest.raises(ValueError, match="inputs are query; the model takes query, key_cache, value_cache"):
        parity.check(path, inputs={"query": inputs["query"]})
    with pytest.raises(RuntimeError, match="runner 'body' failed: .*double"):
        parity.check(path, inputs=inputs | {"query": inputs["query"].astype(np.float64)})


def test_reference_through_polygraphys_own_loop(tmp_path):
    path = saved(variant_model("LeanAttention", 0), tmp_path)
    runners = [parity.ReferenceRunner(path), parity.SessionRunner(path)]
    results = Comparator.run(runners, data_loader=DataLoader(iterations=2, val_range=(-1, 1)))
    assert bool(Comparator.compare_accuracy(results))
    assert runners[1].kernels == {("LeanAttention", "CPUExecutionProvider"): 2}


def test_fused_decoder(tmp_path):
    """Its sums and norms leave outputs out in the middle, which onnx's reference evaluator takes for values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from leanfleet.export import export_decoder

    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=97,
            intermediate_size=96,
            max_position_embeddings=64,
        )
    )
    export_decoder(model, tmp_path)
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    assert any("" in n.output for n in nodes) and "SkipSimplifiedLayerNormalization" in {n.op_type for n in nodes}
    rows, kernels = parity.check(tmp_path / "model.onnx", ("reference", "body", "ort-cpu"))
    assert all(row["passed"] for row in rows), rows
    assert len(rows) == 2 * 5 and kernels["ort-cpu"] == {
        (op, "CPUExecutionProvider"): 2 for op in ("LeanAttention", "GatedActivation")
    }


def test_an_output_left_out_does_not_count_as_upstream(tmp_path):
    """The tolerance of what follows a node with such an output: a "" among its inputs is no dependence."""
    op = OPS["LeanAttention"]
    shapes = {"query": [1, 2, 3, 8], "key_cache": [1, 2, 5, 8], "value_cache": [1, 2, 5, 8]}
    nodes = [ort_models.make_node(op, shapes, {}, f"node_{i}", rename={"output": f"out_{i}", "lse": ""}) for i in range(2)]
    nodes.append(ort_models.make_node(op, {*shapes, "query_lens"}, {}, "node_2", rename={"output": "out_2", "lse": ""}))
    inputs = [(n, onnx.TensorProto.FLOAT, shape) for n, shape in shapes.items()] + [("query_lens", onnx.TensorProto.INT32, [1])]
    model = ort_models.make_model(nodes, inputs, [(f"out_{i}", onnx.TensorProto.FLOAT, None) for i in range(3)])
    assert "" in model.graph.node[2].input and "" in model.graph.node[0].output
    judge = {f"out_{i}": np.ones(3, np.float32) for i in range(3)}
    assert len(set(parity.trial.tolerances(model, judge).values())) == 1


# Inputs


def test_made_up_lengths_and_rows():
    for seed in range(20):
        feed = parity.make_inputs(variant_model("LeanAttention", 2), seed=seed)
        spans = np.diff(feed["cu_seqlens"])
        assert feed["cu_seqlens"][[0, -1]].tolist() == [0, 100] and (spans >= 0).all()
        assert (feed["seq_lens"] <= spans).all() and (feed["seq_lens"] >= np.minimum(spans, 7)).all()
        feed = parity.make_inputs(variant_model("LeanAttention", 3), seed=seed)
        assert sorted(set(feed["block_table"].ravel())) == sorted(feed["block_table"].ravel())
        assert (feed["block_table"] >= 0).all() and (feed["block_table"] < 16).all()
        assert (feed["query_lens"] >= 1).all() and (feed["query_lens"] <= 7).all()
        assert (feed["seq_lens"] >= feed["query_lens"]).all() and (feed["seq_lens"] <= 64).all()
        feed = parity.make_inputs(variant_model("CausalLinearDecay", 2), seed=seed)
        assert len(set(feed["state_index"])) == 2 and feed["state_index"].max() < 16
        assert (feed["log_decay"] <= 0).all() and (feed["key"] >= 0).all() and (feed["value"] < 0).any()
    assert not np.array_equal(feed["value"], parity.make_inputs(variant_model("CausalLinearDecay", 2), seed=0)["value"])


def test_sizes_of_open_dimensions():
    model = chain_model()
    shapes = {name: array.shape for name, array in parity.make_inputs(model, {"slots": 9, "tokens": 3}).items()}
    assert shapes == {
        "query": (2, 6, 3, 16),
        "key_cache": (2, 2, 9, 16),
        "value_cache": (2, 2, 9, 16),
        "seq_lens": (2,),
        "query_lens": (2,),
    }
    feed = parity.make_inputs(model, {"batch": 40})
    assert feed["query"].shape == (40, 6, 7, 16) and feed["key_cache"].shape == (40, 2, 64, 16)
    assert set(feed["query_lens"]) == set(range(1, 8)) and feed["seq_lens"].max() > 50
    with pytest.raises(ValueError, match="size length: no such open dimension .* which have batch, tokens, slots"):
        parity.make_inputs(model, {"length": 3})
    # A dimension that is another plus one, and dimensions without a name.
    shapes = {
        "query": ["b", 4, "n", 8],
        "key_cache": [2, "total", 8],
        "value_cache": [2, "total", None],
        "cu_seqlens": ["ends"],
    }
    feed = parity.make_inputs(ort_models.node_model(OPS["LeanAttention"], shapes), {"b": 5})
    assert feed["cu_seqlens"].shape == (6,) and feed["cu_seqlens"][-1] == 64
    assert feed["value_cache"].shape == (2, 64, 16)


def test_token_ids_lie_in_their_table():
    table = onnx.numpy_helper.from_array(np.zeros((5, 4), np.float32), "table")
    gather = onnx.helper.make_node("Gather", ["table", "ids"], ["rows"])
    shapes = {"query": [2, 2, 3, 8], "key_cache": [2, 2, 9, 8], "value_cache": [2, 2, 9, 8]}
    node = ort_models.make_node(OPS["LeanAttention"], shapes)
    model = ort_models.make_model(
        [gather, node],
        [("ids", onnx.TensorProto.INT64, ["batch", "tokens"])] + [(n, onnx.TensorProto.FLOAT, s) for n, s in shapes.items()],
        [("rows", onnx.TensorProto.FLOAT, None)],
        [table],
    )
    ids = parity.make_inputs(model, {"tokens": 50})["ids"]
    assert ids.shape == (2, 50) and ids.dtype == np.int64 and set(ids.ravel()) == set(range(5))


# polygraphy run


@pytest.fixture
def polygraphy(capfd, monkeypatch):
    """Runs its command in this process: (exit code, what it wrote)."""

    def run(*arguments, **environment):
        capfd.readouterr()
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            code = polygraphy_main(["run", *map(str, arguments)])
        return code, "".join(capfd.readouterr())

    return run


@pytest.mark.slow
def test_polygraphy_run(polygraphy, tmp_path):
    """The body is wrong: only the kernel agrees with the reference. The script of --gen-script does the same."""
    path, script = saved(alter_body(variant_model("LeanAttention", 0), "output"), tmp_path), tmp_path / "script.py"
    code = "import sys; from polygraphy.tools import main; sys.exit(main())"
    command = [
        sys.executable,
        "-P",
        "-c",
        code,
        "run",
        str(path),
        "--onnxrt",
        "--pluginref",
    ]  # a process of its own, as users have
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and "PASSED" in result.stdout, result.stdout + result.stderr
    code, output = polygraphy(path, "--onnxrt", "--pluginref", "--no-leanfleet")
    assert code == 1 and "Mismatched outputs: ['output']" in output, output
    assert polygraphy(path, "--onnxrt", "--pluginref", "--gen-script", script)[0] == 0
    assert "with_kernels(" in script.read_text()
    result = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert result.returncode == 0 and "Pass Rate: 100" in result.stdout, result.stdout + result.stderr


def test_polygraphy_run_without_the_library(polygraphy, tmp_path):
    path = saved(variant_model("LeanAttention", 0), tmp_path)
    code, output = polygraphy(path, "--onnxrt", LEANFLEET_LIBRARY_DIR=str(tmp_path))
    assert code == 1 and "libleanfleet_ort.so does not exist" in output and "Traceback" not in output, output
    foreign = ort_models.make_model(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        [("x", onnx.TensorProto.FLOAT, [3])],
        [("y", onnx.TensorProto.FLOAT, [3])],
    )
    foreign.opset_import.pop()
    code, output = polygraphy(saved(foreign, tmp_path, "foreign.onnx"), "--onnxrt", LEANFLEET_LIBRARY_DIR=str(tmp_path))
    assert code == 0, output


def test_polygraphy_run_makes_inputs_that_fit(polygraphy, tmp_path):
    """A model without a body, which only the kernel can run and which refuses positive decays; a range of the user's stands."""
    shapes = input_shapes("CausalLinearDecay", 0)
    path = saved(ort_models.node_model(OPS["CausalLinearDecay"], shapes, {"return_state": 1}), tmp_path)
    for ranges in ([], ["--val-range", "[-1,1]"], ["--val-range", "log_decay:[-1,0]"], ["--iterations", "2", "--seed", "5"]):
        code, output = polygraphy(path, "--onnxrt", "--pluginref", "--rtol", "1e-4", "--atol", "1e-4", *ranges)
        assert code == 0, output
    with pytest.raises(Exception, match="CausalLinearDecay.*log_decay"):  # as onnxruntime says it
        polygraphy(path, "--onnxrt", "--val-range", "log_decay:[0.5,1]")


@pytest.mark.slow
def test_polygraphy_run_with_lengths(polygraphy, tmp_path):
    """Lengths of 0 and 1, which random integers would be, are wrong for several queries: LEANFLEET_CHECK reports them."""
    path, script = saved(variant_model("LeanAttention", 3), tmp_path), tmp_path / "script.py"
    code, output = polygraphy(path, "--onnxrt", LEANFLEET_CHECK="1")
    assert code == 0, output
    chain = saved(chain_model(), tmp_path, "chain.onnx")
    code, output = polygraphy(
        chain,
        "--onnxrt",
        "--input-shapes",
        "query:[3,6,4,16]",
        "key_cache:[3,2,9,16]",
        "value_cache:[3,2,9,16]",
        "seq_lens:[3]",
        "query_lens:[3]",
        "--gen-script",
        script,
        LEANFLEET_CHECK="1",
    )
    assert code == 0 and "FittingDataLoader(" in script.read_text(), output
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env={**os.environ, "LEANFLEET_CHECK": "1"}
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # infinities of lse, in Polygraphy
@pytest.mark.parametrize("name, index", CASES)
def test_plugin_references(name, index, tmp_path):
    shapes, attrs = input_shapes(name, index), VARIANTS[name][index][1]
    path = saved(ort_models.node_model(OPS[name], shapes, attrs), tmp_path)
    assert set(OPS) <= set(parity.register_references())
    runners = [parity.SessionRunner(path), PluginRefRunner(GsFromOnnx(OnnxFromPath(str(path))))]
    results = Comparator.run(runners, data_loader=[parity.make_inputs(onnx.load(path))])
    compare = SimpleCompareFunc(atol=1e-3, rtol=1e-4, infinities_compare_equal=True)
    assert bool(Comparator.compare_accuracy(results, compare_func=compare))


def test_entry_point_is_installed():
    project = tomllib.loads((ort_models.ROOT / "pyproject.toml").read_text())["project"]
    installed = {e.name: e.value for e in entry_points(group="polygraphy.run.plugins")}
    assert installed["leanfleet"] == project["entry-points"]["polygraphy.run.plugins"]["leanfleet"]
