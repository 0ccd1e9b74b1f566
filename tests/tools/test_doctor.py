"""leanfleet doctor: what it finds here, and in installations that are broken in known ways."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import leanfleet
from leanfleet import cli, doctor, native, spec
from leanfleet.decoder_contract import FORMS
from support.packages import share

PACKAGE = Path(leanfleet.__file__).parent


class Environment:
    """A Python environment of leanfleet, the standard library, and what is added; doctor runs in it as a user's would."""

    def __init__(self, folder):
        self.site, self.variables = folder / "site", {}
        self.site.mkdir()
        (self.site / "leanfleet").symlink_to(PACKAGE)
        self.libraries = folder / "lib"
        self.libraries.mkdir()
        for name in ("leanfleet", "leanfleet_ort"):
            (self.libraries / f"lib{name}.so").symlink_to(native.library_path(name))

    def fake(self, distribution, version, code=None, package=None):
        """A distribution of this name; with code, also its package."""
        info = self.site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if code is not None:
            folder = self.site / (package or distribution)
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").write_text(code)

    def replace_library(self, name, content):
        path = self.libraries / f"lib{name}.so"
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    def doctor(self, *arguments, cwd=None):
        env = {"PATH": "/nowhere", "PYTHONPATH": str(self.site), "LEANFLEET_LIBRARY_DIR": str(self.libraries), **self.variables}
        return subprocess.run(
            [sys.executable, "-S", "-P", "-m", "leanfleet", "doctor", *arguments],
            capture_output=True,
            text=True,
            env=env,
            cwd=cwd or self.site,
        )

    def diagnose(self):
        """(exit code, {name of a check: check}); asserts that nothing was printed that should not be."""
        run = self.doctor("--json")
        assert run.stderr == "" and "Traceback" not in run.stdout
        diagnosis = json.loads(run.stdout)
        assert run.returncode == (0 if diagnosis["usable"] else 1)
        for check in diagnosis["checks"]:
            assert check["status"] in ("ok", "missing", "broken") and "\n" not in check["detail"]
            assert check["status"] != "broken" or check["fix"], check
        return run.returncode, {check["name"]: check for check in diagnosis["checks"]}


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path)


LIBRARY = "libleanfleet.so in ctypes"
ORT = "libleanfleet_ort.so in onnxruntime, CPUExecutionProvider"


@pytest.mark.slow
def test_here(capsys):
    """The environment of the tests has everything but perhaps a GPU, and all of it works."""
    code = cli.main(["doctor", "--json"])
    diagnosis = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in diagnosis["checks"]}
    assert [c for c in checks.values() if c["status"] == "broken"] == []
    assert code == 0 and diagnosis["usable"]
    assert checks["torch"]["detail"] == f"torch {metadata.version('torch')}"
    assert checks[LIBRARY]["detail"].startswith(native.build_info())
    assert "ran LeanAttention on CPUExecutionProvider, right" in checks[ORT]["detail"]
    assert "torch.ops.leanfleet on cpu" in checks["libleanfleet.so in torch"]["detail"]
    assert checks["plugin of polygraphy run"]["status"] == "ok"


def test_modules_of_the_current_folder_are_not_run(environment, tmp_path):
    """A json.py that lies there is none of doctor's business."""
    folder = tmp_path / "somewhere"
    folder.mkdir()
    for name in ("json", "ctypes", "tempfile"):
        (folder / f"{name}.py").write_text("open('it_ran', 'w').close()\nraise SystemExit('not the standard library')\n")
    run = environment.doctor("--json", cwd=folder)
    checks = {check["name"]: check for check in json.loads(run.stdout)["checks"]}
    assert checks[LIBRARY]["status"] == "ok", checks[LIBRARY]
    assert not (folder / "it_ran").exists() and run.returncode == 0


def test_base_install(environment):
    """Nothing but the standard library: the library works, the rest is missing, and that is no error."""
    code, checks = environment.diagnose()
    assert code == 0
    assert checks[LIBRARY]["status"] == "ok"
    caches = checks["quantised caches, CPU"]
    assert caches["status"] == "ok" and caches["detail"].startswith("int8, fp8, int4 right; the kernels of ")
    for name, _, _ in doctor.PACKAGES:
        assert checks[name]["status"] == "missing" and "pip install" in checks[name]["fix"], name
    assert checks["torch"]["fix"] == "pip install 'leanfleet[export]'"
    assert "onnxruntime-gpu" in checks["onnxruntime"]["fix"]
    assert checks["nvcc"]["status"] == "missing" or Path("/usr/local/cuda/bin/nvcc").exists()
    assert checks[ORT]["detail"] == "onnxruntime is not installed"


@pytest.mark.parametrize("form", FORMS)
def test_wrong_numbers_of_quantised_caches_are_seen(form):
    doctor._run_on_cpu(doctor.Case(form=form))
    wrong = doctor.Case(form=form)
    wrong.inputs["value_cache"][5] ^= 2
    with pytest.raises(RuntimeError, match="LeanAttention's output is wrong by"):
        doctor._run_on_cpu(wrong)


def test_runtime_only(environment):
    """onnxruntime alone, without onnx and torch, is enough to try the library in it."""
    share(environment.site, "numpy", "onnxruntime")
    code, checks = environment.diagnose()
    assert code == 0
    assert checks["torch"]["status"] == checks["onnx"]["status"] == "missing"
    assert checks[ORT]["status"] == "ok", checks[ORT]
    assert "ran LeanAttention on CPUExecutionProvider, right" in checks[ORT]["detail"]


def test_text(environment):
    environment.fake("torch", "2.13.0", "raise OSError('libtorch_cpu.so: cannot open shared object file')")
    run = environment.doctor()
    assert run.returncode == 1 and run.stderr == ""
    lines = [line.split() for line in run.stdout.splitlines()]
    assert ["-", "numpy", "not", "installed"] in lines
    assert any(line[:2] == ["BROKEN", "torch"] and "libtorch_cpu.so:" in line for line in lines)
    assert run.stdout.endswith("1 to fix\n  torch: pip install --force-reinstall --no-deps torch\n")


def test_library_missing(environment):
    for file in environment.libraries.iterdir():
        file.unlink()
    share(environment.site, "numpy", "onnxruntime")
    code, checks = environment.diagnose()
    assert code == 1
    for name in (LIBRARY, ORT):
        assert checks[name]["status"] == "broken" and "does not exist" in checks[name]["detail"]
        assert checks[name]["fix"].startswith(f"LEANFLEET_LIBRARY_DIR is {environment.libraries}: unset it")


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "other"])
def test_library_damaged(environment, damage):
    content = native.library_path("leanfleet").read_bytes()
    other = Path(importlib.util.find_spec("_ctypes").origin)
    environment.replace_library(
        "leanfleet",
        {"truncated": content[: len(content) // 3], "text": b"no library", "empty": b"", "other": other.read_bytes()}[damage],
    )
    code, checks = environment.diagnose()
    assert code == 1 and checks[LIBRARY]["status"] == "broken"
    expected = {
        "truncated": ("SIGBUS", "file too short", "ELF"),
        "text": ("file too short", "invalid ELF header"),
        "empty": ("file too short",),
        "other": ("undefined symbol: leanfleet_",),
    }[damage]
    assert any(text in checks[LIBRARY]["detail"] for text in expected), checks[LIBRARY]


def test_runtime_library_damaged(environment):
    share(environment.site, "numpy", "onnxruntime")
    environment.replace_library("leanfleet_ort", b"\x7fELF" + bytes(2000))
    code, checks = environment.diagnose()
    assert code == 1
    assert (checks[LIBRARY]["status"], checks["onnxruntime"]["status"], checks[ORT]["status"]) == ("ok", "ok", "broken")
    assert "libleanfleet_ort.so" in checks[ORT]["detail"]


def test_old_runtime(environment):
    share(environment.site, "numpy")
    environment.fake("onnxruntime", "1.17.3", "__version__ = '1.17.3'")
    code, checks = environment.diagnose()
    assert code == 1 and checks[ORT]["status"] == "broken"
    assert "1.18 or newer; found 1.17.3" in checks[ORT]["detail"]
    assert checks[ORT]["fix"] == "pip install -U onnxruntime"


def test_older_than_the_metadata_asks(environment):
    environment.fake("leanfleet", "0.1.0")
    info = environment.site / "leanfleet-0.1.0.dist-info" / "METADATA"
    info.write_text(info.read_text() + 'Requires-Dist: onnx>=1.19 ; extra == "export"\n')
    environment.fake("onnx", "1.9.0", "")
    code, checks = environment.diagnose()
    assert code == 1 and checks["onnx"]["detail"] == "onnx 1.9.0; leanfleet needs 1.19 or newer"
    assert checks["onnx"]["fix"] == "pip install -U 'onnx>=1.19'"


def test_both_runtimes(environment):
    share(environment.site, "numpy", "onnxruntime")
    environment.fake("onnxruntime-gpu", "1.31.1")
    code, checks = environment.diagnose()
    assert code == 1 and "both write the same files" in checks["onnxruntime"]["detail"]
    assert checks["onnxruntime"]["fix"].startswith("pip uninstall -y onnxruntime onnxruntime-gpu")
    assert checks[ORT]["status"] == "missing" and checks[ORT]["fix"] == "mend onnxruntime, see above"


def test_package_that_ends_the_process(environment):
    environment.fake("polygraphy", "0.53.6", "import os; os.abort()")
    environment.fake("transformers", "5.23.0", "import sys; sys.exit(3)")
    environment.fake("matplotlib", "3.10.0")
    code, checks = environment.diagnose()
    assert code == 1
    assert "SIGABRT" in checks["polygraphy"]["detail"]
    assert checks["transformers"]["status"] == "broken" and "exit code 3" in checks["transformers"]["detail"]
    assert checks["matplotlib"]["detail"] == "matplotlib 3.10.0 is listed as installed, its files are missing"


def test_half_an_installation(environment):
    """What an interrupted pip leaves: metadata without content, a package that imports."""
    (environment.site / "onnx-1.23.2.dist-info").mkdir()
    (environment.site / "onnx").mkdir()
    (environment.site / "onnx" / "__init__.py").write_text("__version__ = '1.23.2'")
    (environment.site / "polygraphy-0.53.6.dist-info").mkdir()
    _, checks = environment.diagnose()
    assert checks["onnx"]["status"] == "ok"
    assert checks["polygraphy"]["status"] in ("broken", "missing")


def test_wrong_numbers_are_found():
    case = doctor.Case()
    case.compare(case.expected)
    for value in (math.nan, case.expected["output"][5] + 2e-4):
        with pytest.raises(RuntimeError, match="LeanAttention's output is wrong by"):
            case.compare(case.expected | {"output": [*case.expected["output"][:5], value, *case.expected["output"][6:]]})


def test_one_node_model_is_valid():
    import onnx

    model = onnx.load_from_string(doctor.one_node_model(doctor.Case()))
    (node,) = model.graph.node
    assert (node.op_type, node.domain, list(node.input)) == (
        "LeanAttention",
        "leanfleet",
        ["query", "key_cache", "value_cache"],
    )
    assert [d.dim_value for d in model.graph.input[1].type.tensor_type.shape.dim] == [1, 1, 10, 64]


DRIVER = """
#include <cstring>
extern "C" {
int cuInit(unsigned) { return INIT; }
int cuGetErrorString(int, const char** text) { *text = "unknown error"; return 0; }
int cuDriverGetVersion(int* version) { *version = 12080; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGetName(char* name, int, int) { std::strcpy(name, "GPU of a test"); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { *value = attribute == 75 ? 8 : 6; return 0; }
}
"""


@pytest.mark.parametrize("status", [0, 999])
def test_driver(environment, tmp_path, status):
    """A stand-in for the driver: listed where it starts, an error to mend where it does not."""
    source = tmp_path / "driver.cpp"
    source.write_text(DRIVER.replace("INIT", str(status)))
    folder = tmp_path / "driver"
    folder.mkdir()
    subprocess.run([shutil.which("g++"), "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    environment.variables["LD_LIBRARY_PATH"] = str(folder)
    code, checks = environment.diagnose()
    if status:
        assert code == 1 and checks["gpu"]["status"] == "broken"
        assert "cuInit failed: unknown error (999)" in checks["gpu"]["detail"]
    else:
        assert checks["gpu"]["status"] == "ok"
        assert checks["gpu"]["detail"].startswith("GPU of a test (sm_86); driver for CUDA 12.8")
        assert "libleanfleet.so in CUDA" in checks


def test_compiler_that_fails(environment, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    nvcc.chmod(0o755)
    environment.variables["CUDACXX"] = str(nvcc)
    code, checks = environment.diagnose()
    assert code == 1 and "it is broken" in checks["nvcc"]["detail"]
    assert checks["nvcc"]["fix"] == "set CUDACXX to an nvcc that works"


TENSORRT = """
import ctypes
__version__ = "VERSION"
class ILogger:
    class Severity:
        ERROR = 1
class Creator:
    def __init__(self, name): self.name, self.plugin_namespace = name, "leanfleet"
class Registry:
    all_creators = []
    def load_library(self, path):
        ctypes.CDLL(path)
        self.all_creators = [Creator(name) for name in NAMES]
        return 1
registry = Registry()
def get_plugin_registry(): return registry
"""


@pytest.mark.parametrize(
    "names, version, problem",
    [(None, "10.14.1", None), (1, "10.14.1", "has no plugin for AllGather"), (None, "9.3.0", "or newer; found 9.3.0")],
)
def test_plugins(environment, names, version, problem):
    """A stand-in for TensorRT: its registry must hold every operator after the library is loaded."""
    operators = list(spec.all_specs())
    environment.fake("tensorrt", version, TENSORRT.replace("VERSION", version).replace("NAMES", repr(operators[:names])))
    _, checks = environment.diagnose()
    assert checks["libleanfleet_trt.so"]["status"] == "missing" and "LEANFLEET_TRT=ON" in checks["libleanfleet_trt.so"]["fix"]
    environment.replace_library("leanfleet_trt", native.library_path("leanfleet").read_bytes())
    code, checks = environment.diagnose()
    check = checks["libleanfleet_trt.so in tensorrt"]
    if problem:
        assert (code, check["status"]) == (1, "broken") and problem in check["detail"]
        assert problem.startswith("has") or check["fix"] == "pip install -U tensorrt"
    else:
        assert (code, check["status"]) == (0, "ok") and "has the plugins AllGather, " in check["detail"]


def test_plugin_library_that_does_not_load(environment):
    environment.replace_library("leanfleet_trt", b"no library")
    code, checks = environment.diagnose()
    assert code == 1 and checks["libleanfleet_trt.so in ctypes"]["status"] == "broken"


def test_environment_isolates(environment):
    """The tests above mean something only if the environment hides what is installed."""
    env = {"PYTHONPATH": str(environment.site), "PATH": os.environ["PATH"]}
    run = subprocess.run([sys.executable, "-S", "-P", "-c", "import torch"], capture_output=True, text=True, env=env)
    assert run.returncode == 1 and "No module named 'torch'" in run.stderr
