"""The build's options: which GPUs it is built for, which nvcc, which sanitizers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

CMAKE = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")


def architectures(tmp_path, requested, nvcc="13.0"):
    """(exit code, what CMAKE_CUDA_ARCHITECTURES becomes, or the error in one line)."""
    script = tmp_path / "script.cmake"
    script.write_text(
        f'include("{ROOT}/csrc/cuda_architectures.cmake")\n'
        f'leanfleet_cuda_architectures("{requested}" {nvcc} result)\nmessage("=${{result}}=")\n'
    )
    run = subprocess.run([CMAKE, "-P", script], capture_output=True, text=True)
    text = " ".join(run.stderr.split())
    return run.returncode, text.split("=")[1] if run.returncode == 0 else text


@pytest.mark.parametrize(
    "requested, expected",
    [
        ("90a;80-virtual", "90a-real;80-virtual"),  # the default
        ("90a-real;80-virtual", "90a-real;80-virtual"),
        ("80;86;89;90a;100;120", "80;86-real;89-real;90a-real;100a-real;120a-real"),
        ("80,86 89", "80;86-real;89-real"),
        ("90", "90a-real"),
        ("90;90a", "90a-real"),
        ("100a;120-real;86-virtual", "100a-real;120a-real;86-virtual"),
    ],
)
def test_architectures(tmp_path, requested, expected):
    assert architectures(tmp_path, requested) == (0, expected)


@pytest.mark.parametrize(
    "requested, entry",
    [("75", "75"), ("80;sm_90", "sm_90"), ("80a", "80a"), ("90a-ptx", "90a-ptx"), ("native", "native"), ("80;103", "103")],
)
def test_unknown_architectures(tmp_path, requested, entry):
    code, message = architectures(tmp_path, requested)
    assert code != 0
    assert f"LEANFLEET_CUDA_ARCHS has '{entry}'; it takes 80, 86, 89, 90a, 100 and 120" in message
    assert "run the PTX of 80-virtual" in message


def test_empty_list(tmp_path):
    code, message = architectures(tmp_path, "")
    assert code != 0 and "LEANFLEET_CUDA_ARCHS is empty" in message


def test_old_compiler(tmp_path):
    assert architectures(tmp_path, "80;89;90a", nvcc="12.4") == (0, "80;89-real;90a-real")
    assert architectures(tmp_path, "100;120", nvcc="12.8")[0] == 0
    code, message = architectures(tmp_path, "90a;100", nvcc="12.4")
    assert code != 0 and "'100', which needs nvcc 12.8 or later; found 12.4" in message


@pytest.mark.parametrize(
    "listed, hopper, once, options",
    [
        ("90a-real;80-virtual", "90a-real", "OFF", "--generate-code=arch=compute_80,code=[compute_80,sm_90]"),  # the default
        ("80;86-real;90a-real", "90a-real", "86-real", "--generate-code=arch=compute_80,code=[compute_80,sm_90,sm_80]"),
        ("80-virtual;86-real", "80-virtual", "80-virtual;86-real", ""),
        ("90a-real;120a-real", "90a-real", "90a-real;120a-real", ""),
        ("80-real;90a-real", "90a-real", "80-real;90a-real", ""),
    ],
)
def test_architectures_of_files_that_need_fewer(tmp_path, listed, hopper, once, options):
    """Files for 9.0 alone leave the others out; files that ask for no architecture make the code of 9.0 from the PTX of 8.0."""
    script = tmp_path / "script.cmake"
    script.write_text(
        f'cmake_minimum_required(VERSION 3.24)\ninclude("{ROOT}/csrc/cuda_architectures.cmake")\n'
        f'leanfleet_hopper_architectures("{listed}" hopper)\nleanfleet_once_architectures("{listed}" once options)\n'
        'message("${hopper} ${once} ${options}")\n'
    )
    run = subprocess.run([CMAKE, "-P", script], capture_output=True, text=True)
    assert run.stderr.rstrip("\n") == f"{hopper} {once} {options}"


def configure(folder, *options):
    return subprocess.run(
        [CMAKE, "-S", ROOT / "csrc", "-B", folder, "-DLEANFLEET_ORT=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("sanitizers", ["", "address", "address,undefined"])
def test_sanitizers(tmp_path, sanitizers):
    """A list of sanitizers goes to the compiler as it is, and the sources know that they are instrumented."""
    run = configure(tmp_path, "-DLEANFLEET_CUDA=OFF", f"-DLEANFLEET_SANITIZE={sanitizers}")
    assert run.returncode == 0, run.stderr
    for entry in json.loads((tmp_path / "compile_commands.json").read_text()):
        words = entry["command"].split()
        assert [w for w in words if "sanitize" in w.lower() and "no-sanitize" not in w] == (
            ["-DLEANFLEET_SANITIZED", f"-fsanitize={sanitizers}"] if sanitizers else []
        ), entry["command"]
        assert not [w for w in words if "BOOL" in w or ">" in w]


def test_compiler_that_is_not_there(tmp_path):
    run = configure(tmp_path, f"-DLEANFLEET_NVCC={tmp_path}/nowhere/nvcc")
    assert run.returncode != 0
    assert "nowhere/nvcc, which does not exist; give the path of an nvcc" in " ".join(run.stderr.split()).replace("/ ", "/")
