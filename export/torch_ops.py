"""torch.ops.leanfleet.*: every operator of ops.toml as PyTorch operators, with fakes and autograd.

For each operator there is a functional form, which is what exports, and, where an output may take an input's buffer,
a mutating form with a trailing underscore for eager use: its attribute ops.toml calls `mutating` is on, the inputs
so taken are changed in place, and the outputs that took them are not returned.

The raw operators return a fixed number of tensors, as PyTorch demands: one that the attributes do not ask for comes
as a tensor of shape [0]. The functions of this module (lean_attention, causal_linear_decay, ...) return just the outputs
asked for: a tensor where it is one, else a tuple.
"""

import ctypes
import functools
import inspect
import itertools
import math
import os
import threading
from typing import NamedTuple

import torch
from torch._C import DispatchKey
from torch.autograd import forward_ad

from leanfleet import native, spec
from leanfleet.export import reference, torch_autograd

_DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8e4m3fn",
    torch.uint8: "uint8",
}
_TYPES = {"bool": bool, "int": int, "float": float, "string": str}
_ALIGNMENT = 256  # bytes; what the library expects of workspace addresses
_LIBRARY = torch.library.Library(spec.DOMAIN, "DEF")
# Operators of the same schemas, by Python and ctypes: what the compiled kernels do not compute goes there.
_FALLBACK = f"{spec.DOMAIN}_python"
_FALLBACK_LIBRARY = torch.library.Library(_FALLBACK, "DEF")
_DEVICE_KEYS = {DispatchKey.CPU: "cpu", DispatchKey.CUDA: "cuda"}
_MOST_ELEMENTS = 2**47  # of a tensor, kMaxElements in csrc/core/op.h
_MAX_PLANS = 512  # kept by a thread; a cache whose capacity grows with every token makes a new one each time
# Launches on one stream follow each other and leave the buffer zero.
_sync_words: dict[tuple, torch.Tensor] = {}  # (device, stream) -> zeroed buffer


def _schema(op, mutating):
    """The operator's schema in PyTorch's notation."""
    taken = {t.takes for t in op.outputs if t.takes} if mutating else set()
    last_required = max(i for i, t in enumerate(op.inputs) if not t.optional)
    arguments = []
    for i, t in enumerate(op.inputs):
        alias = f"({chr(ord('a') + i)}!)" if t.name in taken else ""
        default = "=None" if t.optional and i > last_required else ""
        arguments.append(f"Tensor{alias}{'?' if t.optional else ''} {t.name}{default}")
    arguments.append("*")
    for attr in op.attrs:
        if not (mutating and attr.name == op.mutating):
            default = f'"{attr.default}"' if attr.type == "string" else attr.default
            arguments.append(f"{_TYPES[attr.type].__name__} {attr.name}={default}")
    returns = ["Tensor" for t in op.outputs if not (mutating and t.takes)]
    result = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    return f"{op.snake_name}{'_' if mutating else ''}({', '.join(arguments)}) -> {result}"


def _output_metadata(op, inputs, attrs):
    """[(dtype, shape)] of all outputs; shape (0,) for those that the attributes do not ask for.

    Sizes may be symbolic. Only what is needed to name them is checked: the library checks the rest at run time.
    """
    layout = attrs.get("layout", "bhnd")
    given = op.given((t.name for t, tensor in zip(op.inputs, inputs) if tensor is not None), attrs)
    sizes = []
    for t, tensor in zip(op.inputs, inputs):
        if tensor is None:
            continue
        shape = op.shape_of(t, given, tensor.dim())
        if shape is None:
            expected = " or ".join(str(s) for s in t.shapes)
            raise ValueError(f"{op.name}: {t.name} has shape {list(tensor.shape)}, rank {tensor.dim()}; expected {expected}")
        sizes += zip(shape.ordered(layout), spec.in_numbers(tensor.shape, tensor.dtype))
    dims = spec.sizes_of(sizes)
    for name, size in op.attr_sizes(attrs).items():
        if size < 0:
            raise ValueError(f"{op.name}: attribute {name} is {size}; expected 0 or more")
        dims[name] = size
    for axis, size in sizes:
        if not axis.plus or not isinstance(size, int):
            continue
        if not axis.times and isinstance(wanted := axis.size(dims), int) and size != wanted:
            name = next(t.name for t in op.inputs for s in t.shapes if axis in s.axes)
            sizes_of = " and ".join(f"{symbol} = {dims[symbol]}" for symbol in (axis.symbol, axis.plus))
            raise ValueError(f"{op.name}: {name}'s axis {axis} is {size}; expected {wanted}, because {sizes_of}")
        if axis.times and size < (least := axis.size({**dims, axis.symbol: 1})):
            name = next(t.name for t in op.inputs for s in t.shapes if axis in s.axes)
            raise ValueError(
                f"{op.name}: {name}'s axis {axis} is {size}; expected at least {least}, because {axis.plus} = {dims[axis.plus]}"
            )
    active = {t.name for t in op.active_outputs(attrs)}
    real = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    input_types = {t.name: tensor.dtype for t, tensor in zip(op.inputs, inputs) if tensor is not None}
    metadata = []
    for t in op.outputs:
        dtype = t.dtype(inputs[0].dtype, {"F": real, "I": torch.int32, "L": torch.int64}, input_types)
        if t.name not in active:
            shape = (0,)
        elif t.like:
            shape = tuple(inputs[[i.name for i in op.inputs].index(t.like)].shape)
            if t.repeats:
                shape = (shape[0] * int(attrs.get(t.repeats, op.attr(t.repeats).default)), *shape[1:])
        else:
            shape = tuple(spec.in_elements((axis.size(dims) for axis in op.shape_of(t, given).ordered(layout)), dtype))
        metadata.append((dtype, shape))
    return metadata


def _checked_metadata(op, inputs, attrs):
    """_output_metadata for real tensors: where it fails, the library's own check says what is wrong, and better."""
    try:
        metadata = _output_metadata(op, inputs, attrs)
        if any(size < 0 for _, shape in metadata for size in shape):
            raise ValueError(f"{op.name}: an input is empty")
        if any(math.prod(shape) > _MOST_ELEMENTS for _, shape in metadata):
            raise ValueError(f"{op.name}: an output has more than 2^47 elements")
        return metadata
    except (ValueError, AttributeError, KeyError):
        native.Call(op.name, [_entry(t) for t in inputs], [], attrs).workspace()
        raise


def _check_placement(op, inputs):
    device = inputs[0].device
    for t, tensor in zip(op.inputs, inputs):
        if tensor is None:
            continue
        if tensor.device != device:
            raise ValueError(
                f"{op.name}: {t.name} is on {tensor.device}, {op.inputs[0].name} on {device}; "
                "all tensors of a call must be on one device"
            )
        if tensor.dtype not in _DTYPES:
            own = spec.TYPES["T"] if t.type in spec.OWN else ()
            types = tuple(dict.fromkeys((*own, *spec.TYPES[t.type])))
            expected = " or ".join(filter(None, (", ".join(types[:-1]), types[-1])))
            raise ValueError(f"{op.name}: {t.name} has type {str(tensor.dtype).removeprefix('torch.')}; expected {expected}")


def _entry(tensor):
    return None if tensor is None else (tensor.data_ptr(), tuple(tensor.shape), _DTYPES[tensor.dtype])


def _scratch(size, device):
    buffer = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=device)
    return buffer, (buffer.data_ptr() + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _sync(size, device, stream):
    """Zeroed sync words for a launch on `stream`. In a CUDA graph they are zeroed by a node of the graph; on the CPU, where
    threads have no streams to themselves, each call has its own."""
    if size == 0:
        return None
    if device.type == "cpu" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(size + _ALIGNMENT, dtype=torch.uint8, device=device)
    key = (device, stream)
    if key not in _sync_words or _sync_words[key].numel() < size + _ALIGNMENT:
        _sync_words[key] = torch.zeros(size + _ALIGNMENT, dtype=torch.uint8, device=device)
    return _sync_words[key]


def _run_reference(op, inputs, attrs):
    """float64 has no kernel: the PyTorch reference computes it, which makes gradcheck possible."""
    function = getattr(reference, op.snake_name)
    accepted = {a.name: attrs.get(a.name, a.default) for a in op.attrs if not a.refuse}
    values = dict(zip((t.name for t in op.active_outputs(attrs)), function(*inputs, **accepted)))
    return [values.get(t.name, inputs[0].new_empty(0)) for t in op.outputs]


class _Output(NamedTuple):
    shape: tuple
    strides: tuple
    dtype: torch.dtype
    nothing: torch.Tensor | None  # of shape [0], where the output is not asked for
    taken: int | None  # index of the input whose buffer it takes


class _Plan(NamedTuple):
    """What calls of one form with equal shapes, types, strides and attributes share; addresses change from call to call."""

    call: native.Call
    slots: list
    outputs: list[_Output]
    copies: bool  # some input is not contiguous
    scratch_bytes: int
    sync_bytes: int


class _Plans(threading.local):
    """A thread's plans by key: a plan is written to by the call that uses it."""

    def __init__(self):
        self.by_key = {}


_plans = _Plans()


def _check_taken(op, taken, by_name):
    for name in taken:
        tensor = by_name[name]
        if tensor is None:
            raise ValueError(f"{op.name}: input {name} is missing; {op.snake_name}_ changes it in place")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op.name}: {name} has strides {list(tensor.stride())}; {op.snake_name}_ changes it "
                "in place, so it must be contiguous"
            )


def _make_plan(op, mutating, inputs, attrs, threads):
    """Checks a call and plans it and its like. None: float64, which the reference computes."""
    inputs = list(inputs) + [None] * (len(op.inputs) - len(inputs))
    active = {t.name for t in op.active_outputs(attrs)}
    names = [t.name for t in op.inputs]
    if mutating:
        _check_taken(op, [t.takes for t in op.outputs if t.takes and t.name in active], dict(zip(names, inputs)))
    if inputs[0].dtype == torch.float64:
        return None
    _check_placement(op, inputs)
    copies = any(t is not None and not t.is_contiguous() for t in inputs)
    metadata = _checked_metadata(op, inputs, attrs)
    outputs, entries = [], []
    for t, (dtype, shape) in zip(op.outputs, metadata):
        asked = t.name in active
        with torch.inference_mode(False):  # the plan may serve calls outside of inference mode
            nothing = None if asked else torch.empty(0, dtype=dtype, device=inputs[0].device)
        strides = torch.empty(shape, device="meta").stride()
        outputs.append(_Output(shape, strides, dtype, nothing, names.index(t.takes) if mutating and t.takes else None))
        entries.append((0, shape, _DTYPES[dtype]) if asked else None)
    call = native.Call(op.name, [_entry(t) for t in inputs], entries, attrs, inputs[0].device.type, threads)
    return _Plan(call, call.slots(), outputs, copies, *call.workspace())


def _refuse_tangents(op, inputs):
    """PyTorch would drop them without a word."""
    if forward_ad._current_level < 0:
        return
    if any([t is not None and forward_ad.unpack_dual(t).tangent is not None for t in inputs]):
        raise NotImplementedError(
            f"{op.name} has no forward-mode derivative (torch.func.jvp, dual tensors); reverse mode, "
            "backward() and torch.autograd.grad, is there where it has gradients"
        )


def _runner(op, mutating, device_type):
    """The kernel of one form on "cpu" or "cuda"."""
    form = op.snake_name + ("_" if mutating else "")
    cuda = device_type == "cuda"

    def run(*inputs, **attrs):
        if inputs[0] is None:  # the dispatcher takes None for a tensor
            raise ValueError(f"{op.name}: input {op.inputs[0].name} is missing")
        device = inputs[0].device
        threads = 0 if cuda else torch.get_num_threads()
        key = [form, device, threads, *attrs.items()]
        for t in inputs:
            if t is None:
                key.append(None)
            else:
                key += (t.shape, t.dtype, t.is_contiguous())
                if cuda:
                    key.append(t.device)
        key = tuple(key)
        plan = _plans.by_key.get(key)
        if plan is None:
            if mutating:
                attrs = {**attrs, op.mutating: True}
            plan = _with_device(device, _make_plan, op, mutating, inputs, attrs, threads)
            if plan is None:
                return _call_reference(op, mutating, inputs, attrs)
            if len(_plans.by_key) >= _MAX_PLANS:
                _plans.by_key.clear()
            _plans.by_key[key] = plan
        if cuda and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return _launch(plan, inputs, device)
        return _launch(plan, inputs, device)

    return run


def _with_device(device, function, *arguments):
    if device.type == "cuda":
        with torch.cuda.device(device):
            return function(*arguments)
    return function(*arguments)


def _launch(plan, inputs, device):
    """Runs a plan on a call's tensors; returns the outputs that it made."""
    if plan.copies:
        inputs = [None if t is None else t.contiguous() for t in inputs]
    addresses = [t.data_ptr() for t in inputs if t is not None]
    made = []
    for shape, strides, dtype, nothing, taken in plan.outputs:
        if nothing is None:
            tensor = inputs[taken] if taken is not None else torch.empty_strided(shape, strides, dtype=dtype, device=device)
            addresses.append(tensor.data_ptr())
        if taken is None:
            made.append(tensor if nothing is None else nothing.detach())
    for slot, address in zip(plan.slots, addresses):
        slot.data = address
    scratch, scratch_at = _scratch(plan.scratch_bytes, device) if plan.scratch_bytes else (None, 0)
    # The raw stream, without a torch.cuda.Stream around it.
    stream = 0 if device.type == "cpu" else torch._C._cuda_getCurrentRawStream(device.index)
    sync = _sync(plan.sync_bytes, device, stream)
    sync_at = 0 if sync is None else (sync.data_ptr() + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    plan.call.run(scratch_at, plan.scratch_bytes, sync_at, plan.sync_bytes, stream)
    return made[0] if len(made) == 1 else tuple(made)


def _call_reference(op, mutating, inputs, attrs):
    inputs = list(inputs) + [None] * (len(op.inputs) - len(inputs))
    outputs = _run_reference(op, inputs, attrs)
    if not mutating:
        return _result(outputs)
    active = {t.name for t in op.active_outputs(attrs)}
    by_name = {t.name: tensor for t, tensor in zip(op.inputs, inputs)}
    for t, value in zip(op.outputs, outputs):
        if t.takes and t.name in active:
            by_name[t.takes].copy_(value)
    return _result([o for t, o in zip(op.outputs, outputs) if not t.takes])


def _result(outputs):
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _fake(op, mutating):
    def fake(*inputs, **attrs):
        if mutating:
            attrs = {**attrs, op.mutating: True}
        inputs = list(inputs) + [None] * (len(op.inputs) - len(inputs))
        metadata = _output_metadata(op, inputs, attrs)
        return _result(
            [
                inputs[0].new_empty(shape, dtype=dtype)
                for t, (dtype, shape) in zip(op.outputs, metadata)
                if not (mutating and t.takes)
            ]
        )

    return fake


def _differentiable(op, mutating, runners, setup, backward):
    """The kernel of one form at PyTorch's Autograd key, which records the call where gradients are wanted.

    setup(ctx, inputs, attrs, outputs) gets all inputs and attributes, defaults filled in; backward(ctx, *gradients) returns
    the gradients of the inputs. torch.library.register_autograd makes the same of them, but a call of its kernel takes 35 µs
    more, mostly to fill in defaults from the schema.
    """
    raw = getattr(torch.ops.leanfleet, op.snake_name + ("_" if mutating else "")).default
    defaults = {a.name: a.default for a in op.attrs}

    def call(keyset, inputs, attrs):
        keyset = keyset & torch._C._after_autograd_keyset
        run = None if _COMPILED else runners.get(keyset.highestPriorityTypeId())
        if run is not None:  # no mode, transform or subclass comes before the device: the dispatcher would call the same
            return run(*inputs, **attrs)
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return raw.redispatch(keyset, *inputs, **attrs)
        except (RuntimeError, ValueError) as error:
            raise _typed(op, mutating, error, inputs, attrs) from None

    def forward(ctx, *args):
        *inputs, attrs, keyset = args
        outputs = call(keyset, inputs, attrs)
        setup(ctx, inputs + [None] * (len(op.inputs) - len(inputs)), {**defaults, **attrs}, outputs)
        return outputs

    def gradients(ctx, *grads):
        return *backward(ctx, *grads), None, None  # of attrs and keyset

    node = type(op.name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(gradients)})

    def kernel(keyset, *inputs, **attrs):
        _refuse_tangents(op, inputs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return node.apply(*inputs, attrs, keyset)
        return call(keyset, inputs, attrs)

    return kernel


def _attach():
    """Whether libleanfleet finds PyTorch's stable C functions, so that its compiled kernels can be registered.

    LEANFLEET_TORCH says which are: compiled (the default; autograd too, where torch_autograd was built), stable (kernels
    alone), ctypes (none, as where the library or PyTorch does not allow it). Compiled ones keep to the library of the import,
    whatever LEANFLEET_LIBRARY_DIR says later. Raises ValueError for another word.
    """
    wish = os.environ.get("LEANFLEET_TORCH") or "compiled"
    if wish not in ("compiled", "stable", "ctypes"):
        raise ValueError(f"the environment variable LEANFLEET_TORCH is '{wish}'; expected compiled, stable or ctypes")
    if wish == "ctypes":
        return False
    try:
        library = native.library()
    except (FileNotFoundError, OSError):
        return False  # the operators say so when they are called
    if not hasattr(library, "leanfleet_torch_attach"):
        return False  # LEANFLEET_LIBRARY_DIR has an older one
    library.leanfleet_torch_attach.restype = ctypes.c_char_p
    library.leanfleet_torch_attach.argtypes = [ctypes.c_void_p]
    library.leanfleet_torch_register.argtypes = [ctypes.c_char_p] * 6
    # dlsym looks through the libraries that this one depends on.
    return library.leanfleet_torch_attach(ctypes.CDLL(torch._C.__file__)._handle) is None


def way() -> str:
    """How torch.ops.leanfleet reaches its kernels in this process: "compiled", "stable" (autograd in Python) or "ctypes".

    Example:
        from leanfleet.export.torch_ops import way

        print(way() in ("compiled", "stable", "ctypes"))  # True
    """
    if not _COMPILED:
        return "ctypes"
    return "compiled" if torch_autograd.is_built() else "stable"


def _register_compiled(op, mutating, key):
    name = op.snake_name + ("_" if mutating else "")
    attr = op.mutating.encode() if mutating else None
    texts = [text.encode() for text in (spec.DOMAIN, key, name, op.name)]
    return native.library().leanfleet_torch_register(*texts, attr, f"{_FALLBACK}::{name}".encode()) == 0


_COMPILED = _attach()


def _define(op, setup, backward):
    for mutating in (False, True) if op.mutating else (False,):
        name = op.snake_name + ("_" if mutating else "")
        _LIBRARY.define(_schema(op, mutating), tags=(torch.Tag.pt2_compliant_tag,))
        _FALLBACK_LIBRARY.define(_schema(op, mutating))
        runners = {key: _runner(op, mutating, device_type) for key, device_type in _DEVICE_KEYS.items()}
        for key, run in runners.items():
            _FALLBACK_LIBRARY.impl(name, run, key.name)
            if not _COMPILED or not _register_compiled(op, mutating, key.name):
                _LIBRARY.impl(name, run, key.name)
        torch.library.register_fake(f"{spec.DOMAIN}::{name}", _fake(op, mutating), lib=_LIBRARY)
        differentiated = (_setup_nothing, _no_backward(name)) if mutating else (setup, backward)
        kernel = _differentiable(op, mutating, runners, *differentiated)
        _FALLBACK_LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)
        if not _COMPILED or not torch_autograd.register(op, mutating):
            _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def _documentation(op, mutating):
    lines = [op.doc, "", f"Operator {op.name} (domain {spec.DOMAIN}, version {op.version}).", ""]
    if op.equation:
        lines += ["Equation:", *(f"    {line}".rstrip() for line in op.equation.split("\n")), "", f"Source: {op.paper}.", ""]
    if mutating:
        taken = ", ".join(t.takes for t in op.outputs if t.takes)
        lines += [f"Changes {taken} in place and returns the other outputs; {op.mutating} is on.", ""]
    lines.append(
        "T is float32, float16 or bfloat16 (one type a call), C that, int8, float8e4m3fn or uint8 (two int4 each along the "
        "last axis, whose size is then half), F float32, I int32, L int64; shapes are those of layout "
        '"bhnd". float64 inputs on any device are computed by the PyTorch reference.'
    )
    lines += ["", "Inputs:"]
    for t in op.inputs:
        shapes = " or ".join(str(s) for s in t.shapes)
        lines.append(f"    {t.name}: {t.type} {shapes}{', optional' if t.optional else ''}. {t.doc}")
    lines += ["", "Attributes:"]
    lines += [
        f"    {a.name} ({a.type}, default {a.default!r}{', one of ' * bool(a.values)}{', '.join(a.values)}): {a.doc}"
        for a in op.attrs
        if not (mutating and a.name == op.mutating)
    ]
    lines += ["", "Returns a tuple of those of these outputs that exist; a tensor where it is a single one:"]
    for t in op.outputs:
        if not (mutating and t.takes):
            repeated = f", the first axis {t.repeats} times" if t.repeats else ""
            shapes = f"the shape of {t.like}{repeated}" if t.like else " or ".join(str(s) for s in t.shapes)
            condition = f", only with {' and '.join(t.when)}" if t.when else ""
            lines.append(f"    {t.name}: {t.type} {shapes}{condition}. {t.doc}")
    lines += [
        "",
        "Raises ValueError for a wrong argument, leanfleet.native.UnsupportedError where this build or machine "
        "has no kernel, leanfleet.native.LeanfleetError when CUDA fails.",
    ]
    if op.rules:
        lines += ["", "Rules:", *(f"    {rule}" for rule in op.rules)]
    if op.example and not mutating:
        lines += ["", "Example:", *(f"    {line}".rstrip() for line in op.example.split("\n"))]
    return "\n".join(lines)


def _typed(op, mutating, error, inputs, attrs):
    """The error of a call as ctypes raises it. PyTorch's stable interface knows of no types."""
    code = native.library().leanfleet_torch_error() if _COMPILED else 0
    if code in (1, 2):  # refused before anything was written
        try:
            _runner(op, mutating, inputs[0].device.type if inputs[0] is not None else "cpu")(*inputs, **attrs)
        except (RuntimeError, ValueError) as refused:
            return refused
    return native.LeanfleetError(str(error)) if code else error


def _function(op, mutating):
    """The public function over one operator, which returns just the outputs that the attributes ask for: a tensor where it
    is one, else a tuple."""
    raw = getattr(torch.ops.leanfleet, op.snake_name + ("_" if mutating else "")).default
    kinds = inspect.Parameter
    parameters = [
        kinds(t.name, kinds.POSITIONAL_OR_KEYWORD, default=None, annotation=torch.Tensor | None)
        if t.optional
        else kinds(t.name, kinds.POSITIONAL_OR_KEYWORD, annotation=torch.Tensor)
        for t in op.inputs
    ]
    first_optional = next((i for i, t in enumerate(op.inputs) if t.optional), len(parameters))
    # A required input behind an optional one cannot be given by its place, so neither can those after it.
    by_place = next((i for i, t in enumerate(op.inputs) if i > first_optional and not t.optional), len(parameters))
    parameters = [p if i < by_place else p.replace(kind=kinds.KEYWORD_ONLY) for i, p in enumerate(parameters)]
    parameters += [
        kinds(a.name, kinds.KEYWORD_ONLY, default=a.default, annotation=_TYPES[a.type])
        for a in op.attrs
        if not (mutating and a.name == op.mutating)
    ]
    signature = inspect.Signature(parameters, return_annotation=torch.Tensor | tuple[torch.Tensor, ...])

    positional = sum(p.kind == kinds.POSITIONAL_OR_KEYWORD for p in parameters)
    required = sum(p.default is kinds.empty for p in parameters[:positional])
    converters = {a.name: _TYPES[a.type] for a in op.attrs if not (mutating and a.name == op.mutating)}
    input_names = [t.name for t in op.inputs]
    names = [p.name for p in parameters]
    keywords = [frozenset(names[i:]) for i in range(positional + 1)]  # what i positional arguments leave
    needed = [p.name for p in parameters[positional:] if p.default is kinds.empty]
    implied = {op.mutating: True} if mutating else {}
    defaults = {a.name: implied.get(a.name, a.default) for a in op.attrs}
    conditions = [t.when for t in op.outputs if not (mutating and t.takes)]
    lone = len(conditions) == 1
    switches = list(dict.fromkeys(w for when in conditions for w in when))
    asked = {}  # values of the switches -> indices of the outputs that they ask for
    for values in itertools.product((False, True), repeat=len(switches)):
        on = {switch for switch, value in zip(switches, values) if value}
        asked[values] = [i for i, when in enumerate(conditions) if on.issuperset(when)]

    def function(*args, **kwargs):
        given = len(args)
        if not (required <= given <= positional and kwargs.keys() <= keywords[given] and all([n in kwargs for n in needed])):
            args, kwargs = (), signature.bind(*args, **kwargs).arguments  # raises TypeError where the call is wrong
        attrs = {}
        for name, value in kwargs.items():
            if name in converters:
                attrs[name] = converters[name](value)
        if len(attrs) < len(kwargs):
            args = (*args, *[kwargs.get(name) for name in input_names[len(args) :]])
        try:
            outputs = raw(*args, **attrs)
        except (RuntimeError, ValueError) as error:
            raise _typed(op, mutating, error, args, attrs) from None
        if lone:
            return outputs
        wanted = asked[tuple([bool(attrs.get(w, defaults[w])) for w in switches])]
        return outputs[wanted[0]] if len(wanted) == 1 else tuple([outputs[i] for i in wanted])

    function.__name__ = function.__qualname__ = op.snake_name + ("_" if mutating else "")
    function.__doc__ = _documentation(op, mutating)
    function.__signature__ = signature
    return function


def _save_inputs(ctx, inputs, attrs, outputs):
    ctx.attrs = attrs
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _decay_backward(ctx, grad_output, grad_state, grad_norm):
    """Gradients of CausalLinearDecay; the normalised form as numerator over denominator.

    With V' = [V, 1] one unnormalised call gives both, so one call of the Grad operator serves them: the state
    becomes [S, z] and the gradient of the augmented output [dO / den, -sum(dO * O) / den]. The second part is zero
    where |den| was held at eps, because there the denominator is a constant. With beta the keys are those of every state,
    times beta.
    """
    query, key, value, log_decay, state, norm, cu_seqlens, state_index, beta = ctx.saved_tensors
    attrs = ctx.attrs
    if not attrs["return_state"]:  # under torch.compile these are zeros of shape [0]
        grad_state = grad_norm = None
    elif not attrs["normalize"]:
        grad_norm = None
    if state_index is not None:
        raise NotImplementedError("CausalLinearDecay: state_index is for inference; train with initial_state alone")
    state_type = None if state is None else state.dtype
    state, grad_state = (t if t is None else t.to(torch.promote_types(t.dtype, torch.float32)) for t in (state, grad_state))
    if grad_output is None:
        heads = 1 if attrs["layout"] == "bhnd" else 2
        like = query if query.shape[heads] >= value.shape[heads] else value
        grad_output = query.new_zeros(*like.shape[:3], value.shape[3])
    wants_decay = log_decay is not None and ctx.needs_input_grad[3]
    wants_state = state is not None and (ctx.needs_input_grad[4] or ctx.needs_input_grad[5])
    differentiate = functools.partial(
        torch.ops.leanfleet.causal_linear_decay_grad.default,
        scale=attrs["scale"],
        grad_decay=wants_decay,
        grad_state=wants_state,
        layout=attrs["layout"],
        state_v_first=attrs["state_v_first"] and not attrs["normalize"],
    )
    stored, to_key_and_beta, to_query = key, lambda dk: (dk, None), lambda dq: dq
    if beta is not None:
        axis = 1 if attrs["layout"] == "bhnd" else 2
        stored, to_key_and_beta = _stored_keys(key, beta, value.shape[axis], axis)
        query, to_query = _of_each_state(query, value.shape[axis], axis)
    if not attrs["normalize"]:
        dq, dk, dv, d_decay, d_state = differentiate(
            query, stored, value, log_decay, state, grad_output, grad_state, cu_seqlens
        )
        dk, d_beta = to_key_and_beta(dk)
        d_state = d_state.to(state_type) if wants_state else None
        return to_query(dq), dk, dv, d_decay if wants_decay else None, d_state, None, None, None, d_beta
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v, do = (t.to(wide) for t in (query, stored, value, grad_output))
    ones = torch.ones_like(v[..., :1])
    v_aug = torch.cat([v, ones], dim=-1)
    if attrs["state_v_first"]:
        state, grad_state = (t if t is None else t.mT for t in (state, grad_state))
    state_aug = None if state is None else torch.cat([state, norm.unsqueeze(-1)], dim=-1)
    augmented = causal_linear_decay(
        q, k, v_aug, log_decay, state_aug, cu_seqlens=cu_seqlens, scale=attrs["scale"], layout=attrs["layout"]
    )
    den = augmented[..., -1:]
    held = den.abs() < attrs["eps"]
    guarded = torch.where(held, torch.where(den < 0, -attrs["eps"], attrs["eps"]), den)
    out = augmented[..., :-1] / guarded
    d_den = torch.where(held, torch.zeros_like(den), -(do * out).sum(-1, keepdim=True) / guarded)
    do_aug = torch.cat([do / guarded, d_den], dim=-1)
    d_final = None
    if grad_state is not None or grad_norm is not None:
        shape = [cu_seqlens.numel() - 1 if cu_seqlens is not None else q.shape[0]] + [
            v.shape[1 if attrs["layout"] == "bhnd" else 2],
            k.shape[-1],
        ]
        left = grad_state if grad_state is not None else q.new_zeros(*shape, v.shape[-1])
        right = grad_norm if grad_norm is not None else q.new_zeros(shape)
        d_final = torch.cat([left, right.unsqueeze(-1)], dim=-1)
    dq, dk, dv_aug, d_decay, d_aug = differentiate(q, k, v_aug, log_decay, state_aug, do_aug, d_final, cu_seqlens)
    dk, d_beta = to_key_and_beta(dk)
    dq, dk, dv = (g.to(query.dtype) for g in (to_query(dq), dk, dv_aug[..., :-1]))
    d_state, d_norm = (d_aug[..., :-1].to(state_type), d_aug[..., -1]) if wants_state else (None, None)
    if wants_state and attrs["state_v_first"]:
        d_state = d_state.mT
    return dq, dk, dv, d_decay if wants_decay else None, d_state, d_norm, None, None, d_beta


def _stored_keys(key, beta, states, axis):
    """beta_i k_i of each of so many states, and a function from its gradient to those of key and beta. axis: that of heads."""
    wide = torch.promote_types(key.dtype, torch.float32)
    own, to_key = _of_each_state(key.to(wide), states, axis)
    by = beta.to(wide).unsqueeze(-1)

    def gradients(d_stored):
        d_stored = d_stored.to(wide)
        return to_key(d_stored * by).to(key.dtype), (d_stored * own).sum(-1).to(beta.dtype)

    return (own * by).to(key.dtype), gradients


def _of_each_state(x, states, axis):
    """A tensor whose heads several states may share with as many heads as there are states, if they are more, and a function
    from its gradient to that of x."""
    share = states // x.shape[axis]
    if share <= 1:
        return x, lambda grad: grad
    return x.repeat_interleave(share, axis), lambda grad: grad.unflatten(axis, (-1, share)).sum(axis + 1)


def _delta_backward(ctx, grad_output, grad_state):
    """Gradients of GatedDeltaRule (docs/operators/gated_delta_rule_grad.md)."""
    query, key, value, log_decay, beta, state, cu_seqlens, state_index = ctx.saved_tensors
    attrs = ctx.attrs
    if state_index is not None:
        raise NotImplementedError("GatedDeltaRule: state_index is for inference; train with initial_state alone")
    if not attrs["return_state"]:  # under torch.compile it is zeros of shape [0]
        grad_state = None
    if grad_output is None:
        axis = 1 if attrs["layout"] == "bhnd" else 2
        shape = list(query.shape[:3]) + [value.shape[3]]
        shape[axis] = max(shape[axis], value.shape[axis])
        grad_output = query.new_zeros(shape)
    wants_decay = log_decay is not None and ctx.needs_input_grad[3]
    wants_state = state is not None and ctx.needs_input_grad[5]
    dq, dk, dv, d_beta, d_decay, d_state = torch.ops.leanfleet.gated_delta_rule_grad.default(
        query,
        key,
        value,
        log_decay,
        beta,
        state,
        grad_output,
        grad_state,
        cu_seqlens,
        grad_decay=wants_decay,
        grad_state=wants_state,
        **{name: attrs[name] for name in ("scale", "normalize_qk", "layout", "state_v_first")},
    )
    return dq, dk, dv, d_decay if wants_decay else None, d_beta, d_state if wants_state else None, None, None


def _setup_normalized(ctx, inputs, attrs, outputs):
    query, key, value, coefficients, initial_state, *_ = inputs
    ctx.attrs = {name: attrs[name] for name in ("causal", "normalize_qk", "eps", "layout")}
    ctx.carried = initial_state is not None
    ctx.mark_non_differentiable(*outputs[1:])  # the normaliser and the final sums
    ctx.save_for_backward(query, key, value, coefficients, *outputs[:2])
    ctx.set_materialize_grads(False)


def _normalized_backward(ctx, grad_output, *_):
    """Gradients of NormalizedLinearAttention (docs/operators/normalized_linear_attention_grad.md)."""
    if ctx.carried:
        raise NotImplementedError("NormalizedLinearAttention: carried states have no gradient; train on whole sequences")
    if grad_output is None:
        return (None,) * 8
    query, key, value, coefficients, output, normalizer = ctx.saved_tensors
    wants_coefficients = coefficients is not None and ctx.needs_input_grad[3]
    dq, dk, dv, d_coefficients = torch.ops.leanfleet.normalized_linear_attention_grad.default(
        query, key, value, coefficients, output, normalizer, grad_output, grad_coefficients=wants_coefficients, **ctx.attrs
    )
    return dq, dk, dv, d_coefficients if wants_coefficients else None, None, None, None, None


def _setup_nothing(ctx, inputs, attrs, outputs):
    pass


def _no_backward(what):
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{what} has no backward: it serves inference. Detach its inputs, or call it under torch.no_grad()"
        )

    return backward


_SPECS = spec.all_specs()
_DIFFERENTIATED = {
    "CausalLinearDecay": (_save_inputs, _decay_backward),
    "GatedDeltaRule": (_save_inputs, _delta_backward),
    "NormalizedLinearAttention": (_setup_normalized, _normalized_backward),
}
for _op in reversed(_SPECS.values()):  # gradients come before what they are gradients of
    _define(_op, *_DIFFERENTIATED.get(_op.name, (_setup_nothing, _no_backward(_op.name))))

lean_attention = _function(_SPECS["LeanAttention"], False)
lean_attention_ = _function(_SPECS["LeanAttention"], True)
causal_linear_decay = _function(_SPECS["CausalLinearDecay"], False)
causal_linear_decay_ = _function(_SPECS["CausalLinearDecay"], True)
causal_linear_decay_grad = _function(_SPECS["CausalLinearDecayGrad"], False)
normalized_linear_attention = _function(_SPECS["NormalizedLinearAttention"], False)
normalized_linear_attention_ = _function(_SPECS["NormalizedLinearAttention"], True)
normalized_linear_attention_grad = _function(_SPECS["NormalizedLinearAttentionGrad"], False)
gated_delta_rule = _function(_SPECS["GatedDeltaRule"], False)
gated_delta_rule_ = _function(_SPECS["GatedDeltaRule"], True)
gated_delta_rule_grad = _function(_SPECS["GatedDeltaRuleGrad"], False)
causal_conv = _function(_SPECS["CausalConv"], False)
causal_conv_ = _function(_SPECS["CausalConv"], True)
sample_tokens = _function(_SPECS["SampleTokens"], False)
sample_tokens_ = _function(_SPECS["SampleTokens"], True)
block_linear = _function(_SPECS["BlockLinear"], False)
decay_gates = _function(_SPECS["DecayGates"], False)
gated_activation = _function(_SPECS["GatedActivation"], False)
rms_norm = _function(_SPECS["RmsNorm"], False)
linear = _function(_SPECS["Linear"], False)
all_reduce = _function(_SPECS["AllReduce"], False)
all_gather = _function(_SPECS["AllGather"], False)
merge_attention = _function(_SPECS["MergeAttention"], False)
