"""An exported GGUF file on CPUs beside llama.cpp on the same file, as a user of either sees it.

    leanfleet export MODEL.gguf DIR --serve
    python -m bench.models.llama_cpp DIR MODEL.gguf OUT.json [--threads 2] [--rounds 3]

Ours is what `leanfleet generate` runs: ContinuousBatch, or the decoder where the folder is none to serve from. Prompts are
random tokens, each request's its own; `prompt_seconds` is the time until every request of a batch has its first token,
`step_milliseconds` that of a greedy token of all of them after it, over STEPS steps. Both sides run in processes of their own,
in turns, a warm-up before each line; medians of the rounds. Needs llama-cpp-python. The machine should do nothing else.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

LINES = [(1, 64), (1, 1024), (4, 64), (4, 1024)]  # (batch, tokens of a prompt)
STEPS = 48


class Ours:
    def __init__(self, folder, file, threads):
        import onnxruntime

        from leanfleet.decoder_contract import DECODER, read_facts

        self.folder, self.options = folder, onnxruntime.SessionOptions()
        self.options.intra_op_num_threads = threads
        self.facts = read_facts(folder, DECODER)
        self.vocabulary = self.facts["vocabulary"]
        self.decoders = {}  # of a warm-up and the run after it
        self.version = f"onnxruntime {onnxruntime.__version__}"

    def decoder(self, requests, tokens):
        """For so many prompts of so many tokens."""
        from leanfleet.decoder_contract import has_serving
        from leanfleet.generate import STEP_TOKENS
        from leanfleet.ort_ops import load_decoder
        from leanfleet.ort_ops.serving import ContinuousBatch

        if (requests, tokens) not in self.decoders:
            given = {"providers": ["CPUExecutionProvider"], "session_options": self.options}
            if has_serving(self.folder):
                pages = requests * -(-(tokens + STEPS + 1) // self.facts["serving"]["block"])
                step_tokens = min(requests * tokens, STEP_TOKENS)
                found = ContinuousBatch(self.folder, pages, requests, step_tokens, share=False, **given)
            else:
                found = load_decoder(self.folder, **given)
            self.decoders = {(requests, tokens): found}
        return self.decoders[requests, tokens]

    def run(self, prompts):
        from leanfleet.ort_ops import generate

        decoder = self.decoder(len(prompts), len(prompts[0]))
        _, facts = generate(decoder, prompts, max_new_tokens=STEPS + 1, stop_tokens=())
        return facts.prefill_seconds, facts.decode_seconds / STEPS


class LlamaCpp:
    def __init__(self, folder, file, threads):
        import llama_cpp

        self.api, self.threads = llama_cpp, threads
        llama_cpp.llama_backend_init()
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        self.keep = silent
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.contexts = {}  # of a warm-up and the run after it
        self.sampler = llama_cpp.llama_sampler_init_greedy()
        self.most = llama_cpp.llama_context_default_params().n_batch
        self.batch = llama_cpp.llama_batch_init(self.most, 0, 1)

    def context(self, sequences, tokens):
        if (sequences, tokens) not in self.contexts:
            for context in self.contexts.values():
                self.api.llama_free(context)
            options = self.api.llama_context_default_params()
            options.n_ctx, options.n_seq_max = sequences * (tokens + STEPS + 257), sequences
            options.n_threads = options.n_threads_batch = self.threads
            self.contexts = {(sequences, tokens): self.api.llama_init_from_model(self.model, options)}
        context = self.contexts[sequences, tokens]
        self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
        return context

    def run(self, prompts):
        api, batch, most = self.api, self.batch, self.most
        context = self.context(len(prompts), len(prompts[0]))

        def decode(rows):
            """rows: [(token, position, sequence, whether its logits are wanted)]; the tokens chosen."""
            chosen = []
            for begin in range(0, len(rows), most):
                part = rows[begin : begin + most]
                batch.n_tokens = len(part)
                for i, (token, position, sequence, wanted) in enumerate(part):
                    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
                    batch.seq_id[i][0] = sequence
                if api.llama_decode(context, batch) != 0:
                    raise SystemExit("llama_decode failed")
                chosen += [api.llama_sampler_sample(self.sampler, context, i) for i, row in enumerate(part) if row[3]]
            return chosen

        begin = time.perf_counter()
        length = len(prompts[0])
        tokens = decode([(t, i, s, i == length - 1) for s, p in enumerate(prompts) for i, t in enumerate(p)])
        prompt = time.perf_counter() - begin
        begin = time.perf_counter()
        for step in range(STEPS):
            tokens = decode([(token, length + step, s, True) for s, token in enumerate(tokens)])
        steps = (time.perf_counter() - begin) / STEPS
        return prompt, steps


SIDES = {"leanfleet": Ours, "llama.cpp": LlamaCpp}


def side(arguments):
    engine, draw = SIDES[arguments.side](arguments.folder, arguments.file, arguments.threads), np.random.default_rng(0)
    for batch, tokens in LINES:
        prompts = [draw.integers(0, engine.vocabulary, tokens).tolist() for _ in range(batch)]
        engine.run(prompts)
        prompt, step = engine.run(prompts)
        print(json.dumps([batch, tokens, prompt, 1e3 * step, engine.version]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        return side(arguments)
    found, versions = {}, {}
    for _ in range(arguments.rounds):
        for name in SIDES:
            lines = subprocess.run(
                [sys.executable, "-m", "bench.models.llama_cpp", *sys.argv[1:], "--side", name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.splitlines()
            for batch, tokens, prompt, step, version in map(json.loads, lines):
                found.setdefault((batch, tokens, name), []).append((prompt, step))
                versions[name] = version
    rows = []
    for batch, tokens in LINES:
        row = {"batch": batch, "prompt": tokens}
        for i, key in enumerate(("prompt_seconds", "step_milliseconds")):
            row[key] = {name: statistics.median(t[i] for t in found[batch, tokens, name]) for name in SIDES}
            both, ratio = row[key], row[key]["llama.cpp"] / row[key]["leanfleet"]
            print(f"{batch} x {tokens} {key}: " + ", ".join(f"{n} {v:.3f}" for n, v in both.items()) + f"; {ratio:.2f}x")
        rows.append(row)
    names = (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    facts = {"date": time.strftime("%Y-%m-%d"), "processor": next(names, ""), "threads": arguments.threads}
    facts |= {"file": arguments.file.name, "versions": versions, "rounds": arguments.rounds}
    arguments.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
