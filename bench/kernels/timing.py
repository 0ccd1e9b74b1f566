"""One node on the GPU through the C interface, and how its time and what it counts are taken."""

import argparse
import contextlib
import csv
import functools
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from leanfleet import native, spec
from leanfleet.export import torch_ops

ALIGNMENT = 256  # bytes; what the library expects of workspace addresses
FLUSH = {}
COPY_BYTES_PER_US = 4.25e6  # what an H200 reaches when it copies
FLA_TUNING = "configurations of 4 warps, 2 or 3 stages"  # of quick_tuning, for reports


class Launches:
    """A node with its outputs and a workspace of its own, and launches that a CUDA graph can capture."""

    def __init__(
        self, op_name: str, inputs: Mapping[str, torch.Tensor], attrs: Mapping[str, Any], in_place: bool = False
    ) -> None:
        """in_place: outputs that may take an input's buffer get it."""
        op = spec.all_specs()[op_name]
        self.op_name, self.attrs, self.inputs = op_name, attrs, inputs
        ordered, active = [inputs.get(t.name) for t in op.inputs], {t.name for t in op.active_outputs(attrs)}
        self.outputs = {}
        for t, (dtype, shape) in zip(op.outputs, torch_ops._output_metadata(op, ordered, attrs), strict=True):
            taken = inputs.get(t.takes) if in_place and t.takes else None
            if t.name in active:
                self.outputs[t.name] = torch.empty(shape, dtype=dtype, device="cuda") if taken is None else taken
        outputs = [self.outputs.get(t.name) for t in op.outputs]
        self.entries = [torch_ops._entry(t) for t in ordered], [torch_ops._entry(t) for t in outputs]
        self.buffers, self.workspace = [], []
        for size in native.Call(op_name, *self.entries, attrs, "cuda").workspace():
            buffer = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device="cuda")
            self.buffers.append(buffer)
            self.workspace += [-(-buffer.data_ptr() // ALIGNMENT) * ALIGNMENT, size]

    def run(self) -> dict[str, torch.Tensor]:
        """On torch's current stream; returns the outputs by name."""
        stream = torch.cuda.current_stream().cuda_stream
        native.Call(self.op_name, *self.entries, self.attrs, "cuda", stream=stream).run(*self.workspace)
        return self.outputs

    def capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph


def captured(function: Callable[[], object], count: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of `count` calls after each other, after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            function()
    return graph


def flush() -> None:
    """Reads more than the L2 holds."""
    if not FLUSH:
        FLUSH["data"] = torch.zeros(64 << 20, device="cuda")
        FLUSH["sum"] = torch.zeros((), device="cuda")
    torch.sum(FLUSH["data"], (0,), out=FLUSH["sum"])


def times(graphs: Mapping[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, list[float]]:
    """{name: sorted times in µs} of graphs replayed in turn on a flushed L2, in another order each round: the same call took
    up to 6% longer as the first of a round than behind one that reads the same tensors."""
    found = {name: [] for name in graphs}
    for i in range(rounds + 3):
        events = {}
        for name in random.Random(i).sample(list(graphs), len(graphs)):
            graph = graphs[name]
            flush()
            events[name] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[name][0].record()
            graph.replay()
            events[name][1].record()
        torch.cuda.synchronize()
        if i >= 3:
            for name, (begin, end) in events.items():
                found[name].append(begin.elapsed_time(end) * 1000)
    return {name: sorted(t) for name, t in found.items()}


def shape_table(report: Mapping[str, Any], axes: str) -> str:
    """The Markdown table of what time_shapes wrote. axes: what a row's shape counts, such as "B, N, C"."""
    names = list(report["rows"][0]["us"])
    lines = [f"{report['gpu']}, {report['date']}, {report['rows'][0]['type']}.", ""]
    lines += [f"| {axes} | floor µs | " + " | ".join(f"{n} µs" for n in names) + " |", "|---" * (2 + len(names)) + "|"]
    for row in report["rows"]:
        shape = ", ".join("-" if n is None else str(n) for n in row["shape"])
        lines.append("| " + " | ".join([shape, *(f"{t:.2f}" for t in (row["floor_us"], *row["us"].values()))]) + " |")
    return "\n".join(lines) + "\n"


def time_shapes(
    about: str,
    shapes: Sequence[Any],
    drawn: Callable[[int], Sequence[Any]],
    line: Callable[[Any, int], dict[str, Any]],
    table: Callable[[Mapping[str, Any]], str],
) -> None:
    """A script OUT [--rounds 30] [--drawn 0], which writes OUT.json and OUT.md: line(shape, rounds) of each of the shapes and
    of so many drawn ones, and their table. Both are written after each line: what is measured is kept where the rest fails."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--drawn", type=int, default=0)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    for shape in [*shapes, *drawn(arguments.drawn)]:
        rows.append(line(shape, arguments.rounds))
        print(shape, {name: round(t, 2) for name, t in rows[-1]["us"].items()}, flush=True)
        arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(table(report))


def counted(module: str, metrics: Sequence[str], case: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What ncu counts while `python -m module OUT --once CASE` has the profiler on: (rows, lines printed)."""
    if not shutil.which("ncu"):
        raise SystemExit("ncu (NVIDIA Nsight Compute) is needed for this section, and is not on the path")
    lines = subprocess.run(
        [
            "ncu",
            "--csv",
            "--clock-control",
            "none",
            "--profile-from-start",
            "off",
            "--metrics",
            ",".join(metrics),
            sys.executable,
            "-m",
            module,
            "OUT",
            "--once",
            case,
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    rows = [
        {**r, "Metric Value": float(r["Metric Value"].replace(",", ""))}
        for r in csv.DictReader(n for n in lines if n.startswith('"'))
    ]
    return rows, lines


def _compiled_at_once(tuner: Any, pool: ThreadPoolExecutor, arguments: dict[str, Any]) -> Any:
    """In the place of a tuner's choice of configurations: has them compiled by many threads before they are timed."""
    from triton.runtime._async_compile import AsyncCompileMode

    configs = type(tuner).prune_configs(tuner, arguments)
    with contextlib.suppress(Exception), AsyncCompileMode(pool):  # what does not compile fails again where it is timed
        for config in configs:
            tuner.fn.run(*tuner.nargs.values(), **{**arguments, "warmup": True}, **config.all_kwargs())
    return configs


@contextlib.contextmanager
def quick_tuning(wanted: bool = True) -> Iterator[None]:
    """Has the kernels of flash-linear-attention (fla), where it is installed, tuned over few configurations
    (FLA_TUNING) in short runs, which takes seconds in place of minutes; afterwards they are tuned anew, as fla has them."""
    if not wanted or find_spec("fla") is None:
        yield
        return
    import fla.ops.gla
    import fla.ops.linear_attn
    import fla.ops.simple_gla  # noqa: F401 the kernels have to be there
    import triton
    from triton.runtime.autotuner import Autotuner

    tuners = [t for t in gc.get_objects() if issubclass(type(t), Autotuner) and t.base_fn.__module__.startswith("fla.")]
    before = [(t, dict(vars(t))) for t in tuners]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for tuner in tuners:
            few = [c for c in tuner.configs if c.num_warps == 4 and c.num_stages in (2, 3)]
            tuner.configs, tuner.cache = few or tuner.configs, {}
            tuner.do_bench = functools.partial(triton.testing.do_bench, warmup=5, rep=20)
            tuner.prune_configs = functools.partial(_compiled_at_once, tuner, pool)
        try:
            yield
        finally:
            for tuner, state in before:
                vars(tuner).clear()
                vars(tuner).update(state, cache={})
