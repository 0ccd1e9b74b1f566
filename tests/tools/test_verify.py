"""leanfleet verify: all is right here; a wrong result, a crash and a hang are found and named."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from leanfleet import cli, communicators, driver, native, spec, trt_plugins, verify
from leanfleet.ort_ops import make_session
from leanfleet.trial import run_session
from leanfleet.trt_plugins import running
from support.cpu_time import slow
from support.ort_models import tool

OPS = spec.all_specs()


def command(tmp_path, *arguments, **variables):
    """(exit code, Markdown, report, stderr) of a quick run."""
    file = tmp_path / "report.json"
    line = [sys.executable, "-P", "-m", "leanfleet", "verify", "--quick", "--report", file, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **variables}, timeout=500)
    return done.returncode, done.stdout, json.loads(file.read_text()) if file.exists() else None, done.stderr


@pytest.mark.slow
def test_everything_here_is_right(tmp_path):
    code, text, report, errors = command(tmp_path)
    parts = report["runtimes"]
    assert code == 0 and list(parts) == list(verify.RUNTIMES), errors
    for name in ("ort-cpu", "ort-body", "torch-cpu", "polygraphy"):
        part = parts[name]
        assert part["status"] == "right" and part["failures"] == [] and part["version"], name
        assert part["operators"].keys() == OPS.keys()
        assert sum(sum(types.values()) for types in part["operators"].values()) == report["calls"] > 150
        assert 0 < part["worst"] <= 1
    assert all(all(types.values()) for types in parts["torch-cpu"]["operators"].values())  # each operator in each type
    assert len(parts["ort-cpu"]["timings"]) == 4 and len(parts["torch-cpu"]["timings"]) == 2
    for row in parts["ort-cpu"]["timings"] + parts["torch-cpu"]["timings"]:
        assert len(row["seconds"]) == 2 and all(s > 0 for s in row["seconds"].values()), row
    for name, part in parts.items():
        assert part["status"] != "absent" or f"- {name}: {part['why']}; needs {part['fix']}" in text
    if driver.why_no_gpu():
        assert parts["ort-cuda"]["status"] == parts["torch-cuda"]["status"] == "absent"
        assert "onnxruntime-gpu" in parts["ort-cuda"]["fix"]
    assert f"| ort-cpu: ONNX Runtime, CPU | {parts['ort-cpu']['version']} | {report['calls']} calls right |" in text
    assert "Failures" not in text and "onnxruntime's GroupQueryAttention" in text
    assert text == verify.markdown(report)
    host = os.uname().nodename
    assert str(tmp_path) not in json.dumps(report) and (len(host) < 4 or host not in json.dumps(report))


SHIM = r"""
// libleanfleet.so, but one operator's kernel is off, crashes or hangs.
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <unistd.h>
#include "capi/leanfleet.h"

static void* real(const char* name) {
    static void* library = dlopen(getenv("REAL_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    return dlsym(library, name);
}
extern "C" {
int32_t leanfleet_workspace(const leanfleet_call* call, size_t* a, size_t* b) {
    return ((int32_t (*)(const leanfleet_call*, size_t*, size_t*))real("leanfleet_workspace"))(call, a, b);
}
const char* leanfleet_last_error() {
    return ((const char* (*)())real("leanfleet_last_error"))();
}
const char* leanfleet_op_name(int32_t i) {
    return ((const char* (*)(int32_t))real("leanfleet_op_name"))(i);
}
const char* leanfleet_build_info() {
    return ((const char* (*)())real("leanfleet_build_info"))();
}
int leanfleet_communicator_create(const leanfleet_communicator* made) {
    return ((int (*)(const leanfleet_communicator*))real("leanfleet_communicator_create"))(made);
}
int leanfleet_communicator_lend(const char* name, int32_t engine, leanfleet_lent* lent) {
    return ((int (*)(const char*, int32_t, leanfleet_lent*))real("leanfleet_communicator_lend"))(name, engine, lent);
}
int leanfleet_communicator_destroy(const char* name) {
    return ((int (*)(const char*))real("leanfleet_communicator_destroy"))(name);
}
int32_t leanfleet_run(const leanfleet_call* call) {
    int32_t code = ((int32_t (*)(const leanfleet_call*))real("leanfleet_run"))(call);
    if (strcmp(call->op, getenv("FAULTY")) == 0) {
        if (!strcmp(getenv("FAULT"), "crash")) abort();
        if (!strcmp(getenv("FAULT"), "hang")) for (;;) pause();
        if (call->outputs[0].dtype == 0) static_cast<float*>(call->outputs[0].data)[0] *= 1.01f;
    }
    return code;
}
}
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The variables that make torch's operators run through the shim."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.cpp").write_text(SHIM)
    include = spec.schema_path().parent
    line = [
        tool("g++"),
        "-shared",
        "-fPIC",
        "-O1",
        "-I",
        include,
        "-o",
        folder / "libleanfleet.so",
        folder / "shim.cpp",
        "-ldl",
    ]
    subprocess.run(line, check=True)
    shutil.copy(native.library_path("leanfleet_ort"), folder)
    return {"LEANFLEET_LIBRARY_DIR": str(folder), "REAL_LIBRARY": str(native.library_path("leanfleet"))}


@pytest.mark.slow
def test_a_wrong_result_is_named(tmp_path, faulty):
    code, text, report, _ = command(
        tmp_path, "--runtimes", "torch-cpu,ort-cpu", **faulty, FAULTY="GatedActivation", FAULT="wrong"
    )
    assert code == 1
    part = report["runtimes"]["torch-cpu"]
    assert part["status"] == "failed" and report["runtimes"]["ort-cpu"]["status"] == "right"
    pattern = r"GatedActivation float32 \(.*\): output is off by (\S+), bound (\S+)"
    found = [re.fullmatch(pattern, line) for line in part["failures"]]
    assert found and all(found) and all(float(m[1]) > 10 * float(m[2]) > 0 for m in found)
    assert f"- torch-cpu: {part['failures'][0]}" in text and f"**{len(found)} failures**" in text
    assert part["operators"]["GatedActivation"]["float32"] == 0 < part["operators"]["GatedActivation"]["float16"]


@pytest.mark.slow
def test_a_crash_is_named_and_the_others_run(tmp_path, faulty):
    code, _, report, _ = command(
        tmp_path, "--runtimes", "torch-cpu", **faulty, FAULTY="NormalizedLinearAttentionGrad", FAULT="crash"
    )
    part = report["runtimes"]["torch-cpu"]
    assert code == 1 and part["status"] == "failed"
    assert re.fullmatch(r"NormalizedLinearAttentionGrad float32 \(.*\): the process was ended by SIGABRT", part["failures"][0])
    assert len(part["failures"]) == 3 and part["operators"]["CausalConv"]["bfloat16"] > 0  # one a type, and on it went


@pytest.mark.slow
def test_what_crashes_in_every_call_is_given_up(tmp_path, faulty):
    code, _, report, _ = command(tmp_path, "--runtimes", "torch-cpu", **faulty, FAULTY="GatedDeltaRule", FAULT="crash")
    *crashes, last = report["runtimes"]["torch-cpu"]["failures"]
    assert code == 1 and len(crashes) == verify.CRASHES and re.fullmatch(r"given up: \d+ calls were not run", last)


@pytest.mark.slow
def test_a_hang_is_named(tmp_path, faulty):
    code, _, report, _ = command(
        tmp_path, "--runtimes", "torch-cpu", "--limit", "20", **faulty, FAULTY="CausalConv", FAULT="hang"
    )
    first, last = report["runtimes"]["torch-cpu"]["failures"]
    assert code == 1 and re.fullmatch(r"CausalConv float32 \(.*\): hangs: nothing for 20 s", first)
    assert re.fullmatch(r"given up: \d+ calls were not run", last)


@pytest.mark.parametrize(
    "code, problem",
    [
        ("raise OSError('libnvinfer.so.11 is missing')", "it does not open: OSError: libnvinfer.so.11 is missing"),
        slow(("import os; os.abort()", "it does not open: the process was ended by SIGABRT")),
        slow(("import time; time.sleep(600)", "it does not open: hangs: nothing for 20 s")),
    ],
)
def test_a_runtime_that_does_not_open(tmp_path, code, problem):
    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt" / "__init__.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    status, _, report, _ = command(tmp_path, "--runtimes", "tensorrt", "--limit", "20", PYTHONPATH=path)
    assert status == 1 and report["runtimes"]["tensorrt"]["failures"] == [problem]


# TensorRT where there is a GPU: a stand-in builds and runs the engine


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    line = verify.machine.command("leanfleet.verify", "make_cases", str(folder), str(folder / "answer"), "quick")
    subprocess.run(line, check=True)
    return [verify.Case.load(folder, number) for number in range(len(list(folder.glob("*.json"))))]


class StandIn:
    """An engine: the bytes are the path of the model, the CPU's kernels compute."""

    factor = 1.0

    def __init__(self, engine, trt):
        self.session = make_session(engine.decode(), ["CPUExecutionProvider"])

    def __call__(self, feed):
        return run_session(self.session, feed)

    def numpy(self, outputs):
        return {name: a * a.dtype.type(self.factor) if a.dtype.kind == "f" else a for name, a in outputs.items()}


@pytest.mark.slow
def test_tensorrt_with_a_gpu(cases, monkeypatch):
    layers = []

    def build(model, profiles, trt, compute_capabilities):
        assert compute_capabilities == ()  # for the GPU that is here
        assert all(low == usual == high for low, usual, high in profiles.values())
        return trt_plugins.Build(model.encode(), layers)

    monkeypatch.setattr(trt_plugins, "build_engine", build)
    monkeypatch.setattr(running, "Engine", StandIn)
    runtime = verify._TensorRt.__new__(verify._TensorRt)
    runtime.trt = None
    seen = set()
    for case in cases:
        layers[:] = [("node", case.op)]
        with communicators.create():  # as a process of verify has it
            outcome = verify._outcome(runtime, case)
        assert "right" in outcome, (case, outcome)
        seen.add((case.op, case.dtype, case.int8))
    assert len(seen) == 3 * len(OPS) + 3  # LeanAttention with quantised caches too
    case = next(case for case in cases if case.op == "CausalConv" and case.dtype == "float32")
    layers[:] = []
    assert "plugin layers are [], not one CausalConv" in verify._outcome(runtime, case)["wrong"]
    layers[:] = [("node", "CausalConv")]
    monkeypatch.setattr(StandIn, "factor", 1.01)
    assert re.search(r"output is off by \S+, bound \S+", verify._outcome(runtime, case)["wrong"])


def test_errors():
    a = np.array([1.0, np.inf, np.nan, -np.inf], np.float32)
    assert verify.error_of(a, a.copy()) == 0.0
    assert verify.error_of(a[:1] + 1, a[:1]) == 1.0
    assert verify.error_of(np.array([np.nan]), np.array([1.0])) == np.inf
    assert verify.error_of(np.array([np.inf]), np.array([-np.inf])) == np.inf
    assert verify.error_of(a[:2], a) is None
    assert verify.error_of(np.zeros(0), np.zeros(0)) == 0.0


def test_wrong_arguments(capsys):
    assert cli.main(["verify", "--runtimes", "ort-cpu,openvino"]) == 2
    assert "runtime openvino is unknown; there are ort-cpu, ort-body" in capsys.readouterr().err
    assert cli.main(["verify", "--list"]) == 0
    assert capsys.readouterr().out.split()[0] == "ort-cpu"


# The table of what ran where


def test_the_page_says_what_the_reports_say():
    import support_table

    _, made, _ = support_table.PAGE.read_text().split(support_table.MARK)
    assert made == support_table.table() and made.count("\n") > 4
    for path in support_table.REPORTS.glob("*.json"):
        report = json.loads(path.read_text())
        assert not report["quick"] and not verify.failed(report) and verify.device(report) and report["date"]


def test_the_table_of_several_reports():
    right = {name: dict.fromkeys(spec.TYPES["T"], 2) for name in OPS}
    facts = {"cpu": "a processor", "gpu": None}
    parts = {
        "ort-cpu": {"status": "right", "version": "onnxruntime 1", "operators": right, "refused": {}},
        "tensorrt": {"status": "absent"},
        "tensorrt_rtx": {"status": "built", "version": "rtx 1", "operators": right, "refused": {"caches of int8": 3}},
    }
    first = {"date": "2026-01-02", "machine": facts, "runtimes": parts}
    later = {"ort-cpu": {**parts["ort-cpu"], "status": "failed", "failures": ["a", "b"], "operators": {}}}
    on_gpu = {"date": "2026-01-03", "machine": facts | {"gpu": "GPU (sm_90); driver for CUDA 13.0"}, "runtimes": later}
    count = 6 * len(OPS)
    assert verify.support_table([on_gpu, first]).splitlines()[2:] == [
        f"| ort-cpu: ONNX Runtime, CPU | onnxruntime 1 | a processor | 2026-01-02 | {count} calls right |",
        "| ort-cpu: ONNX Runtime, CPU | onnxruntime 1 | GPU (sm_90) | 2026-01-03 | **2 failures**, 0 calls right |",
        f"| tensorrt_rtx: TensorRT-RTX | rtx 1 | a processor | 2026-01-02 | {count} engines built, none run; 3 with caches of "
        "int8 not taken |",
    ]
