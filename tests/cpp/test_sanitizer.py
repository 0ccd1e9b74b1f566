"""Kernels of every instruction set under AddressSanitizer and UndefinedBehaviorSanitizer: whatever lengths, offsets, tables
and indices hold, no access leaves a buffer; whatever numbers are, nothing is done that C++ does not define."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

# Garbage in every tensor that a kernel takes for a length or an index, logits of every size, random calls, and one plain call of
# every operator.
SELECTION = "any_call or huge_logits or counts_stay or garbage or outside or clamped or functional_and_mutating or kernel_gradients or edges or in_place"
FILES = [
    "operators/test_lean_attention.py",
    "operators/test_causal_linear_decay.py",
    "operators/test_normalized_linear_attention.py",
    "operators/test_sample_tokens.py",
    "operators/test_gated_activation.py",
    "operators/test_linear.py",
    "operators/test_gated_delta_rule.py",
    "operators/test_causal_conv.py",
    "operators/test_decay_gates.py",
    "operators/test_rms_norm.py",
    "operators/test_block_linear.py",
    "operators/test_errors.py",
    "runtimes/test_torch_ops.py",
]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory):
    """A folder with libleanfleet.so built with both sanitizers, CPU kernels alone."""
    build = tmp_path_factory.mktemp("asan")
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    subprocess.run(
        [
            cmake,
            "-S",
            ROOT / "csrc",
            "-B",
            build,
            "-DLEANFLEET_SANITIZE=address,undefined",
            "-DLEANFLEET_CUDA=OFF",
            "-DLEANFLEET_ORT=OFF",
        ],
        check=True,
        capture_output=True,
    )
    subprocess.run([cmake, "--build", build, "-j", "2"], check=True, capture_output=True)
    return build


def environment(build):
    """AddressSanitizer goes first, and the C++ runtime with it: it looks for the exception functions when it starts."""
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "LEANFLEET_LIBRARY_DIR": str(build),
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        # Of the random calls, which take twice as long here; all of them are made by the kernels as they ship.
        "LEANFLEET_TEST_SHARE": "0.25",
    }


def test_the_sanitizer_sees_a_write_past_a_buffer(instrumented):
    """The check of the check: an output buffer that is too short is reported."""
    code = (
        "import ctypes, array\nfrom leanfleet import native\n"
        "libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p\n"
        "q = libc.malloc(4 * 8); k = libc.malloc(4 * 80); v = libc.malloc(4 * 80)\n"
        "[ctypes.memset(p, 0, n) for p, n in ((q, 32), (k, 320), (v, 320))]\n"
        "out = libc.malloc(8); lse = libc.malloc(8)\n"
        "c = native.Call('LeanAttention', [(q, (1, 1, 1, 8), 'float32'), (k, (1, 1, 10, 8), 'float32'), (v, (1, 1, 10, 8), 'float32')],"
        " [(out, (1, 1, 1, 8), 'float32'), (lse, (1, 1, 1), 'float32')], {})\n"
        "n, s = c.workspace(); m = libc.malloc(n + 256); c.run((m + 255) // 256 * 256, n, 0, 0)\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], env=environment(instrumented), capture_output=True, text=True)
    assert run.returncode != 0 and "heap-buffer-overflow" in run.stderr, run.stderr[-2000:]


def test_kernels_stay_inside_their_buffers(instrumented):
    run = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-x",
            "-s",
            "-p",
            "no:cacheprovider",
            "-k",
            f"({SELECTION}) and not onnxruntime and not compile",
            *[str(ROOT / "tests" / f) for f in FILES],
        ],
        env=environment(instrumented),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "passed" in run.stdout
