"""Host time of PyTorch operators: python -m bench.kernels.host_cost [--device cpu] [--calls 32] [--out F.json]

Tiny tensors [1,1,4,16] in float32 on one CPU thread, so that what is measured is everything but the arithmetic. On `cuda` it is
the time until the call has returned: the GPU is idle before each, and what it still has to do is not waited for. Three ways of
calling leanfleet are measured, each in a process of its own: "C++" (kernels over PyTorch's stable interface, autograd built
against it), "stable" (the same kernels, autograd in Python) and "ctypes". Beside them stand SDPA, a Python autograd function
that does nothing, and the multiplication x * x. forward: under no_grad. training: forward and backward of CALLS calls, one
feeding the next, divided by their number, so that what a backward pass costs once is shared. alone: with a graph of one call.
Microseconds; the 2nd percentile, as other work on the machine only adds, and the median. Writes the JSON, and with its name and
.md a table.
"""

import argparse
import datetime
import functools
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

WAYS = {"C++": "compiled", "stable": "stable", "ctypes": "ctypes"}  # to LEANFLEET_TORCH
OTHERS = ("SDPA", "empty autograd.Function", "multiplication")


def microseconds(function, repeats, wait):
    """2nd percentile and median of one call. wait: for what earlier calls have begun."""
    for _ in range(repeats // 10 + 1):
        function()
    taken = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter_ns()
        function()
        taken.append((time.perf_counter_ns() - start) / 1e3)
    taken.sort()
    return {"least": taken[len(taken) // 50], "median": taken[len(taken) // 2]}


def subjects():
    """{name: function of query, key and value that returns one tensor of the query's shape}"""
    import torch

    from leanfleet.export import causal_linear_decay, lean_attention, normalized_linear_attention

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):
            ctx.save_for_backward(query, key, value)
            return query.detach()

        @staticmethod
        def backward(ctx, grad):
            return grad, grad, grad

    sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    return {
        "SDPA": sdpa,
        "empty autograd.Function": Empty.apply,
        "multiplication": lambda query, key, value: query * query,
        "CausalLinearDecay": causal_linear_decay,
        "NormalizedLinearAttention": lambda *inputs: normalized_linear_attention(*inputs)[0],
        "LeanAttention": lambda *inputs: lean_attention(*inputs)[0],
    }


def measure(calls, wanted, device):
    import torch

    torch.set_num_threads(1)
    query, key, value = (torch.rand(1, 1, 4, 16, device=device).requires_grad_() for _ in range(3))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    grad = torch.ones_like(query)
    rows = []
    gc.disable()
    for name, function in subjects().items():
        if (name in OTHERS) != wanted:
            continue

        def chain(calls, function=function):
            x = query
            for _ in range(calls):
                x = function(x, key, value)
            torch.autograd.grad(x, (query, key, value), grad, allow_unused=True)

        with torch.no_grad():
            row = {"call": name, "forward": microseconds(lambda f=function: f(query, key, value), 2000, wait)}
        if name != "LeanAttention":  # it has no backward
            row["training"] = {name: t / calls for name, t in microseconds(lambda c=chain: c(calls), 200, wait).items()}
            row["alone"] = microseconds(lambda c=chain: c(1), 1000, wait)
        rows.append(row)
        gc.collect()
    return rows


def in_a_process(calls, way, device):
    command = [sys.executable, "-m", "bench.kernels.host_cost", "--calls", str(calls), "--way", way, "--device", device]
    environment = {**os.environ, "LEANFLEET_TORCH": WAYS.get(way, "")}
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)


def table(report):
    where = ", ".join(report[key] for key in ("cpu", "device") if key in report)
    lines = [
        f"PyTorch {report['torch']}, {where}; µs of one call, 2nd percentile (median).",
        "",
        "| call | way | forward, no gradient | forward and backward | the same, a graph of one call |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        cells = [
            "{least:.1f} ({median:.1f})".format(**row[key]) if key in row else "" for key in ("forward", "training", "alone")
        ]
        lines.append(f"| {row['call']} | {row['way']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--out", type=Path, help="(default: host_cost_cpu.json of bench/results; on a GPU it must be given)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--way", help="measure this way alone, and print its rows as JSON")
    args = parser.parse_args()
    if args.way is not None:
        from leanfleet.export import torch_ops

        if args.way == "C++" and torch_ops.way() != "compiled":
            raise SystemExit("autograd in C++ is not built: python -m leanfleet.export.torch_autograd")
        print(json.dumps(measure(args.calls, args.way not in WAYS, args.device)))
        return
    if args.out is None and args.device != "cpu":
        parser.error("--device cuda needs --out")
    out = args.out or Path("bench/results/host_cost_cpu.json")
    import torch

    rows = [{**row, "way": ""} for row in in_a_process(args.calls, "", args.device)]
    rows += [{**row, "way": way} for way in WAYS for row in in_a_process(args.calls, way, args.device)]
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    report = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "cpu": cpu, "calls": args.calls}
    if args.device == "cuda":
        report["device"] = torch.cuda.get_device_name()
    report["rows"] = rows
    out.write_text(json.dumps(report, indent=1) + "\n")
    out.with_suffix(".md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
