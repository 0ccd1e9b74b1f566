"""Milliseconds and memory of a decode step of an exported folder, at a context that nothing has read.

    python -m bench.models.step_at FOLDER SAMPLES.npz CONTEXT [--warm 3] [--timed 20]

SAMPLES: what each layer carries after some tokens, by decoder_contract.cache_name, and their number as `tokens`. Each token of
the context gets a row of the keys and values [1,Hkv,tokens,D], in random order; states are sums, grown by CONTEXT / tokens.
Prints one line of JSON: step_ms, the median of the timed steps, and spread_ms, the median of their distances from it;
held_bytes of caches and states; peak_bytes, the most memory that this process had while it made the steps. One request, ONNX
Runtime's CPU provider. Linux.
"""

import argparse
import json
import re
import statistics
import time
from pathlib import Path

import numpy as np

from leanfleet.decoder_contract import DECODER, is_state
from leanfleet.ort_ops.generation import load_decoder


def fill(steps, samples, context):
    """Puts `context` tokens into the caches of one request, and their sums into its states."""
    read = int(samples["tokens"])
    order = np.random.default_rng(0).permutation(context) % read  # of keys and values alike
    for cache, (buffer, *_) in zip(steps.decoder.caches, steps.buffers, strict=True):
        array = samples[cache.name.removeprefix(DECODER.past)]
        if is_state(cache.name):
            buffer.update_inplace(array * np.float32(context / read))
            continue
        rows = np.zeros(buffer.shape(), array.dtype)
        rows[:, :, :context] = array[:, :, order]
        buffer.update_inplace(rows)


def peak_bytes():
    """The most memory that this process had since forget_peak()."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def measure(folder, samples, context, warm, timed):
    decoder = load_decoder(folder, providers=["CPUExecutionProvider"])
    steps = decoder.steps(1, context + warm + timed)
    fill(steps, samples, context)
    forget_peak()
    seconds, one = [], np.ones(1, np.int32)
    for i in range(warm + timed):
        start = time.perf_counter()
        logits = steps.run(np.full((1, 1), 1 + i), one * (context + i + 1), one)
        seconds.append(time.perf_counter() - start)
        if not np.isfinite(logits).all():
            raise RuntimeError(f"a step after {context + i} tokens has logits that are not finite: SAMPLES has wrong numbers")
    median = statistics.median(seconds[warm:])
    return {
        "step_ms": 1e3 * median,
        "spread_ms": 1e3 * statistics.median(abs(s - median) for s in seconds[warm:]),
        "held_bytes": sum(buffer.numpy().nbytes for buffers in steps.buffers for buffer in buffers),
        "peak_bytes": peak_bytes(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("context", type=int)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--timed", type=int, default=20)
    args = parser.parse_args()
    with np.load(args.samples) as samples:
        print(json.dumps(measure(args.folder, dict(samples), args.context, args.warm, args.timed)))


if __name__ == "__main__":
    main()
