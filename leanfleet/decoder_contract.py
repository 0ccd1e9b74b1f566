"""The contract between exporters and runtimes: the files of an exported decoder, and the inputs and outputs of its graph.

Exporters write by it; ONNX Runtime, TensorRT, bundles for onnxruntime-genai and the command line read by it. A folder holds
model.onnx, leanfleet.json (Facts) and, where it was exported with one, the tokenizer's files. There are two kinds of graph.
model.onnx is of one of them; beside one of the first kind may stand serving.onnx, of the second, with the same weights.
A tensor parallel folder has a DECODER graph for each rank in place of model.onnx: model.rank0.onnx, model.rank1.onnx, ..., each
with the rank's share of weights and caches, and AllReduce nodes of the communicator WORLD. Logits are the same on all ranks.
With --serve it has such a SERVING graph for each rank too: serving.rank0.onnx, ...
A context parallel folder has one model.onnx for all ranks, a CONTEXT graph, whose attention exchanges by that communicator, and
with --serve one serving.onnx, a CONTEXT_SERVING graph.

DECODER, of leanfleet.export.export_decoder: B requests of up to N new tokens over caches of S slots, all three dynamic.

    input_ids                     int64 [B,N]       new tokens, at the front of each row; the rest is padding
    seq_lens                      int32 [B]         tokens seen once the new ones are in
    query_lens                    int32 [B]         new tokens of each request; 0: the row is all padding
    past_key_values.L.key/.value  T [B,Hkv,S,D]     the caches of softmax layer L
    past_key_values.L.key_scale, .value_scale  float32 [B,Hkv,S]  beside quantised caches: the scale of each token and
                                                    head, where scales are no constants of the graph; a cache of uint8 is
                                                    [B,Hkv,S,D/2], of two int4 each
    past_key_values.L.recurrent_state  float32 [B,Hkv,R,Dv]  the state of linear layer L, of T with narrow_states;
                                                             zeros before the first token
    past_key_values.L.conv_state  float32 [B,K,C]   the tokens before, of its short convolution; zeros before the first
    past_key_values.L.key_sum, .value_sum  float32 [B,Hkv,R], [B,Hkv,Dv]  beside it where the layer is normalised
    logits                        float32 [B,vocabulary], of each request's last new token; with all_logits [B,N,vocabulary]
    present.L...                  as the past, with the new tokens; may be bound to the inputs' buffers

CONTEXT, of export_decoder with context_parallel: as DECODER, on each of W ranks, but that its caches hold a share of the
tokens. Positions are cut into blocks of `block` tokens; block g is rank g % W's, and number g // W of those that it holds. A
rank appends the tokens of its blocks and attends over them, and the ranks' outputs are joined.

    block_table                   int32 [B,M]       the pages of the request's own blocks, in their order, and then -1, see
                                                    context_table
    rank                          int32 [1]         which of the ranks this is
    past_key_values.L.key/.value  T [P,block,Hkv,D] pools of P pages in place of caches
    past_key_values.L.key_scale, .value_scale  float32 [P,block,Hkv]  beside quantised ones, of uint8 [P,block,Hkv,D/2]

SERVING, of leanfleet.export.serving.export_for_serving: T new tokens of B requests one after the other, M pages a request, in
a pool of P pages of `block` tokens, and a pool of A states; C rows of logits are wanted (all but `block` dynamic).

    input_ids                     int64 [K]         tokens
    token_index                   int64 [T]         which of them each new token is, request after request
    positions                     int64 [T]         each token's position in its request
    last                          int64 [C]         index into T of the tokens whose next ones are wanted: of each request's
                                                    last new token, or of several of them
    seq_lens                      int32 [B]         as above
    cu_query_lens                 int32 [B+1]       request b has tokens cu_query_lens[b] .. [b+1]; behind the last: padding
    block_table                   int32 [B,M]       the pages of each request; without effect where no layer has pages
    state_index                   int32 [B]         each request's row in the pools of states, no row twice; -1: none. Without
                                                    effect where no layer has a state
    temperature, top_p, min_p     float32 [C]       how each next token is chosen, see the operator SampleTokens, which takes
    top_k, seed                   int32, int64 [C]  the next token's position in its request
    pages.L.key, pages.L.value    T [P,block,Hkv,D] the pool of softmax layer L
    pages.L.key_scale, .value_scale  float32 [P,block,Hkv]  beside quantised pools, of uint8 [P,block,Hkv,D/2]
    pages.L.recurrent_state       float32 [A,Hkv,R,Dv]  the pool of states of linear layer L, of the model's type with
                                                        narrow_states; whoever runs the graph sees to it
                                                    that a request's row is 0 before its first token
    pages.L.conv_state            float32 [A,K,C]   the same of the tokens before, of its short convolution
    logits                        float32 [C,vocabulary], of the tokens at `last`
    next_tokens                   int64 [C]         the tokens that come next
    logprob                       float32 [C]       their log-probabilities; NaN where logits are not finite
    pages_out.L.key, ...          the pools with the new tokens; may be bound to the inputs' buffers

Beside a graph of the second kind stands sampler.onnx, SAMPLER, for steps in which a request wants more than these settings. It
chooses all tokens of a step again, from its logits:

    logits, temperature, ...                        as above, seq_lens as `position`
    active                        int32 [B]         0: the row takes no part
    count_index                   int32 [B]         each row's place in the next two, no place twice
    token_counts                  int32 [A,V]       how often a request's tokens stand in its text, see SampleTokens
    bias                          float32 [A,V]     what is added to logits
    allowed_tokens                int32 [A,W]       which tokens may come, a bit each; of W = V / 32 rounded up words
    repetition_penalty, presence_penalty, frequency_penalty  float32 [B]
    next_tokens, logprob                            as above; -1 and NaN where a row takes no part
    top_logprobs, top_tokens      float32, int64 [B,20]  of the most likely tokens
    token_counts_out              int32 [A,V]       with the new tokens; may be bound to the input's buffer

CONTEXT_SERVING, in a folder of export_decoder with context_parallel: as SERVING, on each of W ranks, but that a page is `block`
tokens of which each rank has block / W, in a pool T [P,block/W,Hkv,D]: rank r those from r block / W on. Pages have the same
numbers on all ranks. It takes `rank`, int32 [1], behind `seed`.

Since token_index says where the new tokens stand, input_ids may begin with the next_tokens of an earlier call, which no host
has read yet. export_for_serving wrote other inputs and outputs before. LAST_SERVING, format 3: C is B, `last` has each
request's last new token alone, and there is no state_index, nor a layer with a state. GREEDY_SERVING, format 2: input_ids are
[T], there is no token_index and no setting, and next_tokens are the most likely ones. PADDED_SERVING, format 1: it has no
next_tokens and no logprob either, and in place of cu_query_lens query_lens [B], slots int64 [B,N], the index into T of each
request's new tokens, at the front, then anything, and rows int64 [T], b * N + i of token i of request b.

Importing this module needs only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, TypedDict, cast

import leanfleet

if TYPE_CHECKING:
    import numpy as np

FORMAT = 7  # of leanfleet.json, the newest; one without a format is of the first
MODEL_FILE, FACTS_FILE = "model.onnx", "leanfleet.json"
SAMPLER_FILE = "sampler.onnx"
WORLD = "world"  # the communicator of the nodes of decoders for several ranks
TENSOR_PARALLEL, CONTEXT_PARALLEL = PARALLEL_KINDS = "tensor_parallel", "context_parallel"  # what ranks share
PARALLEL = 5  # the format of a tensor parallel folder
CONTEXT_BLOCK = 64  # tokens of a block of a context parallel decoder that is exported today
MOST_RANKS = 64  # of a communicator
MOST_FACTS, MOST_BLOCK = 1 << 20, 1 << 14  # bytes of leanfleet.json, tokens of a page: more asks for memory alone
SERVING_FILE = "serving.onnx"  # in a folder whose model.onnx is of the other kind
OPTIONAL_FILES = (
    MODEL_FILE,
    f"{MODEL_FILE}.data",
    SERVING_FILE,
    f"{SERVING_FILE}.data",
    SAMPLER_FILE,
    "model.rank*.onnx",
    "model.rank*.onnx.data",
    "serving.rank*.onnx",
    "serving.rank*.onnx.data",
)  # patterns of files of an export; an earlier one may have left them

INPUT_IDS, SEQ_LENS, QUERY_LENS = "input_ids", "seq_lens", "query_lens"
TOKEN_INDEX, TOP_P = "token_index", "top_p"
SETTINGS = ("temperature", "top_k", TOP_P, "min_p", "seed")
POSITIONS, LAST, OFFSETS, BLOCK_TABLE = "positions", "last", "cu_query_lens", "block_table"
SLOTS, ROWS, STATE_INDEX = "slots", "rows", "state_index"
RANK, ONE = "rank", "1"  # an input of one number
LOGITS, NEXT_TOKENS, LOGPROB = "logits", "next_tokens", "logprob"
KEY, VALUE, STATE = "key", "value", "recurrent_state"  # what a layer carries from call to call
KEY_SCALE, VALUE_SCALE = "key_scale", "value_scale"  # beside a quantised KEY and VALUE
CONV_STATE = "conv_state"  # of a layer with a short convolution, beside its STATE
KEY_SUM, VALUE_SUM = "key_sum", "value_sum"  # of a NormalizedLinearAttention layer, beside its STATE
BATCH, TOKENS, CAPACITY = "batch", "tokens", "capacity"  # open dimensions, as the graph names them
LONGEST, TABLE, POOL, ENDS, KNOWN, VOCABULARY = "longest", "table", "pool", "ends", "known", "vocabulary"
STATES, WANTED = "states", "wanted"

# onnxruntime's names of types by numpy's
SESSION_TYPES = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "int32": "tensor(int32)",
    "int64": "tensor(int64)",
    "int8": "tensor(int8)",
    "float8e4m3fn": "tensor(float8e4m3fn)",
    "uint8": "tensor(uint8)",
}
# Types of caches that a folder may have in place of the model's own, by the names that users know.
FORMS = {"int8": "int8", "fp8": "float8e4m3fn", "int4": "uint8"}
CACHES = (*FORMS, *(f"{key}/{value}" for key in FORMS for value in FORMS if key != value))  # of keys and values, or each
_CACHE_TYPES = tuple(SESSION_TYPES[name] for name in ("float32", "float16", "bfloat16", *FORMS.values()))

CACHE_SCALES = "channel", "tensor"  # what a scale that is a constant of the graph is for; else each token and head has its own

LOSSY = "int4"  # the type of keys that costs more than 5% of perplexity, see docs/how_to/quantised_caches.md


def cache_forms(cache: str) -> tuple[str, str]:
    """The types of keys and of values, by numpy's names, that one of CACHES says; of uint8 each holds two int4.

    Raises ValueError for another word.
    """
    if cache not in CACHES:
        raise ValueError(
            f"cache is {cache!r}; expected None, the model's own type, or one of {', '.join(FORMS)}, or two of them, of "
            "keys and of values: 'int8/fp8'"
        )
    key, _, value = cache.partition("/")
    return FORMS[key], FORMS[value or key]


@dataclass(frozen=True)
class Tensor:
    """An input or output of a graph. type: numpy's name. shape: names of its dimensions."""

    name: str
    type: str
    shape: tuple[str, ...]

    def sizes(self, dims: Mapping[str, int]) -> list[int]:
        """The shape with these sizes of its dimensions."""
        return [dims[name] for name in self.shape]


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of a kind of graph. `inputs` are those beside the caches, in the graph's order, which the caches
    follow; outputs are the logits and each cache as it is afterwards."""

    kind: str
    writer: str  # the function that writes such a folder, for messages
    inputs: tuple[Tensor, ...]
    past: str  # what the names of caches begin with, as inputs
    present: str  # and as outputs
    cache_sizes: tuple[str, ...]  # open dimensions that caches may have
    format: int  # of leanfleet.json, where it came
    outputs: tuple[Tensor, ...] = (Tensor(LOGITS, "float32", (BATCH, VOCABULARY)),)  # beside the caches, before them

    @property
    def chooses(self) -> bool:
        """Whether the graph chooses each next token, by settings of its own."""
        return any(t.name == TOKEN_INDEX for t in self.inputs)

    @property
    def of_any_row(self) -> bool:
        """Whether `last` may name any tokens, several of a request too."""
        return any(t.name == LAST and t.shape == (WANTED,) for t in self.inputs)

    def input_names(self, caches: Iterable[str]) -> list[str]:
        """Names of all inputs. caches: names as cache_name makes them."""
        return [*(t.name for t in self.inputs), *(self.past + name for name in caches)]

    def output_names(self, caches: Iterable[str]) -> list[str]:
        """Names of all outputs."""
        return [*(t.name for t in self.outputs), *(self.present + name for name in caches)]

    def is_cache(self, name: str) -> bool:
        """Is this the name of an input that is a cache?"""
        return name.startswith(self.past)

    def output_of(self, name: str) -> str:
        """The output that replaces the input `name`, a cache."""
        return self.present + name.removeprefix(self.past)

    def feed(self, *arrays: Any) -> dict[str, Any]:
        """{input: array}, of arrays in the order of `inputs`."""
        return dict(zip((t.name for t in self.inputs), arrays, strict=True))


DECODER = Interface(
    "decoder",
    "leanfleet.export.export_decoder",
    (Tensor(INPUT_IDS, "int64", (BATCH, TOKENS)), Tensor(SEQ_LENS, "int32", (BATCH,)), Tensor(QUERY_LENS, "int32", (BATCH,))),
    "past_key_values.",
    "present.",
    (BATCH, CAPACITY),
    1,
)
CONTEXT = replace(
    DECODER,
    inputs=(*DECODER.inputs, Tensor(BLOCK_TABLE, "int32", (BATCH, TABLE)), Tensor(RANK, "int32", (ONE,))),
    cache_sizes=(POOL,),
    format=6,
)
SERVING = Interface(
    "serving",
    "leanfleet.export.serving.export_for_serving",
    (
        Tensor(INPUT_IDS, "int64", (KNOWN,)),
        Tensor(TOKEN_INDEX, "int64", (TOKENS,)),
        Tensor(POSITIONS, "int64", (TOKENS,)),
        Tensor(LAST, "int64", (WANTED,)),
        Tensor(SEQ_LENS, "int32", (BATCH,)),
        Tensor(OFFSETS, "int32", (ENDS,)),
        Tensor(BLOCK_TABLE, "int32", (BATCH, TABLE)),
        Tensor(STATE_INDEX, "int32", (BATCH,)),
        *(Tensor(n, t, (WANTED,)) for n, t in zip(SETTINGS, ("float32", "int32", "float32", "float32", "int64"), strict=True)),
    ),
    "pages.",
    "pages_out.",
    (POOL, STATES),
    4,
    (
        Tensor(LOGITS, "float32", (WANTED, VOCABULARY)),
        Tensor(NEXT_TOKENS, "int64", (WANTED,)),
        Tensor(LOGPROB, "float32", (WANTED,)),
    ),
)
CONTEXT_SERVING = replace(SERVING, inputs=(*SERVING.inputs, Tensor(RANK, "int32", (ONE,))), format=7)
LAST_SERVING = replace(
    SERVING,
    inputs=tuple(
        replace(t, shape=tuple(BATCH if n == WANTED else n for n in t.shape)) for t in SERVING.inputs if t.name != STATE_INDEX
    ),
    cache_sizes=(POOL,),
    format=3,
    outputs=(*DECODER.outputs, Tensor(NEXT_TOKENS, "int64", (BATCH,)), Tensor(LOGPROB, "float32", (BATCH,))),
)
GREEDY_SERVING = replace(
    LAST_SERVING,
    inputs=(
        Tensor(INPUT_IDS, "int64", (TOKENS,)),
        *(t for t in LAST_SERVING.inputs if t.name not in (INPUT_IDS, TOKEN_INDEX, *SETTINGS)),
    ),
    format=2,
)
PADDED_SERVING = replace(
    LAST_SERVING,
    inputs=(
        Tensor(INPUT_IDS, "int64", (TOKENS,)),
        Tensor(POSITIONS, "int64", (TOKENS,)),
        Tensor(SLOTS, "int64", (BATCH, LONGEST)),
        Tensor(ROWS, "int64", (TOKENS,)),
        Tensor(LAST, "int64", (BATCH,)),
        Tensor(SEQ_LENS, "int32", (BATCH,)),
        Tensor(QUERY_LENS, "int32", (BATCH,)),
        Tensor(BLOCK_TABLE, "int32", (BATCH, TABLE)),
    ),
    format=1,
    outputs=DECODER.outputs,
)


TOP = 20  # most likely tokens whose log-probabilities a SAMPLER graph gives
ACTIVE, COUNT_INDEX, TOKEN_COUNTS, BIAS, ALLOWED = "active", "count_index", "token_counts", "bias", "allowed_tokens"
TOP_LOGPROBS, TOP_TOKENS, PLACES, WORDS = "top_logprobs", "top_tokens", "places", "words"
PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"
SAMPLER = Interface(
    "sampler",
    SERVING.writer,
    (
        Tensor(LOGITS, "float32", (BATCH, VOCABULARY)),
        *(t for t in LAST_SERVING.inputs if t.name in SETTINGS),
        Tensor(SEQ_LENS, "int32", (BATCH,)),
        Tensor(TOKEN_COUNTS, "int32", (PLACES, VOCABULARY)),
        Tensor(COUNT_INDEX, "int32", (BATCH,)),
        *(Tensor(name, "float32", (BATCH,)) for name in PENALTIES),
        Tensor(BIAS, "float32", (PLACES, VOCABULARY)),
        Tensor(ALLOWED, "int32", (PLACES, WORDS)),
        Tensor(ACTIVE, "int32", (BATCH,)),
    ),
    "",
    "",
    (),
    3,
    (
        *LAST_SERVING.outputs[1:],
        Tensor(TOP_LOGPROBS, "float32", (BATCH, str(TOP))),
        Tensor(TOP_TOKENS, "int64", (BATCH, str(TOP))),
        Tensor(f"{TOKEN_COUNTS}_out", "int32", (PLACES, VOCABULARY)),
    ),
)


def cache_name(layer: int | str, part: str) -> str:
    """Name of what a layer carries, such as "0.key". part: KEY, VALUE, a scale, STATE, CONV_STATE, KEY_SUM or VALUE_SUM."""
    return f"{layer}.{part}"


def rank_file(rank: int, file: str = MODEL_FILE) -> str:
    """The graph of a rank in a tensor parallel folder, of those that are `file` in a folder for one process."""
    return f"{file.removesuffix('.onnx')}.rank{rank}.onnx"


def layer_of(name: str) -> int:
    """The layer of a cache, by its name or that of its input."""
    return int(name.split(".")[-2])


def is_part(name: str, part: str) -> bool:
    """Is the cache of this name, or of this input, a KEY, VALUE, STATE, CONV_STATE, KEY_SUM or VALUE_SUM?"""
    return name.endswith(f".{part}")


def is_state(name: str) -> bool:
    """Does the cache of this name, or of this input, have one row a request, STATE or CONV_STATE, and no tokens?"""
    return is_part(name, STATE) or is_part(name, CONV_STATE)


def parallel_of(facts: Facts) -> Parallel | None:
    """What a folder says of the ranks that it is for; None where it is for one process."""
    if (heads := facts.get("tensor_parallel")) is not None:
        return Parallel(TENSOR_PARALLEL, heads["world"])
    context = facts.get("context_parallel")
    return None if context is None else Parallel(CONTEXT_PARALLEL, context["world"])


def decoder_interface(facts: Facts) -> Interface:
    """The interface of a folder of kind "decoder", by what its leanfleet.json says."""
    return DECODER if facts.get("context_parallel") is None else CONTEXT


def context_pages(capacity: int, world: int, block: int) -> int:
    """Pages that a rank needs for a request of up to `capacity` tokens, in a context parallel folder."""
    return max(1, -(-capacity // (block * world)))


def context_table(batch: int, pages: int, tokens: int, block: int) -> np.ndarray:
    """The block_table of a CONTEXT graph, for requests with `pages` pages each, one request's behind another's, and calls of up
    to `tokens` new tokens each. Needs numpy.

    Behind the pages stands -1 as often as the new tokens may touch blocks of other ranks, and once more.
    """
    import numpy as np

    own = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    return np.pad(own, ((0, 0), (0, (tokens + block - 2) // block + 2)), constant_values=-1)


def serving_interface(facts: Facts) -> Interface:
    """The interface of a folder of kind "serving", by what its leanfleet.json says."""
    if facts.get(CONTEXT_PARALLEL) is not None:
        return CONTEXT_SERVING
    return {1: PADDED_SERVING, 2: GREEDY_SERVING, 3: LAST_SERVING}.get(facts.get("format", 1), SERVING)


def words_of(vocabulary: int) -> int:
    """Of 32 bits, one bit for each token."""
    return -(-vocabulary // 32)


@dataclass(frozen=True)
class Sampling:
    """How a request's next token is chosen, as SampleTokens takes it. temperature 0: the most likely token; the rest then has
    no effect."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Adjustments:
    """What a request may want beside its Sampling, see SampleTokens. logit_bias: (token, what is added). top_logprobs: of how
    many most likely tokens log-probabilities are kept."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0


def settings(requests: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """{input: array [C]} of a SERVING graph, one of each request or wanted row. Needs numpy."""
    import numpy as np

    types = {t.name: t.type for t in SERVING.inputs}
    return {name: np.array([getattr(r, name) for r in requests], types[name]) for name in SETTINGS}


def packed(
    tokens: Sequence[Sequence[int]],
    before: Sequence[int],
    pages: Sequence[Sequence[int]],
    interface: Interface = SERVING,
    sampling: Sequence[Sampling] = (),
    earlier: int = 0,
    states: Sequence[int] = (),
    wanted: Sequence[int] = (),
) -> dict[str, np.ndarray]:
    """The inputs of a SERVING graph, or one of an older format, beside its pool, for B requests. Needs numpy.

    tokens: the new ones of each request, at least one. before: how many of it are in the pool. pages: the numbers of its
    pages, in their order. sampling: one each; default: the most likely tokens. earlier: input_ids
    begin with room for so many tokens of an earlier call; a new token -1 - r is the one that stands there at r.
    states: each request's row in the pools of states; default: none. wanted: behind how many of its new tokens, the last
    ones, the next token is wanted; default: behind the last one.
    """
    import numpy as np

    counts = np.array([len(row) for row in tokens], np.int32)
    seen = np.array(before, np.int32)
    ends = np.cumsum(counts)
    table = np.zeros((len(tokens), max(1, *map(len, pages))), np.int32)
    ids: list[int] = []
    positions: list[int] = []
    for i, (row, there, own) in enumerate(zip(tokens, before, pages, strict=True)):
        table[i, : len(own)] = own
        ids.extend(row)
        positions.extend(range(there, there + len(row)))
    rows = np.array(wanted or [1] * len(tokens))
    owners = np.repeat(np.arange(len(tokens)), rows)  # of the wanted rows
    behind = np.concatenate([np.arange(-n, 0) for n in rows])
    made = {
        INPUT_IDS: np.array(ids, np.int64),
        POSITIONS: np.array(positions, np.int64),
        LAST: (ends[owners] + behind).astype(np.int64),
        SEQ_LENS: seen + counts,
        QUERY_LENS: counts,
        OFFSETS: np.concatenate([[0], ends]).astype(np.int32),
        BLOCK_TABLE: table,
        STATE_INDEX: np.array(states or [-1] * len(tokens), np.int32),
    }
    if interface.chooses:
        new = made[INPUT_IDS]
        made[TOKEN_INDEX] = np.where(new < 0, -1 - new, earlier + np.arange(len(new)))
        made[INPUT_IDS] = np.concatenate([np.zeros(earlier, np.int64), np.maximum(new, 0)])
        each = sampling or [Sampling()] * len(tokens)
        made |= settings([each[i] for i in owners.tolist()])
    if interface is PADDED_SERVING:
        owned = np.arange(counts.max()) < counts[:, None]
        made[SLOTS] = np.where(owned, (ends - counts)[:, None] + np.arange(counts.max()), 0).astype(np.int64)
        made[ROWS] = np.flatnonzero(owned)
    return {t.name: made[t.name] for t in interface.inputs if t.name != RANK}


class Ranks(TypedDict):
    """Of a tensor parallel folder: how many ranks, and each one's graph."""

    world: int
    files: list[str]


class Context(TypedDict):
    """Of a context parallel folder: how many ranks, and the tokens of a block."""

    world: int
    block: int


@dataclass(frozen=True)
class Parallel:
    """What ranks share: of PARALLEL_KINDS; and how many they are."""

    kind: str
    world: int


class Facts(TypedDict, total=False):
    """What leanfleet.json says. `block` is of kind "serving" alone. `serving`: what differs for serving.onnx."""

    format: int
    kind: str  # "decoder", which is also the default, or "serving"
    vocabulary: int
    stop_tokens: list[int]
    max_positions: int | None  # None: no limit
    block: int  # tokens a page
    cache: str | None  # of CACHES: what keys and values are; missing or None: the model's type
    cache_scales: str | None  # of CACHE_SCALES; missing or None: each token and head has a scale of its own
    narrow_states: bool  # states have the model's type of 16 bits; missing: float32
    tensor_parallel: Ranks  # where neither of these is there the folder is for one process
    whole_experts: bool  # of a tensor parallel folder: ranks have whole experts; missing: columns of each
    context_parallel: Context
    fusions: dict[str, int]  # {pass of leanfleet.export.fusions: how often it applied}; missing: fuse=False
    serving: dict[str, Any]  # format, block, fusions and verified, as they are here
    verified: dict[str, Any]  # "largest_difference" and "bound" of the logits, or "skipped": why; missing: not asked for


def write_facts(folder: str | Path, facts: Facts) -> None:
    """Writes leanfleet.json, of the format that today's folders of its kind have."""
    interface = SERVING if facts.get("kind") == SERVING.kind else decoder_interface(facts)
    if "serving" in facts:
        served = SERVING if facts.get(CONTEXT_PARALLEL) is None else CONTEXT_SERVING
        facts = facts | {"serving": {"format": served.format} | facts["serving"]}
    number = PARALLEL if TENSOR_PARALLEL in facts else interface.format
    text = json.dumps({"format": number} | facts, indent=2)
    part = Path(folder) / f"{FACTS_FILE}.part"
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(Path(folder) / FACTS_FILE)


def read_facts(folder: str | Path, interface: Interface, parallel: bool = False) -> Facts:
    """What leanfleet.json in the folder of an exported model says, checked. parallel: it may be a folder for several ranks.

    Raises FileNotFoundError, and ValueError for a file that is damaged, of a format that this version does not know, or of
    another kind.
    """
    folder, writer = Path(folder), interface.writer
    serve = " --serve" if interface.kind == SERVING.kind else ""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give one that leanfleet export or {writer} wrote")
    ranked = not (folder / MODEL_FILE).exists() and (folder / rank_file(0)).is_file()
    for name in (FACTS_FILE,) if ranked else (MODEL_FILE, FACTS_FILE):
        if not (folder / name).is_file():
            hint = (
                f"; it holds a transformers model that is not exported yet: leanfleet export {folder} NEW_FOLDER{serve}"
                if (folder / "config.json").exists() or any(folder.glob("*.gguf"))
                else f"; write the folder with {writer}"
            )
            raise FileNotFoundError(f"{folder / name} does not exist{hint}")
    path = folder / FACTS_FILE
    again = f"export the model again with {writer}"
    if (size := path.stat().st_size) > MOST_FACTS:
        raise ValueError(f"{path} has {size} bytes; at most {MOST_FACTS} are read: {again}")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, thousands of brackets
        raise ValueError(f"{path} is damaged ({error}): {again}") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{path} holds no JSON object: {again}")
    _check_format(path, facts.get("format", 1), again)
    if interface is SERVING and model_file(facts) == SERVING_FILE:
        facts |= facts["serving"] | {"kind": SERVING.kind}
        _check_format(path, facts.get("format", 1), again)
        if not ranked and not (folder / SERVING_FILE).is_file():
            raise FileNotFoundError(f"{folder / SERVING_FILE} does not exist, though {path} names it: {again}")
    found = facts.get("kind", DECODER.kind)
    if found != interface.kind:
        also = ", or leanfleet export --serve" if interface is SERVING else ""
        raise ValueError(f"{folder} holds a model of kind {found}; this needs one from {writer}{also}")
    _check_values(path, facts, interface, again)
    _check_ranks(folder, path, facts, ranked, again)
    _check_shares(path, facts, ranked, again)
    checked = cast(Facts, facts)
    if not parallel and (found_ranks := parallel_of(checked)):
        command = f"leanfleet serve {folder}" if interface is SERVING else f'leanfleet generate {folder} "..."'
        raise ValueError(
            f"{folder} was exported for {found_ranks.world} ranks ({found_ranks.kind}), which run together: {command} "
            f"--gpus {found_ranks.world}"
        )
    return checked


def has_serving(folder: str | Path) -> bool:
    """Whether leanfleet.json in the folder says that there is a SERVING graph, for one process. What it says is checked by
    read_facts."""
    try:
        with (Path(folder) / FACTS_FILE).open(encoding="utf-8") as file:
            facts = json.loads(file.read(MOST_FACTS))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(facts, dict) or any(kind in facts for kind in PARALLEL_KINDS):
        return False
    return facts.get("kind") == SERVING.kind or model_file(facts) == SERVING_FILE


def _check_shares(path: Path, facts: dict[str, Any], ranked: bool, again: str) -> None:
    """Raises ValueError where what leanfleet.json says of a shared context is wrong."""
    if (said := facts.get(CONTEXT_PARALLEL)) is None:
        return
    world, block = ((said.get(name) if isinstance(said, dict) else None) or 0 for name in ("world", "block"))
    if not (_number(world, 2) and world <= MOST_RANKS and _number(block) and block <= MOST_BLOCK):
        raise ValueError(
            f"{path}: {CONTEXT_PARALLEL} is {json.dumps(said)[:60]}; expected a world of 2 to {MOST_RANKS} ranks, and a block "
            f"of 1 to {MOST_BLOCK} tokens: {again}"
        )
    if ranked or facts.get(TENSOR_PARALLEL) is not None:
        raise ValueError(f"{path} has {CONTEXT_PARALLEL}, and the folder is tensor parallel; it cannot be both: {again}")


def _check_ranks(folder: Path, path: Path, facts: dict[str, Any], ranked: bool, again: str) -> None:
    """Raises ValueError or FileNotFoundError where what leanfleet.json says of ranks is wrong, or their files are missing."""
    said: Any = facts.get("tensor_parallel")
    if said is None and not ranked:
        return
    world = said.get("world") if isinstance(said, dict) else None
    fits = isinstance(said, dict) and isinstance(world, int) and _number(world, 2) and world <= MOST_RANKS
    if not fits or said.get("files") != [rank_file(rank) for rank in range(cast(int, world))]:
        found = json.dumps(said)[:60]
        raise ValueError(f"{path}: tensor_parallel is {found}; expected a world of 2 or more ranks, and their files: {again}")
    if not ranked:
        raise ValueError(f"{path} is of a tensor parallel folder, and {folder / MODEL_FILE} is not: {again}")
    served = [rank_file(rank, SERVING_FILE) for rank in range(cast(int, world))] if model_file(facts) == SERVING_FILE else []
    for name in said["files"] + served:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} does not exist, though {path} names it: {again}")


def check_caches_for_tensorrt(folder: str | Path, facts: Facts) -> None:
    """Raises ValueError for a folder with caches that TensorRT has no engines for: int4, whose uint8 no plugin takes, and int8
    beside fp8."""
    cache = facts.get("cache")
    if cache and set(cache_forms(cache)) not in ({"int8"}, {"float8e4m3fn"}):
        raise ValueError(
            f"{folder} was exported with {cache} caches, of which TensorRT builds no engines: run it in ONNX Runtime, or "
            "export the model with caches of int8 or fp8 (leanfleet export --cache int8)"
        )


def model_file(facts: Mapping[str, Any], rank: int | None = None) -> str:
    """The file of the SERVING graph in a folder with these facts, or of a rank's."""
    file = SERVING_FILE if isinstance(facts.get("serving"), dict) else MODEL_FILE
    return file if rank is None else rank_file(rank, file)


def file_of_rank(folder: Path, facts: Facts, interface: Interface, rank: int | None, library: bool) -> str:
    """The graph that a process runs: of a rank's share, or with rank None the whole.

    Raises ValueError for a folder that is for one process, a rank that it does not have, and ranks without the library.
    """
    parallel = parallel_of(facts)
    if rank is None:
        return model_file(facts) if interface is SERVING else MODEL_FILE
    if parallel is None:
        served = " --serve" * (interface is SERVING)
        options = f"--tensor-parallel W{served} or --context-parallel W{served}"
        raise ValueError(
            f"{folder} was exported for one process: leave the rank out, or export the model with leanfleet export {options}"
        )
    if not library:
        raise ValueError(f"{folder} is for several ranks, which exchange by the library: library=False is for one process")
    if not 0 <= rank < parallel.world:
        raise ValueError(f"rank is {rank}, and {folder} was exported for {parallel.world} ranks: 0 to {parallel.world - 1}")
    if parallel.kind == CONTEXT_PARALLEL:
        return model_file(facts) if interface is SERVING else MODEL_FILE
    return model_file(facts, rank) if interface is SERVING else rank_file(rank)


def _check_format(path: Path, found: object, again: str) -> None:
    if _number(found) and cast(int, found) > FORMAT:
        raise ValueError(
            f"{path} has format {found}, and leanfleet {leanfleet.__version__} knows formats up to {FORMAT}: "
            f"update leanfleet, or {again} of this version"
        )
    if not _number(found):
        raise ValueError(f"{path}: format is {json.dumps(found)[:60]}; expected a positive number: {again}")


def _check_values(path: Path, facts: dict[str, Any], interface: Interface, again: str) -> None:
    expected: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "vocabulary": ("a positive number", _number),
        "stop_tokens": ("a list of token ids", lambda v: isinstance(v, list) and all(_number(t, -1) for t in v)),
        "max_positions": ("a positive number or null", lambda v: v is None or _number(v)),
    }
    if facts.get("cache") not in (None, *CACHES):
        known = ", ".join(CACHES)
        raise ValueError(
            f"{path}: cache is {json.dumps(facts['cache'])[:60]}; this version knows {known}: update leanfleet, or {again}"
        )
    if facts.get("cache_scales") not in (None, *CACHE_SCALES):
        found, known = json.dumps(facts["cache_scales"])[:60], ", ".join(CACHE_SCALES)
        raise ValueError(f"{path}: cache_scales is {found}; this version knows {known}: update leanfleet, or {again}")
    if interface is SERVING:
        expected["block"] = f"a number from 1 to {MOST_BLOCK}", lambda v: _number(v) and v <= MOST_BLOCK
    for name, (words, fits) in expected.items():
        if name not in facts:
            raise ValueError(f"{path} has no {name}: {again}")
        if not fits(facts[name]):
            raise ValueError(f"{path}: {name} is {json.dumps(facts[name])[:60]}; expected {words}: {again}")


def _number(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31


def check_interface(session: Any, path: str | Path, interface: Interface, vocabulary: int) -> None:
    """Raises ValueError, telling what is expected, for a model that has not the inputs and outputs of a decoder.

    session: an onnxruntime.InferenceSession. vocabulary: the numbers in a row of logits, the first output.
    """
    types = {t.name: SESSION_TYPES[t.type] for t in interface.inputs}

    def refuse(found: str) -> Never:
        raise ValueError(
            f"{path} is no decoder of {interface.writer}: {found}; it has the inputs {', '.join(types)} and "
            f"{interface.past}..., the outputs {LOGITS} and {interface.present}..."
        )

    def listed(values: Sequence[Any]) -> str:
        return ", ".join(v.name for v in values[:6]) + ", ..." * (len(values) > 6) or "none"

    inputs, outputs = session.get_inputs(), session.get_outputs()
    caches = [i for i in inputs if interface.is_cache(i.name)]
    found = {i.name: i.type for i in inputs if i not in caches}
    if set(found) != set(types) or not caches:
        refuse(f"its inputs are {listed(inputs)}")
    made = {o.name: o.type for o in outputs}
    if (
        not {*interface.output_names(()), *(interface.output_of(i.name) for i in caches)} <= set(made)
        or outputs[0].name != LOGITS
    ):
        refuse(f"its outputs are {listed(outputs)}")
    if wrong := [name for name in types if found[name] != types[name]]:
        refuse(f"{wrong[0]} is a {found[wrong[0]]}, not a {types[wrong[0]]}")
    for i in caches:
        if i.type not in _CACHE_TYPES or not all(n in interface.cache_sizes or isinstance(n, int) and n > 0 for n in i.shape):
            refuse(f"{i.name} is a {i.type} of {i.shape}")
    for t in interface.outputs[1:]:
        if made[t.name] != SESSION_TYPES[t.type]:
            refuse(f"{t.name} is a {made[t.name]}, not a {SESSION_TYPES[t.type]}")
    if outputs[0].type != SESSION_TYPES["float32"] or outputs[0].shape[-1:] != [vocabulary]:
        refuse(f"{LOGITS} are a {outputs[0].type} of {outputs[0].shape}, where {FACTS_FILE} has a vocabulary of {vocabulary}")
