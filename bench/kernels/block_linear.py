"""BlockLinear beside ONNX Runtime's MatMulNBits, on a CPU or in the CUDA provider.

    python -m bench.kernels.block_linear OUT --seed HEX [--cuda] [--shapes 40] [--threads 2] [--rounds 5] [--seconds S]

writes OUT.json, a line a shape, and OUT.md. Shapes are drawn from the seed: 1 to 512 rows (2,048 with --cuda), 256 to 8,192
inputs and outputs, int4 or int8, with a shift or without, in blocks of 32; behind them stand the products of a whole model's
layers, SmolLM2-135M's on a CPU, Llama-3-8B's on a GPU. Each contender is an onnxruntime session of as many products, each with
weights of its own, as it takes to be beyond the last-level cache: they come from where a decoder's come from. Sessions run in
turns, and times are medians, divided by the number of products. Where there is a shift MatMulNBits gets it as exporters give
it: a product of the shifts with the sums of the blocks. Every result is compared with float64 before it is timed.

--cuda: in float16, with MatMul of float16 weights (cuBLAS) as a third contender; each session is captured in a CUDA graph and
timed by events on its stream.
"""

import argparse
import datetime
import itertools
import json
import math
import random
import statistics
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from onnx import helper, numpy_helper

from leanfleet import ort_ops, spec

WEIGHT_BYTES = {"cpu": 160 << 20, "cuda": 256 << 20}  # of all products of a session together
BLOCK = 32
LAUNCH_CYCLES = 300_000  # in which the host has launched a graph
SPINNING = 0.05  # seconds after a run in which a session's threads may still take a core from another's
LAYERS = {  # outputs and inputs
    "cpu": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "cuda": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
MOST_PRODUCTS = 200  # of a session; of the smallest weights fewer bytes are then read
ROWS = {"cpu": (1, 4, 256), "cuda": (1, 2, 4, 8, 16, 64, 2048)}


def shapes(seed, count, device):
    """Of `count` drawn shapes and a model's."""
    draw = random.Random(seed)
    for _ in range(count):
        rows, width = round(2 ** draw.uniform(0, 9 if device == "cpu" else 11)), BLOCK * round(2 ** draw.uniform(3, 8))
        yield rows, width, round(2 ** draw.uniform(8, 13)), draw.choice((4, 4, 8)), draw.choice((True, False))
    for outputs, width in LAYERS[device]:
        for rows in ROWS[device]:
            yield rows, width, outputs, 4, True


def weights(random, width, outputs, bits, dtype):
    """Unsigned numbers as MatMulNBits packs them, scales and shifts."""
    blocks = width // BLOCK
    packed = random.integers(0, 256, (outputs, blocks, BLOCK * bits // 8), dtype=np.uint8)
    scale = (0.5 + random.random((outputs, blocks), dtype=np.float32)) / 2**bits
    return packed, scale.astype(dtype), random.standard_normal((outputs, blocks), dtype=np.float32).astype(dtype)


def integers(packed):
    """[outputs,blocks,BLOCK] of them, centred."""
    if packed.shape[2] == BLOCK:
        return packed.astype(np.int16) - 128
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], BLOCK).astype(np.int16) - 8


def matrix(packed, scale, shift, dtype):
    """[outputs,inputs]."""
    wide = np.promote_types(dtype, np.float32)  # arithmetic of float16 is slow here
    found = integers(packed).astype(wide) * scale.astype(wide)[..., None]
    return (found if shift is None else found + shift.astype(wide)[..., None]).reshape(len(packed), -1).astype(dtype)


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


def whole(i, packed, scale, shift):
    arrays = {f"w{i}": np.ascontiguousarray(matrix(packed, scale, shift, np.float16).T)}
    return [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"])], arrays


CONTENDERS = {"leanfleet": ours, "MatMulNBits": theirs}
CUDA_CONTENDERS = CONTENDERS | {"float16": whole}


class Products:
    """A session of a product of each set, all of one input x [1,rows,inputs]."""

    def __init__(self, make, sets, device, threads):
        self.count, self.outputs, self.device, self.graphs = len(sets), len(sets[0][0]), device, 0
        provider = "CPUExecutionProvider"
        if device == "cuda":
            self.stream = torch.cuda.Stream()
            provider = (
                "CUDAExecutionProvider",
                {"enable_cuda_graph": "1", "user_compute_stream": str(self.stream.cuda_stream)},
            )
        self.session = session(make, sets, threads, provider)

    def take(self, x):
        """What is run from now on; on a GPU, captured."""
        self.feed = {"x": x}
        if self.device == "cpu":
            return
        self.binding, self.options, self.results = self.session.io_binding(), onnxruntime.RunOptions(), []
        self.options.add_run_config_entry("gpu_graph_id", str(self.graphs))
        self.graphs += 1
        self.input = onnxruntime.OrtValue.ortvalue_from_numpy(x, "cuda", 0)
        self.binding.bind_ortvalue_input("x", self.input)
        for i in range(self.count):
            shape = *x.shape[:2], self.outputs
            self.results.append(onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, x.dtype, "cuda", 0))
            self.binding.bind_ortvalue_output(f"y{i}", self.results[i])
        for _ in range(3):
            self.session.run_with_iobinding(self.binding, self.options)

    def result(self, i):
        return self.session.run([f"y{i}"], self.feed)[0] if self.device == "cpu" else self.results[i].numpy()

    def seconds(self):
        """Of a product."""
        if self.device == "cpu":
            time.sleep(SPINNING)
            begin = time.perf_counter()
            self.session.run(None, self.feed)
            return (time.perf_counter() - begin) / self.count
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(LAUNCH_CYCLES)
        begin.record(self.stream)
        self.session.run_with_iobinding(self.binding, self.options)
        end.record(self.stream)
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end) / self.count


def session(make, sets, threads, provider):
    nodes, arrays = [], {}
    for i, given in enumerate(sets):
        own, of_node = make(i, *given)
        nodes += own
        arrays |= of_node
    of = helper.np_dtype_to_tensor_dtype(sets[0][1].dtype)
    results = [helper.make_tensor_value_info(f"y{i}", of, None) for i in range(len(sets))]
    x = helper.make_tensor_value_info("x", of, [1, None, None])
    graph = helper.make_graph(nodes, "g", [x], results, [numpy_helper.from_array(a, n) for n, a in arrays.items()])
    domains = {"": 20, "com.microsoft": 1, spec.DOMAIN: 1}
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid(d, v) for d, v in domains.items()])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    ort_ops.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[provider])


def error_of(result, x, given):
    """Relative, of a product whose input is rounded to 8 bits a block or not."""
    expected = x[0].astype(np.float64) @ matrix(*given, np.float64).T
    return float(np.linalg.norm(result[0] - expected) / np.linalg.norm(expected))


def contenders(matrix_of, device, threads):
    """(the last set of weights, {name: Products}) for inputs, outputs, bits and whether there is a shift."""
    width, outputs, bits, shifted = matrix_of
    dtype = np.dtype(np.float32 if device == "cpu" else np.float16)
    packed, scale, shift = weights(np.random.default_rng(0), width, outputs, bits, dtype)
    count = math.ceil(WEIGHT_BYTES[device] / (packed.nbytes + scale.nbytes * (1 + shifted)))
    # Different ones: onnxruntime may keep equal initializers once.
    sets = [
        (packed ^ np.uint8(i), np.roll(scale, i, 0), np.roll(shift, i, 0) if shifted else None)
        for i in range(max(2, min(MOST_PRODUCTS, count)))
    ]
    makes = CONTENDERS if device == "cpu" else CUDA_CONTENDERS
    return sets[-1], {name: Products(make, sets, device, threads) for name, make in makes.items()}


def line(rows, matrix_of, given, products, rounds):
    x = np.random.default_rng(rows).standard_normal((1, rows, matrix_of[0]), dtype=np.float32).astype(given[1].dtype)
    for name, own in products.items():
        own.take(x)
        if not (error := error_of(own.result(own.count - 1), x, given)) < 0.02:  # what 8 bits lose is below 0.01
            raise SystemExit(f"{rows} rows, {matrix_of}: {name} is off by {error:.3g}; not timed")
    taken = {name: [] for name in products}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(products), len(products)):
            taken[name].append(products[name].seconds())
    found = dict(zip(("rows", "inputs", "outputs", "bits", "shift"), (rows, *matrix_of), strict=True))
    return found | {"us": {name: 1e6 * statistics.median(t) for name, t in taken.items()}}


def table(report):
    """Ours beside the others, and the ratio of the faster one; geometric means of the drawn shapes by their rows."""
    cuda = report.get("device", "cpu") == "cuda"
    where = report["processor"] if cuda else f"{report['processor']}, {report['threads']} threads"
    names = list(report["rows"][0]["us"])
    lines = [
        f"# BlockLinear beside MatMulNBits {'in the CUDA provider' if cuda else 'on a CPU'}\n",
        f"{where}, {report['date']}, onnxruntime {report['onnxruntime']}, seed {report['seed']}. Microseconds a product, its "
        "weights out of the caches. The ratio is that of the fastest other: above 1, ours is faster.\n",
        f"| rows | inputs | outputs | bits | shift | {' | '.join(names)} | ratio |",
        "|---" * (6 + len(names)) + "|",
    ]
    ratio = [min(t for name, t in row["us"].items() if name != "leanfleet") / row["us"]["leanfleet"] for row in report["rows"]]
    for row, r in zip(report["rows"], ratio, strict=True):
        cells = [row["rows"], row["inputs"], row["outputs"], row["bits"], "yes" if row["shift"] else ""]
        cells += [f"{row['us'][name]:.{1 if cuda else 0}f}" for name in names]
        lines.append("| " + " | ".join(map(str, cells)) + f" | {r:.2f} |")
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
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no other matrix is begun")
    arguments = parser.parse_args()
    device = "cuda" if arguments.cuda else "cpu"
    processor = next((n.split(":")[1].strip() for n in open("/proc/cpuinfo") if n.startswith("model name")), "unknown")
    report = {"date": datetime.date.today().isoformat(), "device": device, "threads": arguments.threads}
    report |= {"processor": torch.cuda.get_device_name() if arguments.cuda else processor}
    report |= {"onnxruntime": onnxruntime.__version__, "seed": f"{arguments.seed:x}", "rounds": arguments.rounds}
    report |= {"drawn": 0, "rows": []}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    begin, drawn = time.monotonic(), arguments.shapes
    for number, (matrix_of, group) in enumerate(
        itertools.groupby(shapes(arguments.seed, drawn, device), lambda shape: shape[1:])
    ):
        if time.monotonic() - begin > arguments.seconds:
            break
        given, products = contenders(matrix_of, device, arguments.threads)
        for rows, *_ in group:
            report["rows"].append(line(rows, matrix_of, given, products, arguments.rounds))
            print(report["rows"][-1], flush=True)
        report["drawn"] = min(drawn, number + 1)
        arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
