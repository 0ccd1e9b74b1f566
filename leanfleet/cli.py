"""The command `leanfleet`. Importing this module needs only the standard library.

Exit codes: 0 all well, 1 a comparison found a mismatch, 2 wrong usage or something missing or damaged, with one line that
says what to do about it, 130 stopped by Ctrl-C, 141 nobody reads the output any more (as in `leanfleet info | head`).
What a command writes is there whole or not at all.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import leanfleet
from leanfleet import driver, files, generate, native, progress, ranks, spec
from leanfleet.decoder_contract import SERVING
from leanfleet.tables import print_table

KEY_VARIABLE = "LEANFLEET_API_KEY"
LIBRARIES = ("leanfleet", "leanfleet_ort", "leanfleet_trt")
PACKAGES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "torch", "onnx", "onnxscript", "polygraphy", "transformers")


INTERRUPTED, UNREAD = 130, 141  # 128 and the number of the signal, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: the process's) and returns the exit code. Raises SystemExit for --help and arguments that
    argparse refuses."""
    try:
        try:
            arguments = _parser().parse_args(argv)
            arguments.argv = list(sys.argv[1:] if argv is None else argv)  # for a command that runs itself as several processes
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a closed pipe is caught, and not while Python ends
    except BrokenPipeError:
        _discard_output()
        return UNREAD
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    try:
        with progress.shown():
            return arguments.run(arguments)
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, OSError, ImportError, MemoryError) as error:
        print(f"leanfleet {arguments.command}: {' '.join(_explanation(error, arguments.command).split())}", file=sys.stderr)
        return 2


def _discard_output() -> None:
    """What is still in stdout's buffer goes nowhere: Python would try again to write it, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("leanfleet", description="Attention operators for ONNX Runtime, TensorRT and PyTorch.")
    parser.add_argument("--version", action="version", version=f"leanfleet {leanfleet.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser(
        "info",
        help="what is installed here, and the operators",
        description="Shows the libraries, the runtimes found, and the operators.",
    )
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=info_command)

    doctor = commands.add_parser(
        "doctor",
        help="what works here, and the fix for what does not",
        description="Tries every package, library and runtime that is installed. Exit code 1 when one of them is broken.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=doctor_command)

    verify = commands.add_parser(
        "verify",
        help="does every operator compute right in every runtime that is here?",
        description="Runs every operator in every type, in up to 64 variants, in every runtime that is here, compares the "
        "results with the float64 reference, times a few calls, and prints a report in Markdown. Exit code 1 when a runtime "
        "is wrong, crashes or hangs. Three minutes on two cores.",
    )
    verify.add_argument("--quick", action="store_true", help="an eighth of the calls")
    verify.add_argument("--runtimes", metavar="A,B", help="these alone (default: all; --list shows them)")
    verify.add_argument("--list", action="store_true", help="print the runtimes and stop")
    verify.add_argument(
        "--limit",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="without a finished call after which a runtime hangs (default: %(default)s)",
    )
    verify.add_argument("--report", metavar="FILE.json", help="also write the report there")
    verify.set_defaults(run=verify_command)

    check = commands.add_parser(
        "check",
        help="does a model compute the same everywhere?",
        description="Runs a model with several runners on the same inputs and compares each with the first. Exit code 1 where "
        "they differ, and where a node was edited after its function body was made.",
    )
    check.add_argument("model", help="an ONNX file with leanfleet nodes")
    check.add_argument(
        "--runners",
        default="body,ort-cpu",
        help="two or more of body, ort-cpu, ort-cuda, trt, reference; the first is the judge (default: %(default)s)",
    )
    check.add_argument(
        "--size",
        type=_size,
        action="append",
        default=[],
        metavar="NAME=N",
        help="size of an open dimension of the inputs that are made up; may be given again",
    )
    check.add_argument("--seed", type=int, help="of the inputs that are made up (default: 0)")
    check.add_argument("--inputs", metavar="FILE.npz", help="inputs by name, in place of made-up ones; bfloat16 as float32")
    check.add_argument("--atol", type=_tolerance, help="absolute tolerance, in place of the operators' own")
    check.add_argument("--rtol", type=_tolerance, help="relative tolerance, likewise; either is enough for an element")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=check_command)

    rewrite = commands.add_parser(
        "rewrite",
        help="attention nodes of an ONNX file into leanfleet nodes, and back",
        description="Rewrites attention nodes of ai.onnx and com.microsoft into leanfleet nodes where the meaning is exactly "
        "the same, and says of each node left alone why.",
    )
    rewrite.add_argument("model", help="an ONNX file")
    rewrite.add_argument("-o", "--output", required=True, metavar="FILE", help="the ONNX file to write")
    rewrite.add_argument(
        "--to",
        default="leanfleet",
        choices=("leanfleet", "standard"),
        help="standard: leanfleet nodes into ai.onnx and com.microsoft ones (default: %(default)s)",
    )
    rewrite.add_argument(
        "--operator",
        action="append",
        metavar="DOMAIN.NAME",
        help="rewrite these alone, such as com.microsoft.GroupQueryAttention, or with --to standard leanfleet.LeanAttention; "
        "may be given again",
    )
    rewrite.add_argument(
        "--fixed-caches",
        action="store_true",
        help="GroupQueryAttention's caches have their final length from the start: append to them in place of growing a copy",
    )
    rewrite.add_argument(
        "--inline",
        action="store_true",
        help="with --to standard: function bodies in the place of nodes that no standard operator expresses",
    )
    rewrite.add_argument(
        "--no-verify",
        action="store_true",
        help="do not run the original and the result on the same inputs and compare the outputs",
    )
    rewrite.add_argument("--inputs", metavar="FILE.npz", help="inputs by name to verify with, in place of made-up ones")
    rewrite.add_argument("--json", action="store_true", help="print JSON")
    rewrite.set_defaults(run=rewrite_command)

    generate.add_commands(commands)

    bundle = commands.add_parser(
        "bundle",
        help="a decoder folder for another host",
        description="Writes a folder that onnxruntime-genai loads and generates from, with a copy of the library.",
    )
    bundle.add_argument("folder", help="a decoder folder, written by leanfleet.export.export_decoder")
    bundle.add_argument("--genai", required=True, metavar="DIR", help="the folder to write")
    bundle.set_defaults(run=bundle_command)

    _add_serve(commands)
    _add_engine(commands)

    bench = commands.add_parser(
        "bench",
        help="time the methods of linear attention",
        description="Times methods beside each other, each checked against the float64 reference first. Exit code 1 when "
        "one is wrong or fails.",
    )
    bench.add_argument(
        "--operator",
        default="causal_linear_decay",
        help="causal_linear_decay (default), causal_linear_decay_normalized or normalized_linear_attention",
    )
    bench.add_argument("--methods", help="names, separated by commas (default: all; --list shows them)")
    bench.add_argument("--list", action="store_true", help="print the methods and stop")
    bench.add_argument(
        "--load",
        metavar="FILE.py",
        action="append",
        default=[],
        help="a Python file with more methods, such as bench/kernels/triton_baselines.py; it is run, with all your rights; may "
        "be given again",
    )
    bench.add_argument(
        "--shapes",
        default="1x8x128x64x64,1x8x512x64x64,1x8x2048x64x64",
        help="BxHxNxRxD or BxH/HkvxNxRxD, separated by commas (default: %(default)s)",
    )
    bench.add_argument("--device", default="cpu", help="cpu (default), cuda or, of several GPUs, cuda:1")
    bench.add_argument("--dtype", default="float32", help="float32 (default), float16 or bfloat16")
    bench.add_argument("--decay", default="head", help="none, head (default: one for each head) or token")
    bench.add_argument("--grad", action="store_true", help="forward and backward together")
    bench.add_argument(
        "--seconds", type=_seconds, default=0.5, help="spent on each method of each shape (default: %(default)s)"
    )
    bench.add_argument(
        "--limit",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="leave out, and say so, methods that a shape is expected to keep busy for longer than that, checks "
        "and all (default: %(default)s)",
    )
    bench.add_argument("--threads", type=_positive, help="of the CPU (default: torch's)")
    bench.add_argument("--out", metavar="FILE.json", help="also write the results there")
    bench.add_argument("--plot", metavar="FILE.png", help="also draw them there; needs matplotlib")
    bench.set_defaults(run=bench_command)
    return parser


def _add_serve(commands: argparse._SubParsersAction) -> None:
    serve = commands.add_parser(
        "serve",
        help="an HTTP server with OpenAI's interface",
        description="Serves a model to many clients at once: /v1/chat/completions, /v1/completions, /v1/models, /health and "
        "/metrics. Prompts and answers are in no log. The environment variable LEANFLEET_API_KEY holds an API key. "
        "Ends at Ctrl-C or SIGTERM, once running answers are through. Needs the extra serve.",
    )
    serve.add_argument("folder", help="written by leanfleet.export.serving.export_for_serving, with its tokenizer")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine alone)")
    serve.add_argument("--port", type=_number, default=8000, help="0: any free one (default: %(default)s)")
    serve.add_argument("--name", help="the model's name for clients (default: the folder's)")
    serve.add_argument("--provider", choices=("cpu", "cuda"), help="default: cuda where it works, else cpu")
    serve.add_argument("--device", metavar="DEVICE", help=generate.DEVICE_HELP)
    serve.add_argument(
        "--cuda-graph",
        action=argparse.BooleanOptionalAction,
        help="capture steps as CUDA graphs (default: on a GPU, where they can be and no tokens are guessed)",
    )
    generate.add_ranks(serve, "--tensor-parallel W --serve or --context-parallel W --serve")
    serve.add_argument(
        "--cache-tokens",
        type=_positive,
        metavar="N",
        help="tokens whose keys and values are kept, of all requests together (default: on a GPU, as many as fit in three "
        "quarters of the memory that is free beside the weights; on a CPU and over several GPUs 4096, or the model's "
        "positions, for each of --max-requests)",
    )
    serve.add_argument("--max-requests", type=_positive, metavar="N", help="run at once (default: 16, on a GPU 64)")
    serve.add_argument("--max-waiting", type=_positive, default=256, metavar="N", help="wait at most (default: %(default)s)")
    serve.add_argument(
        "--step-tokens",
        type=_positive,
        metavar="N",
        help="new tokens a step: answers in the making wait while it takes pieces of prompts (default: 128; with CUDA 2048, "
        "and fewer while others are being answered)",
    )
    serve.add_argument("--no-share", dest="share", action="store_false", help="do not share beginnings of prompts")
    serve.add_argument(
        "--speculate",
        type=_count,
        default=0,
        metavar="N",
        help="tokens that are guessed at most, from what followed in a request's own text before (default: none)",
    )
    serve.add_argument(
        "--snapshots",
        type=_count,
        metavar="N",
        help="of layers with linear attention, states that are kept for prompts that begin alike (default: --max-requests)",
    )
    serve.add_argument(
        "--max-body", type=_positive, default=4 << 20, metavar="BYTES", help="of a request (default: %(default)s)"
    )
    serve.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="of a request (default: %(default)s)")
    serve.add_argument(
        "--grace", type=_seconds, default=30.0, metavar="S", help="for running answers at the end (default: %(default)s)"
    )
    serve.set_defaults(run=serve_command)


def _add_engine(commands: argparse._SubParsersAction) -> None:
    engine = commands.add_parser(
        "engine",
        help="TensorRT engines with leanfleet's plugins",
        description="Builds, inspects and runs engines of TensorRT and TensorRT-RTX.",
    )
    actions = engine.add_subparsers(dest="action", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--runtime", help="tensorrt or tensorrt_rtx (default: the one that is installed)")
    common.add_argument("--json", action="store_true", help="print JSON")

    build = actions.add_parser(
        "build",
        parents=[common],
        help="an ONNX model into an engine",
        description="Builds an engine from an ONNX model with leanfleet nodes.",
    )
    build.add_argument("model", help="an ONNX file with leanfleet nodes")
    build.add_argument("engine", help="the file to write")
    build.add_argument(
        "--profile",
        type=_profile,
        action="append",
        default=[],
        metavar="NAME=MIN:OPT:MAX,...",
        help="sizes of all open dimensions, such as batch=1:1:8,tokens=1:16:512; each gives one profile",
    )
    build.add_argument(
        "--compute-capability",
        action="append",
        default=[],
        metavar="8.9",
        help="of the GPU to build for (TensorRT-RTX); may be given again; default: the first GPU that is "
        "here; needed where there is none",
    )
    build.add_argument("--copy-caches", action="store_true", help="no output shares an input's buffer")
    build.add_argument("--embed-plugins", action="store_true", help="put the plugin library into the engine, for Triton")
    build.set_defaults(run=engine_build_command)

    loading = argparse.ArgumentParser(add_help=False)
    loading.add_argument("--device", metavar="DEVICE", help="the GPU, such as cuda:1 (default: the first)")
    loading.add_argument(
        "--allow-host-code",
        action="store_true",
        help="let the engine run code that its file holds, as --embed-plugins puts it there, in this process, "
        "with all your rights: for files from somebody you trust alone",
    )

    prepare = actions.add_parser(
        "prepare",
        help="an ONNX model for trtexec and other tools",
        description="Writes the model as TensorRT's own parser takes it. engine build does this itself.",
    )
    prepare.add_argument("model", help="an ONNX file with leanfleet nodes")
    prepare.add_argument("output", help="the ONNX file to write")
    prepare.set_defaults(run=engine_prepare_command)

    inspect = actions.add_parser(
        "inspect",
        parents=[common, loading],
        help="what an engine holds",
        description="Shows an engine's tensors and layers. Needs a GPU that it was built for.",
    )
    inspect.add_argument("engine", help="an engine file")
    inspect.set_defaults(run=engine_inspect_command)

    run = actions.add_parser(
        "run",
        parents=[common, loading],
        help="run an engine",
        description="Runs an engine and times it. Needs a GPU that it was built for.",
    )
    run.add_argument("engine", help="an engine file")
    run.add_argument("--inputs", metavar="FILE.npz", help="inputs by name; default: ones, in the profile's usual sizes")
    run.add_argument("--profile", type=int, default=0, help="number of the profile (default: 0)")
    run.add_argument("--runs", type=_positive, default=20, help="timed runs (default: %(default)s)")
    run.add_argument("--save", metavar="FILE.npz", help="write the outputs there")
    run.set_defaults(run=engine_run_command)


def _profile(text: str) -> dict[str, tuple[int, ...]]:
    profile = {}
    for part in text.split(","):
        name, _, sizes = part.partition("=")
        if not re.fullmatch(r"\d+:\d+:\d+", sizes):
            raise argparse.ArgumentTypeError(f"'{part}' is not NAME=MIN:OPT:MAX, such as batch=1:1:8")
        if name in profile:
            raise argparse.ArgumentTypeError(f"{name} has two sizes; each --profile gives one to every open dimension")
        profile[name] = tuple(map(int, sizes.split(":")))
    return profile


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=N with N at least 1, such as batch=3")
    return name, int(number)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of a port, 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or a positive number")
    return value


def _explanation(error: Exception, command: str) -> str:
    """What to tell about an error; for a package that is missing, the extra that brings it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        extra = (
            "bench"
            if command == "bench"
            else "trt"
            if command == "engine"
            else "export"
            if package in ("torch", "onnxscript", "onnx_ir")
            else "models"
            if package in ("transformers", "gguf")
            else "ort"
            if command == "generate" or package == "onnxruntime"
            else "serve"
            if command == "serve"
            else "polygraphy"
        )
        return f"the package {package} is missing: pip install 'leanfleet[{extra}]'"
    return str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


# info


def collect_info() -> dict[str, Any]:
    """What `leanfleet info` shows, as a dict that JSON can hold."""
    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "version": leanfleet.__version__,
        "python": platform.python_version(),
        "libraries": _libraries(),
        "packages": packages,
        "onnxruntime": _onnxruntime(),
        "operators": [_operator(op) for op in spec.all_specs().values()],
    }


def _libraries() -> dict[str, dict[str, Any]]:
    """{library: its path, and what it holds or why it cannot be used}."""
    libraries: dict[str, dict[str, Any]] = {}
    for name in LIBRARIES:
        libraries[name] = entry = dict[str, Any](path=None, error=None)
        try:
            entry["path"] = str(native.library_path(name))
            ctypes.CDLL(entry["path"])
            if name == "leanfleet":
                entry |= {"kernels": native.build_info(), "operators": native.op_names()}
        except OSError as error:
            entry["error"] = str(error)
    return libraries


def _onnxruntime() -> dict[str, Any]:
    try:
        import onnxruntime
    except ImportError as error:
        return {"version": None, "providers": [], "error": str(error)}
    return {"version": onnxruntime.__version__, "providers": onnxruntime.get_available_providers(), "error": None}


def _operator(op: Any) -> dict[str, Any]:
    def tensor(t: Any) -> dict[str, Any]:
        shapes = [f"the shape of {t.like}"] if t.like else [str(shape) for shape in t.shapes]
        return {"name": t.name, "type": t.type, "shapes": shapes, "doc": t.doc}

    return {
        "name": op.name,
        "version": op.version,
        "doc": op.doc,
        "inputs": [tensor(t) | {"optional": t.optional} for t in op.inputs],
        "outputs": [tensor(t) | {"when": list(t.when), "takes": t.takes} for t in op.outputs],
        "attributes": [
            {"name": a.name, "type": a.type, "default": a.default, "values": list(a.values), "doc": a.doc}
            for a in op.attrs
            if not a.refuse
        ],
    }


def info_command(arguments: argparse.Namespace) -> int:
    info = collect_info()
    if arguments.json:
        print(json.dumps(info, indent=2))
        return 0
    print(f"leanfleet {info['version']}, Python {info['python']}")
    print("\nlibraries")
    libraries = info["libraries"]
    print_table(
        [
            (name, entry["path"] or "missing", entry.get("kernels") or (entry["path"] and entry["error"]) or "")
            for name, entry in libraries.items()
        ]
    )
    if not libraries["leanfleet"]["path"]:
        print(f"  {libraries['leanfleet']['error']}")
    print("\npackages")
    print_table([(name, version) for name, version in info["packages"].items() if version] or [("none",)])
    runtime = info["onnxruntime"]
    print(f"  onnxruntime's providers: {', '.join(runtime['providers']) or runtime['error']}")
    types = ", ".join(spec.TYPES["T"])
    narrow = " or ".join(spec.TYPES["C"])
    print(f"\noperators, domain {spec.DOMAIN}; T is one of {types}, C that or {narrow}, F float32, I int32, L int64")
    for op in info["operators"]:
        print(f"\n{op['name']}, version {op['version']}: {op['doc']}")
        rows = [
            ("optional input" if t["optional"] else "input", t["name"], t["type"], " or ".join(t["shapes"]))
            for t in op["inputs"]
        ]
        for t in op["outputs"]:
            notes = [f"with {' and '.join(t['when'])}"] if t["when"] else []
            notes += [f"may take {t['takes']}"] if t["takes"] else []
            rows.append(("output", t["name"], t["type"], ", ".join([" or ".join(t["shapes"]), *notes])))
        rows += [("attribute", a["name"], "", f"{a['type']}, default {a['default']}") for a in op["attributes"]]
        print_table(rows)
    return 0


def doctor_command(arguments: argparse.Namespace) -> int:
    from leanfleet import doctor

    diagnosis = doctor.diagnose()
    if arguments.json:
        print(json.dumps(diagnosis, indent=2))
    else:
        doctor.print_diagnosis(diagnosis)
    return 0 if diagnosis["usable"] else 1


# check


def verify_command(arguments: argparse.Namespace) -> int:
    from leanfleet import verify

    if arguments.list:
        print_table([(name, title) for name, (title, _) in verify.RUNTIMES.items()])
        return 0

    def tell(name: str, part: verify.Report) -> None:
        progress.clear()
        print(f"{name}: {verify.outcome(part)}", file=sys.stderr)

    with files.new_file(arguments.report) if arguments.report else nullcontext() as new:
        names = arguments.runtimes.split(",") if arguments.runtimes else None
        report = verify.run(names, arguments.quick, arguments.limit, tell)
        if new is not None:
            new.write_text(json.dumps(report, indent=1) + "\n")
    print(verify.markdown(report), end="")
    return 1 if verify.failed(report) else 0


def check_command(arguments: argparse.Namespace) -> int:
    files.check_onnx(arguments.model)
    if arguments.inputs and (arguments.size or arguments.seed is not None):
        raise ValueError("--inputs gives all inputs: leave --size and --seed out")
    from leanfleet import parity

    runners = arguments.runners.split(",")
    try:
        rows, kernels = parity.check(
            arguments.model,
            runners,
            inputs=_read_inputs(arguments.inputs) if arguments.inputs else None,
            sizes=dict(arguments.size),
            seed=arguments.seed or 0,
            rtol=arguments.rtol,
            atol=arguments.atol,
        )
    except parity.EditedNodeError as error:
        print(
            json.dumps({"model": arguments.model, "judge": runners[0], "passed": False, "edited": str(error)}, indent=2)
            if arguments.json
            else f"MISMATCH {error}"
        )
        return 1
    passed = all(row["passed"] for row in rows)
    if arguments.json:
        finite = [row | {"error": row["error"] if math.isfinite(row["error"]) else None} for row in rows]
        ran = [
            {"runner": runner, "operator": op, "provider": provider, "runs": runs}
            for runner, counts in kernels.items()
            for (op, provider), runs in counts.items()
        ]
        print(
            json.dumps(
                {"model": arguments.model, "judge": runners[0], "passed": passed, "outputs": finite, "kernels": ran},
                indent=2,
                allow_nan=False,
            )
        )
    else:
        parity.print_check(rows, kernels)
    return 0 if passed else 1


def _read_inputs(path: str) -> dict[str, Any]:
    import zipfile

    import numpy as np

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; write it with numpy.savez(FILE, name=array, ...)")
    try:
        with np.load(path) as file:
            return dict(file)
    except (zipfile.BadZipFile, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no file of numpy.savez: {error}") from error


# rewrite


def rewrite_command(arguments: argparse.Namespace) -> int:
    if arguments.inline and arguments.to != "standard":
        raise ValueError("--inline puts function bodies in the place of leanfleet nodes: it goes with --to standard")
    if arguments.inputs and arguments.no_verify:
        raise ValueError("--inputs are what the result is verified with: leave --no-verify out")
    from leanfleet.export import rewrite, rewrite_check

    files.check_file(arguments.output)
    try:
        rows = rewrite.rewrite_file(
            arguments.model,
            arguments.output,
            arguments.to,
            operators=arguments.operator,
            fixed_caches=arguments.fixed_caches,
            inline=arguments.inline,
            verify=not arguments.no_verify,
            inputs=_read_inputs(arguments.inputs) if arguments.inputs else None,
        )
    except rewrite_check.Different as error:
        print(f"leanfleet rewrite: {error}; {arguments.output} is not written", file=sys.stderr)
        return 1
    if arguments.json:
        print(
            json.dumps(
                {"model": arguments.output, "nodes": rewrite.as_json(rows), "verification": vars(rows.verification)}, indent=2
            )
        )
    else:
        rewrite.print_rows(rows)
        print(rows.verification)
    return 0


def bundle_command(arguments: argparse.Namespace) -> int:
    from leanfleet.ort_ops import genai

    target = genai.bundle(arguments.folder, arguments.genai)
    print(f"{target} is ready: onnxruntime_genai.Model({str(target)!r})")
    return 0


# engine


def serve_command(arguments: argparse.Namespace) -> int:
    generate.check_device(arguments)
    ranks.end_with_parent()
    world, here = generate.world_of(arguments, SERVING), ranks.place()
    if world is None:
        return _serve(arguments)
    if here is None:
        return generate.launch_ranks(arguments, world, serving=True)
    if here.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, which reaches all
    with generate.joined(arguments, here, world) as device:
        return _serve(arguments, here, device)


class _AskedToEnd(SystemExit):
    """By SIGTERM."""


def _asked_to_end(number: int, frame: object) -> None:
    raise _AskedToEnd(128 + number)


def _serve(arguments: argparse.Namespace, here: ranks.Place | None = None, device: driver.Device | None = None) -> int:
    """Of several ranks the first answers requests."""
    from leanfleet import serve
    from leanfleet.together import together

    folder = Path(arguments.folder)
    generate.quieten_transformers()
    with progress.stage(f"loading {folder}"):
        server = serve.load_server(
            folder,
            arguments.name,
            os.environ.get(KEY_VARIABLE) or None,
            serve.Limits(arguments.max_body, seconds=arguments.timeout),
            arguments.max_waiting,
            providers=None if arguments.provider is None else [f"{arguments.provider.upper()}ExecutionProvider"],
            device=device or arguments.device,
            rank=None if here is None else here.rank,
            session_options=None if here is None else generate.options_of_rank(here.world, device),
            cache_tokens=arguments.cache_tokens,
            max_requests=arguments.max_requests,
            step_tokens=arguments.step_tokens,
            cuda_graph=arguments.cuda_graph,
            share=arguments.share,
            snapshots=arguments.snapshots,
            speculate=arguments.speculate,
            own_process=here is None,
        )

    def started(address: str) -> None:
        batch = server.batch
        held = [f"{batch.pages} pages of {batch.block} tokens"] * batch.paged + [f"{batch.state_rows} states"] * batch.linear
        kept = f"{', '.join(held)}, {batch.pool_bytes / 1e9:.2f} GB"
        key = ", with an API key" if server.key else ""
        print(f"serving {server.name} at {address} ({kept}{key})", file=sys.stderr, flush=True)

    if here is None:
        try:
            serve.run(server, arguments.host, arguments.port, arguments.grace, started)
            if why := server.batch.over:
                raise RuntimeError(why)
        finally:
            server.close()
        return 0
    # What asks the command to end asks rank 0, which lets running answers end; the others end with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if here.rank else _asked_to_end)
    with together(server.batch) as leads:
        if leads:
            try:
                serve.run(server, arguments.host, arguments.port, arguments.grace, started)
            except (_AskedToEnd, KeyboardInterrupt):  # uvicorn raises signals again once it has ended
                pass
            finally:
                server.close()
    return 0


def engine_build_command(arguments: argparse.Namespace) -> int:
    from leanfleet import trt_plugins

    with progress.stage("building the engine") as stage:
        built = trt_plugins.build_engine(
            arguments.model,
            arguments.profile,
            arguments.engine,
            trt=trt_plugins.runtime(arguments.runtime),
            compute_capabilities=arguments.compute_capability,
            in_place=not arguments.copy_caches,
            progress=stage.at,
            embed_plugins=arguments.embed_plugins,
        )
    facts = {
        "engine": arguments.engine,
        "runtime": built.runtime,
        "compute_capabilities": built.gpus,
        "bytes": len(built.engine),
        "seconds": built.seconds,
        "layers": [{"name": name, "operator": operator} for name, operator in built.layers],
    }
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        print(
            f"{arguments.engine}: {len(built.engine) / 1e6:.1f} MB in {built.seconds:.1f} s, {built.runtime}, for compute "
            f"capability {', '.join(built.gpus)}"
        )
        print_table(
            [(f"{op or 'another plugin'} x{count}",) for op, count in sorted(Counter(op for _, op in built.layers).items())]
            or [("no plugin layers",)]
        )
    return 0


def engine_prepare_command(arguments: argparse.Namespace) -> int:
    from leanfleet import trt_plugins

    library = trt_plugins.get_plugin_path()  # which may raise, before anything is written
    print(f"{trt_plugins.prepare_file(arguments.model, arguments.output)}: for trtexec --onnx, with --dynamicPlugins={library}")
    return 0


def engine_inspect_command(arguments: argparse.Namespace) -> int:
    from leanfleet import trt_plugins

    found = trt_plugins.inspect(
        arguments.engine, trt_plugins.runtime(arguments.runtime), arguments.allow_host_code, arguments.device
    )
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"tensors, {found['profiles']} profiles")
    print_table([(t["mode"], t["name"], t["type"], str(t["shape"])) for t in found["tensors"]])
    print("layers")
    print_table([(layer if isinstance(layer, str) else layer.get("Name", str(layer)),) for layer in found["layers"]])
    return 0


def engine_run_command(arguments: argparse.Namespace) -> int:
    import numpy as np

    from leanfleet import trt_plugins
    from leanfleet.trt_plugins import running

    with files.new_file(arguments.save) if arguments.save else nullcontext() as saved:
        runtime = trt_plugins.runtime(arguments.runtime)
        with progress.stage("loading the engine"):
            engine = running.Engine(arguments.engine, runtime, host_code=arguments.allow_host_code, device=arguments.device)
        feed = _read_inputs(arguments.inputs) if arguments.inputs else engine.made_up_inputs(arguments.profile)
        with progress.stage(f"running the engine {arguments.runs} times"):
            outputs, milliseconds = engine.timed(feed, arguments.profile, arguments.runs)
        if saved:
            with open(saved, "wb") as file:
                np.savez(file, **outputs)  # type: ignore[arg-type]  # its other argument is a bool
    rows: list[dict[str, Any]] = [
        {"name": name, "shape": list(array.shape), "finite": bool(np.isfinite(array).all())} for name, array in outputs.items()
    ]
    if arguments.json:
        print(json.dumps({"milliseconds": milliseconds, "runs": arguments.runs, "outputs": rows}, indent=2))
    else:
        print(f"{milliseconds:.3f} ms, median of {arguments.runs} runs")
        print_table([(r["name"], str(r["shape"]), "" if r["finite"] else "not finite") for r in rows])
    return 0


# bench


def bench_command(arguments: argparse.Namespace) -> int:
    from leanfleet import bench

    if arguments.plot:
        bench.check_plot(arguments.plot)
    if arguments.out:
        files.check_file(arguments.out)
    for path in arguments.load:
        bench.load_file(path)
    if arguments.list:
        print("\n".join(bench.methods(arguments.operator)))
        return 0
    if arguments.decay not in bench.DECAYS:
        raise ValueError(f"--decay is {arguments.decay}; it is one of {', '.join(bench.DECAYS)}")
    if arguments.threads:
        import torch

        torch.set_num_threads(arguments.threads)
    shapes = [bench.parse_shape(text) for text in arguments.shapes.split(",")]
    names = arguments.methods.split(",") if arguments.methods else None

    def print_case(rows: list[bench.Row]) -> None:
        progress.clear()
        bench.print_case(rows)

    with progress.stage("benchmark") as stage:
        report = bench.run(
            shapes,
            names,
            arguments.operator,
            arguments.device,
            arguments.dtype,
            arguments.decay,
            arguments.grad,
            arguments.seconds,
            on_case=print_case,
            limit=arguments.limit,
            on_progress=lambda shape, what: stage.at(f"{shape}: {what}", shapes.index(shape), len(shapes)),
        )
    if arguments.out:
        bench.write_json(report, arguments.out)
    if arguments.plot:
        bench.plot(report, arguments.plot)
    return 1 if any(row["status"] in ("wrong", "failed") for row in report["rows"]) else 0
