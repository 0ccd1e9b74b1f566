"""Is an exported decoder right? Its file, run by ONNX Runtime on the CPU, against the PyTorch model that it was made of.

Three requests of random tokens run as a ragged batch that they join one after the other, one of them in two pieces and one with
a pause, and then the longest alone: a prompt and decode steps. What follows a prompt is given, not generated, so that every
logit can be compared with that of one pass of the model over the whole request, in float64 and without a cache. The bound comes
from there too: the model itself, in its own type, is off by so much. Where caches are quantised the model's keys and values are
rounded as the caches round them. A bfloat16 file is checked as float32, with bfloat16's bound, because CPUs have no kernels for
bfloat16; quantised products with activations that are not rounded to 8 bits.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from leanfleet import model_file, ort_library, ranks, trial
from leanfleet.decoder_contract import (
    BATCH,
    CAPACITY,
    CONTEXT,
    CONTEXT_PARALLEL,
    CONTEXT_SERVING,
    DECODER,
    POOL,
    RANK,
    SERVING,
    SESSION_TYPES,
    WORLD,
    context_pages,
    context_table,
    decoder_interface,
    is_state,
    packed,
    serving_interface,
)
from leanfleet.export import blocks
from leanfleet.export.quantised_caches import CacheType, emulated
from leanfleet.export.support import fixed_rotary, implementation, linear_layers_of

PROMPTS, STEPS = (1, 6, 17), 4
FACTOR, ROUNDINGS = 4, 4  # bound: so many times what PyTorch loses, and so many roundings of the largest logit
RANKS_SECONDS = 600.0  # that ranks may take for the schedule
_remembered: dict[Any, Any] | None = None  # of `once`
TRIES = 3  # two experts that are nearly equally likely may change places: a fault shows with any tokens


class VerificationError(RuntimeError):
    """An exported file does not compute what the model does."""


def verify(
    model: torch.nn.Module, path: str | Path, facts: Mapping[str, Any], rope: str = "short", cache: CacheType | None = None
) -> dict[str, Any]:
    """Compares the file `path` with its model; returns {"largest_difference", "bound"}, or {"skipped": why}.

    facts: what leanfleet.json says. rope: see support.most_positions. cache: the type of caches, where it is not the model's.
    Raises VerificationError.
    """
    if why := _obstacle(model):
        return {"skipped": why}
    with _checkable(Path(path), model) as file:
        return compare(model, _session(file), facts, rope, cache)


@contextmanager
def _checkable(path: Path, model: torch.nn.Module) -> Iterator[Path]:
    """The file, or one in its place that computes the same as exactly as a CPU can: in float32 where it is in bfloat16, with
    activations as they are where its quantised products round them."""
    narrow = any(t.dtype == torch.bfloat16 for t in (*model.parameters(), *model.buffers()))
    if not narrow and not blocks.holders(model):
        yield path
        return
    other = path.with_name(f"verified.{path.name}")  # beside the weights
    try:
        found = ir.load(path)
        changed = blocks.multiply_exactly(found)
        if as_float32(found):
            ir.save(found, other, external_data=f"{other.name}.data")
        else:
            ir.save(found, other)
        yield other if changed or narrow else path
    finally:
        other.unlink(missing_ok=True)
        other.with_name(f"{other.name}.data").unlink(missing_ok=True)


def verify_ranks(
    model: torch.nn.Module, paths: Sequence[Path], facts: Mapping[str, Any], rope: str = "short", cache: CacheType | None = None
) -> dict[str, Any]:
    """As verify, of a decoder for several ranks, which run together, a process each. paths: each one's file, maybe the same."""
    if why := _obstacle(model) or _no_library():
        return {"skipped": why}
    with ExitStack() as stack:
        checkable = {path: stack.enter_context(_checkable(path, model)) for path in dict.fromkeys(paths)}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leanfleet-verify-")))

        def found(tokens: list[np.ndarray]) -> list[tuple[str, int, int, np.ndarray]]:
            chosen = [str(checkable[path].resolve()) for path in paths]
            task = {"files": chosen, "facts": facts, "tokens": [t.tolist() for t in tokens]}
            (folder / "task.json").write_text(json.dumps(task))
            program = "import sys; from leanfleet.export import verification; verification.run_rank(*sys.argv[1:])"
            command = ranks.python("-c", program, str(folder))
            ranks.launch(command, len(paths), environment={"CUDA_VISIBLE_DEVICES": ""}, seconds=RANKS_SECONDS)
            with np.load(folder / "found.npz") as said:
                places, rows = (said[name] for name in said.files)
                return [(*place, logits) for place, logits in zip(json.loads(str(places)), rows, strict=True)]

        return judge_found(model, found, facts, rope, cache)


def run_rank(folder: str) -> None:
    """What a process of verify_ranks does: the schedule with its rank's file; rank 0 writes the logits down."""
    ranks.end_with_parent()
    task, here = json.loads((Path(folder) / "task.json").read_text()), ranks.place()
    assert here is not None
    threads = max(1, (os.cpu_count() or 1) // here.world)
    with ranks.join(WORLD, "shared_memory"):
        session = _session(Path(task["files"][here.rank]), threads)
        found = _found(session, task["facts"], [np.array(t, np.int64) for t in task["tokens"]], here.rank)
    if here.rank == 0:
        places, logits = [place for *place, _ in found], np.stack([logits for *_, logits in found])
        with open(Path(folder) / "found.npz", "wb") as file:
            np.savez(file, np.array(json.dumps(places)), logits)


def _no_library():
    """Why ranks cannot run here, or None."""
    try:
        ort_library.get_library_path()
    except FileNotFoundError as error:
        return str(error)
    return None


def compare(
    model: torch.nn.Module, session: Any, facts: Mapping[str, Any], rope: str = "short", cache: CacheType | None = None
) -> dict[str, Any]:
    """As verify, of a session: an object with onnxruntime's get_inputs() and run()."""
    return judge_found(model, lambda tokens: _found(session, facts, tokens), facts, rope, cache)


def judge_found(
    model: torch.nn.Module,
    found: Callable[[list[np.ndarray]], list[tuple[str, int, int, np.ndarray]]],
    facts: Mapping[str, Any],
    rope: str = "short",
    cache: CacheType | None = None,
) -> dict[str, Any]:
    """As verify. found: runs the schedule with these requests; [(phase, request, position, logits)]."""
    for seed in range(TRIES):
        tokens = _tokens(model, facts, seed)
        try:
            judge, loses = _expected(model, tokens, rope, cache)
        except TypeError as error:  # a model of one's own that runs over caches alone
            if not hasattr(model, "cache_shapes"):
                raise
            return {"skipped": f"{type(model).__name__} does not run without caches ({error})"}
        scale = max(np.abs(rows).max() for rows in judge)
        bound = FACTOR * loses + ROUNDINGS * torch.finfo(getattr(model, "dtype", torch.float32)).eps * scale
        errors = [
            (np.abs(logits.astype(np.float64) - judge[request][position]).max(), phase, position)
            for phase, request, position, logits in found(tokens)
        ]
        worst, phase, position = max(errors, key=lambda e: np.nan_to_num(e[0], nan=np.inf))
        if worst <= bound:  # NaN is not
            return {"largest_difference": float(worst), "bound": float(bound)}
    raise VerificationError(
        f"{type(model).__name__}: the exported file is wrong, and nothing was written: {phase}, at position {position} of a "
        f"request, its logits differ from PyTorch's by {worst:.2e}, where the model's own error in its type allows {bound:.2e} "
        f"(largest logit {scale:.1f}). Please report it; verify=False (leanfleet export --no-verify) writes the file anyway"
    )


def _obstacle(model):
    """Why a model cannot be verified here, or None."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return "onnxruntime is missing: pip install 'leanfleet[ort]'"
    weights = sum(t.numel() * t.element_size() for t in model.parameters())
    layer = max(sum(t.numel() for t in unit.parameters()) for unit in _units(model))
    held = {m.block_name: m.blocks for m in blocks.holders(model)}.values()
    weights += sum(b.packed.nbytes for b in held)
    layer = max([layer, *(2 * b.shape[0] * b.shape[1] for b in held)])
    needed = weights + 8 * layer  # those of the file, and of a layer in float64
    free = _free_memory()
    if free is not None and needed > 0.8 * free:
        return f"running the file and the model needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
    return None


def _free_memory():
    """Bytes that this process may still take, or None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _tokens(model, facts, seed):
    """Random requests, prompts and what follows them, int64 arrays; tokens that have a meaning are left out."""
    config = model.config
    special = {
        value
        for c in {id(c): c for c in (config, getattr(config, "text_config", config))}.values()
        for name, value in vars(c).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    plain = np.array([t for t in range(facts["vocabulary"]) if t not in special] or range(facts["vocabulary"]))
    random = np.random.default_rng(seed)
    longest = max(1, (facts["max_positions"] or 10**9) - STEPS)
    return [random.choice(plain, min(n, longest) + STEPS) for n in _prompts(facts)]


def _prompts(facts):
    """Tokens of the requests' prompts. Where blocks of tokens are shared out one goes on into the next block, one has three."""
    if decoder_interface(facts) is not CONTEXT:
        return PROMPTS
    block = facts[CONTEXT_PARALLEL]["block"]
    return PROMPTS[0], block - STEPS // 2, 2 * block + PROMPTS[2]


@contextmanager
def once() -> Iterator[None]:
    """In this block a model computes once what is expected of all its files; its weights have to stay as they are."""
    global _remembered
    before, _remembered = _remembered, {}
    try:
        yield
    finally:
        _remembered = before


def _expected(model, tokens, rope, cache=None):
    """(logits of every position of every request in float64, what the model loses in its own type)."""
    if _remembered is None:
        return _computed(model, tokens, rope, cache)
    key = id(model), rope, cache, b"".join(t.tobytes() for t in tokens)
    if key not in _remembered:
        _remembered[key] = _computed(model, tokens, rope, cache)
    return _remembered[key]


def _computed(model, tokens, rope, cache):
    """As _expected, anew."""
    ours = hasattr(model, "cache_shapes")
    longest = max(map(len, tokens))
    batch = torch.from_numpy(np.stack([np.pad(t, (0, longest - len(t)), "edge") for t in tokens]))  # causal: padding harms none
    experts = not ours and model._can_set_experts_implementation() and model.get_experts_implementation()

    def logits():
        rows = model(input_ids=batch, use_cache=False).logits.double().numpy()
        return [row[: len(t)] for row, t in zip(rows, tokens, strict=True)]

    with (
        emulated(model, cache)
        if cache
        else nullcontext()
        if ours or linear_layers_of(model)
        else implementation(model, "eager"),
        fixed_rotary(model, rope) if rope == "long" else nullcontext(),
        torch.no_grad(),
    ):
        try:
            if experts:
                model.set_experts_implementation("eager")
            own = logits()
            with in_double(model):
                judge = logits()
        finally:
            if experts:
                model.set_experts_implementation(experts)
    return judge, max(np.abs(a - b).max() for a, b in zip(own, judge, strict=True))


def _units(model):
    """The modules that are widened one at a time: layers of a list, and what stands outside of them with weights of its own."""
    found = []

    def visit(module):
        for child in module.children():
            if isinstance(module, torch.nn.ModuleList) or not list(child.children()):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found or [model]


@contextmanager
def in_double(model: torch.nn.Module) -> Iterator[None]:
    """A model that computes in float64. A layer's weights are wide while it runs, so that no more than those take memory."""
    units = _units(model)
    inside = {id(t) for unit in units for t in (*unit.parameters(), *unit.buffers())}
    before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def widen(tensors):
        for t in tensors:
            if t.is_floating_point() and t.dtype != torch.float64:
                before.append((t, t.data))
                t.data = t.data.double()

    def narrow(count=0):
        while len(before) > count:
            t, data = before.pop()
            t.data = data

    def enter(module, arguments):
        """Some models cast what they hand to their head to its type, which is still the narrow one."""
        widen((*module.parameters(), *module.buffers()))
        return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments)

    widen(t for t in (*model.parameters(), *model.buffers()) if id(t) not in inside)
    outside, hooks = len(before), []
    for unit in units:
        hooks.append(unit.register_forward_pre_hook(enter))
        hooks.append(unit.register_forward_hook(lambda *_: narrow(outside)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        narrow()


def _schedule(prompts):
    """[(phase, [{request: new tokens}, ...])]: calls, one phase after the other, each over caches of its own."""
    first, second, third = prompts
    part = third // 2
    together = [
        {0: first, 2: part},
        {0: 1, 1: second, 2: third - part},
        {0: 1, 1: 1, 2: 1},
        {0: 1, 2: 1},
        {0: 1, 1: 1, 2: 1},
        {1: 1, 2: 1},
        {1: 1},
    ]
    return [("in a ragged batch", together), ("alone", [{2: third}] + [{2: 1}] * STEPS)]


def _found(session, facts, tokens, rank=0):
    """[(phase, request, position, logits)] of a session."""
    found = []
    for phase, calls in _schedule(_prompts(facts)):
        kind = _Pages if facts.get("kind") == SERVING.kind else _Shares if decoder_interface(facts) is CONTEXT else _Batch
        caches = kind(session, facts, len(tokens), rank)
        seen = [0] * len(tokens)
        for call in calls:
            new = {request: tokens[request][seen[request] : seen[request] + count] for request, count in call.items()}
            new = {request: row for request, row in new.items() if len(row)}  # a model of few positions has shorter ones
            for request, logits in (caches.run(new, seen) if new else {}).items():
                seen[request] += len(new[request])
                found.append((phase, request, seen[request] - 1, logits))
    return found


def _session(path, threads=0):
    """A session on the CPU: with the library, or without where it is missing. threads: 0: as many as the machine has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    with suppress(FileNotFoundError):
        ort_library.register(options)
        model_file.check(str(path))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class _Batch:
    """Calls of a graph of export_decoder over caches of a batch. Requests without new tokens are rows of padding."""

    def __init__(self, session, facts, batch, rank):
        self.session, self.batch, self.interface = session, batch, decoder_interface(facts)
        sizes = self.sizes(facts, max(_prompts(facts)) + STEPS + 3)
        self.caches = {}
        for entry in session.get_inputs():
            if DECODER.is_cache(entry.name):
                shape, dtype = [sizes.get(n, n) for n in entry.shape], _NUMPY[entry.type]
                state = not {CAPACITY, POOL} & set(entry.shape) or dtype == np.int32
                self.caches[entry.name] = np.zeros(shape, dtype) if state else _unwritten(shape, dtype)

    def sizes(self, facts, capacity):
        """{dimension: size} of the caches."""
        return {BATCH: self.batch, CAPACITY: capacity}

    def more(self, tokens):
        """What a call of so many tokens takes beside tokens and lengths."""
        return ()

    def run(self, new, seen):
        """{request: logits of its last new token}. new: {request: tokens}; seen: how many tokens of each came before."""
        counts = np.array([len(new.get(r, ())) for r in range(self.batch)], np.int32)
        ids = np.zeros((self.batch, counts.max()), np.int64)
        for request, row in new.items():
            ids[request, : len(row)] = row
        lens = np.array(seen, np.int32) + counts
        feed = self.interface.feed(ids, lens, counts, *self.more(ids.shape[1])) | self.caches
        logits, *caches = trial.run_session(self.session, feed, widen=False).values()
        self.caches = dict(zip(self.caches, caches, strict=True))
        return {r: logits[r] if logits.ndim == 2 else logits[r, counts[r] - 1] for r in new}


class _Shares(_Batch):
    """The same of one rank of a context parallel decoder, over its pools."""

    def __init__(self, session, facts, batch, rank):
        self.rank = np.array([rank], np.int32)
        super().__init__(session, facts, batch, rank)

    def sizes(self, facts, capacity):
        shares = facts[CONTEXT_PARALLEL]
        self.block, self.pages = shares["block"], context_pages(capacity, **shares)
        return {POOL: self.batch * self.pages}

    def more(self, tokens):
        return context_table(self.batch, self.pages, tokens, self.block), self.rank


class _Pages:
    """Calls of a graph of export_for_serving over a pool of pages."""

    def __init__(self, session, facts, batch, rank):
        self.session, self.block = session, facts["block"]
        self.rank = {RANK: np.array([rank], np.int32)} if serving_interface(facts) is CONTEXT_SERVING else {}
        self.table = -(-(max(_prompts(facts)) + STEPS) // self.block)
        self.order = np.random.default_rng(0).permutation(batch * self.table).reshape(batch, self.table).astype(np.int32)
        caches = [i for i in session.get_inputs() if SERVING.is_cache(i.name)]
        self.pools = {}
        for i in caches:
            state = is_state(i.name)  # one row more than there are requests, which nobody writes
            dtype = _NUMPY[i.type]
            if state:
                self.pools[i.name] = np.zeros([batch + 1, *i.shape[1:]], dtype)
            else:
                self.pools[i.name] = _unwritten([self.order.size, *i.shape[1:]], dtype)

    def run(self, new, seen):
        """As _Batch.run."""
        feed = packed(list(new.values()), [seen[r] for r in new], self.order[list(new)], states=list(new)) | self.rank
        logits, *others = trial.run_session(self.session, feed | self.pools, widen=False).values()
        self.pools = dict(zip(self.pools, others[len(SERVING.outputs) - 1 :], strict=True))
        return dict(zip(new, logits, strict=True))


def _unwritten(shape, dtype):
    """What a cache holds before tokens come: nothing that could be taken for numbers."""
    return np.full(shape, {np.dtype(np.int8): -128, np.dtype(np.uint8): 0}.get(dtype, np.nan), dtype)


_NUMPY = {SESSION_TYPES[name]: np.dtype(name) for name in ("float32", "float16", "int32", "int64", "int8", "uint8")}
_NUMPY[SESSION_TYPES["float8e4m3fn"]] = trial.FLOAT8


def as_float32(model: ir.Model) -> bool:
    """Turns every bfloat16 value of an onnx_ir.Model into float32. Returns whether there was one."""
    narrow, wide = ir.DataType.BFLOAT16, ir.DataType.FLOAT
    changed = False

    def widened(tensor):
        return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)

    def widen(value):
        nonlocal changed
        if value is None:
            return
        if value.dtype == narrow:
            value.dtype, changed = wide, True
        if value.const_value is not None and value.const_value.dtype == narrow:
            value.const_value, changed = widened(value.const_value), True

    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for value in (*graph.inputs, *getattr(graph, "initializers", {}).values()):
            widen(value)
        for node in ir.traversal.RecursiveGraphIterator(graph):
            for value in node.outputs:
                widen(value)
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == narrow:
                    node.attributes[name], changed = ir.AttrTensor(name, widened(attribute.value)), True
                elif (
                    attribute.type == ir.AttributeType.INT
                    and name in ("to", "dtype", "output_dtype")
                    and attribute.value == narrow
                ):
                    node.attributes[name], changed = ir.AttrInt64(name, int(wide)), True
    return changed
