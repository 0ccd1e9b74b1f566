"""leanfleet generate on decoder folders that were damaged at random: one line and exit code 2, or an answer."""

import json
import random
import shutil

import onnx
import pytest
import torch
import transformers

from leanfleet import cli
from leanfleet.decoder_contract import FORMAT
from leanfleet.export import export_decoder
from support.decoders import byte_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A decoder folder whose weights lie in a file of their own."""
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=260,
        intermediate_size=64,
        max_position_embeddings=200,
        eos_token_id=256,
    )
    export_decoder(transformers.LlamaForCausalLM(config).eval(), folder, byte_tokenizer())
    model = onnx.load(folder / "model.onnx")
    (folder / "model.onnx").unlink()
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=256)
    return folder


def damaged_bytes(data, rng):
    data, kind = bytearray(data), rng.choice(["cut", "flip", "zero", "insert", "delete", "empty", "junk"])
    at = rng.randrange(len(data))
    if kind == "cut":
        del data[at:]
    elif kind == "flip":
        for _ in range(rng.choice([1, 4, 30])):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "zero":
        data[at : at + 200] = bytes(len(data[at : at + 200]))
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.choice([1, 16]))
    elif kind == "delete":
        del data[at : at + rng.choice([1, 16, 300])]
    else:
        data = b"" if kind == "empty" else rng.randbytes(400)
    return bytes(data)


def damaged_json(text, rng):
    """With one value, at any depth, gone or of another kind."""
    whole = where = json.loads(text)
    while True:
        key = rng.choice(list(where) if isinstance(where, dict) else range(len(where)))
        if not (isinstance(where[key], (dict, list)) and where[key]) or rng.random() < 0.4:
            break
        where = where[key]
    if rng.random() < 0.4:
        del where[key]
    else:
        where[key] = rng.choice([None, -1, 0, 1.5, 10**30, "x", [], {}, [None], True, [where[key]], str(where[key])])
    return json.dumps(whole)


def damage(folder, rng):
    """Damages one file; returns its name."""
    path = rng.choice(sorted(folder.iterdir()))
    if rng.random() < 0.05:
        path.unlink()
    elif path.suffix == ".json" and rng.random() < 0.6:
        path.write_text(damaged_json(path.read_text(), rng))
    else:
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
    return path.name


def generate(folder, capfd):
    """(exit code, stdout, stderr) of three tokens; what libraries print themselves is in stderr too."""
    code = cli.main(["generate", str(folder), "Hi", "--max-tokens", "3", "--provider", "cpu"])
    return code, *capfd.readouterr()


@pytest.mark.slow
def test_damaged_folders(whole, tmp_path, capfd):
    assert generate(whole, capfd)[0] == 0
    refused = {}
    for seed in range(150):
        rng, folder = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(whole, folder)
        name = damage(folder, rng)
        code, out, err = generate(folder, capfd)
        assert code in (0, 2), (seed, name)
        if code == 2:
            assert out == "" and err.count("\n") == 1 and err.startswith("leanfleet generate: "), (seed, name, err)
            assert str(folder) in err or "this model's" in err, (seed, name, err)
            refused[name] = refused.get(name, 0) + 1
        shutil.rmtree(folder)
    assert sum(refused.values()) > 75 and set(refused) == {f.name for f in whole.iterdir()}, refused


FACTS = {
    "no object": ("[1, 2]", "holds no JSON object"),
    "no JSON": ("{'a': 1}", "is damaged"),
    "empty": ("", "is damaged"),
    "no UTF-8": (b'{"vocabulary": "\xff"}', "is damaged"),
    "deep": ("[" * 100000, "is damaged"),
    "large": ('{"a": "' + "x" * (1 << 20) + '"}', "at most 1048576 are read"),
    "no keys": ("{}", "has no vocabulary"),
    "no stop": ('{"vocabulary": 260}', "has no stop_tokens"),
    "text": ({"vocabulary": "260"}, 'vocabulary is "260"; expected a positive number'),
    "negative": ({"vocabulary": -260}, "vocabulary is -260; expected"),
    "huge": ({"vocabulary": 10**30}, "expected a positive number"),
    "true": ({"vocabulary": True}, "vocabulary is true; expected"),
    "other": ({"vocabulary": 261}, "has a vocabulary of 261"),
    "stop": ({"stop_tokens": 2}, "stop_tokens is 2; expected a list of token ids"),
    "stops": ({"stop_tokens": ["</s>"]}, "stop_tokens is"),
    "positions": ({"max_positions": "many"}, 'max_positions is "many"; expected a positive number or null'),
    "format": ({"format": "1"}, 'format is "1"; expected a positive number'),
    "newer": ({"format": FORMAT + 1}, f"has format {FORMAT + 1}, and leanfleet"),
    "none": ({"max_positions": 0}, "max_positions is 0"),
    "kind": ({"kind": ["x"]}, "holds a model of kind"),
    "serving": ({"kind": "serving", "block": 0}, "block is 0; expected a number from 1 to"),
}


@pytest.mark.parametrize("case", FACTS)
def test_facts_that_are_none(case, whole, tmp_path, capfd):
    """generate and bundle alike."""
    content, message = FACTS[case]
    shutil.copytree(whole, tmp_path / "folder")
    path = tmp_path / "folder" / "leanfleet.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = generate(tmp_path / "folder", capfd)
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err and str(tmp_path / "folder") in err
    if case == "serving":  # which bundle does not take
        message = "holds a model of kind serving; this needs one from leanfleet.export.export_decoder"
    if case != "other":  # a matter of the session
        assert cli.main(["bundle", str(tmp_path / "folder"), "--genai", str(tmp_path / "genai")]) == 2
        assert message in capfd.readouterr().err and not (tmp_path / "genai").exists()


def test_model_that_is_no_decoder(whole, tmp_path, capfd):
    shutil.copytree(whole, tmp_path / "folder")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", ["pixels"], ["logits"])],
        "g",
        [value("pixels", 1, [1, 260])],
        [value("logits", 1, [1, 260])],
    )
    onnx.save(
        onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 20)]),
        tmp_path / "folder" / "model.onnx",
    )
    code, out, err = generate(tmp_path / "folder", capfd)
    assert code == 2 and err.count("\n") == 1
    assert (
        "model.onnx is no decoder of leanfleet.export.export_decoder: its inputs are pixels; it has the inputs input_ids, "
        "seq_lens, query_lens and past_key_values...., the outputs logits and present...."
    ) in err
