"""Text generation with a decoder that leanfleet.export.export_decoder wrote. Needs onnxruntime and numpy, for texts
transformers.

Key/value caches and the states of linear attention are allocated once, bound to the graph's inputs and outputs alike, and
updated in place: a step copies no cache. Prompts of unequal length run in one batch (query_lens). On the CUDA provider
caches and states live on the device, and decode steps can be captured as CUDA graphs.
"""

import json
import math
import operator
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from leanfleet.files import reading

_ONNX_TYPES = {"float32": 1, "float16": 10, "bfloat16": 16}
_SESSION_TYPES = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}
_PAST, _PRESENT = "past_key_values.", "present."
WRITER = "leanfleet.export.export_decoder"
INPUTS = {"input_ids": "tensor(int64)", "seq_lens": "tensor(int32)", "query_lens": "tensor(int32)"}  # beside the caches
NEW_TOKENS = 128  # of an answer, where nothing else is said and the model has positions for them


class FolderTokenizer:
    """`tokenizer` of a loaded decoder: the one in its folder, loaded when it is asked for."""

    @cached_property
    def tokenizer(self):
        return load_tokenizer(self.folder)


@dataclass
class DecoderSession(FolderTokenizer):
    """A loaded decoder folder. `caches` are the session's inputs that outputs replace; shapes have "batch" and "capacity"
    where they stand. `in_place` is false without the library, where the function body returns new caches. `tokenizer` is the
    folder's; it raises FileNotFoundError or ValueError where there is none."""

    session: object
    folder: Path
    caches: list
    vocabulary: int
    stop_tokens: list
    max_positions: int | None
    in_place: bool
    captured: dict = field(default_factory=dict)  # (batch, capacity) -> _Steps whose CUDA graphs the session holds

    @property
    def on_cuda(self):
        return self.session.get_providers()[0] == "CUDAExecutionProvider"


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

    @property
    def prefill_tokens_per_second(self):
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else float("nan")


def _session_options(providers):
    """On CUDA without memory patterns: onnxruntime would keep a plan of its memory, in one block, for each length of a prompt,
    up to twice the peak."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = "CUDAExecutionProvider" not in (p if isinstance(p, str) else p[0] for p in providers)
    return options


@contextmanager
def onnxruntime_errors(action):
    """onnxruntime's exceptions, which have no base class of their own, as RuntimeError: "onnxruntime cannot `action`: ..."."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        raise RuntimeError(f"onnxruntime cannot {action}: {error}") from None


def read_facts(folder, kind, writer):
    """What leanfleet.json in the folder of an exported model says, checked: a dict with "vocabulary", "stop_tokens",
    "max_positions" (None: no limit) and, of kind "serving", "block".

    kind: "decoder" or "serving". writer: the function that writes such folders, for messages.
    Raises FileNotFoundError, and ValueError for a file that is damaged or of another kind.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give one that leanfleet export or {writer} wrote")
    for name in ("model.onnx", "leanfleet.json"):
        if not (folder / name).is_file():
            hint = (f"; it holds a transformers model that is not exported yet: leanfleet export {folder} NEW_FOLDER"
                    if (folder / "config.json").exists() or any(folder.glob("*.gguf")) else f"; write the folder with {writer}")
            raise FileNotFoundError(f"{folder / name} does not exist{hint}")
    path = folder / "leanfleet.json"
    again = f"export the model again with {writer}"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, thousands of brackets
        raise ValueError(f"{path} is damaged ({error}): {again}") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{path} holds no JSON object: {again}")
    found = facts.get("kind", "decoder")
    if found != kind:
        raise ValueError(f"{folder} holds a model of kind {found}; this needs one from {writer}")

    def number(value, least=1):
        return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31

    expected = {"vocabulary": ("a positive number", number),
                "stop_tokens": ("a list of token ids", lambda v: isinstance(v, list) and all(number(t, -1) for t in v)),
                "max_positions": ("a positive number or null", lambda v: v is None or number(v))}
    if kind == "serving":
        expected["block"] = "a positive number", number
    for name, (words, fits) in expected.items():
        if name not in facts:
            raise ValueError(f"{path} has no {name}: {again}")
        if not fits(facts[name]):
            raise ValueError(f"{path}: {name} is {json.dumps(facts[name])[:60]}; expected {words}: {again}")
    return facts


def open_exported(folder, kind, writer, providers, session_options, library):
    """(folder, facts of leanfleet.json, session) of an exported model of this kind; see read_facts.

    Raises what read_facts raises, and RuntimeError where onnxruntime cannot load the model.
    """
    import onnxruntime

    from leanfleet.ort_ops import _default_providers, make_session

    facts = read_facts(folder, kind, writer)
    folder = Path(folder)
    path = str(folder / "model.onnx")
    if session_options is None:
        session_options = _session_options(
            providers or (_default_providers(onnxruntime.get_available_providers()) if library else ()))
    with onnxruntime_errors(f"load {path}"):
        session = (make_session(path, providers, session_options) if library else
                   onnxruntime.InferenceSession(path, session_options, providers or ["CPUExecutionProvider"]))
    return folder, facts, session


def check_interface(session, path, writer, inputs, cache, vocabulary, sizes):
    """Raises ValueError, telling what is expected, for a model that has not the inputs and outputs of a decoder.

    inputs: {name: type} of all but the caches. cache: what the names of caches begin with, as inputs and as outputs. sizes:
    names of the open dimensions that a cache may have. vocabulary: the numbers in a row of logits, the first output.
    """
    def refuse(found):
        raise ValueError(f"{path} is no decoder of {writer}: {found}; it has the inputs {', '.join(inputs)} and {past}..., the "
                         f"outputs logits and {present}...")

    def listed(values):
        return ", ".join(v.name for v in values[:6]) + ", ..." * (len(values) > 6) or "none"

    past, present = cache
    found, outputs = session.get_inputs(), session.get_outputs()
    caches = [i for i in found if i.name.startswith(past)]
    types = {i.name: i.type for i in found if i not in caches}
    if set(types) != set(inputs) or not caches:
        refuse(f"its inputs are {listed(found)}")
    if not {present + i.name.removeprefix(past) for i in caches} <= {o.name for o in outputs} or outputs[0].name != "logits":
        refuse(f"its outputs are {listed(outputs)}")
    if wrong := [name for name in inputs if types[name] != inputs[name]]:
        refuse(f"{wrong[0]} is a {types[wrong[0]]}, not a {inputs[wrong[0]]}")
    for i in caches:
        if i.type not in _SESSION_TYPES or not all(n in sizes or isinstance(n, int) and n > 0 for n in i.shape):
            refuse(f"{i.name} is a {i.type} of {i.shape}")
    if outputs[0].type != "tensor(float)" or outputs[0].shape[-1:] != [vocabulary]:
        refuse(f"logits are a {outputs[0].type} of {outputs[0].shape}, where leanfleet.json has a vocabulary of {vocabulary}")


def load_decoder(folder, providers=None, session_options=None, library=True, cuda_graph=False):
    """Opens a folder with model.onnx and leanfleet.json.

    session_options: None: new ones, on CUDA without memory patterns, which can double the memory of long prompts.
    library: register leanfleet's kernels; without them the model's function bodies run (slow, for comparison).
    cuda_graph: on the CUDA provider, capture each batch's decode step once and replay it.
    Raises FileNotFoundError or ValueError for a folder that is not one, and what make_session raises.
    """
    if cuda_graph:
        providers = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})]
    folder, facts, session = open_exported(folder, "decoder", WRITER, providers, session_options, library)
    check_interface(session, folder / "model.onnx", WRITER, INPUTS, (_PAST, _PRESENT), facts["vocabulary"],
                    ("batch", "capacity"))
    if len(session.get_outputs()[0].shape) != 2:
        raise ValueError(f"{folder} was exported with all_logits, for scoring; generation needs the last token's logits alone")
    return DecoderSession(session=session, folder=folder, in_place=library,
                          caches=[i for i in session.get_inputs() if i.name.startswith(_PAST)],
                          vocabulary=facts["vocabulary"], stop_tokens=facts["stop_tokens"],
                          max_positions=facts["max_positions"])


class _Steps:
    """Runs the steps of one batch: its caches, its states, and their bindings.

    A cache that is updated in place has one buffer, bound to the graph's input and output. One that is not has two, and
    steps alternate between reading the first and writing the second, and the reverse: so without the library, whose function
    bodies return new tensors, and for states of linear attention in CUDA graphs. (While it captures, ONNX Runtime runs a step
    several times. Appending a token twice to the same place of a cache does no harm; updating a state twice does.)
    """

    def __init__(self, decoder, batch, capacity, cuda_graph=False):
        import onnxruntime

        self.decoder, self.cuda_graph, self.turn = decoder, cuda_graph, 0
        self.device = "cuda" if decoder.on_cuda else "cpu"
        self.onnxruntime = onnxruntime
        self.buffers, two = [], False
        for cache in decoder.caches:
            shape = [{"batch": batch, "capacity": capacity}.get(n, n) for n in cache.shape]
            state = "capacity" not in cache.shape
            count = 2 if not decoder.in_place or (cuda_graph and state) else 1
            two |= count == 2
            kind = _SESSION_TYPES[cache.type]
            values = [onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, kind, self.device, 0) for _ in range(count)]
            self.buffers.append(values)
        self.reset()
        self.bindings = [self._binding(turn) for turn in range(2 if two else 1)]
        self.graphs = self._graph_bindings(batch) if cuda_graph else None

    def reset(self):
        """Zeros where the first step reads numbers that no token wrote: states, and the whole caches of function bodies."""
        self.turn = 0
        for cache, values in zip(self.decoder.caches, self.buffers, strict=True):
            if "capacity" not in cache.shape or not self.decoder.in_place:
                dtype = np.float16 if cache.type == "tensor(float16)" else np.float32
                values[0].update_inplace(np.zeros(values[0].shape(), dtype))

    def _binding(self, turn):
        binding = self.decoder.session.io_binding()
        for cache, values in zip(self.decoder.caches, self.buffers, strict=True):
            binding.bind_ortvalue_input(cache.name, values[turn % len(values)])
            binding.bind_ortvalue_output(_PRESENT + cache.name.removeprefix(_PAST), values[(turn + 1) % len(values)])
        return binding

    def _graph_bindings(self, batch):
        """[(binding, run options)] of the captured decode steps, one a turn: all addresses are fixed."""
        ort = self.onnxruntime
        self.inputs = {name: ort.OrtValue.ortvalue_from_numpy(np.ones(shape, dtype), "cuda", 0) for name, shape, dtype in (
            ("input_ids", (batch, 1), np.int64), ("seq_lens", (batch,), np.int32), ("query_lens", (batch,), np.int32))}
        self.logits = ort.OrtValue.ortvalue_from_shape_and_type([batch, self.decoder.vocabulary], np.float32, "cuda", 0)
        graphs = []
        first = 1 + 2 * len(self.decoder.captured)  # a graph belongs to its addresses: each batch has ids of its own
        for turn in range(len(self.bindings)):
            binding = self._binding(turn)
            for name, value in self.inputs.items():
                binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output("logits", self.logits)
            options = ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(first + turn))
            graphs.append((binding, options))
        return graphs

    def run(self, input_ids, seq_lens, query_lens, capture=False):
        """One step; returns the logits, float32 [B,vocabulary]. capture: as a CUDA graph, with input_ids [B,1]."""
        turn, self.turn = self.turn, (self.turn + 1) % len(self.bindings)
        feed = {"input_ids": input_ids, "seq_lens": seq_lens, "query_lens": query_lens}
        if capture and self.graphs:
            for name, array in feed.items():
                self.inputs[name].update_inplace(array)
            binding, options = self.graphs[turn]
            self._call(binding, options)
            binding.synchronize_outputs()
            return self.logits.numpy()
        binding = self.bindings[turn]
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        logits = np.empty((len(input_ids), self.decoder.vocabulary), np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        options = None
        if self.cuda_graph:
            options = self.onnxruntime.RunOptions()
            options.add_run_config_entry("gpu_graph_id", "-1")  # prompts are not captured
        self._call(binding, options)
        return logits

    def _call(self, binding, options):
        with onnxruntime_errors(f"run {self.decoder.folder / 'model.onnx'}"):
            self.decoder.session.run_with_iobinding(binding, options)


def _steps(decoder, batch, capacity):
    """The steps of a batch; with CUDA graphs those of an earlier batch of the same size, whose graphs exist already."""
    if hasattr(decoder, "steps"):  # another runtime's, such as leanfleet.trt_plugins.running's
        return decoder.steps(batch, capacity)
    options = decoder.session.get_provider_options().get("CUDAExecutionProvider", {})
    if options.get("enable_cuda_graph") != "1":
        return _Steps(decoder, batch, capacity)
    key = (batch, capacity)
    if key in decoder.captured:
        decoder.captured[key].reset()
    else:
        decoder.captured[key] = _Steps(decoder, batch, capacity, cuda_graph=True)
    return decoder.captured[key]


def check_sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0):
    """Raises ValueError, naming the option, where choose cannot take these."""
    def whole(value):
        return isinstance(value, (int, np.integer)) and value >= 0

    def real(value):
        return isinstance(value, (int, float, np.number)) and math.isfinite(value)

    for name, value, good, expected in (
            ("temperature", temperature, real(temperature) and temperature >= 0, "0 (the likeliest) or a positive number"),
            ("top_k", top_k, whole(top_k), "0 (all tokens) or a positive whole number"),
            ("top_p", top_p, real(top_p) and 0 < top_p <= 1, "a number above 0 and up to 1 (all tokens)"),
            ("seed", seed, whole(seed), "a whole number from 0 on")):
        if not good:
            raise ValueError(f"{name} is {value!r}; expected {expected}")


def check_positive(name, value):
    """Raises ValueError for a value that is no whole number from 1 on."""
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1")


def check_prompt(prompt, vocabulary):
    """The token ids of a prompt as a list of ints. Raises ValueError for an empty one, and for what is no token id."""
    if isinstance(prompt, str):
        raise ValueError(f"a prompt is the text {prompt[:40]!r}; expected a list of token ids")
    try:
        prompt = [operator.index(t) for t in prompt]
    except TypeError as error:
        raise ValueError(f"a prompt is no list of token ids: {error}") from None
    if not prompt:
        raise ValueError("a prompt is empty; every request needs at least one token")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise ValueError(f"token ids lie in 0 .. {vocabulary - 1}; found {min(prompt)} .. {max(prompt)}. Is this the model's "
                         "own tokenizer?")
    return prompt


def stop_set(stop_tokens, default):
    """Stop tokens as a set; None: the default ones. Raises ValueError for what is no list of token ids."""
    try:
        return {operator.index(t) for t in (default if stop_tokens is None else stop_tokens)}
    except TypeError as error:
        raise ValueError(f"stop_tokens is {stop_tokens!r}; expected a list of token ids ({error})") from None


def choose(logits, temperature, top_k, top_p, random):
    """One token a row of logits [B,vocabulary]: the largest for temperature 0, else sampled. Raises ValueError where the
    largest logit of a row is not finite: a model that computes NaN or infinity."""
    chosen = logits.argmax(-1)  # a NaN where a row has one
    largest = np.take_along_axis(logits, chosen[:, None], -1)
    if not np.isfinite(largest).all():
        raise ValueError(f"this model's logits are not finite, {largest[~np.isfinite(largest)][0]} among them: its weights "
                         "are damaged, or its numbers overflow their type")
    if temperature == 0:
        return chosen
    for row, values in enumerate(logits.astype(np.float64) / temperature):
        # Sorting a whole vocabulary takes longer than a small model's step: sort the top_k alone.
        best = np.sort(np.argpartition(-values, top_k)[:top_k]) if 0 < top_k < len(values) else np.arange(len(values))
        order = best[np.argsort(-values[best], kind="stable")]
        p = np.exp(values[order] - values[order[0]])
        p /= p.sum()
        if top_p < 1:
            keep = np.cumsum(p) - p < top_p
            order, p = order[keep], p[keep] / p[keep].sum()
        chosen[row] = random.choice(order, p=p)
    return chosen


def default_new_tokens(prompt, *limits):
    """128, or what a prompt's tokens leave of the least limit (None: no limit); at least 1."""
    return max(min([NEW_TOKENS] + [n - prompt for n in limits if n]), 1)


def _new_tokens(longest, max_new_tokens, capacity, max_positions):
    """(new tokens of each request, cache slots). Defaults (None) are what fits; raises ValueError where a wish does not."""
    for name, value in (("max_new_tokens", max_new_tokens), ("capacity", capacity)):
        if value is not None:
            check_positive(name, value)
    if max_new_tokens is None:
        max_new_tokens = default_new_tokens(longest, capacity, max_positions)
    needed = longest + max_new_tokens
    capacity = needed if capacity is None else capacity
    if needed > capacity:
        raise ValueError(f"generate: a prompt of {longest} tokens and {max_new_tokens} new ones need {needed} cache slots; the "
                         f"caches have {capacity}. Raise capacity, or ask for fewer tokens")
    if max_positions and needed > max_positions:
        raise ValueError(f"generate: {needed} tokens, {longest} of them a prompt's, are more than the {max_positions} "
                         "positions that the model was trained for")
    return max_new_tokens, capacity


def stream(decoder, prompts, max_new_tokens=None, *, capacity=None, temperature=0.0, top_k=0, top_p=1.0, seed=0,
           stop_tokens=None, statistics=None, on_logits=None, chat=None):
    """Yields, step by step, a list with each request's new token, or None once that request has stopped.

    prompts: texts or lists of token ids, of any lengths from 1, also both in one list. A text needs the tokenizer in the
    decoder's folder and is a user's turn in its chat template where it has one; chat=False continues it as it is.
    max_new_tokens: default 128, or as many as the model's positions (and `capacity`) hold if these are fewer.
    capacity: slots of each cache; default: what is needed. temperature 0 is greedy. stop_tokens: default those of the model
    and, with texts, the tokenizer's end of text. statistics: a Statistics to fill. on_logits: called with each step's
    logits, float32 [B,vocabulary]. decoder.tokenizer.decode(tokens) makes text of the tokens.
    Raises ValueError for an empty prompt, ids outside the vocabulary, sampling that is none, more tokens than the caches or
    the model's positions hold, and logits that are not finite, FileNotFoundError for texts where the folder has no
    tokenizer, RuntimeError where the runtime fails.
    """
    if isinstance(prompts, str):
        raise ValueError("generate: prompts is one text; give a list of them")
    check_sampling(temperature, top_k, top_p, seed)
    stop = stop_set(stop_tokens, decoder.stop_tokens)
    if stop_tokens is None and any(isinstance(p, str) for p in prompts) and decoder.tokenizer.eos_token_id is not None:
        stop.add(decoder.tokenizer.eos_token_id)
    prompts = [check_prompt(encode(decoder.tokenizer, p, chat) if isinstance(p, str) else p, decoder.vocabulary)
               for p in prompts]
    if not prompts:
        raise ValueError("generate: there is no prompt; give a list with one or more")
    lengths = np.array([len(p) for p in prompts], dtype=np.int32)
    max_new_tokens, capacity = _new_tokens(int(lengths.max()), max_new_tokens, capacity, decoder.max_positions)
    random = np.random.default_rng(seed)
    statistics = statistics if statistics is not None else Statistics()
    batch = len(prompts)
    steps = _steps(decoder, batch, capacity)
    ids = np.zeros((batch, int(lengths.max())), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, :len(prompt)] = prompt
    seq_lens, query_lens = lengths.copy(), lengths.copy()
    alive = np.ones(batch, dtype=bool)
    statistics.tokens = [[] for _ in prompts]
    for step in range(max_new_tokens):
        start = time.perf_counter()
        logits = steps.run(ids, seq_lens, query_lens, capture=step > 0)
        if on_logits is not None:
            on_logits(logits)
        chosen = choose(logits, temperature, top_k, top_p, random)
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


def generate(decoder, prompts, max_new_tokens=None, **options):
    """All tokens at once: (list of token lists, Statistics). Prompts, options and errors are those of stream."""
    statistics = Statistics()
    for _ in stream(decoder, prompts, max_new_tokens, statistics=statistics, **options):
        pass
    return statistics.tokens, statistics


def load_tokenizer(folder):
    """The tokenizer beside a decoder. Needs transformers. Raises FileNotFoundError for a folder without one, ValueError for
    damaged files."""
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise FileNotFoundError(f"{folder} holds no tokenizer (tokenizer.json); give one to export_decoder, or copy the "
                                "model's own there")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with reading(f"the tokenizer in {folder}"):
        if not (folder / "tokenizer_config.json").exists():
            return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def encode(tokenizer, text, chat=None, system=None):
    """Token ids of a prompt. chat: as a user's turn in the tokenizer's chat template; default: where it has one.

    system: the system's turn before it. Raises ValueError for an empty text, for a chat without a template, and for a
    template or tokenizer that fails.
    """
    if not text.strip():
        raise ValueError("the prompt is empty; give it some text")
    template = getattr(tokenizer, "chat_template", None)
    if (chat or system) and not template:
        raise ValueError("this model's tokenizer has no chat template; leave the system's turn and the chat out")
    if chat is False or not template:
        with reading("the prompt (by this model's tokenizer)"):
            return list(tokenizer(text)["input_ids"])
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": text})
    with reading("the prompt (by this model's chat template, which --raw or chat=False leaves out)"):
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"])


class TextStream:
    """The text of tokens as they come, in whole characters."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.shown = tokenizer, [], 0

    def add(self, token):
        """The text that this token completes."""
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # a character of several tokens
            return ""
        new, self.shown = text[self.shown:], len(text)
        return new
