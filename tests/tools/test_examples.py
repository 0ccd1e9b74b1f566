"""Every script of examples/ runs, and says so. One runs in a process of its own, the others in this one, where PyTorch is there."""

import os
import runpy
import subprocess
import sys

import pytest

from leanfleet import trt_plugins
from support.cpu_time import slow_if
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
    "train_linear": ("the same greedy tokens as PyTorch", ["model.onnx", "leanfleet.json"]),
    "continuous_batching": ("4 requests in", ["model.onnx", "leanfleet.json"]),
    "tensorrt_engine": (engine_line(), ["attention.onnx"]),
    "replicas": ("killed, 2 run; 120 of 120 requests answered, equal ones alike: True", ["model.onnx", "serving.onnx"]),
    "genai": ("the same greedy tokens as transformers", ["genai/genai_config.json"]),
}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "common"}


def assert_left(name, printed, folder):
    text, files = EXPECTED[name]
    assert text in printed and not [f for f in files if not (folder / f).exists()], printed


@pytest.mark.parametrize("name", slow_if(EXPECTED, ["linear_model", "train_linear"]))
def test_example(name, tmp_path, monkeypatch, capfd):
    if name == "replicas":
        pytest.importorskip("ray", reason="Ray Serve is half a gigabyte, and `make test` does not install it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / f"{name}.py"), str(tmp_path)])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert_left(name, capfd.readouterr().out, tmp_path)


@pytest.mark.slow
def test_example_alone(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, EXAMPLES / "own_layer.py", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert_left("own_layer", run.stdout, tmp_path)
