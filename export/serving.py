"""Exports a decoder for continuous batching: requests of unequal length share one graph call and a pool of pages.

The new tokens of all requests stand one after the other, in the attention too, so that no layer sees padding. Softmax layers
keep keys and values in pages; linear layers keep a state for each request, a row of a pool.
leanfleet.decoder_contract has the graph's inputs and outputs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from onnx_ir.external_data import convert_tensors_to_external

from leanfleet import files, progress, spec
from leanfleet.decoder_contract import (
    ALLOWED,
    BATCH,
    BIAS,
    CONTEXT_PARALLEL,
    CONTEXT_SERVING,
    COUNT_INDEX,
    DECODER,
    ENDS,
    KEY,
    KEY_SCALE,
    KEY_SUM,
    KNOWN,
    MODEL_FILE,
    NEXT_TOKENS,
    OPTIONAL_FILES,
    POOL,
    RANK,
    SAMPLER,
    SAMPLER_FILE,
    SEQ_LENS,
    SERVING,
    SERVING_FILE,
    STATE,
    STATES,
    TABLE,
    TOKENS,
    TOP,
    VALUE,
    VALUE_SCALE,
    VALUE_SUM,
    VOCABULARY,
    WANTED,
    WORDS,
    Facts,
    Tensor,
    is_part,
    is_state,
    packed,
    parallel_of,
    rank_file,
    read_facts,
    words_of,
    write_facts,
)
from leanfleet.export import function_bodies, verification
from leanfleet.export.cache import Cache, pool_shape
from leanfleet.export.decoder import INSIDE, Shapes, cache_shapes, made, run, write
from leanfleet.export.quantised_caches import CacheType, cache_facts
from leanfleet.export.support import check_supported
from leanfleet.export import context_parallel as sharing
from leanfleet.export.tensor_parallel import share_of_rank
from leanfleet.export.torch_ops import sample_tokens

PAGE = 64  # tokens: attention copies page by page, and over pages of 16 prompts of heads of 128 take up to 17% longer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_SMALL = 1 << 10  # bytes of a weight that is not worth a reference


class Pages(Cache):
    """The pools of one traced call, by name ("0.key")."""

    heads_axis = 2

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        seq_lens: torch.Tensor,
        cu_query_lens: torch.Tensor,
        block_table: torch.Tensor,
        state_index: torch.Tensor,
        form: CacheType | None,
        orders: sharing.Orders | None = None,
    ) -> None:
        """orders: where several ranks have each page, a block of it each."""
        super().__init__(tensors, seq_lens, cu_query_lens.diff(), form)
        self.block_table, self.cu_query_lens, self.state_index = block_table, cu_query_lens, state_index
        self.orders = orders

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """query [1,H,T,D], key and value [1,Hkv,T,D]; returns [1,T,H,D]."""

        def by_token(x: torch.Tensor) -> torch.Tensor:
            return x[0].transpose(0, 1)  # [T,heads,D]

        output, _ = self.append(
            layer,
            by_token(query),
            cu_query_lens=self.cu_query_lens,
            new_key=by_token(key),
            new_value=by_token(value),
            layout="bnhd",
            **options,
            **dict(block_table=self.block_table) if self.orders is None else self.orders.options(options.get("window", -1)),
        )
        return output.unsqueeze(0)

    def rows(self) -> dict[str, torch.Tensor]:
        """As Cache.rows."""
        return dict(cu_seqlens=self.cu_query_lens, state_index=self.state_index)


class PackedDecoder(torch.nn.Module):
    """A transformers causal LM with the inputs and outputs of this module's graph."""

    def __init__(self, model: torch.nn.Module, names: Iterable[str], cache: CacheType | None = None) -> None:
        super().__init__()
        self.model, self.names, self.cache = model, list(names), cache

    def forward(
        self,
        input_ids: torch.Tensor,
        token_index: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_query_lens: torch.Tensor,
        block_table: torch.Tensor,
        state_index: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seed: torch.Tensor,
        pages: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """pages: tensors in the order of names; returns (logits, next tokens, their log-probabilities, *pages)."""
        settings = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        cache = Pages(zip(self.names, pages, strict=True), seq_lens, cu_query_lens, block_table, state_index, self.cache)
        return self.over(cache, input_ids.index_select(0, token_index), positions, last, settings)

    def over(
        self, cache: Pages, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, settings: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """forward over pages, of new tokens [T]."""
        logits = run(
            self.model,
            cache,
            lambda hidden: hidden[0].index_select(0, last),
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
        )
        position = (positions.index_select(0, last) + 1).to(torch.int32)  # of the next tokens
        chosen = sample_tokens(logits, **settings, position=position, logprob=True)
        return (logits, *chosen, *(cache.tensors[n] for n in self.names))


class SharingPackedDecoder(PackedDecoder):
    """The same for so many ranks that share out the tokens in the pages. block: those of a page that a rank has."""

    def __init__(self, *arguments: Any, world: int, block: int) -> None:
        super().__init__(*arguments)
        self.world, self.block = world, block

    def forward(  # type: ignore[override]  # it has an input more
        self,
        input_ids: torch.Tensor,
        token_index: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_query_lens: torch.Tensor,
        block_table: torch.Tensor,
        state_index: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seed: torch.Tensor,
        rank: torch.Tensor,
        pages: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """As PackedDecoder's, of a CONTEXT_SERVING graph."""
        settings = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        table = sharing.served_table(block_table, positions.shape[0], self.block)
        orders = sharing.Orders(seq_lens, cu_query_lens.diff(), table, rank, self.world, self.block)
        named = zip(self.names, pages, strict=True)
        cache = Pages(named, seq_lens, cu_query_lens, block_table, state_index, self.cache, orders)
        return self.over(cache, input_ids.index_select(0, token_index), positions, last, settings)


def export_for_serving(
    model: torch.nn.Module,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    block: int = PAGE,
    fuse: bool = True,
    verify: bool = True,
    rope: str = "short",
    cache: CacheType | None = None,
    narrow_states: bool = False,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Writes model.onnx, leanfleet.json and, with a tokenizer, its files to `folder`; returns the ONNXProgram.

    model: what export_decoder takes. block: tokens of a page. fuse, verify, rope, cache, narrow_states, options: as for
    export_decoder.
    leanfleet.ort_ops.serving runs it. Raises what export_decoder raises, and ValueError for a model that carries something else
    than keys, values and states from call to call.

    Example:
        from transformers import AutoModelForCausalLM
        from leanfleet.export.serving import export_for_serving

        model = AutoModelForCausalLM.from_pretrained("llama")   # a folder, or a name on the Hugging Face hub
        export_for_serving(model, "exported")
    """
    module, arguments, shapes, names = _traced(model, block, cache, narrow_states)
    facts: Facts = {"kind": SERVING.kind, "block": block}
    facts |= cache_facts(cache)
    facts |= {"narrow_states": True} if narrow_states else {}
    with files.new_folder(folder, OPTIONAL_FILES) as new:
        program = write(module, arguments, shapes, new, facts, tokenizer, fuse, verify, rope, names | options)
        write_sampler(new, read_facts(new, SERVING)["vocabulary"])
    return program


def add_serving(
    model: torch.nn.Module,
    folder: str | Path,
    block: int = PAGE,
    fuse: bool = True,
    verify: bool = True,
    rope: str = "short",
    cache: CacheType | None = None,
    narrow_states: bool | None = None,
    **options: Any,
) -> None:
    """Adds serving.onnx to a folder that export_decoder wrote of the same model: the folder then serves ContinuousBatch and
    `leanfleet serve` too. Weights that model.onnx has in a file beside it are taken from there. A tensor parallel folder gets
    such a graph for each rank. Of a context parallel folder's pages each rank has its share: `block` tokens.

    Arguments and errors are those of export_for_serving, but narrow_states is as in the folder unless it is given. Where an
    error is raised, the folder serves what it did.

    Example:
        from transformers import AutoModelForCausalLM
        from leanfleet.export import export_decoder
        from leanfleet.export.serving import add_serving

        model = AutoModelForCausalLM.from_pretrained("llama")   # a folder, or a name on the Hugging Face hub
        export_decoder(model, "exported")
        add_serving(model, "exported")
    """
    folder = Path(folder)
    facts = read_facts(folder, DECODER, parallel=True)
    parallel = parallel_of(facts)
    shared = parallel.world if parallel is not None and parallel.kind == CONTEXT_PARALLEL else 1
    narrow_states = facts.get("narrow_states", False) if narrow_states is None else narrow_states
    own: dict[str, Any] = {"block": block * shared, "cache": None, "cache_scales": None, **cache_facts(cache)}
    own["narrow_states"] = narrow_states
    with ExitStack() as stack:
        graphs = []
        for rank in [None] if parallel is None or shared > 1 else range(parallel.world):
            with (
                nullcontext(cache)
                if rank is None or parallel is None
                else share_of_rank(model, cache, rank, parallel.world, facts.get("whole_experts", False))
            ) as its_cache:
                module, arguments, shapes, names = _traced(model, block, its_cache, narrow_states, shared)
                program, found = made(module, arguments, shapes, fuse, verify, rope, names | options)
            own |= found
            graphs.append(_Graph(stack, program.model, folder, rank))
        if verify:
            progress.tell("running the file and the model, to compare them")
            of_it = facts | found | {"kind": SERVING.kind, "block": own["block"]}
            paths = [graph.path for graph in graphs] * shared
            own["verified"] = (
                verification.verify(model, paths[0], of_it, rope, cache)
                if parallel is None
                else verification.verify_ranks(model, paths, of_it, rope, cache)
            )
        for graph in graphs:
            graph.finish()
    write_sampler(folder, own["vocabulary"])
    write_facts(folder, facts | {"serving": own})


class _Graph:
    """A SERVING graph, written beside the DECODER graph of the same weights; rank: of those for several. `stack` moves it
    to its place when it closes, and leaves nothing where it closes with an exception."""

    def __init__(self, stack: ExitStack, model: ir.Model, folder: Path, rank: int | None) -> None:
        theirs, name = (file if rank is None else rank_file(rank, file) for file in (MODEL_FILE, SERVING_FILE))
        self.folder, self.data = folder, f"{name}.data"
        self.part = folder / f"{self.data}.part"
        stack.callback(self.part.unlink, missing_ok=True)
        self.path = stack.enter_context(files.new_file(folder / name))
        self.outside = _take_weights(model, folder, theirs, self.part)
        ir.save(model, self.path)
        self.model = model if self.outside else None  # kept no longer than it is needed: it holds all weights

    def finish(self) -> None:
        """Weights of its own go to their file, which an earlier graph of this name may have used until here."""
        if self.model is None:
            return
        self.part.replace(self.folder / self.data)
        for value, tensor in self.outside:
            value.const_value = _placed(tensor, self.data, self.folder, value)
        ir.save(self.model, self.path)


def write_sampler(folder: Path, vocabulary: int) -> None:
    """Writes sampler.onnx, the SAMPLER graph for logits of this vocabulary."""
    types = {"float32": ir.DataType.FLOAT, "int32": ir.DataType.INT32, "int64": ir.DataType.INT64}
    sizes: dict[str, int | str] = {VOCABULARY: vocabulary, WORDS: words_of(vocabulary), str(TOP): TOP}

    def value(t: Tensor) -> ir.Value:
        shape = ir.Shape([sizes.get(name, name) for name in t.shape])
        return ir.Value(name=t.name, type=ir.TensorType(types[t.type]), shape=shape)

    inputs = {t.name: value(t) for t in SAMPLER.inputs}
    outputs = {t.name: value(t) for t in SAMPLER.outputs}
    bias, allowed = (ir.node("Gather", [inputs[name], inputs[COUNT_INDEX]]) for name in (BIAS, ALLOWED))
    op = spec.all_specs()["SampleTokens"]
    given = inputs | {"position": inputs[SEQ_LENS], "logit_bias": bias.outputs[0], ALLOWED: allowed.outputs[0]}
    made = outputs | {"tokens": outputs[NEXT_TOKENS]}
    sample = ir.Node(
        spec.DOMAIN,
        op.name,
        [given.get(t.name) for t in op.inputs],
        [ir.AttrInt64("count_tokens", 1), ir.AttrInt64("logprob", 1), ir.AttrInt64("num_logprobs", TOP)],
        outputs=[made[t.name] for t in op.outputs],
        version=op.version,
    )
    opsets = {"": function_bodies.DEFAULT_OPSET, spec.DOMAIN: spec.OPSET_VERSION}
    graph = ir.Graph(
        list(inputs.values()), list(outputs.values()), nodes=[bias, allowed, sample], opset_imports=opsets, name="sampler"
    )
    ir.save(function_bodies.attach(ir.Model(graph, ir_version=10)), folder / SAMPLER_FILE)


def _take_weights(model: ir.Model, folder: Path, file: str, part: Path) -> list[tuple[ir.Value, ir.ExternalTensor]]:
    """Weights that the folder's `file` has outside it become references to the same; other large ones go to the file `part`.
    Returns the latter."""
    theirs: dict[tuple[Any, ...], list[ir.ExternalTensor]] = {}
    for value in ir.load(folder / file).graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            theirs.setdefault(_content(value.const_value), []).append(value.const_value)
    own = []
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < _SMALL:
            continue
        found = next((t for t in theirs.get(_content(tensor), ()) if t.tobytes() == tensor.tobytes()), None)
        if found is not None:
            value.const_value = _placed(found, str(found.location), folder, value)
        else:
            own.append((value, tensor))
    if sum(tensor.nbytes for _, tensor in own) <= INSIDE:
        return []
    outside = convert_tensors_to_external([tensor for _, tensor in own], folder, part.name)
    for (value, _), tensor in zip(own, outside, strict=True):
        value.const_value = tensor
    return [(value, tensor) for (value, _), tensor in zip(own, outside, strict=True)]


def _placed(tensor: ir.ExternalTensor, location: str, folder: Path, value: ir.Value) -> ir.ExternalTensor:
    """The same bytes of a file, for a value of its own name and shape."""
    assert value.const_value is not None
    shape = ir.Shape(value.const_value.shape.numpy())
    return ir.ExternalTensor(
        location, tensor.offset, tensor.length, tensor.dtype, shape=shape, name=value.name or "", base_dir=folder
    )


def _content(tensor: ir.TensorProtocol) -> tuple[Any, ...]:
    """Equal for tensors of equal bytes, whatever their names and shapes, and hardly ever for others."""
    return tensor.dtype, tensor.nbytes, zlib.crc32(tensor.tobytes())


def _one_state(shapes: Shapes) -> Shapes:
    """These caches with one state in place of the sums of each normalised layer: those of rows (1, k) and (v, 1)."""
    found = {name: told for name, told in shapes.items() if not (is_part(name, KEY_SUM) or is_part(name, VALUE_SUM))}
    for name in (name for name in shapes if is_part(name, KEY_SUM)):
        state = name.removesuffix(KEY_SUM) + STATE
        dtype, (batch, heads, *sizes) = shapes[state]
        found[state] = (dtype, (batch, heads, *(int(n) + 1 for n in sizes)))
    return found


def _traced(
    model: Any, block: int, cache: CacheType | None, narrow_states: bool, world: int = 1
) -> tuple[PackedDecoder, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """(module, example inputs, dynamic shapes, names of inputs and outputs) of a model's SERVING graph. world: above 1: of its
    CONTEXT_SERVING graph."""
    model = model.eval()
    if not hasattr(model, "cache_shapes"):
        check_supported(model)
    caches = _one_state(cache_shapes(model, cache, narrow_states))
    parts = KEY, VALUE, KEY_SCALE, VALUE_SCALE
    if unknown := [name for name in caches if not is_state(name) and not any(is_part(name, part) for part in parts)]:
        raise ValueError(
            f"{type(model).__name__}: it carries {unknown[0]} from call to call; export_for_serving has pools for a layer's "
            f"{KEY}, {VALUE} and {STATE} alone. Use export_decoder"
        )
    batch, table, sizes = 2, 4, {POOL: 9, STATES: 5}
    example = {
        name: torch.from_numpy(array)
        for name, array in packed(
            [[1, 1, 1], [1, 1]],
            [0, 0],
            [range(i * table, (i + 1) * table) for i in range(batch)],
            earlier=2,
            states=range(batch),
            wanted=[2, 1],
        ).items()
    }
    pools = {name: pool_shape(name, shape, block) for name, (_, shape) in caches.items()}
    pages = [torch.zeros(sizes[shape[0]], *shape[1:], dtype=caches[name][0]) for name, shape in pools.items()]
    dims = {name: torch.export.Dim(name, min=1) for name in (KNOWN, TOKENS, BATCH, ENDS, TABLE, POOL, STATES, WANTED)}
    interface = SERVING if world == 1 else CONTEXT_SERVING
    if world > 1:
        example[RANK] = torch.zeros(1, dtype=torch.int32)
    shapes: dict[str, Any] = {t.name: {axis: dims[n] for axis, n in enumerate(t.shape) if n in dims} for t in interface.inputs}
    shapes["pages"] = [{0: dims[shape[0]]} for shape in pools.values()]
    names = {"input_names": interface.input_names(caches), "output_names": interface.output_names(caches)}
    module = (
        PackedDecoder(model, caches, cache)
        if world == 1
        else SharingPackedDecoder(model, caches, cache, world=world, block=block)
    )
    return module.eval(), (*example.values(), pages), shapes, names
