"""leanfleet engine with models that need no plugin: junk files, profiles, GPUs that are not here, Ctrl-C, host code."""

import json
import signal
from types import SimpleNamespace

import onnx
import pytest
from onnx import TensorProto, helper

from leanfleet import cli, driver, trt_plugins
from leanfleet.trt_plugins import polygraphy_runner, running
from support.ort_models import make_model

try:
    TRT = trt_plugins.runtime()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

RTX = TRT.__name__ == "tensorrt_rtx"
GPU = ["--compute-capability", "8.9"] if RTX else []
NO_GPU = driver.why_no_gpu()


@pytest.fixture(autouse=True)
def without_plugins(monkeypatch):
    monkeypatch.setattr(trt_plugins, "load", lambda trt=None: trt or TRT)


@pytest.fixture
def model(tmp_path):
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    path = tmp_path / "model.onnx"
    onnx.save(
        make_model(
            nodes, [("x", TensorProto.FLOAT, ["batch", "tokens", 8])], [("y", TensorProto.FLOAT, ["batch", "tokens", 8])]
        ),
        path,
    )
    return path


def run(capsys, *arguments):
    code = cli.main(["engine", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert code == 0 or out == "" and len(err.splitlines()) == 1, (out, err)
    return code, out + err


JUNK = {"text": b"not a model", "empty": b"", "bytes": bytes(range(256)), "json": b'{"a": 1}', "zeros": bytes(1000)}


@pytest.mark.parametrize("kind", [*JUNK, "truncated", "graph without nodes"])
@pytest.mark.parametrize("action", ["build", "prepare"])
def test_junk_is_no_model(action, kind, model, tmp_path, capsys):
    other = onnx.ModelProto()
    other.graph.name = "g"
    model.write_bytes(
        JUNK.get(kind)
        or (model.read_bytes()[:-20] if kind == "truncated" else other.SerializeToString() if kind != "empty" else b"")
    )
    code, said = run(capsys, action, model, tmp_path / "out", *(GPU if action == "build" else []))
    assert code == 2 and f"{model} is no ONNX model" in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize("action", ["inspect", "run"])
def test_engines_where_no_gpu_is(action, tmp_path, capsys, monkeypatch):
    (tmp_path / "engine").write_bytes(b"junk")
    assert run(capsys, action, tmp_path / "none")[1].endswith("does not exist; build it with leanfleet engine build\n")
    for error, words in (
        (OSError("libcuda.so.1"), "there is no NVIDIA driver here"),
        (RuntimeError("no device"), "there is no GPU here"),
    ):

        def gpus(error=error):
            raise error

        monkeypatch.setattr(driver, "gpus", gpus)
        code, said = run(capsys, action, tmp_path / "engine")
        assert code == 2 and f"cannot load the engine: {words}" in said and "cudaError" not in said


def test_engine_that_is_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(driver, "why_no_gpu", lambda: None)
    (tmp_path / "engine").write_bytes(b"junk")
    assert run(capsys, "inspect", tmp_path / "engine")[0] == 2


@pytest.mark.skipif(not RTX, reason="TensorRT-RTX alone builds without a GPU")
def test_build_names_its_gpus(model, tmp_path, capsys, monkeypatch):
    sizes = ["--profile", "batch=1:1:2,tokens=1:4:8"]
    monkeypatch.setattr(driver, "why_no_gpu", lambda: "there is no NVIDIA driver here")
    code, said = run(capsys, "build", model, tmp_path / "engine", *sizes)
    assert code == 2 and "no NVIDIA driver here: say which one to build for" in said and "--compute-capability" in said
    assert not (tmp_path / "engine").exists()
    assert (
        "compute capability 1.0 is unknown"
        in run(capsys, "build", model, tmp_path / "engine", *sizes, "--compute-capability", "1.0")[1]
    )
    code, said = run(capsys, "build", model, tmp_path / "engine", *sizes, *GPU, "--json")
    assert code == 0 and json.loads(said)["compute_capabilities"] == ["8.9"] and (tmp_path / "engine").stat().st_size > 0
    assert "for compute capability 8.9" in run(capsys, "build", model, tmp_path / "engine", *sizes, *GPU)[1]


@pytest.mark.parametrize(
    "profile, message",
    [
        ("batch=1:1:2", "leaves out the open dimension tokens: each needs its smallest"),
        ("tokens=1:4:8", "leaves out the open dimension batch"),
    ],
)
def test_profiles_are_whole(profile, message, model, tmp_path, capsys):
    code, said = run(capsys, "build", model, tmp_path / "engine", "--profile", profile, *GPU)
    assert code == 2 and message in said and sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]


@pytest.mark.parametrize("words", [["--profile", "batch=1:1:2,batch=1:1:1"], ["--profile", "batch=1"]])
def test_profiles_that_are_none(words, model, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["engine", "build", str(model), "out", *words])
    assert stopped.value.code == 2 and "--profile" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["build", "prepare"])
def test_outputs_are_tried_before_the_work(action, model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trt_plugins, "prepare", lambda *_: pytest.fail("the work began"))
    (tmp_path / "file").touch()
    for target, message in ((tmp_path, "is a folder"), (tmp_path / "file" / "out", "file is a file")):
        code, said = run(capsys, action, model, target, *(GPU if action == "build" else []))
        assert code == 2 and message in said


@pytest.mark.skipif(not RTX, reason="TensorRT-RTX alone builds without a GPU")
def test_ctrl_c_stops_a_build(model, tmp_path):
    """Also inside TensorRT's callbacks, which no exception may leave; nothing is left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore the signal
    with pytest.raises(KeyboardInterrupt):
        trt_plugins.build_engine(
            model,
            {"batch": (1, 1, 2), "tokens": (1, 4, 8)},
            tmp_path / "engine",
            compute_capabilities=["8.9"],
            progress=lambda *told: signal.raise_signal(signal.SIGINT),
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class Loader:
    """Stands in for trt.Runtime: keeps what was allowed, and loads nothing."""

    last = None

    def __init__(self, logger):
        self.engine_host_code_allowed, Loader.last = False, self

    def deserialize_cuda_engine(self, engine):
        return None


@pytest.mark.parametrize("allowed", [False, True])
def test_host_code_runs_on_request_alone(allowed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(driver, "why_no_gpu", lambda: None)
    monkeypatch.setattr(TRT, "Runtime", Loader)
    (tmp_path / "engine").write_bytes(b"an engine")
    for action in ("inspect", "run"):
        code, said = run(capsys, action, tmp_path / "engine", *["--allow-host-code"] * allowed)
        assert code == 2 and "cannot load the engine" in said and Loader.last.engine_host_code_allowed == allowed
    with pytest.raises(RuntimeError):
        running.Engine(b"an engine", host_code=allowed)
    assert Loader.last.engine_host_code_allowed == allowed
    monkeypatch.setattr(trt_plugins, "build_engine", lambda *_, **__: SimpleNamespace(engine=b"an engine"))
    with pytest.raises(RuntimeError):
        polygraphy_runner.engine_loader("model", embed_plugins=allowed)()
    assert Loader.last.engine_host_code_allowed == allowed


def test_help_says_what_host_code_is(capsys):
    with pytest.raises(SystemExit):
        cli.main(["engine", "inspect", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--allow-host-code" in said and "with all your rights: for files from somebody you trust alone" in said


def test_profiles_of_an_engine():
    engine = running.Engine.__new__(running.Engine)
    engine.engine = SimpleNamespace(num_optimization_profiles=2)
    for call in (engine.use_profile, engine.made_up_inputs):
        for index in (2, -1):
            with pytest.raises(ValueError, match=f"profile is {index}; the engine has 2, the first is 0"):
                call(index)


def test_prepare_without_the_library_writes_nothing(model, tmp_path, capsys, monkeypatch):
    def missing():
        raise FileNotFoundError("libleanfleet_trt.so does not exist")

    monkeypatch.setattr(trt_plugins, "get_plugin_path", missing)
    assert run(capsys, "prepare", model, tmp_path / "out.onnx")[0] == 2 and not (tmp_path / "out.onnx").exists()
