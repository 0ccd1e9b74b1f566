"""The command `leanfleet`. Importing this module needs only the standard library.

Exit codes: 0 all well, 1 a comparison found a mismatch, 2 wrong usage or something missing, with one line that says
what to do about it.
"""

import argparse
import ctypes
import json
import math
import platform
import sys
from importlib import metadata
from pathlib import Path

import leanfleet
from leanfleet import native, spec

LIBRARIES = ("leanfleet", "leanfleet_ort", "leanfleet_trt")
PACKAGES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "torch", "onnx", "onnxscript", "polygraphy", "transformers")


def main(argv=None):
    """Runs a command line (default: the process's) and returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"leanfleet {arguments.command}: {' '.join(_explanation(error).split())}", file=sys.stderr)
        return 2


def _parser():
    parser = argparse.ArgumentParser(
        "leanfleet", description="Attention operators for ONNX Runtime, TensorRT and PyTorch.")
    parser.add_argument("--version", action="version", version=f"leanfleet {leanfleet.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser("info", help="what is installed here, and the operators",
                               description="Shows the libraries, the runtimes found, and the operators.")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=info_command)

    check = commands.add_parser(
        "check", help="does a model compute the same everywhere?",
        description="Runs a model with several runners on the same inputs and compares each with the first.")
    check.add_argument("model", help="an ONNX file with leanfleet nodes")
    check.add_argument("--runners", default="body,ort-cpu", help="two or more of body, ort-cpu, ort-cuda, reference; "
                       "the first is the judge (default: %(default)s)")
    check.add_argument("--size", type=_size, action="append", default=[], metavar="NAME=N",
                       help="size of an open dimension of the inputs that are made up; may be given again")
    check.add_argument("--seed", type=int, help="of the inputs that are made up (default: 0)")
    check.add_argument("--inputs", metavar="FILE.npz",
                       help="inputs by name, in place of made-up ones; bfloat16 as float32")
    check.add_argument("--atol", type=_tolerance, help="absolute tolerance, in place of the operators' own")
    check.add_argument("--rtol", type=_tolerance, help="relative tolerance, likewise; either is enough for an element")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=check_command)
    return parser


def _size(text):
    name, _, number = text.partition("=")
    if not name or not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=N with N at least 1, such as batch=3")
    return name, int(number)


def _tolerance(text):
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or a positive number")
    return value


def _explanation(error):
    """What to tell about an error; for a package that is missing, the extra that brings it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        extra = "export" if package == "torch" else "polygraphy"
        return f"the package {package} is missing: pip install 'leanfleet[{extra}]'"
    return str(error)


# info


def collect_info():
    """What `leanfleet info` shows, as a dict that JSON can hold."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {"version": leanfleet.__version__, "python": platform.python_version(), "libraries": _libraries(),
            "packages": packages, "onnxruntime": _onnxruntime(),
            "operators": [_operator(op) for op in spec.all_specs().values()]}


def _libraries():
    """{library: its path, and what it holds or why it cannot be used}."""
    libraries = {}
    for name in LIBRARIES:
        libraries[name] = entry = {"path": None, "error": None}
        try:
            entry["path"] = str(native.library_path(name))
            ctypes.CDLL(entry["path"])
            if name == "leanfleet":
                entry |= {"kernels": native.build_info(), "operators": native.op_names()}
        except OSError as error:
            entry["error"] = str(error)
    return libraries


def _onnxruntime():
    try:
        import onnxruntime
    except ImportError as error:
        return {"version": None, "providers": [], "error": str(error)}
    return {"version": onnxruntime.__version__, "providers": onnxruntime.get_available_providers(), "error": None}


def _operator(op):
    def tensor(t):
        shapes = [f"the shape of {t.like}"] if t.like else [str(shape) for shape in t.shapes]
        return {"name": t.name, "type": t.type, "shapes": shapes, "doc": t.doc}

    return {"name": op.name, "version": op.version, "doc": op.doc,
            "inputs": [tensor(t) | {"optional": t.optional} for t in op.inputs],
            "outputs": [tensor(t) | {"when": list(t.when), "takes": t.takes} for t in op.outputs],
            "attributes": [{"name": a.name, "type": a.type, "default": a.default, "values": list(a.values),
                            "doc": a.doc} for a in op.attrs if not a.refuse]}


def info_command(arguments):
    info = collect_info()
    if arguments.json:
        print(json.dumps(info, indent=2))
        return 0
    print(f"leanfleet {info['version']}, Python {info['python']}")
    print("\nlibraries")
    libraries = info["libraries"]
    print_table([(name, entry["path"] or "missing", entry.get("kernels") or (entry["path"] and entry["error"]) or "")
                 for name, entry in libraries.items()])
    if not libraries["leanfleet"]["path"]:
        print(f"  {libraries['leanfleet']['error']}")
    print("\npackages")
    print_table([(name, version) for name, version in info["packages"].items() if version] or [("none",)])
    runtime = info["onnxruntime"]
    print(f"  onnxruntime's providers: {', '.join(runtime['providers']) or runtime['error']}")
    print(f"\noperators, domain {spec.DOMAIN}; T is one of {', '.join(spec.TYPES['T'])}, F float32, I int32")
    for op in info["operators"]:
        print(f"\n{op['name']}, version {op['version']}: {op['doc']}")
        rows = [("optional input" if t["optional"] else "input", t["name"], t["type"], " or ".join(t["shapes"]))
                for t in op["inputs"]]
        for t in op["outputs"]:
            notes = [f"with {' and '.join(t['when'])}"] if t["when"] else []
            notes += [f"may take {t['takes']}"] if t["takes"] else []
            rows.append(("output", t["name"], t["type"], ", ".join([" or ".join(t["shapes"]), *notes])))
        rows += [("attribute", a["name"], "", f"{a['type']}, default {a['default']}") for a in op["attributes"]]
        print_table(rows)
    return 0


# check


def check_command(arguments):
    if not Path(arguments.model).is_file():
        raise FileNotFoundError(f"{arguments.model} does not exist; give the path of an ONNX file")
    if arguments.inputs and (arguments.size or arguments.seed is not None):
        raise ValueError("--inputs gives all inputs: leave --size and --seed out")
    from leanfleet import parity

    runners = arguments.runners.split(",")
    rows, kernels = parity.check(
        arguments.model, runners, inputs=_read_inputs(arguments.inputs) if arguments.inputs else None,
        sizes=dict(arguments.size), seed=arguments.seed or 0, rtol=arguments.rtol, atol=arguments.atol)
    passed = all(row["passed"] for row in rows)
    if arguments.json:
        finite = [row | {"error": row["error"] if math.isfinite(row["error"]) else None} for row in rows]
        ran = [{"runner": runner, "operator": op, "provider": provider, "runs": runs}
               for runner, counts in kernels.items() for (op, provider), runs in counts.items()]
        print(json.dumps({"model": arguments.model, "judge": runners[0], "passed": passed, "outputs": finite,
                          "kernels": ran}, indent=2, allow_nan=False))
    else:
        print_check(rows, kernels)
    return 0 if passed else 1


def _read_inputs(path):
    import zipfile

    import numpy as np

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; write it with numpy.savez(FILE, name=array, ...)")
    try:
        with np.load(path) as file:
            return dict(file)
    except (zipfile.BadZipFile, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no file of numpy.savez: {error}") from error


def print_check(rows, kernels):
    """Prints what parity.check returned."""
    table = [("runner", "output", "largest error", "tolerance", "")]
    table += [(r["runner"], r["output"], f"{r['error']:.2e}", f"{r['tolerance']:.2e}",
               "ok" if r["passed"] else "MISMATCH") for r in rows]
    print(f"compared with {rows[0]['judge']}")
    print_table(table, right=(2, 3))
    print("kernels of leanfleet that ran")
    print_table([(runner, ", ".join(f"{op} x{runs} ({provider})" for (op, provider), runs in sorted(counts.items())) or
                  "none: the function bodies ran") for runner, counts in kernels.items()])


def print_table(rows, right=()):
    """Prints rows of text, indented, in aligned columns; those numbered in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.rjust(width) if i in right else text.ljust(width)
                 for i, (text, width) in enumerate(zip(row, widths, strict=True))]
        print("  " + "  ".join(cells).rstrip())
