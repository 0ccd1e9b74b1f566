"""Every operator of the schema has all the pieces that CONTRIBUTING.md names; what is missing is named."""

import pytest

from leanfleet import export, native, spec, trial
from leanfleet.export import function_bodies, reference, torch_ops
from support.paths import ROOT


def missing_pieces(op):
    """What an operator (a spec.OpSpec) lacks, a line each."""
    name, page = op.snake_name, f"docs/operators/{op.snake_name}.md"
    forms = [name] + ([name + "_"] if op.mutating else [])
    pieces = {
        f"csrc/{op.folder}/operators.cmake": (ROOT / "csrc" / op.folder / "operators.cmake").exists(),
        "csrc/core/op_specs.h without it: run python csrc/generate.py": f'"{op.name}"'
        in (ROOT / "csrc" / "core" / "op_specs.h").read_text(),
        "the library has no kernel of it: build again": op.name in native.op_names(),
        f"export/reference.py: function {name}": hasattr(reference, name),
        f"export/function_bodies.py: an entry of _BODIES for {op.name}": op.name in function_bodies._BODIES,
        f"leanfleet/trial.py: an entry of TOLERANCE for {op.name}": op.name in trial.TOLERANCE,
        f"{page}: run python csrc/generate.py": (ROOT / page).exists(),
        f"mkdocs.yml: {page}": page.removeprefix("docs/") in (ROOT / "mkdocs.yml").read_text(),
        "csrc/ops.toml: paper, equation and example": all((op.paper, op.equation, op.example)),
    }
    for form in forms:
        pieces[f"export/torch_ops.py: {form} = _function(...)"] = hasattr(torch_ops, form)
        pieces[f"export/__init__.py: {form}"] = form in export.__all__
    return [what for what, there in pieces.items() if not there]


@pytest.mark.parametrize("name", spec.all_specs())
def test_no_piece_is_missing(name):
    assert not (missing := missing_pieces(spec.all_specs()[name])), "\n".join([f"{name} lacks", *missing])


def test_every_missing_piece_is_named(tmp_path):
    schema = tmp_path / "ops.toml"
    schema.write_text(
        '[HalfDone]\nversion = 1\nfolder = "half_done"\nmutating = "accumulate"\ndoc = ""\n'
        'inputs = [{ name = "x", type = "T", shape = "B K", doc = "" }]\n'
        'outputs = [{ name = "y", type = "T", shape = "B K", takes = "x", doc = "" }]\n'
        'attrs = [{ name = "accumulate", type = "bool", default = false, doc = "" }]\n'
    )
    (op,) = spec.parse(schema)
    missing = "\n".join(missing_pieces(op))
    for place in (
        "csrc/half_done/operators.cmake",
        "op_specs.h",
        "library",
        "export/reference.py",
        "_BODIES",
        "TOLERANCE",
        "docs/operators/half_done.md",
        "mkdocs.yml",
        "half_done = _function",
        "half_done_ = _function",
        "export/__init__.py: half_done_",
        "paper, equation and example",
    ):
        assert place in missing, place


def test_the_larger_of_two_sizes_tells_neither(tmp_path):
    schema = tmp_path / "ops.toml"
    entry = (
        '[Likely]\nversion = 1\nfolder = "likely"\ndoc = ""\nattrs = []\n'
        'inputs = [{{ name = "x", type = "T", shape = "B {}", doc = "" }}, '
        '{{ name = "y", type = "T", shape = "C", doc = "" }}]\n'
        'outputs = [{{ name = "z", type = "T", shape = "max(B,C)", doc = "" }}]\n'
    )
    schema.write_text(entry.format("V"))
    (op,) = spec.parse(schema)
    (axis,) = op.outputs[0].shapes[0].axes
    assert str(axis) == "max(B,C)" and axis.size({"B": 2, "C": 5}) == 5 and axis.size({"B": 7, "C": 5}) == 7
    assert spec.sizes_of([(axis, 9)]) == {} and spec.sizes_of([(axis, 9), *zip(op.inputs[0].shapes[0].axes, (2, 3))]) == dict(
        B=2, V=3
    )
    schema.write_text(entry.format("max(B,C)"))
    assert spec.parse(schema)
    schema.write_text(entry.format("max(B,V)"))
    with pytest.raises(ValueError, match=r"Likely: axis max\(B,V\): no required input tells V"):
        spec.parse(schema)


def test_sizes_told_by_attributes_are_of_outputs_alone(tmp_path):
    schema = tmp_path / "ops.toml"
    entry = (
        '[Likely]\nversion = 1\nfolder = "likely"\ndoc = ""\n'
        'inputs = [{{ name = "x", type = "T", shape = "B {}", doc = "" }}]\n'
        'outputs = [{{ name = "y", type = "L", shape = "B count", doc = "" }}]\n'
        'attrs = [{{ name = "count", type = "int", default = 2, doc = "" }}]\n'
    )
    schema.write_text(entry.format("V"))
    (op,) = spec.parse(schema)
    assert op.attr_sizes({}) == {"count": 2} and op.attr_sizes({"count": 5}) == {"count": 5}
    schema.write_text(entry.format("count"))
    with pytest.raises(ValueError, match="Likely: an input's axis has the name of an attribute"):
        spec.parse(schema)
