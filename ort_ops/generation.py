"""Text generation with a decoder that leanfleet.export.export_decoder wrote. Needs onnxruntime and numpy.

The caches are allocated once, bound to the graph's inputs and outputs alike, and updated in place: a step copies no
cache. Prompts of unequal length run in one batch (query_lens).
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_ONNX_TYPES = {"float32": 1, "float16": 10, "bfloat16": 16}


@dataclass
class DecoderSession:
    """A loaded decoder folder. `in_place` is false without the library, where the function body returns new caches."""

    session: object
    folder: Path
    layers: int
    kv_heads: int
    head_size: int
    dtype: str
    vocabulary: int
    stop_tokens: list
    max_positions: int | None
    in_place: bool


@dataclass
class Statistics:
    """Seconds and tokens of a generation; `decode_tokens` leaves out each request's first token, which prefill makes."""

    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    tokens: list = field(default_factory=list)

    @property
    def tokens_per_second(self):
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else float("nan")


def load_decoder(folder, providers=None, session_options=None, library=True):
    """Opens a folder with model.onnx and leanfleet.json.

    library: register leanfleet's kernels; without them the model's function bodies run (slow, for comparison).
    Raises FileNotFoundError where a file is missing, and what make_session raises.
    """
    from leanfleet.ort_ops import make_session

    folder = Path(folder)
    for name in ("model.onnx", "leanfleet.json"):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder / name} does not exist; write the folder with leanfleet.export.export_decoder")
    facts = json.loads((folder / "leanfleet.json").read_text())
    if library:
        session = make_session(folder / "model.onnx", providers=providers, session_options=session_options)
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / "model.onnx", sess_options=session_options,
                                               providers=providers or ["CPUExecutionProvider"])
    return DecoderSession(session=session, folder=folder, in_place=library, **facts)


class _Caches:
    """The caches of a batch: names, and buffers for inputs and outputs (the same ones when in place)."""

    def __init__(self, decoder, batch, capacity):
        import onnxruntime

        shape = [batch, decoder.kv_heads, capacity, decoder.head_size]
        self.cuda = decoder.session.get_providers()[0] == "CUDAExecutionProvider"
        device = "cuda" if self.cuda else "cpu"

        def allocate():
            return [onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, _ONNX_TYPES[decoder.dtype], device, 0)
                    for _ in range(2 * decoder.layers)]

        self.inputs = [f"past_key_values.{i}.{part}" for i in range(decoder.layers) for part in ("key", "value")]
        self.outputs = [f"present.{i}.{part}" for i in range(decoder.layers) for part in ("key", "value")]
        self.current = allocate()
        self.next = self.current if decoder.in_place else allocate()
        if not decoder.in_place:  # the body reads whole caches: give it numbers
            for value in self.current:
                value.update_inplace(np.zeros(shape, dtype=np.float16 if decoder.dtype == "float16" else np.float32))

    def bind(self, binding):
        for name, value in zip(self.inputs, self.current, strict=True):
            binding.bind_ortvalue_input(name, value)
        for name, value in zip(self.outputs, self.next, strict=True):
            binding.bind_ortvalue_output(name, value)

    def swap(self):
        self.current, self.next = self.next, self.current


def _choose(logits, temperature, top_k, top_p, random):
    """One token a row of logits [B,vocabulary]: the largest for temperature 0, else sampled."""
    if temperature == 0:
        return logits.argmax(-1)
    chosen = np.empty(len(logits), dtype=np.int64)
    for row, values in enumerate(logits.astype(np.float64) / temperature):
        order = np.argsort(-values, kind="stable")[:top_k or None]
        p = np.exp(values[order] - values[order[0]])
        p /= p.sum()
        if top_p < 1:
            keep = np.cumsum(p) - p < top_p
            order, p = order[keep], p[keep] / p[keep].sum()
        chosen[row] = random.choice(order, p=p)
    return chosen


def stream(decoder, prompts, max_new_tokens=128, *, capacity=None, temperature=0.0, top_k=0, top_p=1.0, seed=0,
           stop_tokens=None, statistics=None, on_logits=None):
    """Yields, step by step, a list with each request's new token, or None once that request has stopped.

    prompts: lists of token ids, of any lengths from 1. capacity: slots of each cache; default: what is needed.
    temperature 0 is greedy. stop_tokens: default those of the model. statistics: a Statistics to fill.
    on_logits: called with each step's logits, float32 [B,vocabulary].
    Raises ValueError for an empty prompt, ids outside the vocabulary, or more tokens than the caches hold.
    """
    lengths = np.array([len(p) for p in prompts], dtype=np.int32)
    if len(prompts) == 0 or lengths.min() == 0:
        raise ValueError("generate: a prompt is empty; every request needs at least one token")
    needed = int(lengths.max()) + max_new_tokens
    capacity = needed if capacity is None else capacity
    if needed > capacity:
        raise ValueError(f"generate: a prompt of {lengths.max()} tokens and {max_new_tokens} new ones need {needed} cache "
                         f"slots; the caches have {capacity}. Raise capacity, or ask for fewer tokens")
    if decoder.max_positions and needed > decoder.max_positions:
        raise ValueError(f"generate: {needed} tokens are more than the {decoder.max_positions} positions that the model "
                         "was trained for")
    for prompt in prompts:
        if min(prompt) < 0 or max(prompt) >= decoder.vocabulary:
            raise ValueError(f"generate: token ids lie in 0 .. {decoder.vocabulary - 1}; found {min(prompt)} .. {max(prompt)}. "
                             "Is this the model's own tokenizer?")
    stop = set(decoder.stop_tokens if stop_tokens is None else stop_tokens)
    random = np.random.default_rng(seed)
    statistics = statistics if statistics is not None else Statistics()
    batch = len(prompts)
    caches = _Caches(decoder, batch, capacity)
    ids = np.zeros((batch, int(lengths.max())), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, :len(prompt)] = prompt
    seq_lens, query_lens = lengths.copy(), lengths.copy()
    alive = np.ones(batch, dtype=bool)
    statistics.tokens = [[] for _ in prompts]
    binding = decoder.session.io_binding()
    binding.bind_output("logits")  # first, so that it is get_outputs()[0]
    for step in range(max_new_tokens):
        start = time.perf_counter()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("seq_lens", seq_lens)
        binding.bind_cpu_input("query_lens", query_lens)
        if step == 0 or not decoder.in_place:
            caches.bind(binding)
        decoder.session.run_with_iobinding(binding)
        logits = binding.get_outputs()[0].numpy()
        if not decoder.in_place:
            caches.swap()
        if on_logits is not None:
            on_logits(logits)
        chosen = _choose(logits, temperature, top_k, top_p, random)
        seconds = time.perf_counter() - start
        if step == 0:
            statistics.prefill_seconds, statistics.prefill_tokens = seconds, int(lengths.sum())
            ids, query_lens = np.zeros((batch, 1), dtype=np.int64), np.ones(batch, dtype=np.int32)
        else:
            statistics.decode_seconds += seconds
            statistics.decode_tokens += int(alive.sum())
        new = []
        for row in range(batch):
            token = int(chosen[row]) if alive[row] else None
            new.append(token)
            if token is not None:
                statistics.tokens[row].append(token)
                alive[row] = token not in stop
        yield new
        if not alive.any():
            return
        ids[:, 0] = [token if token is not None else 0 for token in new]
        # A request that has stopped adds nothing: its length stays, its row of the batch is padding.
        query_lens = alive.astype(np.int32)
        seq_lens = seq_lens + query_lens


def generate(decoder, prompts, max_new_tokens=128, **options):
    """All tokens at once: (list of token lists, Statistics). The options are those of stream."""
    statistics = Statistics()
    for _ in stream(decoder, prompts, max_new_tokens, statistics=statistics, **options):
        pass
    return statistics.tokens, statistics
