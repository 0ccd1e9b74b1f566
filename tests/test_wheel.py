"""The wheel: one py3-none platform file with the libraries inside, that works in a fresh environment with no compiler."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Runs in the fresh environment: one decode step of LeanAttention through the C interface, on plain memory.
SCRIPT = """
import array, ctypes, math, sys
from leanfleet import native
assert "torch" not in sys.modules and "numpy" not in sys.modules
buffers = [array.array("f", [float(i % 3) for i in range(n)]) for n in (8, 40, 40)]
query, keys, values = [(b.buffer_info()[0], s, "float32") for b, s in zip(buffers, ((1, 2, 1, 4), (1, 1, 10, 4), (1, 1, 10, 4)))]
output, lse = array.array("f", [math.nan] * 8), array.array("f", [math.nan] * 2)
call = native.Call("LeanAttention", [query, keys, values],
                   [(output.buffer_info()[0], (1, 2, 1, 4), "float32"), (lse.buffer_info()[0], (1, 2, 1), "float32")], {})
scratch_bytes, sync_bytes = call.workspace()
scratch = ctypes.create_string_buffer(scratch_bytes + 256)
call.run((ctypes.addressof(scratch) + 255) // 256 * 256, scratch_bytes, 0, 0)
q, k, v = buffers
for h in range(2):
    logits = [sum(q[4 * h + d] * k[4 * j + d] for d in range(4)) / 2 for j in range(10)]
    total = sum(map(math.exp, logits))
    assert abs(lse[h] - math.log(total)) < 1e-5, (lse[h], math.log(total))
    for d in range(4):
        expected = sum(math.exp(x) * v[4 * j + d] for j, x in enumerate(logits)) / total
        assert abs(output[4 * h + d] - expected) < 1e-5
print(native.build_info())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT],
                   check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_name_and_contents(wheel):
    assert re.fullmatch(r"leanfleet-[\d.]+-py3-none-\w*linux\w*\.whl", wheel.name), wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in ("leanfleet/__init__.py", "leanfleet/ops.toml", "leanfleet/lib/libleanfleet.so", "leanfleet/cli.py",
                   "leanfleet/lib/libleanfleet_ort.so", "leanfleet/ort_ops/__init__.py", "leanfleet/export/__init__.py"):
        assert needed in names, needed
    assert not [n for n in names if n.endswith((".cpp", ".o", ".cu", "CMakeLists.txt"))]


def test_base_install_needs_nothing(wheel):
    """No torch, no onnxruntime, no numpy: extras bring them."""
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert required == []


def test_works_in_a_fresh_environment_without_a_compiler(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    bare = {"PATH": str(tmp_path / "env" / "bin"), "HOME": str(tmp_path)}
    pip = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-index", wheel], check=True, env={**bare, **pip}, cwd=tmp_path)
    run = subprocess.run([python, "-c", SCRIPT], capture_output=True, text=True, env=bare, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("cpu ")
    command = subprocess.run([tmp_path / "env" / "bin" / "leanfleet", "info"], capture_output=True, text=True, env=bare,
                             cwd=tmp_path)
    assert command.returncode == 0 and "LeanAttention" in command.stdout, command.stderr
