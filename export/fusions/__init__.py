"""Rewrites of an exported decoder's graph into forms that ONNX Runtime has one kernel for. Each computes what it replaces.

A pass is a function pass(model, positions=None) -> how often it applied, in a file of its name. It changes an onnx_ir.Model in
place. positions: how many a request may have, for passes that make a table of them. A place that does not have the pass's
pattern is left as it is; what is raised is an error.
"""

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from leanfleet.export import function_bodies
from leanfleet.export.fusions.cancel_transposes import cancel_transposes
from leanfleet.export.fusions.divide_by_roots import divide_by_roots
from leanfleet.export.fusions.drop_transposes import drop_transposes
from leanfleet.export.fusions.fold_scales import fold_scales
from leanfleet.export.fusions.fuse_decay_gates import fuse_decay_gates
from leanfleet.export.fusions.fuse_gates import fuse_gates
from leanfleet.export.fusions.fuse_linear import fuse_linear
from leanfleet.export.fusions.fuse_norms import fuse_norms
from leanfleet.export.fusions.fuse_residuals import fuse_residuals
from leanfleet.export.fusions.fuse_rotary import fuse_rotary
from leanfleet.export.fusions.fuse_rotated_halves import fuse_rotated_halves
from leanfleet.export.fusions.graph import MICROSOFT, set_function
from leanfleet.export.fusions.merge_splits import merge_splits
from leanfleet.export.fusions.narrow_norms import narrow_norms
from leanfleet.export.fusions.nest_splits import nest_splits
from leanfleet.export.fusions.norm_products import norm_products
from leanfleet.export.fusions.pack_heads import pack_heads
from leanfleet.export.fusions.pack_projections import pack_projections
from leanfleet.export.fusions.plain_softplus import plain_softplus
from leanfleet.export.fusions.read_columns import read_columns
from leanfleet.export.fusions.regroup_columns import regroup_columns
from leanfleet.export.fusions.rotate_inside import rotate_inside
from leanfleet.export.fusions.split_convolutions import split_convolutions
from leanfleet.export.fusions.attend_packed import attend_packed

__all__ = ["MICROSOFT", "PASSES", "fuse_for_onnxruntime", "set_function"]

Pass = Callable[[ir.Model, int | None], int]

# In the order in which they run.
PASSES: tuple[Pass, ...] = (
    cancel_transposes,
    divide_by_roots,
    fold_scales,
    regroup_columns,
    pack_projections,
    merge_splits,  # of packed projections
    split_convolutions,  # after merge_splits
    fuse_gates,  # likewise
    plain_softplus,
    fuse_decay_gates,  # of plain softpluses
    narrow_norms,  # that divide by roots
    fuse_residuals,  # norms that divide by roots
    norm_products,  # likewise
    fuse_rotary,
    fuse_rotated_halves,  # for models without nodes of fuse_rotary
    rotate_inside,  # nodes of fuse_rotary
    drop_transposes,  # with the rotary encodings that stay outside
    attend_packed,
    pack_heads,  # attention of tokens first, after drop_transposes and attend_packed
    fuse_norms,  # of gates and of parts that no pass before packs
    read_columns,  # of splits that later passes look for
    nest_splits,  # which side_by_side would not know
    fuse_linear,  # after all that look for products
)


def fuse_for_onnxruntime(model: ir.Model, positions: int | None = None) -> dict[str, int]:
    """Runs PASSES, and removes what they leave unused. Returns {pass: how often it applied}, in their order.

    model: changed in place. positions: how many a request may have; None leaves rotary encodings outside LeanAttention, which
    have no such bound. Where a rotary encoding stays outside for another reason, the logger leanfleet.export.fusions says why,
    at level INFO.
    """
    counts = {}
    for each in PASSES:
        counts[each.__name__] = each(model, positions)
        RemoveUnusedNodesPass()(model)
    if not any(node.domain == MICROSOFT for node in model.graph):
        model.opset_imports.pop(MICROSOFT, None)
    function_bodies.attach(model)  # another layout is another function
    RemoveUnusedFunctionsPass()(model)
    return counts
