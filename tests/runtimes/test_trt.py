"""Engines with leanfleet's plugins, built by TensorRT on a machine that needs no GPU."""

import copy
import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from leanfleet import cli, spec, trt_plugins
from leanfleet.ort_ops import make_session
from support.cpu_time import rest_slow, slow_if
from support.decoders import hybrid
from support.ort_models import make_model, make_node, node_model
from support.trt_cases import input_shapes, layouts_of, profiles, quantised_forms, scaled_variants, variants

try:
    TRT = trt_plugins.runtime()
    trt_plugins.get_plugin_path()
except (ImportError, FileNotFoundError) as error:
    pytest.skip(str(error), allow_module_level=True)

GPUS = ["8.0", "8.9", "12.0"] if TRT.__name__ == "tensorrt_rtx" else []
SPECS = spec.all_specs()


def build(op, ranks, attrs, dtype, forms=None, **options):
    shapes = input_shapes(op, ranks, attrs, "open")
    names = {d for shape in shapes.values() for d in shape if isinstance(d, str)}
    entries = [{name: sizes for name, sizes in entry.items() if name in names} for entry in profiles(op)]
    model = node_model(op, shapes, attrs, dtype, forms=forms)
    gpus = GPUS[1:] if "float8e4m3fn" in (forms or {}).values() else GPUS  # those before 8.9 have no such type
    return trt_plugins.build_engine(model, entries, compute_capabilities=gpus, **options)


def has_cuda_kernel(op):
    """Whether this build has a CUDA kernel of an operator: without, its creator refuses every node and says so."""
    try:
        build(op, *next(variants(op)), "float32")
    except RuntimeError as error:
        if f"{op.name} 'node': there is no CUDA kernel of it yet" in str(error):
            return False
        raise
    return True


PLAIN = {"query": None, "key_cache": None, "value_cache": None}


@pytest.mark.parametrize("op", SPECS.values(), ids=lambda op: op.name)
def test_some_variants_build(op):
    """With the fewest optional inputs and outputs, and with the most."""
    cases = sorted(variants(op), key=lambda case: len(case[0]))
    assert_builds(op, "float16", {0: cases[0], 1: cases[-1]})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", spec.TYPES["T"])
@pytest.mark.parametrize("op", SPECS.values(), ids=lambda op: op.name)
def test_every_variant_builds(op, dtype):
    """Every combination of optional inputs and outputs, every type."""
    cases = list(variants(op))
    assert len(cases) > any(t.optional for t in op.inputs)  # more than one where something can be left out
    assert_builds(op, dtype, dict(enumerate(cases)))


@pytest.mark.parametrize("count", [pytest.param(None, marks=pytest.mark.slow, id="all"), pytest.param(4, id="some")])
def test_quantised_caches_build(count):
    """Caches of int8 and float8 with scales of every kind."""
    op = SPECS["LeanAttention"]
    cases = sorted(scaled_variants(op), key=lambda case: len(case[0]))
    cases = [*enumerate(cases if count is None else cases[:: len(cases) // (count - 1)][:count])]
    for first, dtype in enumerate(spec.TYPES["T"]):
        assert_builds(op, dtype, dict(cases[first :: len(spec.TYPES["T"])]), quantised=True)


def assert_builds(op, dtype, cases, quantised=False):
    """Of open sizes, with two profiles, for three kinds of GPU; a case's number chooses its layout, and with `quantised` the
    types of its caches."""
    if not has_cuda_kernel(op):
        return
    for number, (ranks, attrs) in cases.items():
        layouts = layouts_of(op, ("bhnd", "bnhd"))
        layout = layouts[number % len(layouts)]
        attrs = attrs | layout
        built = build(op, ranks, attrs, dtype, quantised_forms(ranks, number) if quantised else None)
        assert built.layers == [("node", op.name)], (ranks, attrs)
        # An engine can be loaded on a GPU alone. What the plugin wrote into it shows that its layer is there.
        written = [
            op.name,
            *layout.values(),
            ",".join(t.name for t in op.inputs if t.name in ranks),
            ",".join(t.name for t in op.active_outputs(attrs)),
        ]
        missing = [text for text in written if built.engine.count(text.encode() + b"\0") < 2]  # once a profile
        assert not missing, (ranks, attrs)


def test_open_numbers_of_packed_heads():
    """The query's heads are those of the packed tensor less the keys' and values', also where neither is known."""
    ranks, attrs = PLAIN | {"seq_lens": None}, {"append": 1, "packed_qkv": 1}
    op = SPECS["LeanAttention"]
    shapes = input_shapes(op, ranks, attrs, 1)
    shapes["query"][1] = "all_heads"
    for kv_heads, profile in ((2, {"all_heads": (5, 10, 18)}), ("kv_heads", {"all_heads": (3, 10, 18), "kv_heads": (1, 2, 3)})):
        shapes["key_cache"][1] = shapes["value_cache"][1] = kv_heads
        built = trt_plugins.build_engine(node_model(op, shapes, attrs, "float16"), [profile], compute_capabilities=GPUS)
        assert built.layers == [("node", "LeanAttention")]
    shapes = input_shapes(op, ranks | {"sinks": None}, attrs, 1)  # sinks tell the query's heads, these the caches'
    shapes["key_cache"][1] = shapes["value_cache"][1] = "kv_heads"
    built = trt_plugins.build_engine(
        node_model(op, shapes, attrs, "float16"), [{"kv_heads": (2, 2, 2)}], compute_capabilities=GPUS
    )
    assert built.layers == [("node", "LeanAttention")]


def refusal(op, ranks, attrs=None, dtype="float32", change=None, **options):
    """What a build of a node says that must fail; change: edits the model first."""
    shapes = input_shapes(SPECS[op], ranks, attrs or {}, 1)
    model = node_model(SPECS[op], shapes, attrs, dtype)
    if change:
        change(model)
    with pytest.raises(RuntimeError) as error:
        trt_plugins.build_engine(model, compute_capabilities=GPUS, **options)
    return str(error.value)


def set_shape(name, *sizes):
    def change(model):
        value = next(v for v in model.graph.input if v.name == name)
        value.type.CopyFrom(helper.make_tensor_type_proto(value.type.tensor_type.elem_type, sizes))

    return change


def set_types(**codes):
    def change(model):
        for value in model.graph.input:
            value.type.tensor_type.elem_type = codes.get(value.name, value.type.tensor_type.elem_type)

    return change


def set_type(name, code):
    return set_types(**{name: code})


@pytest.mark.parametrize(
    "attrs, ranks, change, message",
    [
        ({"layout": "nhbd"}, PLAIN, None, "attribute layout is 'nhbd'; expected one of bhnd, bnhd"),
        ({"window": 0}, PLAIN, None, "attribute window is 0; expected 1 or more, or -1 for off"),
        ({"scale": 2}, PLAIN, None, "attribute scale is an integer; expected a float"),
        ({"causal": 7}, PLAIN, None, "attribute causal is 7; expected 0 or 1"),
        ({"causal": [1, 0]}, PLAIN, None, "attribute causal is a list; expected a single value"),
        ({"softcap": -1.0}, PLAIN, None, "attribute softcap is -1; expected 0 or more"),
        ({"append": 1}, PLAIN, None, "append = 1 needs input new_key, which is missing"),
        ({}, PLAIN, set_shape("query", 3, 6, 32), "query has shape [3,6,32], rank 3; expected [B,H,Nq,D]"),
        (
            {},
            PLAIN,
            set_shape("key_cache", 3, 2, "S", 16),
            "key_cache has shape [3,2,130,16]: axis 3 of [B,Hkv,S,D] is 16; expected 32, because query gives D = 32",
        ),
        ({}, PLAIN, set_shape("query", 3, 7, 5, 32), "H = 7 is not a multiple of Hkv = 2"),
        (
            {},
            PLAIN,
            set_type("key_cache", TensorProto.FLOAT16),
            "key_cache has type float16; expected float32, the type of query, or int8",
        ),
        ({}, PLAIN, set_type("key_cache", TensorProto.INT8), "key_cache is int8 and key_scale is missing; give the scales"),
        (
            {},
            PLAIN,
            set_type("value_cache", TensorProto.UINT8),
            "value_cache is uint8, which ONNX Runtime's layers take and TensorRT's plugins cannot; give it int8 or",
        ),
        (
            {},
            PLAIN | {"key_scale": 3, "value_scale": 3},
            set_types(key_cache=TensorProto.INT8, value_cache=TensorProto.FLOAT8E4M3FN),
            "key_cache is int8 and value_cache float8e4m3fn; a TensorRT engine has one of the two: give both caches the same type",
        ),
        ({}, PLAIN | {"seq_lens": None}, set_type("seq_lens", TensorProto.INT64), "seq_lens has type int64; expected int32"),
        ({}, PLAIN | {"sinks": None}, set_type("sinks", TensorProto.FLOAT16), "sinks has type float16; expected float32"),
    ],
)
def test_refusals_name_the_argument(attrs, ranks, change, message):
    assert f"LeanAttention 'node': {message}" in refusal("LeanAttention", ranks, attrs, change=change)


def test_the_reference_s_algorithms_are_refused():
    ranks = {name: None for name in ("query", "key", "value")}
    assert "which only the PyTorch reference has" in refusal("CausalLinearDecay", ranks, {"algorithm": "vanilla"})


def test_what_cuda_kernels_do_not_take_is_refused():
    """D = 300 is for the CPU kernels alone."""
    shapes = input_shapes(SPECS["LeanAttention"], PLAIN, {}, 1)
    model = node_model(SPECS["LeanAttention"], {name: shape[:-1] + [300] for name, shape in shapes.items()})
    with pytest.raises(RuntimeError, match="LeanAttention 'node': D = 300; the CUDA kernels take"):
        trt_plugins.build_engine(model, compute_capabilities=GPUS)


def test_the_plugin_is_taken_over_the_function_body(tmp_path):
    """The same file that runs without leanfleet becomes an engine of plugin layers."""
    from leanfleet.export import export, lean_attention

    class Attention(torch.nn.Module):
        def forward(self, query, key, value, seq_lens):
            return lean_attention(query, key, value, seq_lens)[0]

    batch, slots = torch.export.Dim("batch"), torch.export.Dim("slots")
    export(
        Attention().eval(),
        (torch.randn(2, 4, 3, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16), torch.tensor([9, 4]).int()),
        tmp_path / "model.onnx",
        input_names=["query", "key", "value", "lens"],
        output_names=["output"],
        dynamic_shapes=({0: batch}, {0: batch, 2: slots}, {0: batch, 2: slots}, {0: batch}),
    )
    model = onnx.load(tmp_path / "model.onnx")
    assert model.functions
    built = trt_plugins.build_engine(
        tmp_path / "model.onnx", {"batch": (1, 2, 4), "slots": (1, 64, 1024)}, tmp_path / "engine", compute_capabilities=GPUS
    )
    assert [op for _, op in built.layers] == ["LeanAttention"]
    assert (tmp_path / "engine").read_bytes() == built.engine
    assert onnx.load(tmp_path / "model.onnx") == model, "the file is not changed"


def test_prepared_models_are_for_tensorrt_alone(tmp_path):
    """Gaps between inputs and outputs go; preparing again changes nothing; ONNX Runtime refuses the result."""
    op = SPECS["LeanAttention"]
    attrs = {"append": 1}
    shapes = input_shapes(op, PLAIN | {"query_lens": None, "new_key": None, "new_value": None}, attrs, "open")
    model = node_model(op, shapes, attrs, outputs=["output", "", "", "value_cache_out"])
    once = trt_plugins.prepare(copy.deepcopy(model))
    node = once.graph.node[0]
    assert list(node.input) == list(shapes) and list(node.output) == ["output", "value_cache_out"]
    assert trt_plugins.prepare(copy.deepcopy(once)) == once
    onnx.save(model, tmp_path / "model.onnx")
    assert onnx.load(trt_plugins.prepare_file(tmp_path / "model.onnx", tmp_path / "prepared.onnx")) == once
    with pytest.raises(Exception, match="leanfleet.trt"):
        make_session(once)
    entries = [{name: sizes for name, sizes in profiles(op)[0].items() if name in ("B", "Nq", "S")}]
    assert trt_plugins.build_engine(once, entries, compute_capabilities=GPUS).layers == [("node", "LeanAttention")]


def test_nodes_in_branches_are_prepared():
    """Subgraphs too."""
    op = SPECS["LeanAttention"]
    shapes = input_shapes(op, PLAIN, {}, 1)
    inner = make_node(op, shapes, outputs=["output"])
    branch = helper.make_graph([inner], "branch", [], [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)])
    node = helper.make_node("If", ["flag"], ["result"], then_branch=branch, else_branch=copy.deepcopy(branch))
    model = make_model(
        [node],
        [(n, TensorProto.FLOAT, s) for n, s in shapes.items()] + [("flag", TensorProto.BOOL, [])],
        [("result", TensorProto.FLOAT, None)],
    )
    prepared = trt_plugins.prepare(model)
    for attribute in prepared.graph.node[0].attribute:
        found = {a.name: a.s.decode() for a in attribute.g.node[0].attribute}
        assert found["connected_inputs"] == "query,key_cache,value_cache" and found["connected_outputs"] == "output"


def test_profiles_and_other_arguments():
    op = SPECS["LeanAttention"]
    model = node_model(op, input_shapes(op, PLAIN, {}, "open"))
    good = {"B": (1, 2, 3), "Nq": (1, 1, 1), "S": (8, 8, 8)}
    by_shape = {"query": ((1, 6, 1, 32), (2, 6, 1, 32), (3, 6, 1, 32))}
    for entries, message in (
        (None, "the model has open dimensions \\(B, Nq, S\\) and needs profiles"),
        ({"batch": (1, 2, 3)}, "profile batch: no such open dimension or input"),
        ({"B": (1, 2, 3), "Nq": (1, 1, 1)}, "leaves out the open dimension S"),
        (by_shape, "leaves out the open dimension B, S"),
        (good | {"B": (3, 2, 1)}, "must not fall from the smallest to the largest"),
    ):
        with pytest.raises(ValueError, match=message):
            trt_plugins.build_engine(model, entries, compute_capabilities=GPUS)
    assert trt_plugins.build_engine(model, good | by_shape, compute_capabilities=GPUS).layers
    with pytest.raises(ValueError, match="runtime is 'onnx'; it is one of tensorrt, tensorrt_rtx"):
        trt_plugins.runtime("onnx")
    with pytest.raises(FileNotFoundError, match="nothing.onnx does not exist"):
        trt_plugins.build_engine("nothing.onnx")
    if GPUS:
        with pytest.raises(ValueError, match="compute capability 1.0 is unknown"):
            trt_plugins.build_engine(model, good, compute_capabilities=["1.0"])


def test_progress_and_stopping():
    op = SPECS["LeanAttention"]
    model = node_model(op, input_shapes(op, PLAIN, {}, 1))
    seen = []
    trt_plugins.build_engine(model, compute_capabilities=GPUS, progress=lambda *told: seen.append(told))
    assert any(step == steps > 0 for _, step, steps in seen)
    with pytest.raises(RuntimeError, match="cannot build the engine"):
        trt_plugins.build_engine(model, compute_capabilities=GPUS, progress=lambda *told: False)
    with pytest.raises(RuntimeError, match="cannot build the engine"):
        trt_plugins.build_engine(model, compute_capabilities=GPUS, progress=lambda *told: 1 / 0)


def test_engines_that_cannot_be_loaded(tmp_path):
    op = SPECS["LeanAttention"]
    engine = trt_plugins.build_engine(node_model(op, input_shapes(op, PLAIN, {}, 1)), compute_capabilities=GPUS).engine
    for damaged in (engine[: len(engine) // 2], b"not an engine", b""):
        with pytest.raises(RuntimeError, match="cannot load the engine"):  # without a GPU for want of one
            trt_plugins.deserialize(damaged)
    with pytest.raises(FileNotFoundError, match="leanfleet engine build"):
        trt_plugins.deserialize(tmp_path / "missing")


def test_loading_again_changes_nothing():
    before = len(TRT.get_plugin_registry().all_creators)
    assert trt_plugins.load() is TRT
    creators = TRT.get_plugin_registry().all_creators
    assert len(creators) == before
    ours = {c.name: c for c in creators if c.plugin_namespace == "leanfleet"}
    assert set(ours) == set(SPECS) and all(c.plugin_version == "1" for c in ours.values())


def test_importing_needs_no_tensorrt():
    code = "import sys, leanfleet.trt_plugins; assert not {'tensorrt', 'tensorrt_rtx', 'onnx', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize("kind", rest_slow(["llama", "normalized", "minimax", "llama, int8", "llama, fp8 found before"]))
def test_decoders_build(kind, tmp_path):
    """Whole exported models, prompts and steps; every attention layer is a plugin's."""
    import transformers

    from leanfleet.export import calibrate, export_decoder
    from leanfleet.export.linear_attention import register_transformers
    from leanfleet.trt_plugins import running

    sizes = dict(
        vocab_size=96,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    if kind.startswith("llama"):
        config, expected = transformers.LlamaConfig(**sizes), ["LeanAttention", "GatedActivation"] * 2
    elif kind == "normalized":
        config = transformers.LlamaConfig(**sizes, leanfleet_linear_layers=[0])
        expected = ["NormalizedLinearAttention", "GatedActivation", "LeanAttention", "GatedActivation"]
    else:
        config = transformers.MiniMaxConfig(
            **sizes,
            num_local_experts=2,
            num_experts_per_tok=1,
            block_size=4,
            layer_types=["linear_attention", "full_attention"],
        )
        expected = ["CausalLinearDecay", "RmsNorm", "LeanAttention"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if kind == "normalized":
        model.set_attn_implementation(register_transformers())
    options = {}
    if kind.endswith("int8"):
        options = dict(cache="int8")
    if "found" in kind:
        options = dict(cache=calibrate(model, torch.randint(0, 96, (1, 40)).tolist(), "fp8"))
    export_decoder(model, tmp_path, **options)
    built = trt_plugins.build_engine(
        tmp_path / "model.onnx",
        running.decoder_profiles(capacity=(16, 256, 256), tokens=(1, 16, 64)),
        compute_capabilities=GPUS,
    )
    assert [op for _, op in built.layers] == expected


GATED = ["GatedActivation"]
HYBRIDS = {  # gates of recurrent layers and attention, and of feed-forward layers or shared experts
    "qwen3-next": [
        *(delta := ["CausalConv", "DecayGates", "GatedDeltaRule", "RmsNorm", *GATED]),
        *["RmsNorm", "RmsNorm", "LeanAttention", *GATED, *GATED],
        *delta,
    ],
    "bamba": ["CausalConv", "DecayGates", "CausalLinearDecay", *GATED, *GATED, "LeanAttention", *GATED],
    "mamba2": ["CausalConv", "DecayGates", "CausalLinearDecay", *GATED] * 2,
}


@pytest.mark.parametrize("name", slow_if(HYBRIDS, ["qwen3-next", "bamba", "mamba2"]))
def test_hybrids_build(name, tmp_path):
    """Gated delta rules beside experts, Mamba-2 beside attention, and states alone: a decoder without caches."""
    from leanfleet.export import export_decoder
    from leanfleet.trt_plugins import running

    torch.manual_seed(0)
    export_decoder(hybrid(name), tmp_path)
    states = "LeanAttention" not in HYBRIDS[name]
    profiles = running.decoder_profiles((1, 1, 4), (1, 16, 64), None if states else (16, 128, 128))
    gpus = GPUS[1:2]
    built = trt_plugins.build_engine(tmp_path / "model.onnx", profiles, compute_capabilities=gpus)
    assert [op for _, op in built.layers] == HYBRIDS[name] and len(built.engine) > 10_000
    if states:
        with pytest.raises(ValueError, match="profile capacity: no such open dimension"):
            trt_plugins.build_engine(tmp_path / "model.onnx", running.decoder_profiles(), compute_capabilities=gpus)


def test_command_line(tmp_path, capsys):
    op = SPECS["LeanAttention"]
    model, engine = str(tmp_path / "model.onnx"), str(tmp_path / "engine")
    onnx.save(node_model(op, input_shapes(op, PLAIN, {}, "open")), model)
    gpus = [word for gpu in GPUS for word in ("--compute-capability", gpu)]
    assert cli.main(["engine", "build", model, engine, "--profile", "B=1:2:4,Nq=1:1:8,S=64:64:128", *gpus, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layers"] == [{"name": "node", "operator": "LeanAttention"}]
    assert facts["bytes"] == (tmp_path / "engine").stat().st_size > 0
    assert cli.main(["engine", "prepare", model, str(tmp_path / "prepared.onnx")]) == 0
    assert trt_plugins.get_plugin_path() in capsys.readouterr().out
    assert cli.main(["engine", "build", model, engine, *gpus]) == 2
    assert "needs profiles" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["engine", "build", model, engine, "--profile", "B=1"])
    assert "'B=1' is not NAME=MIN:OPT:MAX" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["engine", "inspect"], ["engine", "run"], ["check", "--runners", "ort-cpu,trt"]])
def test_commands_that_need_a_gpu(command, tmp_path, capsys):
    """With a GPU that TensorRT serves they work; anywhere else they say why not, in one line."""
    op = SPECS["LeanAttention"]
    model = node_model(op, input_shapes(op, PLAIN, {}, 1))
    path = tmp_path / "file"
    if command[0] == "check":
        onnx.save(model, path)
    else:
        path.write_bytes(trt_plugins.build_engine(model, compute_capabilities=GPUS).engine)
    code = cli.main([command[0], *command[1:], str(path)] if command[0] == "check" else [*command, str(path)])
    said = capsys.readouterr()
    if torch.cuda.is_available() and code == 0:
        assert "LeanAttention" in said.out or command[1] == "run"
    else:
        assert code == 2 and len(said.err.splitlines()) == 1 and "cudaError" not in said.err
        assert ("cannot load the engine" if torch.cuda.is_available() else "there is no NVIDIA driver here") in said.err


@pytest.mark.parametrize(
    "field, message",
    (
        ("winodw", "LeanAttention 'layers.3': there is no attribute winodw; it has scale, causal, window"),
        ("window", None),
        ("plugin_version", None),
    ),
)
def test_fields_that_are_no_attributes_are_refused(field, message, capfd):
    """Those that a program gives a creator itself: TensorRT's parser hands over none that the creator does not list. The
    message goes to TensorRT's logger, or to stderr where no call of TensorRT's has noted one."""
    trt_plugins.load(TRT)
    logger = trt_plugins.make_logger(TRT)
    logger.errors = []
    creator = TRT.get_plugin_registry().get_creator("LeanAttention", "1", trt_plugins.NAMESPACE)
    value = np.array([4], np.int32)
    fields = TRT.PluginFieldCollection([TRT.PluginField(field, value, TRT.PluginFieldType.INT32)])
    plugin = creator.create_plugin("layers.3", fields, TRT.TensorRTPhase.BUILD)
    said = "\n".join([*logger.errors, capfd.readouterr().err])
    assert (plugin is None) == (message is not None)
    assert not message or message in said, said
