"""From PyTorch to ONNX: operator schemas, the exporter's translation table, and export()."""

import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import onnxscript
import torch

from leanfleet import spec
from leanfleet.export import function_bodies, shortcuts, torch_ops  # noqa: F401  torch_ops defines torch.ops.leanfleet

_TYPES = spec.TYPES | {own: tuple(dict.fromkeys(spec.TYPES["T"] + spec.TYPES[own])) for own in spec.OWN}
_TYPE_STRINGS = {name: [f"tensor({t.replace('float32', 'float')})" for t in types] for name, types in _TYPES.items()}
_ANNOTATIONS = {"bool": int, "int": int, "float": float, "string": str}


def op_schema(op: spec.OpSpec) -> onnx.defs.OpSchema:
    """The onnx.defs.OpSchema of an operator (a spec.OpSpec)."""
    schema = onnx.defs.OpSchema
    optional = schema.FormalParameterOption.Optional

    def variable(t):
        """The name of its type: caches of keys and of values are chosen apart."""
        return f"{t.type}_{t.takes or t.name}" if t.type in spec.OWN else t.type

    used = {variable(t): _TYPE_STRINGS[t.type] for t in op.inputs + op.outputs}

    def parameter(t, is_optional):
        option = optional if is_optional else schema.FormalParameterOption.Single
        return schema.FormalParameter(t.name, variable(t), t.doc, param_option=option)

    return schema(
        op.name,
        spec.DOMAIN,
        op.version,
        op.doc,
        inputs=[parameter(t, t.optional) for t in op.inputs],
        outputs=[parameter(t, True) for t in op.outputs],  # any may be left unconnected
        type_constraints=[(name, types, "") for name, types in used.items()],
        attributes=[
            schema.Attribute(a.name, onnx.helper.make_attribute(a.name, _onnx_value(a, a.default)), a.doc) for a in op.attrs
        ],
    )


def register_schemas() -> None:
    """Makes onnx know the operators, so that onnxscript and the checker do. Safe to call again.

    Example:
        import onnx
        from leanfleet.export import register_schemas

        register_schemas()
        print(onnx.defs.get_schema("LeanAttention", domain="leanfleet").inputs[0].name)  # query
    """
    for op in spec.all_specs().values():
        if not onnx.defs.has(op.name, spec.DOMAIN):
            onnx.defs.register_schema(op_schema(op))


def _onnx_value(attr, value):
    return {"bool": int, "int": int, "float": float, "string": str}[attr.type](value)


def _translation(op):
    """The function that the exporter calls for a node of torch.ops.leanfleet: it emits one ONNX node."""

    def translate(*inputs, **keywords):
        tensors = dict(zip((t.name for t in op.inputs), inputs))
        tensors |= {name: keywords.pop(name) for name in list(keywords) if name in {t.name for t in op.inputs}}
        attrs = {a.name: _onnx_value(a, keywords.get(a.name, a.default)) for a in op.attrs if not a.refuse}
        arguments = [tensors.get(t.name) for t in op.inputs]
        while arguments[-1] is None:
            arguments.pop()
        outputs = getattr(onnxscript.values.Opset(spec.DOMAIN, op.version), op.name)(*arguments, **attrs)
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        node = outputs[0].producer()
        node.resize_outputs(1 + max(i for i, t in enumerate(op.outputs) if t in op.active_outputs(attrs)))
        return list(node.outputs) if len(op.outputs) > 1 else node.outputs[0]  # as PyTorch's operator returns them

    parameters = [inspect.Parameter(t.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for t in op.inputs]
    parameters += [
        inspect.Parameter(
            a.name, inspect.Parameter.KEYWORD_ONLY, default=_onnx_value(a, a.default), annotation=_ANNOTATIONS[a.type]
        )
        for a in op.attrs
    ]
    translate.__signature__ = inspect.Signature(parameters)
    translate.__annotations__ = {a.name: _ANNOTATIONS[a.type] for a in op.attrs}
    translate.__name__ = op.snake_name
    return translate


def translation_table() -> dict[Callable, Callable]:
    """torch operator -> translation, for torch.onnx.export(custom_translation_table=...).

    Example:
        import torch
        from leanfleet.export import LinearAttention, finalize, translation_table

        layer, hidden = LinearAttention(hidden_size=64, num_heads=4).eval(), torch.randn(1, 10, 64)
        program = torch.onnx.export(layer, (hidden,), dynamo=True, verbose=False, custom_translation_table=translation_table())
        model = finalize(program.model)
        print([node.op_type for node in model.graph if node.domain == "leanfleet"])  # ['NormalizedLinearAttention']
    """
    register_schemas()
    return {getattr(torch.ops.leanfleet, op.snake_name).default: _translation(op) for op in spec.all_specs().values()}


def finalize(model: onnx_ir.Model) -> onnx_ir.Model:
    """Completes a model (onnx_ir.Model) that the exporter made with translation_table. Returns the model.

    Attaches the function body of every leanfleet node. Removes stack traces, which name files of this machine; attributes
    that operators only refuse; and the names of outputs that the attributes do not ask for. ONNX outputs are positional, so
    such an output stays as an empty name where others follow.

    Example:
        import torch
        from leanfleet.export import causal_linear_decay, finalize, translation_table

        class Layer(torch.nn.Module):
            def forward(self, query, key, value):
                return causal_linear_decay(query, key, value)

        program = torch.onnx.export(
            Layer(), (torch.randn(1, 2, 5, 8),) * 3, dynamo=True, verbose=False, custom_translation_table=translation_table()
        )
        model = finalize(program.model)
        print([function.name for function in model.functions.values()])  # ['CausalLinearDecay']
    """
    specs = spec.all_specs()
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
        if node.domain == spec.DOMAIN and node.op_type in specs:
            op = specs[node.op_type]
            for attr in op.attrs:
                if attr.refuse:
                    node.attributes.pop(attr.name, None)
            active = op.active_outputs({a.name: a.value for a in node.attributes.values()})
            for t, output in zip(op.outputs, node.outputs):
                if t not in active:
                    output.name = ""
                elif t.type == "S" and output.type is None:  # no input says it
                    output.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    _ask_others_for_sizes(model.graph)
    return function_bodies.attach(model)


def _ask_others_for_sizes(graph):
    """Sizes that the exporter takes from inputs of float8 come from others that have them too: onnxruntime has no Shape of
    such."""
    float8 = onnx_ir.DataType.FLOAT8E4M3FN
    others = {}  # name of a dimension: (input, axis)
    for value in graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, onnx_ir.SymbolicDim) and value.dtype != float8:
                others.setdefault(size.value, (value, axis))
    for node in graph:
        value = node.inputs[0] if node.op_type == "Shape" and node.domain == "" else None
        if value is None or value.dtype != float8 or value not in graph.inputs:
            continue
        axis = node.attributes.get_int("start", 0)
        size = value.shape[axis]
        if node.attributes.get_int("end", len(value.shape)) == axis + 1 and getattr(size, "value", None) in others:
            other, at = others[size.value]
            node.replace_input_with(0, other)
            node.attributes["start"], node.attributes["end"] = onnx_ir.AttrInt64("start", at), onnx_ir.AttrInt64("end", at + 1)


# What torch.onnx.export says of every model, whatever the caller does.
_SAID_OF_ALL = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"# The axis name: .* will not be used, since it shares the same shape constraints with another axis",
)


@contextmanager
def _quiet():
    """Without the warnings of _SAID_OF_ALL, and without those about operators of torchvision where that is not installed."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")

    def told(record):
        return "torchvision is not installed" not in record.getMessage()

    logger.addFilter(told)
    try:
        with warnings.catch_warnings():
            for message in _SAID_OF_ALL:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        logger.removeFilter(told)


@contextmanager
def _in_eval_mode(module):
    """Training modes are as they were afterwards."""
    training = [m for m in module.modules() if m.training] if isinstance(module, torch.nn.Module) else []
    try:
        for m in training:
            m.training = False
        yield
    finally:
        for m in training:
            m.training = True


def _name_outputs(model):
    """Names a graph's outputs: an output of a leanfleet node as its operator calls it, if that name is free; others by their
    place, output_0, output_1, ... Inputs and weights that are outputs too keep their names."""
    graph = model.graph
    made = {}  # output -> the name wished for
    for i, value in enumerate(graph.outputs):
        node = value.producer()
        if node is not None:
            ours = node.domain == spec.DOMAIN and spec.all_specs().get(node.op_type)
            made.setdefault(value, ours.outputs[value.index()].name if ours else f"output_{i}")
    taken = {v.name for v in (*graph.inputs, *graph.initializers.values())}
    taken |= {v.name for node in onnx_ir.traversal.RecursiveGraphIterator(graph) for v in node.outputs if v not in made}
    wished = Counter(made.values())
    for i, value in enumerate(graph.outputs):
        if name := made.pop(value, None):
            name = name if wished[name] == 1 and name not in taken else f"output_{i}"
            while name in taken:
                name += "_"
            value.name = name
            taken.add(name)


def export(
    module: torch.nn.Module,
    args: Sequence[Any],
    path: str | Path | None = None,
    *,
    dynamic_shapes: Any = None,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Exports a module to ONNX with leanfleet nodes and, for each, a function of the same meaning in standard
    operators, so that the model runs where the library is not registered too.

    module: torch.nn.Module, exported as it is in eval mode. args, kwargs: example inputs.
    path: where to save; weights above 2 GB go to a file beside it. dynamic_shapes and further options are those of
    torch.onnx.export(dynamo=True), for example opset_version, input_names, output_names. Without output_names the
    output of a leanfleet node gets its name in ops.toml where only one output would; others are output_0, output_1, ...
    Returns the torch.onnx.ONNXProgram. Raises torch.onnx.errors.* where the module cannot be exported, OSError where `path`
    cannot be written. Module and inputs stay as they are.

    Example:
        import torch
        from leanfleet.export import LinearAttention, export

        layer = LinearAttention(hidden_size=64, num_heads=4)
        batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")
        export(layer, (torch.randn(2, 10, 64),), "layer.onnx", dynamic_shapes=({0: batch, 1: tokens},))
    """
    with _quiet(), _in_eval_mode(module), shortcuts.taken():
        program = torch.onnx.export(
            module,
            args,
            kwargs=kwargs,
            dynamo=True,
            dynamic_shapes=dynamic_shapes,
            custom_translation_table=translation_table(),
            **{"verbose": False, **options},
        )
    finalize(program.model)
    if options.get("output_names") is None:
        _name_outputs(program.model)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        program.save(str(path))
    return program


def load_ir(path: str | Path) -> onnx_ir.Model:
    """Reads an ONNX file as an onnx_ir.Model."""
    return onnx_ir.load(str(path))
