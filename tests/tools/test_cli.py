"""The command leanfleet: what it prints and its exit codes."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest

import leanfleet
from leanfleet import native, parity, spec
from leanfleet.cli import main
from support.parity_models import alter_body, chain_model, saved, variant_model


@pytest.fixture
def model(tmp_path):
    return str(saved(variant_model("LeanAttention", 0), tmp_path))


@pytest.fixture
def wrong_model(tmp_path):
    return str(saved(alter_body(variant_model("LeanAttention", 0), "lse"), tmp_path, "wrong.onnx"))


def table(text):
    """The words of each line, by the line's first two."""
    return {tuple(words[:2]): words for words in map(str.split, text.splitlines()) if len(words) > 1}


def test_check_passes(model, capsys):
    assert main(["check", model, "--runners", "reference,body,ort-cpu"]) == 0
    out, err = capsys.readouterr()
    lines = table(out)
    for key in (("body", "output"), ("body", "lse"), ("ort-cpu", "output"), ("ort-cpu", "lse")):
        error, tolerance, verdict = lines[key][2:]
        assert 0 <= float(error) <= float(tolerance) < 1e-4 and verdict == "ok"
    assert "compared with reference" in out and err == ""
    assert re.search(r"^  ort-cpu +LeanAttention x1 \(CPUExecutionProvider\)$", out, re.M)
    assert re.search(r"^  body +none: the function bodies ran$", out, re.M)


def test_columns_are_aligned(model, capsys):
    main(["check", model])
    lines = [line for line in capsys.readouterr().out.splitlines() if "e-0" in line or "tolerance" in line]
    ends = {tuple(m.end() for m in re.finditer(r"\S+(?: error)?", line))[2:4] for line in lines}
    assert len(lines) == 3 and len(ends) == 1


def test_mismatch_is_exit_1(wrong_model, capsys):
    assert main(["check", wrong_model, "--runners", "ort-cpu,body"]) == 1
    lines = table(capsys.readouterr().out)
    assert lines["body", "lse"][-1] == "MISMATCH" and lines["body", "output"][-1] == "ok"
    assert main(["check", wrong_model, "--runners", "reference,ort-cpu"]) == 0
    assert main(["check", wrong_model, "--rtol", "2e-3"]) == 0
    assert main(["check", wrong_model, "--atol", "1e-8", "--rtol", "1e-6"]) == 1


def test_check_json(wrong_model, capsys):
    assert main(["check", wrong_model, "--json", "--runners", "reference,ort-cpu,body"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["judge"], result["passed"]) == (wrong_model, "reference", False)
    assert [(r["runner"], r["output"], r["passed"]) for r in result["outputs"]] == [
        ("ort-cpu", "output", True),
        ("ort-cpu", "lse", True),
        ("body", "output", True),
        ("body", "lse", False),
    ]
    assert all(r["error"] <= r["tolerance"] for r in result["outputs"] if r["passed"])
    assert result["kernels"] == [
        {"runner": "ort-cpu", "operator": "LeanAttention", "provider": "CPUExecutionProvider", "runs": 1}
    ]


def test_sizes_seed_and_inputs(tmp_path, capsys):
    path = str(saved(chain_model(), tmp_path))
    errors = {}
    for name, arguments in {
        "default": [],
        "sizes": ["--size", "batch=3", "--size", "tokens=5"],
        "seed": ["--seed", "4"],
    }.items():
        assert main(["check", path, "--json", *arguments]) == 0
        errors[name] = [r["tolerance"] for r in json.loads(capsys.readouterr().out)["outputs"]]
    assert len({tuple(e) for e in errors.values()}) == 3
    feed = parity.make_inputs(onnx.load(path), seed=4)
    np.savez(tmp_path / "feed.npz", **feed)
    assert main(["check", path, "--json", "--inputs", str(tmp_path / "feed.npz")]) == 0
    assert [r["tolerance"] for r in json.loads(capsys.readouterr().out)["outputs"]] == errors["seed"]


def test_bfloat16_inputs_from_a_file(tmp_path):
    path = str(saved(variant_model("LeanAttention", 0, "bfloat16"), tmp_path))
    feed = parity.make_inputs(onnx.load(path))
    np.savez(tmp_path / "feed.npz", **{name: array.astype(np.float32) for name, array in feed.items()})
    assert main(["check", path, "--runners", "reference,body,ort-cpu", "--inputs", str(tmp_path / "feed.npz")]) == 0


def without_body(tmp_path):
    model = variant_model("LeanAttention", 0)
    del model.functions[:]
    return str(saved(model, tmp_path, "bare.onnx"))


def without_nodes(tmp_path):
    model = variant_model("LeanAttention", 0)
    model.graph.node[0].domain = "elsewhere"
    return str(saved(model, tmp_path, "foreign.onnx"))


# arguments (made from the folder, which holds model.onnx, text.onnx and some.npz), and what the one line must say
USAGE = {
    "no model": (lambda d: [f"{d}/none.onnx"], r"none\.onnx does not exist; give the path of an ONNX file"),
    "a folder": (lambda d: [f"{d}"], r"is a folder; give the path of an ONNX file, such as .*model\.onnx"),
    "not a model": (lambda d: [f"{d}/text.onnx"], r"text\.onnx is no ONNX model"),
    "no leanfleet nodes": (lambda d: [without_nodes(d)], r"no leanfleet nodes: there is nothing to check"),
    "no body": (lambda d: [without_body(d)], r"runner 'body': the model holds no function for its LeanAttention nodes"),
    "unknown runner": (
        lambda d: [f"{d}/model.onnx", "--runners", "body,gpu"],
        r"runner 'gpu' is unknown; choose from body, ort-cpu, ort-cuda, trt, reference",
    ),
    "one runner": (lambda d: [f"{d}/model.onnx", "--runners", "body"], r"runners are body; expected two or more"),
    "runner twice": (lambda d: [f"{d}/model.onnx", "--runners", "body,body"], r"expected two or more different ones"),
    "unknown size": (lambda d: [f"{d}/model.onnx", "--size", "batch=3"], r"size batch: no such open dimension"),
    "no inputs": (lambda d: [f"{d}/model.onnx", "--inputs", f"{d}/none.npz"], r"none\.npz does not exist; write it"),
    "inputs no npz": (lambda d: [f"{d}/model.onnx", "--inputs", f"{d}/text.onnx"], r"is no file of numpy\.savez"),
    "wrong inputs": (
        lambda d: [f"{d}/model.onnx", "--inputs", f"{d}/some.npz"],
        r"inputs are x; the model takes query, key_cache, value_cache",
    ),
    "inputs and sizes": (
        lambda d: [f"{d}/model.onnx", "--inputs", f"{d}/some.npz", "--seed", "1"],
        r"--inputs gives all inputs: leave --size and --seed out",
    ),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_exit_2(case, model, tmp_path, capsys):
    (tmp_path / "text.onnx").write_text("not a model")
    np.savez(tmp_path / "some.npz", x=np.zeros(3))
    arguments, message = USAGE[case]
    assert main(["check", *arguments(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("leanfleet check: ") and re.search(message, err), err


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["check", "m", "--size", "batch"],
        ["check", "m", "--size", "b=0"],
        ["check", "m", "--atol", "-1"],
        ["nothing"],
        [],
    ],
)
def test_command_line_errors_are_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and "error: " in capsys.readouterr().err


def test_cuda_runner_without_cuda(model, capsys):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    assert main(["check", model, "--runners", "body,ort-cuda"]) == 2
    assert re.search(r"runner 'ort-cuda' failed: .*onnxruntime-gpu", capsys.readouterr().err)


def test_missing_library(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LEANFLEET_LIBRARY_DIR", str(tmp_path))
    assert main(["check", model]) == 2
    err = capsys.readouterr().err
    assert re.search(r"libleanfleet_ort\.so does not exist.*pip install.*LEANFLEET_LIBRARY_DIR", err)
    assert main(["info"]) == 0
    assert re.search(r"leanfleet_ort +missing\n.*\n.*does not exist.*pip install", capsys.readouterr().out)
    (tmp_path / "libleanfleet.so").write_text("no library")
    assert main(["info"]) == 0
    assert re.search(r"libleanfleet\.so: (file too short|invalid ELF header)", capsys.readouterr().out)


@pytest.mark.parametrize("package, extra", [("polygraphy", "polygraphy"), ("onnx", "polygraphy")])
def test_missing_package_names_the_extra(package, extra, model, monkeypatch, capsys):
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}.") or name == "leanfleet.parity":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(leanfleet, "parity")
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["check", model]) == 2
    expected = f"leanfleet check: the package {package} is missing: pip install 'leanfleet[{extra}]'\n"
    assert capsys.readouterr().err == expected


def test_missing_torch_names_the_extra(model, monkeypatch, capsys):
    for name in list(sys.modules):
        if name == "torch" or name.startswith("leanfleet.export"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(leanfleet, "export")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["check", model, "--runners", "reference,ort-cpu"]) == 2
    assert capsys.readouterr().err == "leanfleet check: the package torch is missing: pip install 'leanfleet[export]'\n"


def test_info(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"leanfleet {leanfleet.__version__}, Python ") and native.build_info() in out
    assert "CPUExecutionProvider" in out and re.search(r"^  polygraphy +0\.", out, re.M)
    for op in spec.all_specs().values():
        section = out.split(f"\n{op.name}, version {op.version}: ")[1].split("\n\n")[0]
        listed = {
            (words[-2] if words[0] == "optional" else words[0], name)
            for line in section.splitlines()[1:]
            if (words := line.split())
            for name in words[1:3]
        }
        for t in op.inputs + op.outputs:
            assert any(name == t.name for _, name in listed), t.name
        for a in op.attrs:
            assert any(name == a.name for _, name in listed) == (not a.refuse), a.name


def test_info_json(capsys):
    assert main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["version"] == leanfleet.__version__
    assert info["libraries"]["leanfleet"]["path"] == str(native.library_path("leanfleet"))
    assert info["libraries"]["leanfleet"]["operators"] == native.op_names()
    assert info["libraries"]["leanfleet_ort"]["error"] is None
    assert "CPUExecutionProvider" in info["onnxruntime"]["providers"]
    assert [op["name"] for op in info["operators"]] == list(spec.all_specs())
    attention = info["operators"][0]
    assert attention["inputs"][3] == {
        "name": "seq_lens",
        "type": "I",
        "shapes": ["[B]"],
        "optional": True,
        "doc": spec.all_specs()["LeanAttention"].input("seq_lens").doc,
    }
    assert attention["outputs"][2]["takes"] == "key_cache" and attention["outputs"][2]["when"] == ["append"]
    assert {"name", "type", "default", "values", "doc"} == set(attention["attributes"][0])


@pytest.mark.slow
def test_as_a_module(model):
    result = subprocess.run(
        [sys.executable, "-P", "-m", "leanfleet", "check", model], capture_output=True, text=True, env=os.environ
    )
    assert result.returncode == 0 and "ort-cpu" in result.stdout and result.stderr == "", result.stderr
    result = subprocess.run([sys.executable, "-P", "-m", "leanfleet", "--version"], capture_output=True, text=True)
    assert result.stdout == f"leanfleet {leanfleet.__version__}\n"


# Ctrl-C, closed pipes, outputs that cannot be written

COMMANDS = {
    "info": ("leanfleet.cli.collect_info", []),
    "doctor": ("leanfleet.doctor.diagnose", []),
    "check": ("leanfleet.parity.check", ["{d}/model.onnx"]),
    "rewrite": ("leanfleet.export.rewrite.rewrite_file", ["{d}/model.onnx", "-o", "{d}/out/new.onnx"]),
    "bundle": ("leanfleet.ort_ops.genai.read_facts", ["{d}", "--genai", "{d}/out/genai"]),
    "export": ("leanfleet.generate.locate", ["{d}", "{d}/out/model"]),
    "generate": ("leanfleet.ort_ops.generation.load_decoder", ["{d}", "Hi"]),
    "bench": ("leanfleet.bench.run", ["--out", "{d}/out/times.json", "--plot", "{d}/out/times.png"]),
    "engine prepare": ("leanfleet.trt_plugins.prepare", ["{d}/model.onnx", "{d}/out/new.onnx"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c(command, model, tmp_path, capsys, monkeypatch):
    """Exit code 130, no traceback, nothing written, no folder left."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    function, arguments = COMMANDS[command]
    monkeypatch.setattr(function, interrupted)
    assert main([*command.split(), *(word.format(d=tmp_path) for word in arguments)]) == 130
    assert len(capsys.readouterr().err.splitlines()) <= 1 and [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_ctrl_c_of_a_process(model):
    """The real signal, while it works."""
    # A shell's background jobs, and what they start, ignore the signal unless told otherwise.
    code = (
        "import signal, sys, leanfleet.cli as cli; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "cli.collect_info = lambda: signal.raise_signal(signal.SIGINT); "
        "sys.exit(cli.main(['info']))"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments", ["info", "--help"])
def test_closed_pipe(arguments):
    """As in `leanfleet info | head -1`, where the reader is gone at once."""
    # Without a buffer argparse would meet the error, and look away.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-m", "leanfleet", arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


OUTPUTS = {
    **{name: COMMANDS[name] for name in ("rewrite", "bundle", "export", "engine prepare")},
    "bench": ("leanfleet.bench.run", ["--out", "{d}/out/times.json"]),
    "bench picture": ("leanfleet.bench.run", ["--plot", "{d}/out/times.png"]),
    "engine run": ("leanfleet.trt_plugins.running.Engine", ["{d}/model.onnx", "--save", "{d}/out/new.npz"]),
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_outputs_are_tried_before_the_work(command, model, tmp_path, capsys, monkeypatch):
    function, arguments = OUTPUTS[command]
    monkeypatch.setattr(function, lambda *_, **__: pytest.fail("the work began"))
    (tmp_path / "leanfleet.json").write_text('{"vocabulary": 9, "stop_tokens": [], "max_positions": 9}')
    (tmp_path / "out").touch()
    if command == "bundle":
        monkeypatch.undo()
        monkeypatch.setattr("leanfleet.ort_ops.genai.ir.load", lambda *_: pytest.fail("the work began"))
    assert main([*command.replace(" picture", "").split(), *(word.format(d=tmp_path) for word in arguments)]) == 2
    err = capsys.readouterr().err
    assert "cannot be written:" in err and "out is a file" in err and err.count("\n") == 1


def test_picture_of_no_kind(tmp_path, capsys):
    assert main(["bench", "--plot", str(tmp_path / "times.docx")]) == 2
    assert re.search(r"times\.docx is no kind of picture; matplotlib writes .*\.png", capsys.readouterr().err)


# Models that are none


@pytest.fixture
def no_hub(monkeypatch):
    """Counts the calls to a hub that does not answer."""
    import huggingface_hub
    import transformers

    calls = []

    def model_info(self, name, timeout=None, **_):
        calls.append(timeout)
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("asked again"))
    return calls


@pytest.mark.parametrize(
    "name, message, asked",
    [
        ("./nowhere", "neither a folder here nor a model on the Hugging Face hub, whose names are OWNER/NAME", 0),
        ("/tmp/no/such/model", "neither a folder here nor a model", 0),
        ("models/", "neither a folder here nor a model", 0),
        ("~/model", "neither a folder here nor a model", 0),
        ("a b", "neither a folder here nor a model", 0),
        ("{d}/model.onnx", "is no GGUF file; give one, or the folder that the model lies in", 0),
        ("nobody/nothing-of-that-name", "is no folder here, and the Hugging Face hub does not answer: no route to the hub", 1),
    ],
)
def test_mistyped_models(name, message, asked, model, tmp_path, capsys, no_hub):
    assert main(["export", name.format(d=tmp_path), str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err.splitlines()
    assert message in err[-1] and len(err) == 2 and not (tmp_path / "out").exists()
    assert len(no_hub) == asked and all(seconds <= 30 for seconds in no_hub)


def broken_files(folder):
    """{what is broken: (file, its new content)} of a folder with a small Llama."""
    weights, config = (folder / "model.safetensors").read_bytes(), json.loads((folder / "config.json").read_text())
    return {
        "cut": ("model.safetensors", weights[:-1000], r"model\.safetensors is damaged or not whole"),
        "cut header": ("model.safetensors", weights[:50], r"model\.safetensors is damaged or not whole"),
        "empty": ("model.safetensors", b"", r"model\.safetensors is damaged or not whole"),
        "config": ("config.json", b"{", r"config"),
        "list": ("config.json", b"[]", r"the model .* cannot be read"),
        "types": ("config.json", json.dumps(config | {"hidden_size": "wide"}).encode(), r"the model .* cannot be read"),
    }


def test_damaged_models(tmp_path, capsys):
    import transformers

    whole = tmp_path / "whole"
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9, intermediate_size=8)
    ).save_pretrained(whole)
    for case, (name, content, message) in broken_files(whole).items():
        folder = tmp_path / case.replace(" ", "_")
        shutil.copytree(whole, folder)
        (folder / name).write_bytes(content)
        capsys.readouterr()
        assert main(["export", str(folder), str(tmp_path / "out")]) == 2, case
        err = capsys.readouterr().err.splitlines()
        assert re.search(message, err[-1]) and len(err) == 2 and not (tmp_path / "out").exists(), (case, err)
