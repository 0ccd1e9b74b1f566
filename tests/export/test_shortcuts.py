"""What torch.onnx.export may leave out: the graph is the same with and without, and programs that need it get it."""

from contextlib import nullcontext

import onnxruntime
import pytest
import torch
from onnxscript.rewriter import RewriteRule
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import InsertTypePromotion

from leanfleet.export import export, shortcuts


class Plain(torch.nn.Module):
    """Casts to the same type and to another, a check and a slice: nothing that must be decomposed."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = torch.nn.functional.silu(self.linear(x.to(torch.float32)))
        return y[:, :4].to(torch.float64).to(torch.float32) * 2.0, y.to(torch.float32)


class Writing(torch.nn.Module):
    """Writes to a tensor in place: decompositions make it functional."""

    def forward(self, x):
        y = torch.zeros_like(x)
        y[:, 1:] += x[:, :-1]
        y.mul_(3.0)
        return y, x + 1.0


class Decomposed(torch.nn.Module):
    """Has an operator that ONNX has no counterpart of."""

    def forward(self, x):
        return torch.nn.functional.huber_loss(x, x + 2.0), x + 1.0


class Mixed(torch.nn.Module):
    """Takes values of different types together, which ONNX's operators do not."""

    def forward(self, x):
        steps = torch.arange(x.shape[-1])
        return x * steps + 1, torch.where(x > 0, x, 2), torch.pow(x.double(), steps), torch.true_divide(steps, 3)


class Halved(torch.nn.Module):
    """A number and a half-precision tensor: the number takes the tensor's type."""

    def forward(self, x):
        return (x.half() * 0.3 + 1).float()


def kinds(program):
    return [(n.op_type, [(v.dtype, list(v.shape) if v.shape else None) for v in n.outputs]) for n in program.model.graph]


@pytest.mark.parametrize(
    ("module", "functional", "promoted"),
    ((Plain, True, False), (Writing, False, False), (Decomposed, False, False), (Mixed, True, True), (Halved, True, True)),
)
def test_graphs_are_the_same(module, functional, promoted, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, x = module().eval(), torch.randn(8, 8)
    used = {}

    def noted(name):
        honest = getattr(shortcuts, name)
        monkeypatch.setattr(shortcuts, name, lambda *a: used.setdefault(name, []).append(honest(*a)) or used[name][-1])

    noted("is_functional")
    noted("promotes")
    ours = export(model, (x,), tmp_path / "model.onnx")
    assert used == {"is_functional": [functional], "promotes": [promoted]}
    found = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {ours.model.graph.inputs[0].name: x.numpy()})
    expected = model(x)
    tolerance = 2e-3 if module is Halved else 1e-5  # onnxruntime's CPU provider rounds once where PyTorch rounds twice
    for a, b in zip(found, expected if isinstance(expected, tuple) else [expected], strict=True):
        assert torch.allclose(torch.from_numpy(a), b.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    monkeypatch.setattr(shortcuts, "taken", nullcontext)
    assert kinds(ours) == kinds(export(model, (x,)))


def test_methods_are_as_they_were():
    owners = torch.export.ExportedProgram, InsertTypePromotion, RewriteRule, ONNXRegistry
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(torch.onnx.OnnxExporterError):
        export(Broken(), (torch.ones(2),))
    assert [dict(vars(owner)) for owner in owners] == before


def test_an_exports_own_operators_are_not_kept():
    with shortcuts.taken():
        first = ONNXRegistry.from_torchlib()
        first.register_op(torch.ops.leanfleet.lean_attention.default, lambda *a: None)
        assert not ONNXRegistry.from_torchlib().is_registered(torch.ops.leanfleet.lean_attention.default)
        assert ONNXRegistry.from_torchlib(opset_version=20).opset_version == 20


class Broken(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("no")
