"""BlockLinear on the CPU beside ONNX Runtime's MatMulNBits.

    python -m bench.kernels.block_linear OUT --seed HEX [--shapes 40] [--threads 2] [--rounds 5]

writes OUT.json, a line a shape, and OUT.md. Shapes are drawn from the seed: 1 to 512 rows, 256 to 8,192 inputs and outputs,
int4 or int8, with a shift or without, in blocks of 32; behind them stand the products of SmolLM2-135M's layers for 1, 4 and 256
rows. Each contender is an onnxruntime session of as many products, of different weights, as it takes to be beyond the last-
level cache that a virtual machine can count on, so that weights come from where a decoder's come from; both sessions run in
turns, and times are medians, divided by the number of products. Where there is a shift MatMulNBits gets it as exporters give
it: a product of the shifts with the sums of the blocks. Every result is compared with float64 before it is timed.
"""

import argparse
import datetime
import json
import math
import random
import statistics
import time
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from leanfleet import ort_ops, spec

WEIGHT_BYTES = 160 << 20  # of all products of a session together
BLOCK = 32
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # outputs and inputs


def shapes(seed, count):
    """Of `count` drawn shapes and SmolLM2's."""
    draw = random.Random(seed)
    for _ in range(count):
        rows, width = round(2 ** draw.uniform(0, 9)), BLOCK * round(2 ** draw.uniform(3, 8))
        yield rows, width, round(2 ** draw.uniform(8, 13)), draw.choice((4, 4, 8)), draw.choice((True, False))
    for rows in (1, 4, 256):
        for outputs, width in LAYER:
            yield rows, width, outputs, 4, True


def weights(random, width, outputs, bits):
    """Unsigned numbers as MatMulNBits packs them, scales and shifts."""
    blocks = width // BLOCK
    packed = random.integers(0, 256, (outputs, blocks, BLOCK * bits // 8), dtype=np.uint8)
    scale = (0.5 + random.random((outputs, blocks), dtype=np.float32)) / 2**bits
    return packed, scale, random.standard_normal((outputs, blocks), dtype=np.float32)


def ours(i, packed, scale, shift):
    flat = packed.reshape(len(packed), -1)
    numbers = flat if packed.shape[2] < BLOCK else (flat ^ np.uint8(128)).view(np.int8)
    arrays = {f"w{i}": numbers, f"s{i}": scale} | ({} if shift is None else {f"m{i}": shift})
    return [helper.make_node("BlockLinear", ["x", *arrays], [f"y{i}"], domain=spec.DOMAIN, round_input=1)], arrays


def theirs(i, packed, scale, shift):
    outputs, blocks, size = packed.shape
    arrays = {f"w{i}": packed, f"s{i}": scale}
    sizes = {"K": blocks * BLOCK, "N": outputs, "bits": 8 * size // BLOCK, "block_size": BLOCK, "accuracy_level": 4}
    product = f"p{i}" if shift is not None else f"y{i}"
    nodes = [helper.make_node("MatMulNBits", ["x", *arrays], [product], domain="com.microsoft", **sizes)]
    if shift is not None:
        arrays |= {f"m{i}": shift.T.copy(), "cut": np.array([0, 0, blocks, BLOCK]), "last": np.array([-1])}
        nodes += [
            helper.make_node("Reshape", ["x", "cut"], [f"c{i}"]),
            helper.make_node("ReduceSum", [f"c{i}", "last"], [f"b{i}"], keepdims=0),
            helper.make_node("MatMul", [f"b{i}", f"m{i}"], [f"a{i}"]),
            helper.make_node("Add", [product, f"a{i}"], [f"y{i}"]),
        ]
    return nodes, arrays


def session(make, sets, threads):
    nodes, arrays = [], {}
    for i, given in enumerate(sets):
        own, of_node = make(i, *given)
        nodes += own
        arrays |= of_node
    results = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(len(sets))]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, None, None])
    graph = helper.make_graph(nodes, "g", [x], results, [numpy_helper.from_array(a, n) for n, a in arrays.items()])
    domains = {"": 20, "com.microsoft": 1, spec.DOMAIN: 1}
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid(d, v) for d, v in domains.items()])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    ort_ops.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def error_of(result, x, packed, scale, shift):
    """Relative, of a product whose input is rounded to 8 bits a block or not."""
    q = packed if packed.shape[2] == BLOCK else np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], BLOCK)
    numbers = (q.astype(np.float64) - (128 if packed.shape[2] == BLOCK else 8)) * scale[..., None]
    matrix = (numbers if shift is None else numbers + shift[..., None]).reshape(len(packed), -1)
    expected = x[0].astype(np.float64) @ matrix.T
    return float(np.linalg.norm(result[0] - expected) / np.linalg.norm(expected))


def line(shape, threads, rounds):
    rows, width, outputs, bits, shifted = shape
    random = np.random.default_rng(0)
    count = max(2, min(200, math.ceil(WEIGHT_BYTES / (width * outputs * (bits / 8 + (8 if shifted else 4) / BLOCK)))))
    sets = [weights(random, width, outputs, bits) for _ in range(count)]
    sets = [(packed, scale, shift if shifted else None) for packed, scale, shift in sets]
    x = random.standard_normal((1, rows, width), dtype=np.float32)
    sessions = {"leanfleet": session(ours, sets, threads), "MatMulNBits": session(theirs, sets, threads)}
    for name, own in sessions.items():
        found = own.run(["y1"], {"x": x})[0]
        if not (error := error_of(found, x, *sets[1])) < 0.02:  # what 8 bits lose is below 0.01
            raise SystemExit(f"{shape}: {name} is off by {error:.3g}; not timed")
    taken = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, own in sessions.items():
            begin = time.perf_counter()
            own.run(None, {"x": x})
            taken[name].append((time.perf_counter() - begin) / count)
    names = ("rows", "inputs", "outputs", "bits", "shift")
    return dict(zip(names, shape, strict=True)) | {"us": {name: 1e6 * statistics.median(t) for name, t in taken.items()}}


def table(report):
    """Ours beside theirs, and the ratio; geometric means of the drawn shapes by their rows."""
    head = f"{report['processor']}, {report['threads']} threads, {report['date']}, onnxruntime {report['onnxruntime']}"
    lines = [
        "# BlockLinear beside MatMulNBits on a CPU\n",
        f"{head}, seed {report['seed']}. Microseconds a product, its weights out of the caches. Above 1, ours is faster.\n",
        "| rows | inputs | outputs | bits | shift | leanfleet | MatMulNBits | ratio |",
        "|---" * 8 + "|",
    ]
    ratio = [row["us"]["MatMulNBits"] / row["us"]["leanfleet"] for row in report["rows"]]
    for row, r in zip(report["rows"], ratio, strict=True):
        cells = [row["rows"], row["inputs"], row["outputs"], row["bits"], "yes" if row["shift"] else "", *row["us"].values()]
        lines.append("| " + " | ".join(f"{c:.0f}" if isinstance(c, float) else str(c) for c in cells) + f" | {r:.2f} |")
    drawn = list(zip(report["rows"], ratio, strict=True))[: report["drawn"]]
    parts = {"1 to 4": (1, 4), "5 to 32": (5, 32), "33 and more": (33, 1 << 30)}
    means = []
    for name, (least, most) in parts.items():
        own = [r for row, r in drawn if least <= row["rows"] <= most]
        if own:
            means.append(f"{name} rows {statistics.geometric_mean(own):.2f} ({len(own)} shapes, {min(own):.2f} at worst)")
    return "\n".join([*lines, f"\nGeometric means of the drawn shapes: {', '.join(means)}."]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=lambda text: int(text, 16), default=0, help="hexadecimal")
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    processor = next((n.split(":")[1].strip() for n in open("/proc/cpuinfo") if n.startswith("model name")), "unknown")
    report = {"date": datetime.date.today().isoformat(), "processor": processor, "threads": arguments.threads}
    report |= {"onnxruntime": onnxruntime.__version__, "seed": f"{arguments.seed:x}", "rounds": arguments.rounds}
    report |= {"drawn": arguments.shapes, "rows": []}
    for shape in shapes(arguments.seed, arguments.shapes):
        row = line(shape, arguments.threads, arguments.rounds)
        report["rows"].append(row)
        print(shape, {name: round(us, 1) for name, us in row["us"].items()}, flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
