"""Is an exported decoder right? Its file, run by ONNX Runtime on the CPU, against the PyTorch model that it was made of.

Three requests of random tokens run as a ragged batch that they join one after the other, one of them in two pieces and one with
a pause, and then the longest alone: a prompt and decode steps. What follows a prompt is given, not generated, so that every
logit can be compared with that of one pass of the model over the whole request, in float64 and without a cache. The bound comes
from there too: the model itself, in its own type, is off by so much. Where caches are quantised the model's keys and values are
rounded as the caches round them. A bfloat16 file is checked as float32, with bfloat16's bound, because CPUs have no kernels for
bfloat16; quantised products with activations that are not rounded to 8 bits.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from leanfleet import ort_library, ranks
from leanfleet.export import blocks
from leanfleet.export.quantised_caches import CacheType, emulated
from leanfleet.export.scheduled_calls import STEPS, open_session, prompts, run_schedule
from leanfleet.export.support import fixed_rotary, implementation, linear_layers_of

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
        return compare(model, open_session(file), facts, rope, cache)


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
            program = "import sys; from leanfleet.export import scheduled_calls; scheduled_calls.run_rank(*sys.argv[1:])"
            command = ranks.python("-c", program, str(folder))
            ranks.launch(command, len(paths), environment={"CUDA_VISIBLE_DEVICES": ""}, seconds=RANKS_SECONDS)
            with np.load(folder / "found.npz") as said:
                places, rows = (said[name] for name in said.files)
                return [(*place, logits) for place, logits in zip(json.loads(str(places)), rows, strict=True)]

        return judge_found(model, found, facts, rope, cache)


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
    return judge_found(model, lambda tokens: run_schedule(session, facts, tokens), facts, rope, cache)


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
        if not all(np.isfinite(rows).all() for rows in judge):
            raise VerificationError(
                f"{type(model).__name__}: nothing was written, as the PyTorch model itself gives logits that are not finite: "
                f"look for weights that are not, and for numbers beyond {getattr(model, 'dtype', torch.float32)}; verify=False "
                "(leanfleet export --no-verify) writes the file anyway"
            )
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
    return [random.choice(plain, min(n, longest) + STEPS) for n in prompts(facts)]


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
