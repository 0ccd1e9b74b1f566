"""The rewrites of an exported decoder's graph compute what they replace, and reach the kernels that they are for."""

import copy
import itertools
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from transformers import LlamaConfig, LlamaForCausalLM

from leanfleet import export as lf
from leanfleet.export import causal_conv, causal_linear_decay, decay_gates, export, export_decoder, fusions
from leanfleet.export import gated_delta_rule, lean_attention
from leanfleet.export.linear_attention import rotary
from leanfleet.ort_ops import make_session
from leanfleet.trt_plugins import prepare
from support.cpu_time import rest_slow
from support.splits import sizes_of, splits_by_tables

HEADS, KV_HEADS, SIZE, HIDDEN = 6, 2, 8, 40


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), -1)


class Layer(torch.nn.Module):
    """RMS norm, projections, rotary encoding as transformers writes it, LeanAttention. x [B,N,40]; caches [B,2,S,8].

    norm_heads: a norm of each head between projection and rotary. equal_halves: cos and sin of concatenated angles, as all
    of transformers' rotary encodings; else of angles that differ in their halves. turned: columns that turn. first: what is
    added to positions; "longest": the longest request's length; "table": positions come out of a table of 24 rows. bias: of
    queries, keys and values.
    """

    def __init__(self, norm_heads=False, equal_halves=True, turned=SIZE, first=0, bias=False):
        super().__init__()
        self.norm_heads, self.equal_halves, self.turned, self.first = norm_heads, equal_halves, turned, first
        self.query, self.key, self.value = (torch.nn.Linear(HIDDEN, h * SIZE, bias=bias) for h in (HEADS, KV_HEADS, KV_HEADS))
        self.out = torch.nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.weight = torch.nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.register_buffer("rows", torch.arange(24))
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(turned // 2) / (turned // 2)))

    def rms(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def turn(self, x, cos, sin):
        x, rest = x[..., : self.turned], x[..., self.turned :]
        x = x * cos + rotate_half(x) * sin
        return x if self.turned == SIZE else torch.cat((x, rest), -1)

    def forward(self, x, key_cache, value_cache, seq_lens, query_lens=None):
        counts = x.shape[1] if query_lens is None else query_lens
        positions = (seq_lens - counts).unsqueeze(1) + torch.arange(x.shape[1])
        if self.first == "table":
            positions = self.rows[positions]
        else:
            positions = positions + (seq_lens.max() if self.first == "longest" else self.first)
        angles = positions.unsqueeze(-1).float() * self.frequencies
        angles = torch.cat((angles, angles if self.equal_halves else 2 * angles), -1)
        cos, sin = (1.5 * angles.cos()).unsqueeze(1), (1.5 * angles.sin()).unsqueeze(1)
        normed = self.weight * self.rms(x)
        q, k, v = (p(normed).view(*x.shape[:2], -1, SIZE) for p in (self.query, self.key, self.value))
        if self.norm_heads:
            q, k = self.rms(q), self.rms(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        out, _, keys, values = lean_attention(
            q, key_cache, value_cache, seq_lens, query_lens=query_lens, new_key=k, new_value=v, append=True
        )
        return x + self.out(out.transpose(1, 2).reshape(*x.shape[:2], -1)), keys, values


def inputs(ragged=False):
    torch.manual_seed(2)
    plain = torch.randn(3, 5, HIDDEN), *torch.randn(2, 3, KV_HEADS, 20, SIZE), torch.tensor([5, 9, 20], dtype=torch.int32)
    return (*plain, torch.tensor([5, 1, 3], dtype=torch.int32)) if ragged else plain


def exported(module, ragged=False):
    """ragged: the module takes query_lens too."""
    warnings.filterwarnings("ignore")
    batch, tokens, slots = (torch.export.Dim(n) for n in ("batch", "tokens", "slots"))
    shapes = {0: batch, 1: tokens}, {0: batch, 2: slots}, {0: batch, 2: slots}, {0: batch}, {0: batch}
    return export(module, inputs(ragged), dynamic_shapes=shapes[: 5 if ragged else 4]).model


def kinds(model):
    return [n.op_type for n in model.graph]


def renamed(model, name="RotaryEmbedding"):
    """The model with its nodes of an operator under a name that no runtime knows, so that their function runs."""
    proto = ir.to_proto(model)
    for node in proto.graph.node:
        node.op_type = "Unknown" if node.op_type == name else node.op_type
    for function in proto.functions:
        function.name = "Unknown" if function.name == name else function.name
    return proto


def results(model, library=True, ragged=False, values=None):
    model = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
    onnx.checker.check_model(model)
    session = (
        make_session(model, ["CPUExecutionProvider"])
        if library
        else onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    )
    names = [i.name for i in session.get_inputs()]
    return session.run(None, dict(zip(names, (t.numpy() for t in values or inputs(ragged)), strict=True)))


@pytest.mark.parametrize("norm_heads", [False, True])
def test_a_layer_is_the_same_in_fewer_nodes(norm_heads):
    module = Layer(norm_heads).eval()
    model = exported(module)
    with torch.no_grad():
        expected = [t.numpy() for t in module(*inputs())]
    before = kinds(model)
    fusions.fuse_for_onnxruntime(model)
    after = kinds(model)
    assert after.count("MatMul") == 2 and after.count("RotaryEmbedding") == 2 and after.count("Div") == 1 + 2 * norm_heads
    assert not {"Neg", "Transpose", "Reciprocal"} & set(after) and len(after) < len(before)
    layouts = [n.attributes.get_string("layout") for n in model.graph if n.op_type == "LeanAttention"]
    assert layouts == ["bnhd"]
    for found in (
        results(model),
        results(model, library=False),
        results(renamed(model)),
        results(renamed(model), library=False),
    ):
        for a, b in zip(found, expected, strict=True):
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_rotary_function_of_heads_first():
    """Where attention keeps its transposes, the function of RotaryEmbedding is that of 4-D inputs."""
    module = Layer().eval()
    model = exported(module)
    assert fusions.fuse_rotary(model) == 2
    with torch.no_grad():
        expected = [t.numpy() for t in module(*inputs())]
    for found in (results(model), results(renamed(model))):
        for a, b in zip(found, expected, strict=True):
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize("options", [{}, {"norm_heads": True}, {"turned": 4}, {"first": 2}, {"bias": True}], ids=str)
def test_attention_takes_in_rotary_encodings(options):
    """Of all columns and of the first ones; the cosines become a constant, and caches hold the turned keys."""
    module = Layer(**options).eval()
    model = exported(module, ragged=True)
    with torch.no_grad():
        expected = [t.numpy() for t in module(*inputs(ragged=True))]
    fusions.fuse_for_onnxruntime(model, positions=32)
    found = kinds(model)
    assert not {"RotaryEmbedding", "Cos", "Neg", "Transpose"} & set(found) and "com.microsoft" not in model.opset_imports
    (node,) = (n for n in model.graph if n.op_type == "LeanAttention")
    assert [list(v.shape) for v in node.inputs[10:]] == [[32, options.get("turned", SIZE) // 2]] * 2
    assert node.attributes.get_string("layout") == "bnhd"
    if not options.get("norm_heads"):
        assert node.attributes.get_int("packed_qkv") == 1 and node.inputs[5] is node.inputs[6] is None
        made = node.inputs[0].producer().inputs[0].producer()
        assert "Split" not in found and made.op_type == ("Add" if options.get("bias") else "MatMul")
    real = torch.arange(5) < inputs(ragged=True)[4].unsqueeze(1)
    for library in (True, False):
        for i, (a, b) in enumerate(zip(results(model, library, ragged=True), expected, strict=True)):
            a, b = (a[real], b[real]) if i == 0 else (a, b)
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


class Packed(torch.nn.Module):
    """Projections in one product, taken apart in different ways; LeanAttention. Inputs as Layer's."""

    def __init__(self, kind, kv_heads=KV_HEADS, biases=(True, True, True)):
        super().__init__()
        self.kind, self.widths = kind, [h * SIZE for h in (HEADS, kv_heads, kv_heads)]
        self.together = torch.nn.Linear(HIDDEN, sum(self.widths))
        self.apart = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, w, bias=b) for w, b in zip(self.widths, biases, strict=True))

    def forward(self, x, key_cache, value_cache, seq_lens, query_lens):
        a, b, _ = self.widths
        if self.kind == "products":
            parts = [p(x) for p in self.apart]
        elif self.kind == "slices":
            t = self.together(x)
            parts = t[..., :a], t[..., a : a + b], t[..., a + b :]
        elif self.kind == "flat slices":
            t = self.together(x.reshape(-1, HIDDEN))
            parts = t[:, :a], t[:, a : a + b], t[:, a + b :]
        elif self.kind == "another order":
            key, query, value = self.together(x).split((b, a, b), -1)
            parts = query, key, value
        else:
            parts = self.together(x.reshape(1, -1, HIDDEN) if self.kind == "flat" else x).split(self.widths, -1)
        query, key, value = (t.reshape(*x.shape[:2], -1, SIZE).transpose(1, 2) for t in parts)
        out, _, keys, values = lean_attention(
            query, key_cache, value_cache, seq_lens, query_lens=query_lens, new_key=key, new_value=value, append=True
        )
        return out.transpose(1, 2).reshape(*x.shape[:2], -1), keys, values


@pytest.mark.parametrize(
    "kind, packs, options",
    [
        ("split", True, {}),
        ("slices", True, {}),
        ("products", True, {}),
        ("products", True, {"biases": (True, False, True)}),
        ("equal split", True, {"kv_heads": HEADS}),
        ("flat", False, {}),
        ("flat slices", False, {}),
        ("another order", False, {}),
    ],
    ids=str,
)
def test_projections_are_packed_where_they_lie_side_by_side(kind, packs, options):
    module = Packed(kind, **options).eval()
    values = list(inputs(ragged=True))
    values[1:3] = torch.randn(2, 3, options.get("kv_heads", KV_HEADS), 20, SIZE)
    with torch.no_grad():
        expected = [t.numpy() for t in module(*values)]
    warnings.filterwarnings("ignore")
    batch, tokens, slots = (torch.export.Dim(n) for n in ("batch", "tokens", "slots"))
    shapes = {0: batch, 1: tokens}, {0: batch, 2: slots}, {0: batch, 2: slots}, {0: batch}, {0: batch}
    model = export(module, tuple(values), dynamic_shapes=shapes).model
    fusions.fuse_for_onnxruntime(model, positions=32)
    (node,) = (n for n in model.graph if n.op_type == "LeanAttention")
    assert node.attributes.get_int("packed_qkv", 0) == packs
    assert not packs or not {"Split", "Slice"} & set(kinds(model)) and kinds(model).count("MatMul") == 1
    real = torch.arange(5) < values[4].unsqueeze(1)
    for library in (True, False):
        for i, (a, b) in enumerate(zip(results(model, library, values=values), expected, strict=True)):
            a, b = (a[real], b[real]) if i == 0 else (a, b)
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize(
    "options, ragged, positions",
    [({"first": "longest"}, True, 32), ({}, False, 32), ({}, True, None), ({}, True, 2**18 + 1)],
    ids=str,
)
def test_other_positions_stay_outside(options, ragged, positions):
    """Positions that depend on another request; lengths that are not said; no bound that is known, or a far one."""
    module = Layer(**options).eval()
    model = exported(module, ragged)
    with torch.no_grad():
        expected = [t.numpy() for t in module(*inputs(ragged))]
    fusions.fuse_for_onnxruntime(model, positions)
    assert kinds(model).count("RotaryEmbedding") == 2
    for i, (a, b) in enumerate(zip(results(model, ragged=ragged), expected, strict=True)):
        if i or not ragged:
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_what_is_no_rotary_encoding_stays():
    module = Layer(equal_halves=False).eval()
    model = exported(module)
    assert fusions.fuse_rotary(model) == 0
    fusions.fuse_for_onnxruntime(model)
    assert "RotaryEmbedding" not in kinds(model) and "Neg" in kinds(model)
    with torch.no_grad():
        expected = [t.numpy() for t in module(*inputs())]
    for a, b in zip(results(model), expected, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_export_without_fusions(tmp_path):
    """fuse=False leaves nothing of another domain than the standard's and ours."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=50,
            intermediate_size=32,
        )
    ).eval()
    export_decoder(model, tmp_path, fuse=False)
    found = onnx.load(tmp_path / "model.onnx")
    assert {n.domain for n in found.graph.node} == {"", "leanfleet"} and {f.domain for f in found.functions} == {"leanfleet"}


class Retention(torch.nn.Module):
    """Two layers of linear attention over rotated heads [B,N,H,D]. form: "other" has sines of other angles than the cosines,
    "flat" heads that were rows [B,N*H,D]."""

    def __init__(self, form):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HEADS * SIZE, bias=False) for _ in range(3)) for _ in range(2)
        )
        self.out = torch.nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.form = form

    def turn(self, x, positions):
        if self.form != "other":
            return rotary(x, positions, 100.0, "bnhd")
        angles = positions[:, :, None, None].float() * torch.linspace(0.1, 1.0, SIZE // 2)
        cos, sin = angles.cos(), (angles * 2).sin()
        first, second = x[..., : SIZE // 2], x[..., SIZE // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    def forward(self, x, positions):
        for layer in self.layers:
            q, k, v = (p(x).unflatten(-1, (HEADS, SIZE)) for p in layer)
            if self.form == "flat":
                q, k = (torch.relu(t.reshape(t.shape[0], -1, SIZE)).view(*v.shape) for t in (q, k))
            q, k = self.turn(q, positions), self.turn(k, positions) * (positions % 5 > 0)[..., None, None].to(k.dtype)
            x = x + self.out(causal_linear_decay(q, k, v, layout="bnhd").flatten(2)) * 0.1
        return x


@pytest.mark.parametrize("dtype", rest_slow([torch.float32, torch.float16]), ids=str)
@pytest.mark.parametrize("form", ["plain", "other", "flat"])
def test_rotated_halves_of_heads(form, dtype):
    """Rotary encodings of linear attention, whose angles are a request's own, become nodes that share their tables; what
    padding's keys are multiplied with goes into these. Not where heads come from rows of their own."""
    torch.manual_seed(4)
    module, x = Retention(form).eval().to(dtype), torch.randn(3, 7, HIDDEN).to(dtype)
    positions = torch.tensor([[0], [40], [1000]]) + torch.arange(7)
    # Tables in 16 bits lose about as much again as the module does, which rotates in float32.
    found = fused_and_compared(module, (x, positions), ({0: BATCH, 1: TOKENS},) * 2, "RotaryEmbedding", 3)
    assert (found.count("RotaryEmbedding"), found.count("Cos")) == (4 if form == "plain" else 0, 1)
    if form == "plain":  # angles and two tables; the factors of 0.1 are in matrices
        assert found.count("Mul") == 3


def test_rotated_halves_in_float64():
    """ONNX Runtime's node has no such type."""
    warnings.filterwarnings("ignore")
    module, x = Retention("plain").eval().double(), torch.randn(3, 7, HIDDEN).double()
    model = export(module, (x, torch.arange(7).expand(3, 7)), dynamic_shapes=({0: BATCH, 1: TOKENS},) * 2).model
    fusions.fuse_for_onnxruntime(model)
    assert "RotaryEmbedding" not in kinds(model)


class Residuals(torch.nn.Module):
    """Three blocks of norm and product whose results are added up. simplified: RMS norms as transformers writes them, else
    LayerNorms. epsilons: of the norms, the last of which reads the result."""

    def __init__(self, simplified, epsilons):
        super().__init__()
        self.simplified, self.epsilons = simplified, epsilons
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(HIDDEN, e) for e in epsilons)
        self.products = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in epsilons[1:])
        for norm in self.norms:
            torch.nn.init.normal_(norm.weight)
            torch.nn.init.normal_(norm.bias)

    def norm(self, i, x):
        if not self.simplified:
            return self.norms[i](x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.norms[i].weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilons[i])).to(x.dtype)

    def forward(self, x):
        for i, product in enumerate(self.products):
            x = x + product(self.norm(i, x))
        return self.norm(len(self.products), x), x.sum(-1)


def fused_and_compared(module, inputs, shapes, name, rounds=2):
    """The fused model of a module in float32 or float16, of which kernels and functions lose at most `rounds` times what the
    module does."""
    warnings.filterwarnings("ignore")
    dtype = next(module.parameters()).dtype
    with torch.no_grad():
        plain = module(*inputs)
        exact = module.double()(*(t.double() if t.is_floating_point() else t for t in inputs))
        module.to(dtype)
    as_list = [(x if isinstance(x, tuple) else (x,)) for x in (plain, exact)]
    model = export(module, inputs, dynamic_shapes=shapes).model
    fusions.fuse_for_onnxruntime(model)
    for made in (ir.to_proto(model), renamed(model, name), prepare(ir.to_proto(model))):
        onnx.checker.check_model(made)
    for made in (ir.to_proto(model), renamed(model, name)):
        session = make_session(made, ["CPUExecutionProvider"])
        found = session.run(None, {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)})
        for x, other, judge in zip(found, *as_list, strict=True):
            assert np.abs(x - judge.numpy()).max() <= rounds * (other.double() - judge).abs().max().item()
    return kinds(model)


BATCH, TOKENS = (torch.export.Dim(n) for n in ("batch", "tokens"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("simplified", [True, False])
@pytest.mark.parametrize("epsilons, fused", [((1e-5,) * 4, 3), ((1e-5, 1e-5, 1e-3, 1e-5), 2)])
def test_a_sum_and_its_norm(epsilons, fused, simplified, dtype):
    """ONNX Runtime's kernels, and the functions, which hold one epsilon; RmsNorm in float16, whose functions are one for each."""
    torch.manual_seed(6)
    module, x = Residuals(simplified, epsilons).eval().to(dtype), (30 * torch.randn(2, 5, HIDDEN)).to(dtype)
    name = "SkipSimplifiedLayerNormalization" if simplified else "SkipLayerNormalization"
    if simplified and dtype == torch.float16:
        name, fused = "RmsNorm", 3
    found = fused_and_compared(module, (x,), ({0: BATCH, 1: TOKENS},), name)
    assert (found.count(name), found.count("Add")) == (fused, (3 - fused) + simplified * (4 - fused))


@pytest.mark.parametrize("biases", [(True, True, False), (True, False, True)])
def test_norms_with_and_without_bias(biases):
    """A function has as many inputs as its first node: norms with other numbers of parameters stay."""
    torch.manual_seed(6)
    module = Residuals(False, (1e-5,) * 3).eval()
    module.norms = torch.nn.ModuleList(torch.nn.LayerNorm(HIDDEN, bias=b) for b in biases)
    found = fused_and_compared(module, (torch.randn(2, 5, HIDDEN),), ({0: BATCH, 1: TOKENS},), "SkipLayerNormalization")
    assert (found.count("SkipLayerNormalization"), found.count("LayerNormalization")) == (1, 2)


def test_a_weight_for_all_columns_is_no_norms_parameter():
    torch.manual_seed(6)
    module = Residuals(True, (1e-5,) * 3).eval()
    for norm in module.norms:
        norm.weight = torch.nn.Parameter(torch.randn(1))
    found = fused_and_compared(
        module, (torch.randn(2, 5, HIDDEN),), ({0: BATCH, 1: TOKENS},), "SkipSimplifiedLayerNormalization"
    )
    assert "SkipSimplifiedLayerNormalization" not in found


def test_each_pass_reports_how_often_it_applied():
    """In the declared order, the passes that found nothing too."""
    counts = fusions.fuse_for_onnxruntime(exported(Layer(), ragged=True), positions=32)
    assert list(counts) == [each.__name__ for each in fusions.PASSES]
    assert counts == {
        "cancel_transposes": 0,
        "divide_by_roots": 1,
        "fold_scales": 0,
        "regroup_columns": 0,
        "pack_projections": 2,
        "merge_splits": 0,
        "split_convolutions": 0,
        "fuse_gates": 0,
        "plain_softplus": 0,
        "fuse_decay_gates": 0,
        "narrow_norms": 0,
        "fuse_residuals": 0,
        "norm_products": 0,
        "fuse_rotary": 2,
        "fuse_rotated_halves": 0,
        "rotate_inside": 1,
        "drop_transposes": 1,
        "attend_packed": 0,
        "pack_heads": 1,
        "fuse_norms": 0,
        "read_columns": 0,
        "nest_splits": 0,
        "fuse_linear": 0,
    }


def test_an_error_inside_a_pass_is_raised(monkeypatch):
    """It is told from a graph that does not have the pattern, which is left as it is, with the reason in the log."""
    model = exported(Layer(), ragged=True)

    def fail(*arguments, **options):
        raise RuntimeError("broken")

    monkeypatch.setattr(np, "allclose", fail)
    with pytest.raises(RuntimeError, match="broken"):
        fusions.fuse_for_onnxruntime(model, positions=32)


@pytest.mark.parametrize(
    "first, reason",
    [
        ("longest", "it depends on other requests, or on more than positions"),
        ("table", "it cannot be computed for 1 requests of 32 tokens: index 24 is out of bounds"),
    ],
)
def test_why_a_rotary_encoding_stays_outside_is_logged(first, reason, caplog):
    """Positions that depend on another request; a table of the model's own that is shorter than the positions asked for."""
    module = Layer(first=first).eval()
    model = exported(module, ragged=True)
    with caplog.at_level("INFO", logger="leanfleet.export.fusions"):
        counts = fusions.fuse_for_onnxruntime(model, positions=32)
    assert (counts["fuse_rotary"], counts["rotate_inside"]) == (2, 0)
    (said,) = (r.getMessage() for r in caplog.records if r.name.startswith("leanfleet.export.fusions"))
    assert reason in said and "stays outside" in said


class Gated(torch.nn.Module):
    """A gated feed-forward layer. order: which halves the activation and the other factor are; widths: of the two halves."""

    def __init__(self, activation, order=(0, 1), widths=(24, 24), packed=False):
        super().__init__()
        self.activation, self.order, self.widths = activation, order, widths
        self.both = torch.nn.Linear(HIDDEN, sum(widths), bias=False) if packed else None
        self.apart = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, w, bias=False) for w in widths)

    def forward(self, x):
        halves = self.both(x).split(self.widths, -1) if self.both else [m(x) for m in self.apart]
        return self.activation(halves[self.order[0]]) * halves[self.order[1]]


GELU_TANH = torch.nn.GELU(approximate="tanh")


@pytest.mark.parametrize(
    "module, fused",
    [
        (Gated(torch.nn.SiLU()), 1),
        (Gated(torch.nn.SiLU(), packed=True), 1),
        (Gated(torch.nn.GELU()), 1),
        (Gated(GELU_TANH, packed=True), 1),
        (Gated(torch.nn.ReLU()), 1),
        (Gated(torch.nn.Sigmoid()), 1),
        (Gated(torch.nn.Tanh()), 0),
        (Gated(torch.nn.SiLU(), order=(1, 0)), 1),  # the gate behind the values
        (Gated(GELU_TANH, packed=True, order=(1, 0)), 1),
        (Gated(torch.nn.SiLU(), order=(0, 0)), 1),  # of values apart
        (Gated(torch.nn.SiLU(), widths=(24, 1)), 0),  # broadcast
    ],
    ids=str,
)
def test_gates(module, fused):
    torch.manual_seed(0)
    x = 2 * torch.randn(2, 5, HIDDEN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = export(module.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("b"), 1: torch.export.Dim("n")},)).model
    counts = fusions.fuse_for_onnxruntime(model)
    assert counts["fuse_gates"] == fused == kinds(model).count("GatedActivation")
    proto = ir.to_proto(model)
    for rows in (x, x[:1, :1]):
        with torch.no_grad():
            expected = module(rows)
        for library in (True, False):
            options = ["CPUExecutionProvider"]
            session = (
                make_session(proto, options)
                if library
                else onnxruntime.InferenceSession(proto.SerializeToString(), providers=options)
            )
            (found,) = session.run(None, {session.get_inputs()[0].name: rows.numpy()})
            torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6)


def test_transposes_that_undo_each_other():
    """They go; one of another order stays, and so does a pair whose result the graph gives."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 3, 4]))
    nodes, made = [], []
    for first, second, shown in (((0, 2, 1), (0, 2, 1), False), ((1, 2, 0), (1, 2, 0), False), ((2, 0, 1), (1, 2, 0), True)):
        a = ir.node("Transpose", [x], {"perm": first})
        b = ir.node("Transpose", [a.outputs[0]], {"perm": second})
        c = ir.node("Neg", [b.outputs[0]])
        nodes += [a, b, c]
        made += [b.outputs[0] if shown else c.outputs[0]]
    for i, value in enumerate(made):
        value.name = f"y{i}"
    model = ir.Model(ir.Graph([x], made, nodes=nodes, opset_imports={"": 20}), ir_version=10)
    given = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)}

    def run():
        return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, given)

    for value in made:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    before = run()
    assert fusions.cancel_transposes(model) == 1
    fusions.RemoveUnusedNodesPass()(model)
    assert [n.op_type for n in model.graph].count("Transpose") == 4
    for a, b in zip(before, run(), strict=True):
        assert np.array_equal(a, b)


class Mamba(torch.nn.Module):
    """The parts of a Mamba-2 layer that are no operators of ours: a product with factors on both sides, whose parts are split
    twice and joined again, softplus, gates in float32, and a norm whose weight is applied in float32."""

    def __init__(self, gate_of_heads=False):
        super().__init__()
        self.gate_of_heads = gate_of_heads
        self.projection = torch.nn.Linear(HIDDEN, 3 * HIDDEN + 6, bias=False)
        self.others = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.out = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.weight = torch.nn.Parameter(torch.rand(HIDDEN) - 0.5)
        self.register_buffer("factors", 2.0 ** torch.randint(-2, 3, (1, 1, 3 * HIDDEN + 6)))

    def norm(self, x, weight):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * (1.0 + weight.float())).to(x.dtype)

    def forward(self, x):
        gate, rest = (self.projection(x * 0.25) * self.factors).split([HIDDEN, 2 * HIDDEN + 6], -1)
        first, second, step = rest.split([HIDDEN, HIDDEN, 6], -1)
        second = torch.cat([second, step], -1)[..., :HIDDEN] + torch.cat([m(x) * 0.5 for m in self.others], -1)[..., HIDDEN:]
        step = torch.nn.functional.softplus(step).clamp(0.0, float("inf")).float()
        y = second.float() * step.mean(-1, keepdim=True)
        if self.gate_of_heads:
            y, gate = (t.unflatten(-1, (4, HIDDEN // 4)) for t in (y, gate))
        y = (y * torch.nn.functional.silu(gate.float())).to(x.dtype)
        x = x + self.out(y.flatten(2) if self.gate_of_heads else y) + first
        return self.norm(x, self.weight), x.sum(-1)


@pytest.mark.parametrize("gate_of_heads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_stands_around_recurrent_layers(dtype, gate_of_heads):
    torch.manual_seed(7)
    module, x = Mamba(gate_of_heads).eval().to(dtype), torch.randn(2, 5, HIDDEN).to(dtype)
    norm, product = ("RmsNorm", "Linear") if dtype == torch.float16 else ("SkipSimplifiedLayerNormalization", "MatMul")
    found = fused_and_compared(module, (x,), ({0: BATCH, 1: TOKENS},), norm, 3)
    # One Split of four parts, nested.
    assert [found.count(n) for n in ("Split", product, "GatedActivation", "Softplus")] == [2, 2, 1, 1]
    assert not {"Where", "Greater", "Clip", "Sigmoid"} & {*found}
    assert found.count(norm) == 1 and found.count("Mul") == 1  # the one by steps


class Skipped(torch.nn.Module):
    """What Mamba-2 does behind its recurrence: a part of the layer's input added to the output, both of heads, and a gate."""

    def __init__(self, rounds, turned, kept):
        super().__init__()
        self.rounds, self.turned, self.kept = rounds, turned, kept
        self.D = torch.nn.Parameter(torch.randn(4))

    def forward(self, gate, y, x):
        gate_, y, x_, D = (t if t.dtype == torch.float64 else t.float() for t in (gate, y, x, self.D))
        part = x_ * D[:, None]
        whole = part + y if self.turned else y + part
        out = whole.flatten(2) * torch.nn.functional.silu(gate_)
        out = out.to(gate.dtype) if self.rounds else out
        return (out, part.sum(-1)) if self.kept else (out, x[..., 0])


@pytest.mark.parametrize("rounds, turned, kept", [(True, False, False), (False, True, False), (True, True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_is_added_beside_a_recurrent_layer(dtype, rounds, turned, kept):
    torch.manual_seed(3)
    module = Skipped(rounds, turned, kept).to(dtype)
    gate, y, x = (torch.randn(2, 5, *sizes).to(dtype) for sizes in ((HIDDEN,), (4, HIDDEN // 4), (4, HIDDEN // 4)))
    found = fused_and_compared(module, (gate, y, x), ({0: BATCH, 1: TOKENS},) * 3, "GatedActivation", 1)
    assert found.count("Add") == found.count("Mul") == kept  # a part that others read stays
    if dtype == torch.float32 or rounds and not kept:
        assert "Cast" not in found


def counts_of(module, *inputs):
    warnings.filterwarnings("ignore")
    model = export(module.eval(), inputs, dynamic_shapes=({0: BATCH, 1: TOKENS},) * len(inputs)).model
    return fusions.fuse_for_onnxruntime(model), model


def test_factors_that_stay():
    """Those of values that others read too, of each row, and too large ones in float16."""

    class Factors(torch.nn.Module):
        def __init__(self, form):
            super().__init__()
            self.form, self.product = form, torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

        def forward(self, x):
            y = self.product(x)
            if self.form == "read twice":
                return y * 0.5 + y
            if self.form == "of rows":
                return y * x[..., :1]
            return y * {"large": 1e6, "right": 3.0}[self.form] + 1

    x = torch.randn(2, 5, HIDDEN)
    for form, folded in (("read twice", 0), ("of rows", 0), ("large", 1), ("right", 1)):
        assert counts_of(Factors(form), x)[0]["fold_scales"] == folded, form
    assert counts_of(Factors("large").half(), x.half())[0]["fold_scales"] == 0
    assert counts_of(Factors("right").half(), x.half())[0]["fold_scales"] == 1


def test_parts_that_stay_apart():
    """Parts that others read too, in another order, or that are not neighbours."""

    class Parts(torch.nn.Module):
        def __init__(self, order, more=False):
            super().__init__()
            self.order, self.more = order, more

        def forward(self, x):
            parts = x.split([10, 10, 20], -1)
            joined = torch.cat([parts[i] for i in self.order], -1) + 1
            return (joined, parts[0] + 1) if self.more else joined

    x = torch.randn(2, 5, HIDDEN)
    for order, more, merged in (((0, 1), False, 1), ((1, 2), True, 1), ((0, 1, 2), False, 1)):
        counts, model = counts_of(Parts(order, more), x)
        assert counts["merge_splits"] == merged, order
        expected = Parts(order, more)(x)
        found = results(model, values=(x,))
        for a, b in zip(found, expected if more else (expected,), strict=True):
            assert np.array_equal(a, b.numpy())
    for order, more in (((1, 0), False), ((0, 2), False), ((0, 1), True)):
        assert counts_of(Parts(order, more), x)[0]["merge_splits"] == 0, order


def split_model(sizes, given="constant", unread=(), axis=-1, width=None):
    """A Split whose parts are outputs of the graph or read by a node in turns, but for the `unread` ones. given: how it has its
    sizes."""
    tensor = numpy_helper.from_array(np.array(sizes), "sizes")
    shape = ["batch", "tokens", width or sum(sizes)] if axis == -1 else [sum(sizes), "tokens", 4]
    inputs, initializers, nodes, names = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)], [], [], []
    if given == "constant":
        nodes.append(helper.make_node("Constant", [], ["sizes"], value=tensor))
    elif given == "initializer":
        initializers.append(tensor)
    elif given == "input":
        inputs.append(helper.make_tensor_value_info("sizes", TensorProto.INT64, [len(sizes)]))
    options = {"num_outputs": len(sizes)} if given == "num_outputs" else {}
    parts = [f"part{i}" for i in range(len(sizes))]
    nodes.append(helper.make_node("Split", ["x"] if options else ["x", "sizes"], parts, axis=axis, **options))
    for i, part in enumerate(parts):
        if i not in unread:
            names.append(part if i % 2 else f"negative{i}")
            nodes += [] if i % 2 else [helper.make_node("Neg", [part], names[-1:])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["a", "b", "c"]) for name in names]
    graph = helper.make_graph(nodes, "split", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def nested(before, folder):
    """(how often the pass applied, sizes of the Splits that it leaves), once they give the same and need no tables."""
    model = ir.from_proto(before)
    count = fusions.nest_splits(model)
    after = ir.to_proto(model)
    assert [o.name for o in after.graph.output] == [o.name for o in before.graph.output]
    assert splits_by_tables(after, folder) == []
    x = torch.randn(2, 3, before.graph.input[0].type.tensor_type.shape.dim[2].dim_value)
    for found, expected in zip(results(after, values=(x,)), results(before, values=(x,)), strict=True):
        assert np.array_equal(found, expected)
    return count, [sizes_of(node) for node in model.graph if node.op_type == "Split"]


@pytest.mark.parametrize("given", ["constant", "initializer"])
@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((6, 18), [[6, 18, 0]]),
        ((224, 4, 4, 96), [[224, 8, 96], [4, 4]]),
        ((3072, 3584, 48, 1024, 256, 256), [[3072, 3584, 1584], [48, 1024, 512], [256, 256]]),
        ((6, 6, 12, 12), [[12, 12, 12], [6, 6]]),
        ((8, 8, 8, 3, 5), [[8, 8, 8, 8], [3, 5, 0]]),
        ((2, 1, 1, 1, 1), [[2, 1, 3], [1, 1, 1]]),
        ((1,) * 33, [[1, 1, 31], [1] * 31]),
        ((5, 6, 7), None),
        ((6, 6), None),
        ((1,) * 32, None),
    ],
    ids=str,
)
def test_splits_are_nested(sizes, expected, given, tmp_path):
    assert nested(split_model(sizes, given), tmp_path) == ((0, [[*sizes]]) if expected is None else (1, expected))


def test_splits_of_a_number_of_parts(tmp_path):
    """Of which the last one may be smaller."""
    assert nested(split_model((3, 3, 3, 1), "num_outputs"), tmp_path) == (1, [[3, 3, 4], [3, 1, 0]])
    assert nested(split_model((3, 3, 3, 3), "num_outputs"), tmp_path) == (0, [[3, 3, 3, 3]])


def test_parts_that_nobody_reads(tmp_path):
    """Neighbours of them are one part."""
    assert nested(split_model((5, 1, 2, 3), unread=(1, 2)), tmp_path) == (1, [[5, 3, 3]])
    assert nested(split_model((5, 1, 2, 3), unread=(2, 3)), tmp_path) == (1, [[5, 1, 5]])
    assert nested(split_model((5, 1, 2, 3, 4), unread=(0, 2)), tmp_path) == (1, [[5, 6, 4], [1, 2, 3]])


def test_splits_of_which_too_little_is_known_stay():
    for model in (
        split_model((1, 2, 3, 4), "input"),
        split_model((1, 2, 3, 4), "num_outputs", width="columns"),
        split_model((1, 2, 3, 4), axis=0),
        split_model((1, 0, 3, 4)),
    ):
        assert fusions.nest_splits(ir.from_proto(model)) == 0


def fewest(sizes):
    """The columns that the best nesting copies again, of all: in each step all ways to cut neighbours into groups."""
    if len(sizes) < 4 or len(set(sizes)) == 1:
        return 0
    ways = []
    for cuts in (c for n in range(1, len(sizes)) for c in itertools.combinations(range(1, len(sizes)), n)):
        groups = [sizes[a:b] for a, b in itertools.pairwise((0, *cuts, len(sizes)))]
        if len(groups) <= 3 or len({sum(group) for group in groups}) == 1:
            ways.append(sum(sum(group) + fewest(group) for group in groups if len(group) > 1))
    return min(ways)


def test_fewest_columns_are_copied_again(tmp_path):
    draw = np.random.default_rng(3)
    for count in (4, 4, 5, 5, 6, 6, 7):
        sizes = tuple(int(n) for n in draw.integers(1, 7, count))
        _, found = nested(split_model(sizes), tmp_path)
        assert sum(map(sum, found)) - sum(sizes) == fewest(sizes), sizes


def test_norms_in_bfloat16_keep_a_weight_that_does_not_fit():
    """1 + w has too few bits left of w; a weight that is one of bfloat16 already has all."""

    class Norm(torch.nn.Module):
        def __init__(self, one):
            super().__init__()
            self.one, self.weight = one, torch.nn.Parameter(torch.rand(HIDDEN) / 8 + 0.01)

        def forward(self, x):
            wide = x.float()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
            return (normed * (self.one + self.weight.float())).to(x.dtype)

    x = torch.randn(2, 5, HIDDEN)
    for dtype, one, narrowed in ((torch.bfloat16, 1.0, 0), (torch.bfloat16, 0.0, 1), (torch.float16, 1.0, 1)):
        assert counts_of(Norm(one).to(dtype), x.to(dtype))[0]["narrow_norms"] == narrowed


class HeadByHead(torch.nn.Module):
    """A product of 3 heads, each with a query, a key, values and a gate, as Qwen3-Next has it. joined: queries, keys and values
    are one tensor again; else each part is read by itself, one of them as heads."""

    def __init__(self, joined):
        super().__init__()
        self.joined, self.both = joined, torch.nn.Linear(HIDDEN, 3 * 22, bias=False)

    def forward(self, x):
        query, key, value, gate = self.both(x).unflatten(-1, (3, 22)).split([4, 4, 6, 8], -1)
        flat = [t.flatten(2) for t in (query, key, value)]
        if self.joined:
            return torch.cat(flat, -1) * 2, gate.reshape(-1, 8) + 1
        return flat[0] * 2, flat[1] - 1, value.transpose(1, 2) + 1, gate.sum(-1)


@pytest.mark.parametrize("joined", [True, False])
def test_columns_of_heads_are_sorted_by_parts(joined):
    torch.manual_seed(8)
    x, module = torch.randn(2, 5, HIDDEN), HeadByHead(joined)
    counts, model = counts_of(module, x)
    assert (counts["regroup_columns"], counts["merge_splits"], counts["nest_splits"]) == (1, joined, 1)
    assert kinds(model).count("Split") == (1 if joined else 2)
    for found, expected in zip(results(model, values=(x,)), module(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=1e-5, atol=1e-6)


class HalvesReadTwice(torch.nn.Module):
    """The gate behind its values, one of which is read once more."""

    def __init__(self, form):
        super().__init__()
        self.form, self.both = form, torch.nn.Linear(HIDDEN, 48, bias=False)

    def forward(self, x):
        up, gate = self.both(x).chunk(2, -1)
        active = torch.nn.functional.silu(gate)
        if self.form == "values":
            return active * up + up
        if self.form == "gate":
            return active * up + gate
        if self.form == "active":
            return active * up + active
        return active * up + torch.relu(gate) * up


@pytest.mark.parametrize("form", ["values", "gate", "active", "both"])
def test_halves_that_others_read_stay_in_their_places(form):
    torch.manual_seed(9)
    x, module = torch.randn(2, 5, HIDDEN), HalvesReadTwice(form)
    _, model = counts_of(module, x)
    torch.testing.assert_close(torch.from_numpy(results(model, values=(x,))[0]), module(x).detach(), rtol=1e-5, atol=1e-6)


class GatedRows(torch.nn.Module):
    """Gates of 16 bits whose product with float32 values goes on in float32, where float16 does not hold it."""

    def __init__(self, rounded):
        super().__init__()
        self.rounded = rounded

    def forward(self, x, gate):
        y = x.float() * 300 * torch.nn.functional.silu(gate.float())
        return (y * 1e-3 if not self.rounded else y.to(x.dtype) * 0.5).to(x.dtype)


@pytest.mark.parametrize("rounded", [False, True])
def test_gates_in_float16_keep_the_range_of_float32(rounded):
    x, gate = (torch.full((2, 5, HIDDEN), n).half() for n in (300.0, 1e-3 if rounded else 10.0))
    counts, model = counts_of(GatedRows(rounded), x, gate)
    assert counts["fuse_gates"] == 1
    found = torch.from_numpy(results(model, values=(x, gate))[0])
    torch.testing.assert_close(found, GatedRows(rounded)(x, gate), rtol=2e-3, atol=0)


class Recurrent(torch.nn.Module):
    """The gates of a gated delta rule over H = D = N = 4, as transformers traces them; with `form` something that they are not."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.rate, self.bias = -torch.rand(4), torch.randn(4)

    def forward(self, raw, beta, rows, lens):
        x = raw.float() + self.bias
        if self.form in ("of keys", "rate of keys"):
            x = x.unsqueeze(-1) * torch.tensor([1.0, 0.5, 2.0, -1.0])
        rate = self.rate.unsqueeze(-1) if self.form == "of keys" else self.rate
        decay = rate * torch.nn.functional.softplus(x)
        decay = torch.where(decay <= 0, decay, torch.zeros(()))
        beta = 2 * beta.sigmoid().float()
        inside = torch.arange(raw.shape[1]) < lens.unsqueeze(1)
        inside = inside.unsqueeze(1) if self.form == "mask of heads" else inside.unsqueeze(-1)
        beta = beta * inside.float()
        decay = torch.where(inside if decay.dim() == 3 else inside.unsqueeze(-1), decay, torch.zeros(()))
        return gated_delta_rule(rows, rows, rows, decay, beta=beta, normalize_qk=True, layout="bnhd")


@pytest.mark.parametrize(("form", "fused"), (("of heads", 1), ("of keys", 1), ("rate of keys", 0), ("mask of heads", 0)))
def test_gates_of_recurrences(form, fused):
    torch.manual_seed(1)
    module = Recurrent(form).eval()
    x = torch.randn(2, 4, 4), torch.randn(2, 4, 4), torch.randn(2, 4, 4, 4), torch.tensor([4, 2], dtype=torch.int32)
    shapes = {0: BATCH}, {0: BATCH}, {0: BATCH}, {0: BATCH}
    warnings.filterwarnings("ignore")
    model = export(module, x, dynamic_shapes=shapes).model
    counts = fusions.fuse_for_onnxruntime(model)
    assert counts["fuse_decay_gates"] == fused == kinds(model).count("DecayGates")
    expected = module(*x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    for library in (True, False):
        found = torch.from_numpy(results(model, library, values=x)[0])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Convolved(torch.nn.Module):
    """A product whose columns are a gate, what is convolved and split, and others; sizes of the gate and of the three parts."""

    def __init__(self, gate, parts, others=8):
        super().__init__()
        self.sizes, self.parts = (gate, sum(parts), others), parts
        self.product = torch.nn.Linear(HIDDEN, sum(self.sizes), bias=False)
        self.taps = torch.nn.Parameter(torch.randn(3, sum(parts)))

    def forward(self, x):
        gate, mixed, others = self.product(x).split(self.sizes, -1)
        first, second, third = causal_conv(mixed, self.taps, activation="silu").split(self.parts, -1)
        return torch.nn.functional.silu(gate) * first, second * 2, third, others + 1


@pytest.mark.parametrize(
    ("gate", "parts", "split", "read"),
    ((16, (16, 4, 8), 1, 2), (16, (16, 3, 9), 1, 2), (5, (5, 4, 3), 1, 0), (6, (6, 4, 4), 1, 1)),
)
def test_convolutions_among_other_columns(gate, parts, split, read):
    """Read where they stand if they begin at 16 bytes, and written in three parts."""
    torch.manual_seed(2)
    x, module = torch.randn(2, 5, HIDDEN), Convolved(gate, parts)
    counts, model = counts_of(module, x)
    assert (counts["split_convolutions"], counts["read_columns"]) == (split, read)
    for library in (True, False):
        for found, expected in zip(results(model, library, values=(x,)), module(x), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=1e-5, atol=1e-5)


class GatedHeads(torch.nn.Module):
    """A product whose columns are what gates heads, the raw beta and decays of another layer, and others; the gated heads are
    rows, as in Qwen3-Next."""

    def __init__(self, heads, width, others, whole):
        super().__init__()
        self.sizes, self.heads, self.width, self.whole = (heads * width, heads, heads, others), heads, width, whole
        self.product = torch.nn.Linear(HIDDEN, sum(self.sizes), bias=False)
        self.rate = torch.nn.Parameter(-torch.rand(heads))

    def forward(self, x):
        gate, raw_beta, raw, others = self.product(x).split(self.sizes, -1)
        decay, beta = decay_gates(raw, self.rate, beta_input=raw_beta, return_beta=True)
        rows = (others[..., :1] * torch.arange(self.heads * self.width)).reshape(-1, self.width)
        gated = rows * torch.nn.functional.silu(gate.reshape(-1, self.width))
        return gated.reshape(gate.shape) if self.whole else gated, decay, beta, others + 1


@pytest.mark.parametrize("whole", (True, False), ids=("seen as whole rows", "rows of heads"))
@pytest.mark.parametrize(("heads", "width", "others", "read"), ((4, 8, 8, 3), (3, 5, 2, 2), (4, 6, 7, 2)), ids=str)
def test_gates_among_other_columns(heads, width, others, read, whole):
    """A gate that is seen as rows of heads is read where it stands if rows begin at 16 bytes; raw decays and beta anywhere."""
    torch.manual_seed(2)
    x, module = torch.randn(2, 5, HIDDEN), GatedHeads(heads, width, others, whole)
    counts, model = counts_of(module, x)
    assert (counts["fuse_gates"], counts["read_columns"]) == (1, read)
    assert kinds(model).count("Slice") == 4 - read + 1
    for library in (True, False):
        for found, expected in zip(results(model, library, values=(x,)), module(x), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("whole", (True, False), ids=("seen as whole rows", "rows of heads"))
def test_gates_of_heads_without_tokens(whole):
    """As before, where the library's operators are not there to refuse it."""

    class Heads(torch.nn.Module):
        def forward(self, x):
            gate, up = x.split((16, 24), -1)
            rows = torch.nn.functional.silu(gate.reshape(-1, 4)) * up[..., :16].exp().reshape(-1, 4)
            return rows.reshape(gate.shape) if whole else rows

    counts, model = counts_of(Heads(), x := torch.randn(2, 5, HIDDEN))
    assert counts["fuse_gates"] == 1
    for rows in (x, x[:, :0]):
        found = torch.from_numpy(results(model, False, values=(rows,))[0])
        torch.testing.assert_close(found, Heads()(rows), rtol=1e-5, atol=1e-5)


class NormedHeads(torch.nn.Module):
    """A product of queries, what gates rows, keys of the same head size and others; norms of heads, one before the gate."""

    def __init__(self, heads, width, others, dtype, wide_weight=False):
        super().__init__()
        self.heads, self.width, self.wide = heads, width, wide_weight
        self.sizes = heads * width, heads * width, 2 * width, others
        self.product = torch.nn.Linear(HIDDEN, sum(self.sizes), bias=False, dtype=dtype)
        self.weights = torch.nn.ParameterList(torch.rand(width) + 0.5 for _ in range(3)).to(dtype)

    def norm(self, x, weight):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * weight.float()).to(x.dtype) if self.wide else weight * wide.to(x.dtype)

    def forward(self, x):
        query, gate, key, others = self.product(x).split(self.sizes, -1)
        query, key = (t.unflatten(-1, (-1, self.width)) for t in (query, key))
        rows = (others[..., :1] * torch.arange(self.heads * self.width).to(x.dtype)).reshape(-1, self.width)
        gated = self.norm(rows, self.weights[2]) * torch.nn.functional.silu(gate.reshape(-1, self.width))
        normed = [self.norm(t, w) for t, w in zip((query, key), self.weights, strict=False)]
        return *normed, gated.reshape(gate.shape), others + 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("width", "others", "read"), ((8, 8, 3), (6, 3, 0)), ids=str)
@pytest.mark.parametrize("wide", (False, True), ids=("weights of their type", "weights of float32"))
def test_norms_of_heads_among_other_columns(dtype, width, others, read, wide):
    """One kernel for a norm and the gate behind it; norms read queries and keys in the product if rows begin at 16 bytes."""
    torch.manual_seed(3)
    x, module = torch.randn(2, 5, HIDDEN).to(dtype), NormedHeads(4, width, others, dtype, wide)
    counts, model = counts_of(module, x)
    assert (counts["fuse_norms"], counts["read_columns"]) == (3, read)
    assert kinds(model).count("RmsNorm") == 3 and not {"GatedActivation", "ReduceMean", "Pow"} & set(kinds(model))
    exact = module.double()(x.double())
    rounding = {torch.float32: 2e-6, torch.float16: 4e-3}.get(dtype)
    for library in (True, False) if rounding else ():  # on CPUs onnxruntime has no products of bfloat16
        for found, expected in zip(results(model, library, values=(x,)), exact, strict=True):
            torch.testing.assert_close(torch.from_numpy(found).double(), expected.detach(), rtol=rounding, atol=rounding)


class NormedProduct(NormedHeads):
    """Queries, keys and values of one product, the first two normalised by head."""

    def __init__(self, dtype, values, wide_weight=False, heads_first=False):
        super().__init__(4, 8, values - 32, dtype, wide_weight)  # sizes: 32, 32, 16, values - 32
        self.parts, self.heads_first = (32, 16, values), heads_first

    def forward(self, x):
        query, key, values = self.product(x).split(self.parts, -1)
        query, key = (t.unflatten(-1, (-1, self.width)) for t in (query, key))
        if self.heads_first:
            return *(self.norm(t.transpose(1, 2), w) * 2 for t, w in zip((query, key), self.weights, strict=False)), values
        return *(self.norm(t, w).transpose(1, 2) for t, w in zip((query, key), self.weights, strict=False)), values


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("wide", (False, True), ids=("weights of their type", "weights of float32"))
@pytest.mark.parametrize("heads_first", (False, True))
def test_norms_of_queries_and_keys_of_a_product(dtype, wide, heads_first):
    """One kernel for both, and values come out of it as they are."""
    torch.manual_seed(4)
    x, module = torch.randn(2, 5, HIDDEN).to(dtype), NormedProduct(dtype, 32, wide, heads_first)
    counts, model = counts_of(module, x)
    assert (counts["norm_products"], counts["fuse_norms"]) == (1, 0)
    assert kinds(model).count("RmsNorm") == 1 and not {"ReduceMean", "Pow", "Sqrt"} & set(kinds(model))
    exact = module.double()(x.double())
    rounding = {torch.float32: 2e-6, torch.float16: 4e-3}.get(dtype)
    for library in (True, False) if rounding else ():
        for found, expected in zip(results(model, library, values=(x,)), exact, strict=True):
            torch.testing.assert_close(torch.from_numpy(found).double(), expected.detach(), rtol=rounding, atol=rounding)


def root(x):
    return x.pow(2).mean(-1, keepdim=True) + 1e-5


# What else reads a part of the norm of queries q: the root, the widened queries, a product with something else, the squares.
READERS = {
    "root": lambda norm, q: (q * torch.rsqrt(root(q)) * norm, torch.rsqrt(root(q))),
    "widened": lambda norm, q: ((q.float() * torch.rsqrt(root(q.float()))).to(q.dtype) * norm, q.float() * 2),
    "product": lambda norm, q: (q * torch.rsqrt(root(q)) * norm, (q * (norm + 2)).mean(-1)),
    "square": lambda norm, q: (q * torch.rsqrt(root(q)) * norm, q.pow(2).mean(1)),
}


@pytest.mark.parametrize("reader", READERS)
def test_norms_of_a_product_of_which_others_read_a_part(reader):
    """A norm in front of the Split would change what they read."""

    class Read(NormedProduct):
        def forward(self, x):
            query, key, values = self.product(x).split(self.parts, -1)
            query, key = (t.unflatten(-1, (-1, self.width)) for t in (query, key))
            found = *READERS[reader](self.weights[0], query), key * torch.rsqrt(root(key)) * self.weights[1], values
            return tuple(t.transpose(0, 1) * 1.5 for t in found)

    torch.manual_seed(5)
    dtype = torch.float16 if reader == "widened" else torch.float32
    x, module = torch.randn(2, 5, HIDDEN).to(dtype), Read(dtype, 32)
    counts, model = counts_of(module, x)
    assert counts["norm_products"] == 0
    rounding = 4e-3 if dtype == torch.float16 else 1e-5
    for found, expected in zip(results(model, values=(x,)), module(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=rounding, atol=rounding)


def test_norms_of_a_product_that_do_not_fit_together():
    """Of other epsilons; queries that are read as they are too; values that are no heads."""

    class Apart(NormedProduct):
        def norm(self, x, weight):
            epsilon = 1e-5 if weight is self.weights[0] else 1e-3
            return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    class Shared(NormedProduct):
        def forward(self, x):
            query, key, values = self.product(x).split(self.parts, -1)
            heads = query.unflatten(-1, (-1, self.width))
            return (
                self.norm(heads, self.weights[0]),
                heads * 2,
                self.norm(key.unflatten(-1, (-1, self.width)), self.weights[1]),
                values,
            )

    for module in (Apart(torch.float32, 32), Shared(torch.float32, 32), NormedProduct(torch.float32, 35)):
        x = torch.randn(2, 5, HIDDEN)
        counts, model = counts_of(module, x)
        assert counts["norm_products"] == 0
        for found, expected in zip(results(model, values=(x,)), module(x), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", (False, True), ids=("weights of their type", "weights of float32"))
def test_sums_and_norms_in_bfloat16(wide):
    """One kernel that gives both; in float32 they are SkipSimplifiedLayerNormalization."""

    class Stream(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(HIDDEN).to(torch.bfloat16))

        def forward(self, x, y):
            total = x.to(torch.bfloat16) + y.to(torch.bfloat16)
            wide_sum = total.float()
            normed = wide_sum * torch.rsqrt(wide_sum.pow(2).mean(-1, keepdim=True) + 1e-5)
            scaled = (normed * self.weight.float()).to(total.dtype) if wide else self.weight * normed.to(total.dtype)
            return scaled.float(), total.float() * 2

    module, (x, y) = Stream(), torch.randn(2, 2, 5, HIDDEN).to(torch.bfloat16).float()
    counts, model = counts_of(module, x, y)
    assert counts["fuse_norms"] == 1 and "RmsNorm" in kinds(model) and not {"Add", "ReduceMean"} & set(kinds(model))
    for library in (True, False):
        normed, doubled = results(model, library, values=(x, y))
        assert torch.equal(torch.from_numpy(doubled), module(x, y)[1])
        total = (x + y).to(torch.bfloat16).double()
        exact = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * module.weight.double()
        torch.testing.assert_close(torch.from_numpy(normed).double(), exact.detach(), rtol=2.0**-8, atol=0.0)


def test_norms_that_others_read_stay():
    """What is normalised, or the norm before its gate, is read by others too; a norm of something else than columns."""

    class Shared(NormedHeads):
        def forward(self, x):
            query, gate, key, others = self.product(x).split(self.sizes, -1)
            rows = self.norm((gate * 2).reshape(-1, self.width), self.weights[2])
            gated = rows * torch.nn.functional.silu(others[..., : self.heads * self.width].reshape(-1, self.width))
            return self.norm(query.unflatten(-1, (-1, self.width)), self.weights[0]), query, gated, rows, key

    x, module = torch.randn(2, 5, HIDDEN), Shared(4, 8, 32, torch.float32)
    counts, model = counts_of(module, x)
    assert counts["fuse_norms"] == 0
    for found, expected in zip(results(model, values=(x,)), module(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=1e-5, atol=1e-5)


def test_gates_of_other_ranks_stay():
    class Ranks(torch.nn.Module):
        def forward(self, x):
            row, more = x.mean((0, 1)), x.unsqueeze(2).unsqueeze(2)
            return torch.relu(row) * torch.tanh(row), torch.relu(more) * torch.tanh(more)

    x = torch.randn(2, 5, HIDDEN)
    counts, model = counts_of(Ranks(), x)
    assert counts["fuse_gates"] == 0
    for found, expected in zip(results(model, values=(x,)), Ranks()(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6)


def test_what_is_no_norm_is_not_narrowed():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((HIDDEN,), 1e-3))

        def forward(self, x):
            wide = x.float()
            return (wide / torch.sqrt(wide.abs() * 1e-9) * self.weight.float()).to(x.dtype)

    assert counts_of(Scaled().half(), torch.randn(2, 5, HIDDEN).half())[0]["narrow_norms"] == 0


class Products(torch.nn.Module):
    """A gated feed-forward layer and a product of its input. kept: the gate's product is read by something else too."""

    def __init__(self, bias, kept=False):
        super().__init__()
        self.up, self.kept = torch.nn.Linear(HIDDEN, 2 * HIDDEN, bias=bias), kept
        self.down, self.other = torch.nn.Linear(HIDDEN, HIDDEN, bias=bias), torch.nn.Linear(HIDDEN, 24, bias=not bias)

    def forward(self, x):
        both = self.up(x)
        gate, values = both.chunk(2, -1)
        y = self.down(torch.nn.functional.silu(gate) * values)
        return y, self.other(y), both.sum(-1) if self.kept else x.sum(-1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("bias, kept", ((False, False), (True, False), (True, True)))
def test_products_in_16_bits(bias, kept, dtype):
    """Biases and gates are theirs; a product that others read keeps its gate apart."""
    torch.manual_seed(8)
    module, x = Products(bias, kept).to(dtype), torch.randn(2, 5, HIDDEN).to(dtype)
    counts, model = counts_of(module, x)
    if dtype == torch.float32:
        assert counts["fuse_linear"] == 0 and "Linear" not in kinds(model)
        return
    nodes = [node for node in model.graph if node.op_type == "Linear"]
    assert counts["fuse_linear"] == len(nodes) == 3 and not {"MatMul", "Gemm"} & {*kinds(model)}
    assert [n.attributes.get_int("gated", 0) for n in nodes] == [int(not kept), 0, 0]
    assert kinds(model).count("GatedActivation") == int(kept)
    assert [len(n.inputs) for n in nodes] == [2 + bias, 2 + bias, 2 + (not bias)]
    assert all(n.attributes.get_int("constant_weight", 0) for n in nodes)
    if dtype == torch.bfloat16:  # onnxruntime's inputs come from NumPy, which has no such numbers
        return
    exact = copy.deepcopy(module).double()(x.double())
    for library in (True, False):
        for found, expected in zip(results(model, library, values=(x,)), exact, strict=True):
            torch.testing.assert_close(torch.from_numpy(found).double(), expected.detach(), rtol=4e-3, atol=4e-3)


def test_products_of_what_is_no_constant_stay():
    class Given(torch.nn.Module):
        def forward(self, x):
            return x @ x.transpose(1, 2), x[0] @ x[0].transpose(0, 1)

    assert counts_of(Given().half(), torch.randn(2, 5, HIDDEN).half())[0]["fuse_linear"] == 0


def test_products_whose_readers_stay():
    """A gate that sees a product as other rows, and one that reads a sum in a branch."""

    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(HIDDEN, 2 * HIDDEN)

        def forward(self, x):
            return lf.gated_activation(self.up(x).view(1, -1, 2, HIDDEN))

    class Branch(Rows):
        def forward(self, x):
            product = self.up(x)
            return torch.cond(x.sum() > 0, lambda p, x: p + 1, lambda p, x: p * 2, (product, x))

    torch.manual_seed(9)
    for module, kept in ((Rows().half().eval(), "GatedActivation"), (Branch().half().eval(), "If")):
        x = torch.randn(2, 5, HIDDEN).half()
        counts, model = counts_of(module, x)
        assert counts["fuse_linear"] == 1 and {"Linear", kept} <= {*kinds(model)}
        (found,) = results(model, values=(x,))
        torch.testing.assert_close(torch.from_numpy(found), module(x).detach(), rtol=4e-3, atol=4e-3)
