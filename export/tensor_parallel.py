"""One rank's share of a decoder, for tensor parallel exports (Shoeybi et al., "Megatron-LM", 2019, section 3).

Query heads are shared out with the heads of keys and values that they attend over, the value heads of layers of the gated
delta rule with their key heads, and the heads of Mamba-2's scans with their groups (HeadShare); the heads of linear attention;
the columns of feed-forward layers, and of each expert, or whole experts. A rank computes its share from whole hidden states,
and what it adds to them is summed over the ranks behind the projection that ends the layer. A norm over the channels of all
heads sums the ranks' squares. Embeddings, other norms, routers and the language model's head are on every rank.

The modules stay the model's own: while shard() lasts, their projections and their counts of heads are one rank's, so that all
that traces, fuses and checks a decoder takes the share for a model like any other.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import Linear, Module, Parameter

from leanfleet import communicators, progress
from leanfleet.decoder_contract import KEY, MOST_RANKS, WORLD
from leanfleet.export.hybrid_layers import hybrid_layers
from leanfleet.export.linear_decoder import LinearDecoder
from leanfleet.export.quantised_caches import CacheType, CalibratedCache
from leanfleet.export.support import LIGHTNING, check_shared_layers, check_supported
from leanfleet.export.torch_ops import all_reduce

_OUTPUTS = "o_proj", "dense", "out_proj"  # what an attention layer may call its last projection
_FEED_FORWARD = (  # projections that begin and end a feed-forward layer
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("input_linear",), "output_linear"),
)
_HEADS = "num_attention_heads", "num_heads"  # attributes of modules and configurations that count heads
_KV_HEADS = "num_key_value_heads", "num_kv_heads"
_GROUPS = ("num_key_value_groups",)
_DELTA_HEADS = "num_k_heads", "num_v_heads"  # of layers of the gated delta rule that are shared out
_SCANS = "FalconH1Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer"
_TILE = 64  # columns of a feed-forward layer: kernels are made for multiples of it
_EACH_HEADS_OWN = "GPTNeoX"  # classes whose joint projection has each head's query, key and value in turn


def shares(count: int, world: int) -> list[range]:
    """`count` things over ranks, in their order, as evenly as can be: the first ranks have one more."""
    each, more = divmod(count, world)
    ends = [rank * each + min(rank, more) for rank in range(world + 1)]
    return [range(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def key_heads(count: int, world: int) -> list[range]:
    """Heads of keys and values over ranks: whole ones while there are enough, else one on each rank, a head on several."""
    if world <= count:
        return shares(count, world)
    return [range(head, head + 1) for head, ranks in enumerate(shares(world, count)) for _ in ranks]


class HeadShare:
    """A rank's heads: `own`, of queries, and `keys`, the heads of keys and values that these attend over. Ranks that have the
    same head of keys share its query heads; `first` is the one of them that counts where something is summed over key heads."""

    def __init__(self, heads: int, kv_heads: int, rank: int, world: int) -> None:
        of_ranks, group = key_heads(kv_heads, world), heads // kv_heads
        self.keys = of_ranks[rank]
        place = rank - of_ranks.index(self.keys)
        part = shares(group * len(self.keys), of_ranks.count(self.keys))[place]
        start = self.keys.start * group
        self.own = range(start + part.start, start + part.stop)
        self.first = place == 0


def columns(width: int, world: int) -> list[range]:
    """The columns of a feed-forward layer over ranks, in tiles where there are enough of them."""
    tile = next(t for t in (_TILE, _TILE // 2, _TILE // 4, _TILE // 8, 1) if width % t == 0 and width // t >= world or t == 1)
    return [range(r.start * tile, r.stop * tile) for r in shares(width // tile, world)]


def check_world(world: object) -> int:
    """Raises ValueError for what is no number of ranks."""
    if not isinstance(world, int) or isinstance(world, bool) or not 2 <= world <= MOST_RANKS:
        raise ValueError(f"tensor_parallel is {world!r}; expected a number of ranks, 2 or more, at most {MOST_RANKS}")
    return world


def check_shardable(model: Any, world: int, layers: Sequence[str], whole_experts: bool = False) -> None:
    """Raises ValueError, naming the layer, for a model that cannot be shared out so. layers: names of its caches."""
    if whole_experts:
        _check_whole(model, world)
    name, again = type(model).__name__, "export it for one GPU"
    if hasattr(model, "cache_shapes"):
        return _check_ours(model, world)
    check_supported(model)
    recurrent = _recurrent_layers(model)
    others = [c for c in layers if int(c.partition(".")[0]) not in recurrent]
    known = (
        "softmax attention, MiniMax's linear attention, the gated delta rule of Qwen's and OLMo's layers and Mamba-2's scans"
    )
    check_shared_layers(model, others, "tensor_parallel", known)
    for number, module in recurrent.items():
        count, what = _cut_by(module)
        if world > count:
            raise ValueError(
                f"{name}: tensor_parallel is {world}, and layer {number} ({type(module).__name__}) has {count} "
                f"{what}{'s' * (count > 1)}, none of which is cut: export it for fewer ranks"
            )
    config = model.config.get_text_config(decoder=True)
    if any(own is not config for own in getattr(config, "per_layer_config", None) or ()):
        raise ValueError(f"{name}: its layers have configurations of their own, which tensor_parallel does not take: {again}")
    heads = _count(config, _HEADS)
    attends = any(layer.endswith(KEY) for layer in layers)
    if attends and world > heads:
        raise ValueError(
            f"{name}: tensor_parallel is {world}, and its attention has {heads} query head{'s' * (heads > 1)}, none of which "
            f"is cut: at most {heads} ranks" + (f", or {again}" if heads == 1 else "")
        )


def _is_experts(module: Module) -> bool:
    """Whether a module has the weights of a layer's experts, one behind the other."""
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return all(isinstance(w, Parameter) and w.dim() == 3 for w in weights)


def _check_whole(model: Any, world: int) -> None:
    found = [(path, module) for path, module in model.named_modules() if _is_experts(module)]
    name, cut = type(model).__name__, "leave whole_experts out, which cuts each expert's columns"
    if not found:
        raise ValueError(
            f"{name}: whole_experts is for mixtures of experts, and it has none that tensor_parallel knows: leave it out"
        )
    for path, module in found:
        count = module.down_proj.shape[0]
        takes = list(inspect.signature(module.forward).parameters)
        if getattr(module, "num_experts", None) != count or len(takes) != 3:
            raise ValueError(
                f"{name}: its experts {path} ({type(module).__name__}) take {', '.join(takes)}, where tensor_parallel knows "
                f"hidden states, the experts of each token and their weights: {cut}"
            )
        if world > count:
            raise ValueError(
                f"{name}: tensor_parallel is {world}, and {path} has {count} experts: at most {count} ranks, or {cut}"
            )


def _check_ours(model: Any, world: int) -> None:
    if not isinstance(model, LinearDecoder):
        raise ValueError(f"{type(model).__name__}: tensor_parallel is for transformers' decoders and LinearDecoder")
    if world > (heads := model.config.num_attention_heads):
        raise ValueError(
            f"LinearDecoder: tensor_parallel is {world}, and its layers have {heads} head{'s' * (heads > 1)}, none of which is "
            "cut: export it for fewer ranks"
        )


def _count(owner: Any, names: Sequence[str]) -> int:
    return next((n for n in (getattr(owner, name, None) for name in names) if isinstance(n, int)), 0)


@contextmanager
def shard(model: Any, rank: int, world: int, whole_experts: bool = False) -> Iterator[None]:
    """A decoder that is, while this lasts, the share of one rank. See check_shardable. whole_experts: of a mixture's experts a
    rank has some, whole, in place of some columns of each.

    Raises ValueError, naming the layer, for one whose projections are not known.
    """
    with ExitStack() as undo:
        if isinstance(model, LinearDecoder):
            _share_ours(undo, model, rank, world)
        else:
            _share_theirs(undo, model, rank, world, whole_experts)
        yield


def _share_ours(undo: ExitStack, model: LinearDecoder, rank: int, world: int) -> None:
    heads = model.config.num_attention_heads
    own, states = shares(heads, world)[rank], model.cache_shapes()
    for number, layer in enumerate(model.layers):
        share = _Layer(undo, rank, world, f"LinearDecoder: layer {number}")
        share.retention(layer.attention, heads, own)
        names = (("up", "gate"), "down") if hasattr(layer, "down") else (("value", "gate"), "out")
        share.feed_forward(layer, [name for name in names[0] if getattr(layer, name) is not None], names[1])
    of_rank = {name: (dtype, (shape[0], len(own), *shape[2:])) for name, (dtype, shape) in states.items()}
    undo.callback(model.__dict__.pop, "cache_shapes", None)
    model.__dict__["cache_shapes"] = lambda: of_rank


def _share_theirs(undo: ExitStack, model: Any, rank: int, world: int, whole_experts: bool) -> None:
    config = model.config.get_text_config(decoder=True)
    heads, kv_heads = _count(config, _HEADS), _count(config, _KV_HEADS) or _count(config, _HEADS)
    recurrent = {id(module) for module in _recurrent_layers(model).values()}
    done: set[int] = set()  # decoder layers whose feed-forward layers are shared out: some have attention beside a scan
    layers = _layers(model, recurrent)
    for layer, attention in layers:
        path = next(path for path, m in model.named_modules() if m is attention)
        share = _Layer(undo, rank, world, f"{type(model).__name__}: layer {path} ({type(attention).__name__})")
        if id(attention) not in recurrent:
            share.attention(attention, heads, kv_heads)
        elif type(attention).__name__ in _SCANS:
            share.scan(attention)
        elif type(attention).__name__ == LIGHTNING:
            share.lightning(attention)
        else:
            share.delta(attention)
        if id(layer) not in done:
            done.add(id(layer))
            where = f"{type(model).__name__}: layer {path.rpartition('.')[0]}"
            _feed_forward(undo, layer, attention, rank, world, where, whole_experts)
    if all(id(module) in recurrent for _, module in layers):
        return  # nothing attends, and heads in the configuration are the recurrence's
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    share_of = HeadShare(heads, kv_heads, rank, world)
    _set(undo, config, "head_dim", size)  # which otherwise follows from the number of heads
    for names, count in ((_HEADS, len(share_of.own)), (_KV_HEADS, len(share_of.keys))):
        for name in names:
            if isinstance(getattr(config, name, None), int):
                _set(undo, config, name, count)


def share_of_cache(cache: CacheType | None, rank: int, world: int) -> CacheType | None:
    """A rank's caches: scales of channels are those of its heads."""
    if not isinstance(cache, CalibratedCache) or cache.kind == "tensor":
        return cache
    own = CalibratedCache(cache.form, cache.kind, {})
    for name, scale in cache.named_buffers():  # [Hkv,1,D]
        heads = key_heads(len(scale), world)[rank]
        own.register_buffer(name, scale[heads.start : heads.stop])
    return own


@contextmanager
def share_of_rank(
    model: Any, cache: CacheType | None, rank: int, world: int, whole_experts: bool = False
) -> Iterator[CacheType | None]:
    """While it lasts, the model is one rank's share and can be traced, in a world of its own. Gives the rank's caches."""
    with progress.stage(f"rank {rank} of {world}"), shard(model, rank, world, whole_experts), alone(WORLD):
        yield share_of_cache(cache, rank, world)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """While this lasts, this process is a world of its own under a communicator's name: a share can be run and traced."""
    with communicators.create(name, rank=0, world=1):
        yield


def _recurrent_layers(model: Module) -> dict[int, Any]:
    """{number of the layer: its recurrent module} of those that can be shared out."""
    found = hybrid_layers(model) | {m.layer_idx: m for m in model.modules() if type(m).__name__ == LIGHTNING}
    kinds = (*_SCANS, LIGHTNING)
    return {n: m for n, m in found.items() if type(m).__name__ in kinds or all(hasattr(m, name) for name in _DELTA_HEADS)}


def _cut_by(module: Any) -> tuple[int, str]:
    """(how many parts a recurrent module has that ranks can share, what they are called)."""
    if type(module).__name__ == LIGHTNING:
        return module.num_attention_heads, "head"
    return (module.num_heads, "head") if type(module).__name__ in _SCANS else (module.num_v_heads, "value head")


def _layers(model: Module, recurrent: set[int]) -> list[tuple[Module, Any]]:
    """[(decoder layer, its attention or recurrent module)] of a model whose layers all have one, or both."""
    found = []
    for module in model.modules():
        for child in module.children():
            attention = getattr(child, "layer_idx", None) is not None and type(child).__name__.endswith("Attention")
            if attention or id(child) in recurrent:
                found.append((module, child))
    return found


def _set(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """An attribute, until `undo` is closed."""
    if isinstance(owner, Module) and name in owner._modules:
        before = owner._modules[name]
        undo.callback(setattr, owner, name, before)
    elif isinstance(owner, Module) and name in owner._parameters:
        undo.callback(owner._parameters.__setitem__, name, owner._parameters[name])
        owner._parameters[name] = value
        return
    elif name in vars(owner) or hasattr(owner, name):
        undo.callback(setattr, owner, name, getattr(owner, name))
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _part(parameter: torch.Tensor, index: torch.Tensor | slice) -> Parameter:
    return Parameter(parameter.detach()[index], requires_grad=False)


def _rows(linear: Linear, index: torch.Tensor) -> Linear:
    """A projection to these rows of its outputs alone."""
    own = Linear(1, 1, bias=False, device="meta")
    own.in_features, own.out_features = linear.in_features, len(index)
    own.weight = _part(linear.weight, index)
    own.bias = None if linear.bias is None else _part(linear.bias, index)
    return own


class Reduced(Module):
    """The projection that ends a layer, from one rank's columns of its inputs; its outputs are summed over the ranks, and the
    bias comes once, behind the sum."""

    def __init__(self, linear: Linear, index: torch.Tensor) -> None:
        super().__init__()
        self.weight = Parameter(linear.weight.detach()[:, index].contiguous(), requires_grad=False)
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        summed = all_reduce(torch.nn.functional.linear(hidden, self.weight), communicator=WORLD)
        return summed if self.bias is None else summed + self.bias


class SharedNorm(Module):
    """An RMS norm over `width` channels of several ranks, of which this one has those of `index`; it may have a gate.

    counts: whether the rank's squares count; not where an earlier rank has the same channels. group: (which, of how many) that
    are normed each by itself and lie on several ranks: all groups' squares are summed at once.
    """

    def __init__(
        self, norm: Any, index: torch.Tensor, width: int, counts: bool = True, group: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__()
        self.gate_last = getattr(norm, "norm_before_gate", False)
        self.group, groups = group
        self.place = None
        if groups > 1 or not counts:
            self.place = torch.zeros(groups)
            self.place[self.group] = counts
        weight = getattr(norm, "weight", None)
        self.weight = None if weight is None else _part(weight, index)
        self.eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        self.width = width

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        gates = None if gate is None else torch.nn.functional.silu(gate.to(wide.dtype))
        if gates is not None and not self.gate_last:
            wide = wide * gates
        squares = wide.pow(2).sum(-1, keepdim=True)
        if self.place is not None:
            squares = squares * self.place.to(wide.dtype)
        squares = all_reduce(squares, communicator=WORLD)[..., self.group : self.group + 1]
        normed = wide * torch.rsqrt(squares / self.width + self.eps)
        if gates is not None and self.gate_last:
            normed = normed * gates
        normed = normed.to(hidden.dtype)
        return normed if self.weight is None else self.weight * normed


class OwnConvolution(Module):
    """A short convolution of some channels: what transformers' layers read of theirs."""

    def __init__(self, whole: Any, index: torch.Tensor) -> None:
        super().__init__()
        self.weight = _part(whole.weight, index)
        self.bias = None if whole.bias is None else _part(whole.bias, index)


def _blocks(which: range, size: int, start: int = 0) -> torch.Tensor:
    """The numbers of these heads' rows, of `size` rows each; the first head's begin at `start`."""
    return torch.arange(start + which.start * size, start + which.stop * size)


def _joint(share: HeadShare, each: int, first: int, sizes: Sequence[int]) -> torch.Tensor:
    """Rows of a joint projection that has, key head after key head, `first` rows and then, for each of `sizes`, a block of so
    many rows for each of its `each` value heads."""
    found, width = [], first + each * sum(sizes)
    for head in share.keys:
        at = head * width
        found.append(torch.arange(at, at + first))
        at += first
        mine = range(max(share.own.start - head * each, 0), min(share.own.stop - head * each, each))
        for size in sizes:
            found.append(_blocks(mine, size, at))
            at += each * size
    return torch.cat(found)


class _Layer:
    """Replaces the projections of a layer by one rank's. where: the layer, for errors."""

    def __init__(self, undo: ExitStack, rank: int, world: int, where: str) -> None:
        self.undo, self.rank, self.world, self.where = undo, rank, world, where

    def attention(self, module: Any, heads: int, kv_heads: int) -> None:
        share = HeadShare(heads, kv_heads, self.rank, self.world)
        end = self._end(module)
        for name, index in self._inputs(module, heads, kv_heads, share).items():
            _set(self.undo, module, name, _rows(self._linear(module, name), index))
        last = self._linear(module, end)
        _set(self.undo, module, end, Reduced(last, _blocks(share.own, self._each(last.in_features, heads))))
        self._parameters(module, heads, kv_heads, share)
        own, keys = len(share.own), len(share.keys)
        counts = (_HEADS, heads, own), (_KV_HEADS, kv_heads, keys), (_GROUPS, heads // kv_heads, own // keys)
        for names, all_of_them, count in counts:
            for name in names:
                if getattr(module, name, None) == all_of_them:
                    _set(self.undo, module, name, count)

    def lightning(self, module: Any) -> None:
        """MiniMax's linear attention, whose joint projection has each head's query, key and value in turn."""
        heads = module.num_attention_heads
        own = shares(heads, self.world)[self.rank]
        each, joint = _blocks(own, module.head_dim), _blocks(own, 3 * module.head_dim)
        for name, index in (("qkv_proj", joint), ("output_gate", each)):
            _set(self.undo, module, name, _rows(self._linear(module, name), index))
        _set(self.undo, module, "out_proj", Reduced(self._linear(module, "out_proj"), each))
        _set(self.undo, module, "norm", SharedNorm(module.norm, each, heads * module.head_dim))
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):
            whole = getattr(module, name)
            axis = next(axis for axis, size in enumerate(whole.shape) if size == heads)
            _set(self.undo, module, name, whole.narrow(axis, own.start, len(own)))
        _set(self.undo, module, "num_attention_heads", len(own))

    def retention(self, module: Any, heads: int, own: range) -> None:
        """A layer of LinearDecoder: RetNet's retention, or TransNormerLLM's gated linear attention."""
        for name in ("query", "key", "value", "gate"):
            linear = self._linear(module, name)
            _set(self.undo, module, name, _rows(linear, _blocks(own, self._each(linear.out_features, heads))))
        last = self._linear(module, "out")
        index = _blocks(own, self._each(last.in_features, heads))
        _set(self.undo, module, "out", Reduced(last, index))
        if hasattr(module, "norm"):
            _set(self.undo, module, "norm", SharedNorm(module.norm, index, last.in_features))
        if getattr(module, "theta", None) is not None:
            _set(self.undo, module, "theta", _part(module.theta, slice(own.start, own.stop)))
        _set(self.undo, module, "log_decay", module.log_decay[own.start : own.stop])
        _set(self.undo, module, "heads", len(own))

    def delta(self, module: Any) -> None:
        """A layer of the gated delta rule, whose value heads are what queries are to attention. Channels of its convolution are
        queries, keys and values."""
        each = module.num_v_heads // module.num_k_heads
        share = HeadShare(module.num_v_heads, module.num_k_heads, self.rank, self.world)
        keys, values = _blocks(share.keys, module.head_k_dim), _blocks(share.own, module.head_v_dim)
        channels = torch.cat([keys, module.key_dim + keys, 2 * module.key_dim + values])
        of_values = torch.arange(share.own.start, share.own.stop)
        known = {
            "in_proj_qkvz": _joint(share, each, 2 * module.head_k_dim, (module.head_v_dim, module.head_v_dim)),
            "in_proj_ba": _joint(share, each, 0, (1, 1)),
            "in_proj_qkv": channels,
            **dict.fromkeys(("q_proj", "k_proj"), keys),
            **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), values),
            **dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj"), of_values),
        }
        end = self._end(module)
        taken = {name: index for name, index in known.items() if hasattr(module, name)}
        for path, parameter in module.named_parameters():
            holder = path.partition(".")[0]
            each_head = parameter.shape in ((module.num_v_heads,), (module.head_v_dim,))
            if holder not in (*taken, end, "conv1d") and not each_head:
                raise self._not_by_heads(path, parameter)
        for name, index in taken.items():
            _set(self.undo, module, name, _rows(self._linear(module, name), index))
        _set(self.undo, module, end, Reduced(self._linear(module, end), values))
        counts = {"num_k_heads": len(share.keys), "num_v_heads": len(share.own), "key_dim": len(keys), "value_dim": len(values)}
        self._recurrence(module, of_values, channels, counts)

    def scan(self, module: Any) -> None:
        """Mamba-2's mixer, whose heads are to their group's B and C what queries are to keys. Its projection gives gates,
        values, B, C and dt; channels of its convolution are values, B and C."""
        share = HeadShare(module.num_heads, module.n_groups, self.rank, self.world)
        groups, heads = share.keys, share.own
        width, states = module.intermediate_size, module.n_groups * module.ssm_state_size
        values, of_groups = _blocks(heads, module.head_dim), _blocks(groups, module.ssm_state_size)
        of_heads = torch.arange(heads.start, heads.stop)
        channels = torch.cat([values, width + of_groups, width + states + of_groups])
        projected = torch.cat([values, width + channels, width + module.conv_dim + of_heads])
        _set(self.undo, module, "in_proj", _rows(self._linear(module, "in_proj"), projected))
        _set(self.undo, module, "out_proj", Reduced(self._linear(module, "out_proj"), values))
        if getattr(module, "mup_vector", None) is not None:
            _set(self.undo, module, "mup_vector", module.mup_vector[..., projected])
        if (weight := getattr(module.norm, "weight", None)) is not None:
            if self.world > module.n_groups:
                group = groups.start, module.n_groups
                _set(self.undo, module, "norm", SharedNorm(module.norm, values, width // module.n_groups, group=group))
            else:
                _set(self.undo, module.norm, "weight", _part(weight, values))
                if hasattr(module.norm, "n_groups"):
                    _set(self.undo, module.norm, "n_groups", len(groups))
        counts = {"num_heads": len(heads), "n_groups": len(groups), "intermediate_size": len(values)}
        self._recurrence(module, of_heads, channels, {**counts, "groups_time_state_size": len(of_groups)})

    def _recurrence(self, module: Any, heads: torch.Tensor, channels: torch.Tensor, counts: dict[str, int]) -> None:
        """What recurrent modules have in common: a convolution, numbers for each head, counts."""
        _set(self.undo, module, "conv1d", OwnConvolution(module.conv1d, channels))
        for name in ("A_log", "dt_bias", "D"):
            if hasattr(module, name):
                _set(self.undo, module, name, _part(getattr(module, name), heads))
        for name, count in {**counts, "conv_dim": len(channels)}.items():
            if hasattr(module, name):
                _set(self.undo, module, name, count)

    def _inputs(self, module: Any, heads: int, kv_heads: int, share: HeadShare) -> dict[str, torch.Tensor]:
        """{projection: the rows of its outputs that this rank has}."""
        own, own_kv = share.own, share.keys
        if all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj")):
            counts = {"q_proj": (heads, own), "k_proj": (kv_heads, own_kv), "v_proj": (kv_heads, own_kv)}
            return {
                name: _blocks(which, self._each(self._linear(module, name).out_features, count))
                for name, (count, which) in counts.items()
            }
        if hasattr(module, "qkv_proj"):
            size = self._each(self._linear(module, "qkv_proj").out_features, heads + 2 * kv_heads)
            starts = (0, own), (heads * size, own_kv), ((heads + kv_heads) * size, own_kv)
            return {"qkv_proj": torch.cat([_blocks(which, size, start) for start, which in starts])}
        if hasattr(module, "query_key_value") and type(module).__name__.startswith(_EACH_HEADS_OWN):
            return {"query_key_value": _blocks(own, self._each(self._linear(module, "query_key_value").out_features, heads))}
        raise self._unknown(module)

    def _parameters(self, module: Any, heads: int, kv_heads: int, share: HeadShare) -> None:
        """Shares out what a layer has a number of for each head, and RMS norms over all heads; refuses other parameters that
        span several heads."""
        size = getattr(module, "head_dim", None) or getattr(module, "head_size", None) or 0
        replaced = {id(p) for child in module.children() if isinstance(child, (Linear, Reduced)) for p in child.parameters()}
        for path, parameter in module.named_parameters():
            if id(parameter) in replaced:
                continue
            if parameter.shape == (heads,) and "." not in path and heads != size:  # such as attention sinks
                _set(self.undo, module, path, _part(parameter, slice(share.own.start, share.own.stop)))
            elif parameter.shape != (size,):
                known = {heads * size: (share.own, True), kv_heads * size: (share.keys, share.first)}
                self._norm(module, path, parameter, size, known)

    def _norm(self, module: Any, path: str, parameter: Parameter, size: int, known: dict[int, tuple[range, bool]]) -> None:
        """An RMS norm over all heads. size: channels of one. known: {its width: (the rank's heads, whether they count)}."""
        name, _, weight = path.rpartition(".")
        norm = getattr(module, name, None) if "." not in name else None
        width = parameter.shape[0] if parameter.dim() == 1 else 0
        if weight != "weight" or "RMSNorm" not in type(norm).__name__ or width not in known:
            raise self._not_by_heads(path, parameter)
        heads, counts = known[width]
        _set(self.undo, module, name, SharedNorm(norm, _blocks(heads, size), width, counts))

    def _not_by_heads(self, path: str, parameter: Parameter) -> ValueError:
        return ValueError(
            f"{self.where}: its {path} is {list(parameter.shape)}, which tensor_parallel cannot share out by heads: export it "
            "for one GPU"
        )

    def _linear(self, module: Any, name: str) -> Linear:
        found = getattr(module, name)
        if type(found) is not Linear:
            raise ValueError(
                f"{self.where}: its {name} is a {type(found).__name__}; tensor_parallel shares out plain weights (Linear): "
                "give it a model that is not quantised, or export this one for one GPU"
            )
        return found

    def _end(self, module: Any) -> str:
        """The name of a layer's last projection."""
        ends = [name for name in _OUTPUTS if hasattr(module, name)]
        if len(ends) != 1:
            raise self._unknown(module)
        return ends[0]

    def _each(self, size: int, count: int) -> int:
        """Rows or columns a head."""
        if size % count:
            raise ValueError(f"{self.where}: {size} numbers do not divide into {count} heads: export it for one GPU")
        return size // count

    def _unknown(self, module: Module) -> ValueError:
        names = ", ".join(name for name, child in module.named_children() if isinstance(child, Linear)) or "none"
        return ValueError(
            f"{self.where}: tensor_parallel does not know its projections ({names}): export it for one GPU, or give it a model "
            "with q_proj, k_proj, v_proj and o_proj, or with qkv_proj"
        )

    def feed_forward(self, module: Any, starts: Sequence[str], end: str) -> None:
        last = self._linear(module, end)
        own = columns(last.in_features, self.world)[self.rank]
        for name in starts:
            first = self._linear(module, name)
            parts = range(0, first.out_features, last.in_features)  # gates and values of a joint projection
            index = torch.cat([torch.arange(at + own.start, at + own.stop) for at in parts])
            _set(self.undo, module, name, _rows(first, index))
        _set(self.undo, module, end, Reduced(last, torch.arange(own.start, own.stop)))

    def experts(self, module: Any) -> None:
        """Shares out the columns of every expert, so that all ranks have the same work whichever experts are chosen."""
        inner = -2 if getattr(module, "is_transposed", False) else -1  # of down_proj [E,H,I] or [E,I,H]
        width = module.down_proj.shape[inner]
        own = columns(width, self.world)[self.rank]
        index = torch.arange(own.start, own.stop)
        joined = (
            torch.cat([index, width + index])
            if getattr(module, "is_concatenated", True)
            else torch.stack([2 * index, 2 * index + 1], 1).flatten()
        )
        taken = {"gate_up_proj": (-3 - inner, joined), "down_proj": (inner, index), "gate_up_proj_bias": (-1, joined)}
        for name, (axis, chosen) in taken.items():
            if (whole := getattr(module, name, None)) is not None:
                _set(self.undo, module, name, Parameter(whole.detach().index_select(axis, chosen), requires_grad=False))
        if self.rank and getattr(module, "down_proj_bias", None) is not None:  # it is summed too, so that one rank has it
            _set(self.undo, module, "down_proj_bias", Parameter(torch.zeros_like(module.down_proj_bias), requires_grad=False))
        forward: Callable[..., torch.Tensor] = module.forward
        self._forward(module, lambda *given, **named: all_reduce(forward(*given, **named), communicator=WORLD))

    def whole_experts(self, module: Any) -> None:
        """Gives this rank some of the experts, which it computes for the tokens that chose them: others have the weight 0."""
        own = shares(module.num_experts, self.world)[self.rank]
        for name, whole in list(module.named_parameters(recurse=False)):
            if whole.shape[0] == module.num_experts:
                _set(self.undo, module, name, _part(whole, slice(own.start, own.stop)))
        _set(self.undo, module, "num_experts", len(own))
        _set(self.undo, module, "leanfleet_elsewhere", True)
        forward: Callable[..., torch.Tensor] = module.forward

        def of_own(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            here = (chosen >= own.start) & (chosen < own.stop)
            among = torch.where(here, chosen - own.start, 0)
            return all_reduce(forward(hidden, among, torch.where(here, weights, 0)), communicator=WORLD)

        self._forward(module, of_own)

    def _forward(self, module: Any, function: Callable[..., torch.Tensor]) -> None:
        module.forward = types.MethodType(lambda _, *given, **named: function(*given, **named), module)
        self.undo.callback(vars(module).pop, "forward", None)


def _feed_forward(
    undo: ExitStack, layer: Module, attention: Module, rank: int, world: int, where: str, whole_experts: bool
) -> None:
    """Shares out what a decoder layer has beside its attention."""
    inside = {id(m) for m in attention.modules()}
    found = False
    for path, module in list(layer.named_modules()):
        if id(module) in inside:
            continue
        share = _Layer(undo, rank, world, f"{where}.{path} ({type(module).__name__})".replace(". ", " "))
        if _is_experts(module):
            (share.whole_experts if whole_experts else share.experts)(module)
            found = True
            continue
        for starts, end in _FEED_FORWARD:
            if all(isinstance(getattr(module, name, None), Module) for name in (*starts, end)):
                share.feed_forward(module, starts, end)
                found = True
                break
    others = [m for m in layer.modules() if id(m) not in inside and isinstance(m, Linear)]
    if not found and others:
        raise ValueError(f"{where}: tensor_parallel knows no feed-forward layer in it: export it for one GPU")
