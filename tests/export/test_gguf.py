"""GGUF files: their blocks as ONNX Runtime's, whole models, and files that are damaged."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers

from leanfleet import cli, gguf_file, ort_ops
from leanfleet.export import blocks, export_decoder, function_bodies, gguf_model
from leanfleet.export.fusions import MICROSOFT
from support import gguf_files
from support.cpu_time import rest_slow

EXTREME = np.array([0.0, 2.0**-24, 6e-5, 0.013, 1.0, 1000.0, -0.02, 65504.0])
OPERATORS = {"", MICROSOFT}


@pytest.mark.parametrize("kind", blocks.KINDS)
@pytest.mark.parametrize("scales", (None, EXTREME[:7], EXTREME), ids=("usual", "small", "extreme"))
def test_blocks_are_exactly_what_gguf_makes_of_them(kind, scales):
    """Bit for bit in float32; in float64 within float32's rounding."""
    data, _ = gguf_files.random_blocks(kind, 24, 1024, seed=7, scales=scales)
    found, expected = blocks.KINDS[kind](data), gguf_files.dequantized(kind, data)
    assert found.shape == (24, 1024) and np.isfinite(expected).all()
    assert np.array_equal(found.numbers(), expected)
    wide = found.numbers(np.float64)
    assert (np.abs(wide - expected) <= 1e-6 * np.abs(wide).max()).all()
    order = np.random.default_rng(0).permutation(24)
    assert np.array_equal(found.rows(order).numbers(), expected[order])
    assert len(np.unique(expected)) > 50


def block_model(kind, rows, columns, exact, tokens=None, dtype=ir.DataType.FLOAT):
    """(session, weights): the product of x with a matrix of blocks, or its rows."""
    data, _ = gguf_files.random_blocks(kind, rows, columns, seed=3)
    found = blocks.KINDS[kind](data)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.INT64 if tokens else dtype))
    x.shape = ir.Shape(["batch", "tokens"] if tokens else ["batch", "tokens", columns])
    node = ir.node("Embedding" if tokens else "Linear", [x], {"weight": "w"}, domain=blocks.DOMAIN, name="n")
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(dtype), ir.Shape(["batch", "tokens", columns if tokens else rows])
    graph = ir.Graph([x], [y], nodes=[node], opset_imports={"": 20, blocks.DOMAIN: 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    assert blocks.expand(model, {"w": found}) == 1
    for i, n in enumerate(graph):
        for value in n.outputs:
            value.name = value.name or f"v{i}"
    function_bodies.attach(model)
    if exact:
        blocks.multiply_exactly(model)
    options = onnxruntime.SessionOptions()
    ort_ops.register(options)
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options), found.numbers(np.float64)


@pytest.mark.parametrize("kind", blocks.KINDS)
@pytest.mark.parametrize("tokens", (1, 5))
def test_products_of_blocks(kind, tokens):
    """With activations as they are: as exact as float32. With rounded ones: off by what rounding them to 8 bits gives."""
    x = np.random.default_rng(1).standard_normal((2, tokens, 512)).astype(np.float32)
    for exact in (True, False):
        session, weights = block_model(kind, 96, 512, exact)
        expected = x.astype(np.float64) @ weights.T
        scale = np.linalg.norm(x, axis=-1, keepdims=True) * np.linalg.norm(weights, axis=1)
        error = (np.abs(session.run(None, {"x": x})[0] - expected) / scale).max()
        assert error < (2e-6 if exact else 8e-3), (kind, exact, error)
    assert error > 1e-5  # it does round


@pytest.mark.parametrize("kind", blocks.KINDS)
def test_rows_of_blocks(kind):
    session, weights = block_model(kind, 96, 512, False, tokens=True)
    tokens = np.random.default_rng(1).integers(0, 96, (2, 5))
    assert np.allclose(session.run(None, {"x": tokens})[0], weights[tokens], rtol=2e-6, atol=1e-6)


def both(path):
    """(ours, transformers' own) of a GGUF file, ours with its matrices kept."""
    ours, tokenizer = gguf_model.load(path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return ours, theirs.eval(), tokenizer


@pytest.mark.parametrize(
    ("kinds", "embedding", "tied", "architecture"),
    rest_slow(
        (
            (("Q4_1",), "Q8_0", True, "llama"),
            (("Q4_0", "Q5_0", "Q8_0"), "Q4_0", False, "llama"),
            (("Q4_K", "Q4_K", "Q6_K", "Q5_K"), "Q6_K", True, "llama"),
            (("Q5_1", "F32"), "F32", True, "llama"),
            (("Q4_0",), "Q4_1", True, "llama"),
            (("Q8_0",), "Q5_K", True, "llama"),
            (("Q4_1", "Q4_1", "Q4_0"), "Q4_1", False, "qwen2"),
        )
    ),
)
def test_a_model_stays_as_its_file_has_it(kinds, embedding, tied, architecture, tmp_path):
    """Each parameter equals transformers', rows in its order; the exported file is verified against them and not much larger
    than the GGUF file, with the embedding in it once."""
    path = gguf_files.write(tmp_path / "model.gguf", kinds, embedding, tied, architecture)
    ours, theirs, tokenizer = both(path)
    assert blocks.holders(ours)
    tokens = torch.randint(0, 256, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(ours(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    expanded, _ = gguf_model.load(path, keep=False)
    assert not blocks.holders(expanded)
    state, expected = expanded.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    assert torch.equal(expanded.model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)
    assert ours.generation_config.eos_token_id == theirs.generation_config.eos_token_id

    out = tmp_path / "out"
    export_decoder(ours, out, tokenizer)
    verified = json.loads((out / "leanfleet.json").read_text())["verified"]
    assert 0 < verified["largest_difference"] < verified["bound"] < 0.01
    graph = onnx.load(out / "model.onnx").graph
    assert {n.domain for n in graph.node} == {*OPERATORS, "leanfleet"}
    kept = [t for t in graph.initializer if t.name.endswith((".q", ".numbers"))]
    assert all(t.data_type in (onnx.TensorProto.UINT8, onnx.TensorProto.INT8) for t in kept)
    assert len([t for t in kept if t.name.startswith("token_embd.weight.")]) == (embedding != "F32")
    if architecture == "llama" and len(kinds) == 1:
        size = sum(f.stat().st_size for f in out.glob("model.onnx*"))
        assert size < 1.1 * path.stat().st_size
        products = [n for n in graph.node if n.op_type in ("MatMulNBits", "BlockLinear")]
        assert len(products) == 4 * gguf_files.LAYERS + 1  # queries, keys and values are one; gate and up too; the head


def test_a_wrong_block_is_found(tmp_path, monkeypatch):
    """Verification sees one weight of one block."""
    from leanfleet.export.verification import VerificationError

    model, _ = gguf_model.load(gguf_files.write(tmp_path / "model.gguf"))
    honest = blocks.expand

    def wrong(graph, matrices):
        count = honest(graph, matrices)
        value = next(v for name, v in graph.graph.initializers.items() if name.endswith("ffn_down.weight.q"))
        packed = value.const_value.numpy().copy()
        packed[5, 3, 0] ^= 15
        value.const_value = ir.tensor(packed, name=value.name)
        return count

    monkeypatch.setattr(blocks, "expand", wrong)
    with pytest.raises(VerificationError, match="the exported file is wrong"):
        export_decoder(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_export_by_the_path_and_by_the_folder(tmp_path, capsys):
    path = gguf_files.write(tmp_path / "in" / "model.gguf") if (tmp_path / "in").mkdir() is None else None
    for given in (path, path.parent):
        assert cli.main(["export", str(given), str(tmp_path / "out"), "--no-verify"]) == 0
        told = capsys.readouterr().err
        assert "matrices that stay as the file has them: 1 of Q8_0, 14 of Q4_0" in told
    assert cli.main(["generate", str(tmp_path / "out"), "Hello", "--raw", "--max-tokens", "4", "--provider", "cpu"]) == 0
    for options in (["--weights", "expand"], ["--dtype", "float16"], ["--no-fuse"]):
        assert cli.main(["export", str(path), str(tmp_path / "other"), "--no-verify", *options]) == 0
        assert "stay" not in capsys.readouterr().err
        graph = onnx.load(tmp_path / "other" / "model.onnx").graph
        assert not any(n.op_type in ("MatMulNBits", "BlockLinear") for n in graph.node)


def test_a_vocabulary_without_its_size(tmp_path):
    model, _ = gguf_model.load(gguf_files.write(tmp_path / "model.gguf", vocabulary=False))
    assert model.config.vocab_size == 288


def refusal(capsys, tmp_path, *arguments):
    capsys.readouterr()
    assert cli.main(["export", *map(str, arguments), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    return capsys.readouterr().err.splitlines()[-1]


def test_errors_are_one_line(tmp_path, capsys):
    path = gguf_files.write(tmp_path / "model.gguf")
    content = path.read_bytes()
    bad = tmp_path / "bad.gguf"

    def told(data, *options):
        bad.write_bytes(data)
        return refusal(capsys, tmp_path, bad, *options)

    assert "is not whole: tensor" in told(content[: len(content) - 100])
    assert "its header ends or makes no sense" in told(content[:3000])
    assert "is no GGUF file: it begins with b'PK\\x03\\x04'" in told(b"PK\x03\x04" + content[4:])
    assert "it has 3 bytes" in told(b"abc")
    assert "version 1" in told(content[:4] + (1).to_bytes(4, "little") + content[8:])
    at = content.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4 + 8
    assert "type 99, which leanfleet does not know" in told(content[:at] + (99).to_bytes(4, "little") + content[at + 4 :])
    assert "does not exist" in refusal(capsys, tmp_path, tmp_path / "none.gguf")
    (tmp_path / "text.txt").write_text("x")
    assert "is no GGUF file" in refusal(capsys, tmp_path, tmp_path / "text.txt")
    assert "--no-fuse leaves out" in refusal(capsys, tmp_path, path, "--weights", "keep", "--no-fuse")
    missing = content.replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_up__.weight")
    assert "lacks the weights of model.layers.1.mlp.down_proj.weight" in told(missing)
    unknown = content.replace(b"llama", b"lxama")
    assert "lxama" in told(unknown)


def test_random_damage_gives_one_line_or_a_model(tmp_path):
    """No byte of a header makes anything but a ValueError."""
    content = bytearray(gguf_files.write(tmp_path / "model.gguf").read_bytes())
    random, refused = np.random.default_rng(0), 0
    for _ in range(300):
        damaged = bytearray(content)
        for at in random.integers(4, 3000, 3):
            damaged[at] = random.integers(0, 256)
        (tmp_path / "bad.gguf").write_bytes(damaged)
        try:
            gguf_file.read(tmp_path / "bad.gguf")
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 30
