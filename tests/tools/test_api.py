"""Every public name has a docstring, annotations and an example, and the examples run.

Public is what docs/reference shows and what a package's __all__ names. Examples find in their folder: `llama`, a model of
transformers with its tokenizer; `decoder` and `serving`, exported from it; `layer.onnx`, a LinearAttention layer of open
sizes; `model.onnx` with a node of ai.onnx Attention.
"""

import dataclasses
import importlib
import inspect
import re
import shutil
import textwrap
import time

import onnx
import pytest
import torch
import transformers
import yaml

from leanfleet import bench, driver, export, native, ort_ops, spec, trt_plugins
from leanfleet.export.serving import export_for_serving
from support.cpu_time import slow_if
from support.decoders import byte_tokenizer
from support.documents import DOCS, run
from support.rewrite_models import model_of, qkv

SECONDS = 20  # of processors that an example may take


def shown(text):
    """The names that a page of docs/reference shows by mkdocstrings, in full."""
    for name, options in re.findall(r"^::: ([\w.]+)\n((?: {4}.*\n)*)", text, re.M):
        members = (yaml.safe_load(options) or {}).get("options", {}).get("members") if options else None
        yield from [f"{name}.{member}" for member in members] if members else [name]


def found(name):
    """The object of a dotted name."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


NAMES = sorted({name for page in sorted((DOCS / "reference").glob("*.md")) for name in shown(page.read_text() + "\n")})
PACKAGES = {"leanfleet.export": export, "leanfleet.ort_ops": ort_ops}
OPERATORS = {
    op.snake_name + mark for op in spec.all_specs().values() for mark in ("", "_")
}  # tests/tools/test_docs.py has them
# What only carries values, or is raised: the examples of the functions that return or raise it show it.
CARRIERS = [
    n for n in NAMES if dataclasses.is_dataclass(found(n)) or isinstance(found(n), type) and issubclass(found(n), Exception)
]
SLOW = ["leanfleet.verify.run", "leanfleet.verify.support_table", "leanfleet.export.linear_decoder.LinearDecoder"]
WITH_EXAMPLE = [name for name in NAMES if name not in CARRIERS]


def example(thing):
    """The program in a docstring, "" where there is none."""
    _, _, text = (inspect.getdoc(thing) or "").partition("\nExample:\n")
    return textwrap.dedent(text)


def public_methods(cls):
    """Those that a class of ours defines itself."""
    return [f for name, f in vars(cls).items() if inspect.isfunction(f) and (name == "__init__" or not name.startswith("_"))]


def unannotated(function):
    """Parameters of a function without an annotation, and "return"."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    missing = [p.name for p in parameters if p.annotation is p.empty and p.name not in ("self", "cls")]
    return missing + (["return"] if signature.return_annotation is signature.empty else [])


def test_reference_shows_what_packages_hand_out():
    shown_last = {name.rpartition(".")[2] for name in NAMES}
    for package in PACKAGES.values():
        assert set(package.__all__) - shown_last - OPERATORS == set()


@pytest.mark.parametrize("name", [*NAMES, *(f"leanfleet.export.{name}" for name in sorted(OPERATORS & set(export.__all__)))])
def test_docstring_and_annotations(name):
    thing = found(name)
    assert inspect.getdoc(thing) and len(inspect.getdoc(thing).split()) > 4, name
    if isinstance(thing, type):
        generated = dataclasses.is_dataclass(thing) or issubclass(thing, (Exception, tuple))
        missing = {f.__name__: unannotated(f) for f in public_methods(thing) if not (generated and f.__name__ == "__init__")}
    else:
        missing = {thing.__name__: unannotated(thing)}
    assert not [(function, names) for function, names in missing.items() if names], missing


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_there_is_an_example(name):
    assert found(name).__name__ in example(found(name)), name


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        eos_token_id=256,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder that examples get a copy of."""
    folder = tmp_path_factory.mktemp("examples")
    model, tokenizer = llama(), byte_tokenizer()
    model.save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    export.export_decoder(model, folder / "decoder", tokenizer, verify=False)
    export_for_serving(model, folder / "serving", tokenizer, verify=False)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    layer = export.LinearAttention(hidden_size=64, num_heads=4)
    export.export(layer, (torch.randn(2, 10, 64),), folder / "layer.onnx", dynamic_shapes=(sizes,), input_names=["hidden"])
    inputs = qkv()
    onnx.save(model_of("Attention", "", inputs, ["output"], {"is_causal": 1}), folder / "model.onnx")
    return folder


def lacking(program):
    """Why an example cannot run here, "" where it can."""
    if "trt_plugins" not in program:
        return ""
    if re.search(
        r"\b(deserialize|inspect|Engine|TrtRunner|running import (generate, )?load_decoder|serving import ContinuousBatch)\b",
        program,
    ):
        return driver.why_no_gpu() or "there is no engine"
    try:
        trt_plugins.runtime()
        native.library_path("leanfleet_trt")
    except (ImportError, FileNotFoundError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", slow_if(WITH_EXAMPLE, SLOW))
def test_example_runs(name, files, tmp_path, monkeypatch, capfd):
    program = example(found(name))
    compile(program, name, "exec")
    for module, names in re.findall(r"^from (leanfleet\S*) import (.+)$", program, re.M):
        for each in names.split(", "):
            found(f"{module}.{each}")
    if why := lacking(program):
        pytest.skip(why)
    shutil.copytree(files, tmp_path / "here")
    monkeypatch.setattr(bench, "_methods", dict(bench._methods))  # what an example registers goes with it
    start = time.process_time()
    run(program, tmp_path / "here", monkeypatch)
    assert time.process_time() - start < SECONDS
