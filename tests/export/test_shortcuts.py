"""What torch.onnx.export may leave out: the graph is the same with and without, and programs that need it get it."""

from contextlib import nullcontext

import onnxruntime
import pytest
import torch

from leanfleet.export import export, shortcuts


class Plain(torch.nn.Module):
    """Casts to the same type and to another, a check and a slice: nothing that must be decomposed."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = torch.nn.functional.silu(self.linear(x.to(torch.float32)))
        return y[:, :4].to(torch.float64).to(torch.float32) * 2, y.to(torch.float32)


class Writing(torch.nn.Module):
    """Writes to a tensor in place: decompositions make it functional."""

    def forward(self, x):
        y = torch.zeros_like(x)
        y[:, 1:] += x[:, :-1]
        y.mul_(3)
        return y, x + 1


class Decomposed(torch.nn.Module):
    """Has an operator that ONNX has no counterpart of."""

    def forward(self, x):
        return torch.nn.functional.huber_loss(x, x + 2), x + 1


def kinds(program):
    return [(n.op_type, [list(v.shape) if v.shape else None for v in n.outputs]) for n in program.model.graph]


@pytest.mark.parametrize(("module", "shortcut"), ((Plain, True), (Writing, False), (Decomposed, False)))
def test_graphs_are_the_same(module, shortcut, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, x = module().eval(), torch.randn(8, 8)
    used = []
    honest = shortcuts.is_functional
    monkeypatch.setattr(shortcuts, "is_functional", lambda *a: used.append(honest(*a)) or used[-1])
    ours = export(model, (x,), tmp_path / "model.onnx")
    assert used == [shortcut]
    found = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {ours.model.graph.inputs[0].name: x.numpy()})
    for a, b in zip(found, model(x), strict=True):
        assert torch.allclose(torch.from_numpy(a), b.detach(), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(shortcuts, "taken", nullcontext)
    assert kinds(ours) == kinds(export(model, (x,)))


def test_methods_are_as_they_were():
    before = torch.export.ExportedProgram.run_decompositions
    with pytest.raises(torch.onnx.OnnxExporterError):
        export(Broken(), (torch.ones(2),))
    assert torch.export.ExportedProgram.run_decompositions is before


class Broken(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("no")
