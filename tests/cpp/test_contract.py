"""What the source tree promises: one schema, layers that do not see each other, hidden symbols, imports that need little."""

import os
import re
import subprocess
import sys

import pytest

from leanfleet import native, spec
from support.paths import ROOT

CSRC = ROOT / "csrc"
HOST_HEADERS = re.compile(r'#\s*include\s*[<"](onnxruntime|NvInfer|torch/|ATen/|c10/|Python\.h)')
INTERFACES = {
    "leanfleet": r"leanfleet_\w+",
    "leanfleet_ort": r"RegisterCustomOps|leanfleet_(communicator_\w+|nccl_id|last_error)",
    "leanfleet_trt": r"getCreators|setLoggerFinder|leanfleet_(communicator_\w+|nccl_id|last_error)",
}
CUDA_HEADERS = re.compile(r'#\s*include\s*[<"]cuda')


def sources(folder):
    return [p for p in sorted(folder.rglob("*")) if p.suffix in (".h", ".cpp", ".cu", ".cuh")]


def test_generated_tables_are_current():
    result = subprocess.run([sys.executable, CSRC / "generate.py", "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_an_operator_may_have_more_of_everything(tmp_path):
    """More inputs, outputs, attributes, symbols, axes, alternatives, conditions and partners than any operator has today:
    the schema alone says so, and nothing else needs to know."""
    attrs = [f'{{ name = "b{i}", type = "bool", default = false, doc = "" }}' for i in range(20)]
    attrs.append(
        '{ name = "text", type = "string", default = "x", doc = "", '
        'values = ["x", "a_value_that_takes_many_more_characters_than_any_other_of_the_schema"] }'
    )
    inputs = [f'{{ name = "in{i}", type = "T", shape = "S{i}", doc = "" }}' for i in range(36)]
    inputs += [f'{{ name = "partner{i}", type = "T", optional = true, shape = "P{i}", doc = "" }}' for i in range(6)]
    shapes = " | ".join(" ".join(f"A{axis}" for axis in range(rank)) for rank in range(3, 9))
    inputs.append(f'{{ name = "last", type = "T", shape = "{shapes}", doc = "" }}')
    outputs = [
        f'{{ name = "out{i}", type = "T", shape = "S{i}", doc = "", when = {[f"b{k}" for k in range(20)]} }}' for i in range(15)
    ]
    together = "together " + " ".join(f"partner{i}" for i in range(6))
    schema = tmp_path / "wide.toml"
    schema.write_text(
        '[Wide]\nversion = 1\nfolder = "wide"\ndoc = ""\n'
        f"inputs = [{', '.join(inputs)}]\noutputs = [{', '.join(outputs)}]\nattrs = [{', '.join(attrs)}]\n"
        f'rules = ["{together}"]\n'
    )
    subprocess.run([sys.executable, CSRC / "generate.py", schema, tmp_path / "core" / "op_specs.h"], check=True)
    program = tmp_path / "wide"
    subprocess.run(
        [
            os.environ.get("CXX", "c++"),
            "-std=c++17",
            "-O0",  # where every access is checked, optimising takes longer than running
            "-fsanitize=address,undefined",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{tmp_path}",
            f"-I{CSRC}",
            ROOT / "tests" / "cpp" / "wide_op_test.cpp",
            CSRC / "core" / "op.cpp",
            CSRC / "core" / "cpu_isa.cpp",
            "-o",
            program,
        ],
        check=True,
    )
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.split() == ["43", "15", "21", "50", "8"], result.stdout + result.stderr


def test_the_interface_has_room_for_every_rank():
    header = (CSRC / "capi" / "leanfleet.h").read_text()
    assert native.MAX_RANK == int(re.search(r"LEANFLEET_MAX_RANK (\d+)", header)[1])
    assert native.MAX_RANK >= max(
        len(shape.axes) for s in spec.all_specs().values() for t in s.inputs + s.outputs for shape in t.shapes
    )


def test_core_and_kernels_see_no_runtime_headers():
    folders = [CSRC / "core", CSRC / "linear_scan", CSRC / "capi", *(CSRC / s.folder for s in spec.all_specs().values())]
    checked = [p for folder in folders for p in sources(folder)]
    assert len(checked) > 15
    for path in checked:
        assert not HOST_HEADERS.search(path.read_text()), f"{path.relative_to(ROOT)} includes a runtime's header"


def test_only_ort_sees_onnxruntime_headers():
    users = {p.parent.name for p in sources(CSRC) if re.search(r'#\s*include\s*[<"]onnxruntime', p.read_text())}
    assert users == {"ort"}


def test_cuda_headers_stay_out_of_what_a_cpu_build_compiles():
    """Headers and plain C++ files build without a CUDA toolkit, but for the one that reads the device."""
    users = {
        str(p.relative_to(CSRC)) for p in sources(CSRC) if p.suffix in (".h", ".cpp") and CUDA_HEADERS.search(p.read_text())
    }
    assert users <= {"core/cuda_target.cpp", "core/peers.cpp", "ort/cuda.cpp", "trt/plugin.cpp"}, users  # built with CUDA alone


def test_only_trt_sees_tensorrt_headers():
    users = {p.parent.name for p in sources(CSRC) if re.search(r'#\s*include\s*[<"]NvInfer', p.read_text())}
    assert users == {"trt"}


@pytest.mark.parametrize("adapter", ["ort", "trt", "capi", "torch"])
def test_adapters_name_no_operator(adapter):
    """No operator, input, output or attribute of ops.toml is spelled in an adapter."""
    words = {s.name for s in spec.all_specs().values()} | {s.snake_name for s in spec.all_specs().values()}
    words |= {f'"{t.name}"' for s in spec.all_specs().values() for t in s.inputs + s.outputs}
    words |= {f'"{a.name}"' for s in spec.all_specs().values() for a in s.attrs}
    for path in sources(CSRC / adapter):
        code = "\n".join(line.split("//")[0] for line in path.read_text().splitlines())
        code = re.sub(r"/\*.*?\*/", "", code, flags=re.S)
        assert not (found := [w for w in words if w in code]), f"{path.name} spells {found}"


@pytest.fixture(params=INTERFACES)
def library(request):
    """Each library; the plugins are there in builds with CUDA."""
    if request.param == "leanfleet_trt" and "cuda" not in native.build_info():
        pytest.skip("built without CUDA, so without TensorRT plugins")
    return request.param


def test_libraries_export_only_their_interface(library):
    path, allowed = native.library_path(library), INTERFACES[library]
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in symbols.splitlines() if line.split()[-2] in "TWVBDRu"]
    assert names, "nm printed nothing"
    foreign = [n for n in names if not re.fullmatch(allowed, n)]
    assert not foreign, foreign[:10]


def test_libraries_need_no_driver_and_no_runtime(library):
    needed = subprocess.run(["readelf", "-d", native.library_path(library)], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"NEEDED.*\[(.*?)\]", needed)
    assert not [n for n in names if re.match(r"lib(cuda|cudart|onnxruntime|nvinfer|torch)", n)], names


def test_library_holds_the_operators_of_the_schema():
    assert native.op_names() == list(spec.all_specs())


@pytest.mark.parametrize("module", ["leanfleet", "leanfleet.spec", "leanfleet.native", "leanfleet.cli", "leanfleet.ort_ops"])
def test_imports_need_only_the_standard_library(module):
    """Neither torch nor onnxruntime nor numpy is loaded, and nothing is registered, by importing."""
    code = (
        f"import sys, {module}; loaded = {{'torch', 'onnx', 'onnxruntime', 'numpy', 'polygraphy'}} & set(sys.modules);"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_missing_library_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANFLEET_LIBRARY_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="libleanfleet.so does not exist.*pip install"):
        native.library_path("leanfleet")


def test_cmake_has_no_glob():
    for path in [CSRC / "CMakeLists.txt", *CSRC.rglob("*.cmake")]:
        assert not re.search(r"file\s*\(\s*GLOB", path.read_text()), path
