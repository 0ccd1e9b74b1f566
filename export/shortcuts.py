"""What torch.onnx.export can leave out, because the result is the same without: most of the time that a decoder's export took.

- Decompositions trace the whole program a second time. One that has neither an operator that must be decomposed nor one that
  writes to its inputs comes out of that as it went in.
- Type promotion runs the whole program a third time. One whose operators take values of one type each comes out as it went in.
- The rewriter of onnxscript tries each of its rules at each node, and one of them looks at all nodes of the graph whenever it
  is tried: a rule can apply only at a node of the kind that it ends with.
- The table of what ONNX can say is the same in every export of a process.
"""

import functools
import operator
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.rewriter import RewriteRule
from torch.onnx._internal.exporter import _capture_strategies
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import InsertTypePromotion, type_promotion

_ATEN = torch.ops.aten
_CASTS = (_ATEN.to.dtype, _ATEN.to.device, _ATEN.to.dtype_layout)
_CHECKS = (_ATEN._assert_tensor_metadata.default, _ATEN._assert_scalar.default, _ATEN._assert_async.msg)


@contextmanager
def taken() -> Iterator[None]:
    """While this lasts, torch.onnx.export takes all shortcuts."""
    shorter: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
        (torch.export.ExportedProgram, "run_decompositions", _decompositions),
        (InsertTypePromotion, "_run", _promotion),
        (RewriteRule, "try_rewrite", _rewriting),
        (ONNXRegistry, "from_torchlib", _registry),
    )
    before = [vars(owner)[name] for owner, name, _ in shorter]
    try:
        for owner, name, shorten in shorter:
            setattr(owner, name, shorten(getattr(owner, name)))
        yield
    finally:
        for (owner, name, _), method in zip(shorter, before, strict=True):
            setattr(owner, name, method)


@contextmanager
def one_way() -> Iterator[None]:
    """While this lasts, torch.onnx.export traces in one way alone: what fails by it is not tried again by bytecode, which no
    transformers decoder of ours needs and which takes several times as long."""
    before = _capture_strategies.CAPTURE_STRATEGIES
    try:
        _capture_strategies.CAPTURE_STRATEGIES = (_capture_strategies.TorchExportNonStrictStrategy,)
        yield
    finally:
        _capture_strategies.CAPTURE_STRATEGIES = before


def _decompositions(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_decompositions(self: torch.export.ExportedProgram, table: Any = None, **options: Any) -> Any:
        if table is not None and not options:
            simplify(self.graph_module)
            if is_functional(self.graph_module, table):
                return self
        return original(self, table, **options)

    return run_decompositions


def simplify(module: torch.fx.GraphModule) -> None:
    """Takes checks and unused nodes out of a graph of torch.export, and casts to the type that a value has already."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in _CHECKS:
            graph.erase_node(node)
        elif node.target in _CASTS and isinstance(node.args[0], torch.fx.Node):
            source, dtype = node.args[0], node.meta["val"].dtype
            returned = any(user.op == "output" for user in node.users)  # the program's signature knows its name
            same = source.meta["val"].dtype == dtype and source.meta["val"].device == node.meta["val"].device
            if same and not returned:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            elif source.meta["val"].device == node.meta["val"].device:
                node.target, node.args, node.kwargs = _ATEN._to_copy.default, (source,), {"dtype": dtype}
    graph.eliminate_dead_code()
    module.recompile()


def is_functional(module: torch.fx.GraphModule, table: Container[Any]) -> bool:
    """Whether decompositions by this table {operator: function} leave a graph as it is: it has none of the table's operators,
    none that writes to an input, and no graph inside."""
    for node in module.graph.nodes:
        if node.op == "call_module" or (node.op == "get_attr" and isinstance(_attribute(module, node), torch.nn.Module)):
            return False
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                return False
            continue  # arithmetic of sizes
        if node.target in table or node.target._schema.is_mutable:
            return False
    return True


def _attribute(module: torch.nn.Module, node: torch.fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(module)


def _promotion(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: InsertTypePromotion, *args: Any) -> torch.fx.GraphModule:
        return original(self, *args) if promotes(self.module, self.interpreter.type_promotion_table) else self.module

    return run


def promotes(module: torch.fx.GraphModule, table: type_promotion.TypePromotionTable) -> bool:
    """Whether type promotion changes a graph: it has an operator that this table wants to give arguments of another type."""
    return any(_promotes(node, table) for node in module.graph.nodes if node.op == "call_function")


def _promotes(node: torch.fx.Node, table: type_promotion.TypePromotionTable) -> bool:
    rule = type_promotion.get_type_promotion_rule(node, table)
    if rule is None:
        return False
    args, keywords = torch.fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    types = rule.preview_type_promotion(args, keywords)
    wanted = [(args[i], t) for i, t in types.args_dtypes.items() if i < len(args)]
    wanted += [(keywords[name], t) for name, t in types.kwargs_dtypes.items() if name in keywords]
    return any(_type(x) != t for values, t in wanted for x in (values if isinstance(values, (list, tuple)) else [values]))


def _type(value: Any) -> torch.dtype | None:
    """The type that a tensor or a number counts as."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return type_promotion.fx_type_utils.from_scalar_type_to_torch_dtype(type(value))


def _rewriting(original: Callable[..., Any]) -> Callable[..., Any]:
    def try_rewrite(self: RewriteRule, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        pattern = getattr(self, "_target_pattern", None)  # onnxscript's own; without it every rule is tried
        last = pattern.output_nodes[0].op_identifier() if pattern is not None else None
        return original(self, model, graph, node, **options) if last in (None, node.op_identifier()) else None

    return try_rewrite


def _registry(original: Callable[..., ONNXRegistry]) -> Any:
    def from_torchlib(*args: Any, **options: Any) -> ONNXRegistry:
        """A copy, since an export adds operators of its own."""
        made, copy = _made_once(original, args, tuple(options.items())), ONNXRegistry()
        vars(copy).update(vars(made))
        copy.functions = {target: list(found) for target, found in made.functions.items()}
        return copy

    return staticmethod(from_torchlib)


@functools.cache
def _made_once(make: Callable[..., ONNXRegistry], args: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> ONNXRegistry:
    return make(*args, **dict(options))
