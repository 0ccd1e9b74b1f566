"""Every script of examples/ runs, and says so."""

import os
import subprocess
import sys

import pytest

from leanfleet import trt_plugins
from support.paths import ROOT

EXAMPLES = ROOT / "examples"


def engine_line():
    """What the TensorRT example prints here."""
    try:
        trt_plugins.runtime()
        trt_plugins.get_plugin_path()
    except (ImportError, FileNotFoundError):
        return "no engine is built here: "
    return ": LeanAttention\n"


# Script -> what it prints when its own comparison holds, and the files that it leaves.
EXPECTED = {
    "own_layer": ("kernels in ONNX Runtime and PyTorch: largest difference", ["layer.onnx"]),
    "hugging_face": ("the same greedy tokens as transformers", ["model.onnx", "leanfleet.json"]),
    "linear_model": ("the same greedy tokens as PyTorch", ["model.onnx", "leanfleet.json"]),
    "continuous_batching": ("4 requests in", ["model.onnx", "leanfleet.json"]),
    "tensorrt_engine": (engine_line(), ["attention.onnx"]),
    "genai": ("the same greedy tokens as transformers", ["genai/genai_config.json"]),
}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "common"}


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name, tmp_path):
    text, files = EXPECTED[name]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", tmp_path], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert run.returncode == 0 and text in run.stdout, run.stdout + run.stderr
    assert not [f for f in files if not (tmp_path / f).exists()]
