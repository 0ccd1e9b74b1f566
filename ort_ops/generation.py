"""Text generation in ONNX Runtime with a decoder that leanfleet.export.export_decoder wrote. Needs onnxruntime and numpy, for
texts transformers.

Key/value caches and the states of linear attention are allocated once, bound to the graph's inputs and outputs alike, and
updated in place: a step copies no cache. On the CUDA provider caches and states live on the device, and decode steps can be
captured as CUDA graphs. What is the same in every runtime, sampling and the loop over steps, is in leanfleet.generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from leanfleet import driver
from leanfleet.decoder_contract import (
    BATCH,
    BLOCK_TABLE,
    CAPACITY,
    DECODER,
    FACTS_FILE,
    LOGITS,
    MODEL_FILE,
    POOL,
    RANK,
    SESSION_TYPES,
    TOKENS,
    Facts,
    check_interface,
    context_pages,
    context_table,
    decoder_interface,
    file_of_rank,
    read_facts,
)
from leanfleet.generation import FolderTokenizer as FolderTokenizer
from leanfleet.generation import Statistics as Statistics
from leanfleet.generation import TextStream as TextStream
from leanfleet.generation import encode as encode
from leanfleet.generation import encode_chat as encode_chat
from leanfleet.generation import generate as generate
from leanfleet.generation import load_tokenizer as load_tokenizer
from leanfleet.generation import stream as stream
from leanfleet.driver import Device
from leanfleet.ort_ops.sessions import CUDA, Providers, cuda_options, device_of, on_device, onnxruntime_errors, open_exported
from leanfleet.ort_ops.sessions import new_options as _session_options  # noqa: F401  for bench/
from leanfleet.sampling import check_sampling as check_sampling

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, IOBinding, NodeArg, RunOptions, SessionOptions

# ONNX's numbers of types, by onnxruntime's names
_SESSION_TYPES = {
    SESSION_TYPES[name]: number
    for name, number in (("float32", 1), ("uint8", 2), ("int8", 3), ("float16", 10), ("bfloat16", 16), ("float8e4m3fn", 17))
}
PIECE = 2048  # tokens of a prompt that ranks of a context parallel folder read together: only what came before is shared out
_KEPT = {CAPACITY, POOL}  # dimensions of caches of which nothing is read that was not written
_ZEROS = {SESSION_TYPES[name]: np.dtype(name) for name in ("float16", "int8", "uint8")}  # types of zeros; of others float32
_ZEROS[SESSION_TYPES["float8e4m3fn"]] = np.dtype(np.uint8)  # numpy has none: their bytes


@dataclass(frozen=True)
class Share:
    """A rank's part in a context parallel folder."""

    rank: int
    world: int
    block: int

    def pages(self, capacity: int) -> int:
        """Of each request."""
        return context_pages(capacity, self.world, self.block)

    def inputs(self, batch: int, capacity: int, tokens: int) -> dict[str, np.ndarray]:
        """{input: array} of CONTEXT beside those of DECODER, for calls of so many tokens."""
        table = context_table(batch, self.pages(capacity), tokens, self.block)
        return {BLOCK_TABLE: table, RANK: np.array([self.rank], np.int32)}


@dataclass
class DecoderSession(FolderTokenizer):
    """A loaded decoder folder. `caches` are the session's inputs that outputs replace; shapes have "batch" and "capacity"
    where they stand, or "pool". `in_place` is false without the library, where the function body returns new caches. `share`:
    of a context parallel folder. `tokenizer` is the folder's; it raises FileNotFoundError or ValueError where there is none."""

    session: InferenceSession
    folder: Path
    caches: list[NodeArg]
    vocabulary: int
    stop_tokens: list[int]
    max_positions: int | None
    in_place: bool
    share: Share | None = None
    captured: dict[tuple[int, int], _Steps] = field(default_factory=dict)  # by (batch, capacity), with CUDA graphs

    @property
    def device(self) -> Device:
        """Where the graph runs, and its caches are."""
        return device_of(self.session)

    def steps(self, batch: int, capacity: int) -> _Steps:
        """The steps of a batch. With CUDA graphs they are those of an earlier batch of the same size, captured already."""
        options = self.session.get_provider_options().get(CUDA, {})
        if options.get("enable_cuda_graph") != "1":
            return _Steps(self, batch, capacity)
        key = (batch, capacity)
        if key in self.captured:
            self.captured[key].reset()
        else:
            self.captured[key] = _Steps(self, batch, capacity, cuda_graph=True)
        return self.captured[key]


def load_decoder(
    folder: str | Path,
    providers: Providers | None = None,
    session_options: SessionOptions | None = None,
    library: bool = True,
    cuda_graph: bool = False,
    device: str | Device | None = None,
    rank: int | None = None,
) -> DecoderSession:
    """Opens a folder with model.onnx and leanfleet.json.

    rank: of a folder for several ranks, whose share this process runs, with all others at once and on the same prompts; before
    it runs, the process joins a communicator named "world" of as many ranks (leanfleet.communicators).

    session_options: None: new ones, on CUDA without memory patterns, which can double the memory of long prompts.
    library: register leanfleet's kernels; without them the model's function bodies run (slow, for comparison).
    cuda_graph: on the CUDA provider, capture each batch's decode step once and replay it; of providers the CUDA provider's
    options count then. device: "cpu", "cuda" or "cuda:1", as make_session takes it.
    Raises FileNotFoundError or ValueError for a folder that is not one, and what make_session raises.

    Example:
        from leanfleet.ort_ops import generate, load_decoder

        decoder = load_decoder("decoder", providers=["CPUExecutionProvider"])
        answers, statistics = generate(decoder, ["Good morning", [1, 2, 3]], max_new_tokens=8)
        print(decoder.tokenizer.decode(answers[0]), statistics.tokens_per_second)
    """
    if cuda_graph:
        providers = [(CUDA, cuda_options(providers) | {"enable_cuda_graph": "1"})]
    providers = on_device(providers, device)
    folder = Path(folder)
    facts = read_facts(folder, DECODER, parallel=rank is not None)
    file = file_of_rank(folder, facts, DECODER, rank, library)
    session = open_exported(folder, providers, session_options, library, file)
    interface = decoder_interface(facts)
    check_interface(session, folder / file, interface, facts["vocabulary"])
    if len(session.get_outputs()[0].shape) != 2:
        raise ValueError(f"{folder} was exported with all_logits, for scoring; generation needs the last token's logits alone")
    caches = [i for i in session.get_inputs() if interface.is_cache(i.name)]
    return DecoderSession(
        session=session,
        folder=folder,
        in_place=library,
        caches=caches,
        vocabulary=facts["vocabulary"],
        stop_tokens=facts["stop_tokens"],
        max_positions=facts["max_positions"],
        share=None if rank is None or interface is DECODER else _share_of(folder, facts, rank, caches),
    )


def _share_of(folder: Path, facts: Facts, rank: int, caches: list[NodeArg]) -> Share:
    """Raises ValueError where the graph has other blocks than leanfleet.json says."""
    said = facts["context_parallel"]
    share = Share(rank, said["world"], said["block"])
    if other := next((cache for cache in caches if cache.shape[1] != share.block), None):
        raise ValueError(
            f"{folder / MODEL_FILE} is damaged or another model's: its input {other.name} has blocks of {other.shape[1]} "
            f"tokens, where {FACTS_FILE} has {share.block}: export the model again with {DECODER.writer}"
        )
    return share


class _Steps:
    """Runs the steps of one batch: its caches, its states, and their bindings.

    A cache that is updated in place has one buffer, bound to the graph's input and output. Others have two, which change
    roles from step to step: one is read, the other written. Two are needed without the library, whose function bodies return
    new tensors, and for states of linear attention in CUDA graphs: ONNX Runtime runs a step several times while it captures.
    Appending a token twice to the same place of a cache does no harm; updating a state twice does.
    """

    def __init__(self, decoder: DecoderSession, batch: int, capacity: int, cuda_graph: bool = False) -> None:
        import onnxruntime

        self.decoder, self.cuda_graph, self.turn = decoder, cuda_graph, 0
        self.device = decoder.device
        # With a stream for CUDA graphs, onnxruntime makes cuBLAS's handle in the first run, for whichever GPU is current.
        several = cuda_graph and self.device.kind == "cuda" and len(driver.gpus()) > 1
        self.current = self.device if several else None
        self.onnxruntime = onnxruntime
        self.buffers, two = [], False
        self.batch, self.capacity, share = batch, capacity, decoder.share
        sizes = {BATCH: batch, CAPACITY: capacity} if share is None else {POOL: batch * share.pages(capacity)}
        for cache in decoder.caches:
            shape = [sizes.get(n, n) for n in cache.shape]
            state = not _KEPT & set(cache.shape)
            count = 2 if not decoder.in_place or (cuda_graph and state) else 1
            two |= count == 2
            kind = _SESSION_TYPES[cache.type]
            allocate = onnxruntime.OrtValue.ortvalue_from_shape_and_type
            self.buffers.append([allocate(shape, kind, self.device.kind, self.device.index) for _ in range(count)])
        self.reset()
        self.bindings = [self._binding(turn) for turn in range(2 if two else 1)]
        self.graphs = self._graph_bindings(batch) if cuda_graph else None

    def reset(self) -> None:
        """Zeroes what the first step reads before a token was written there: states, and without the library whole caches."""
        self.turn = 0
        for cache, values in zip(self.decoder.caches, self.buffers, strict=True):
            if not _KEPT & set(cache.shape) or not self.decoder.in_place:
                values[0].update_inplace(np.zeros(values[0].shape(), _ZEROS.get(cache.type, np.float32)))

    def _binding(self, turn: int) -> IOBinding:
        binding = self.decoder.session.io_binding()
        for cache, values in zip(self.decoder.caches, self.buffers, strict=True):
            binding.bind_ortvalue_input(cache.name, values[turn % len(values)])
            binding.bind_ortvalue_output(DECODER.output_of(cache.name), values[(turn + 1) % len(values)])
        return binding

    def _of_share(self, tokens: int) -> dict[str, np.ndarray]:
        """{input: array} of what a CONTEXT graph takes more, for calls of so many tokens; the same from call to call."""
        share = self.decoder.share
        return {} if share is None else share.inputs(self.batch, self.capacity, tokens)

    def _graph_bindings(self, batch: int) -> list[tuple[IOBinding, RunOptions]]:
        """[(binding, run options)] of the captured decode steps, one a turn: all addresses are fixed."""
        ort, there = self.onnxruntime, (self.device.kind, self.device.index)
        first_values = {t.name: np.ones(t.sizes({BATCH: batch, TOKENS: 1}), t.type) for t in DECODER.inputs} | self._of_share(1)
        self.inputs = {name: ort.OrtValue.ortvalue_from_numpy(array, *there) for name, array in first_values.items()}
        self.logits = ort.OrtValue.ortvalue_from_shape_and_type([batch, self.decoder.vocabulary], np.float32, *there)
        graphs = []
        first = 1 + 2 * len(self.decoder.captured)  # a graph belongs to its addresses: each batch has ids of its own
        for turn in range(len(self.bindings)):
            binding = self._binding(turn)
            for name, value in self.inputs.items():
                binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(LOGITS, self.logits)
            options = ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(first + turn))
            graphs.append((binding, options))
        return graphs

    def run(self, input_ids: np.ndarray, seq_lens: np.ndarray, query_lens: np.ndarray, capture: bool = False) -> np.ndarray:
        """One step; returns the logits, float32 [B,vocabulary]. capture: as a CUDA graph, with input_ids [B,1]."""
        if self.decoder.share is None or input_ids.shape[1] <= PIECE:
            return self._run(input_ids, seq_lens, query_lens, capture)
        before, logits = seq_lens - query_lens, np.zeros((len(input_ids), self.decoder.vocabulary), np.float32)
        for begin in range(0, input_ids.shape[1], PIECE):
            ids, new = np.ascontiguousarray(input_ids[:, begin : begin + PIECE]), np.clip(query_lens - begin, 0, PIECE)
            found = self._run(ids, before + np.minimum(query_lens, begin + PIECE), new)
            logits = np.where(new[:, None] > 0, found, logits)
        return logits

    def _run(self, input_ids: np.ndarray, seq_lens: np.ndarray, query_lens: np.ndarray, capture: bool = False) -> np.ndarray:
        turn, self.turn = self.turn, (self.turn + 1) % len(self.bindings)
        feed = DECODER.feed(input_ids, seq_lens, query_lens)
        if capture and self.graphs:
            for name, array in feed.items():
                self.inputs[name].update_inplace(array)
            binding, options = self.graphs[turn]
            self._call(binding, options)
            binding.synchronize_outputs()
            return self.logits.numpy()
        binding = self.bindings[turn]
        feed |= self._of_share(input_ids.shape[1])
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        logits = np.empty((len(input_ids), self.decoder.vocabulary), np.float32)
        binding.bind_output(LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        options = None
        if self.cuda_graph:
            options = self.onnxruntime.RunOptions()
            options.add_run_config_entry("gpu_graph_id", "-1")  # prompts are not captured
        self._call(binding, options)
        return logits

    def _call(self, binding: IOBinding, options: RunOptions | None) -> None:
        with onnxruntime_errors(f"run {self.decoder.folder / MODEL_FILE}"), driver.current(self.current):
            self.decoder.session.run_with_iobinding(binding, options)
