"""Quantised key/value caches of exported decoders: scales found beforehand, and what caches do to a model, in PyTorch.

A cache is of one of decoder_contract.CACHES. Each token and head has a scale of its own, kept beside the cache; or scales are
constants of the graph, found by calibrate() on text that is like what the model will read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from leanfleet import progress
from leanfleet.decoder_contract import CACHE_SCALES, KEY, KEY_SCALE, VALUE, VALUE_SCALE, cache_forms, cache_name
from leanfleet.export.reference import FORM_TYPES, FORMS, numbers_of, quantised, row_scales
from leanfleet.export.support import implementation

if TYPE_CHECKING:
    from leanfleet.decoder_contract import Facts

PREPARED = "leanfleet_prepared"  # the attention function's name in transformers
Pair = tuple[torch.Tensor, torch.Tensor]  # of keys and of values


class CalibratedCache(torch.nn.Module):
    """A type of caches with scales that are constants of the graph: calibrate() returns it, export_decoder takes it as `cache`.

    form: of decoder_contract.CACHES. kind: of decoder_contract.CACHE_SCALES. scales: {"0.key_scale": float32 [Hkv,1,D] for
    "channel", [1] for "tensor"}.

    Example:
        from transformers import AutoModelForCausalLM
        from leanfleet.export import CalibratedCache, calibrate

        cache = calibrate(AutoModelForCausalLM.from_pretrained("llama"), [[1, 2, 3]], "int8", "tensor")
        assert isinstance(cache, CalibratedCache)
        print(cache.form, cache.kind, [tuple(scale.shape) for scale in cache.of_layer(0).values()])
    """

    def __init__(self, form: str, kind: str, scales: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.form, self.kind = form, kind
        for name, scale in scales.items():
            self.register_buffer(name.replace(".", "_"), scale)

    def of_layer(self, layer: int) -> dict[str, torch.Tensor]:
        """{input of LeanAttention: scales} of a softmax layer."""
        return {part: getattr(self, cache_name(layer, part).replace(".", "_")) for part in (KEY_SCALE, VALUE_SCALE)}


CacheType = str | CalibratedCache  # one of decoder_contract.CACHES, with a scale for each token and head, or calibrated


def form_of(cache: CacheType) -> str:
    """The one of decoder_contract.CACHES that a cache is of."""
    return cache.form if isinstance(cache, CalibratedCache) else cache


def cache_facts(cache: CacheType | None) -> Facts:
    """What leanfleet.json says of the type of caches."""
    if isinstance(cache, CalibratedCache):
        return {"cache": cache.form, "cache_scales": cache.kind}
    return {} if cache is None else {"cache": cache}


def cached(cache: CacheType, key: torch.Tensor, value: torch.Tensor, layer: int | None = None) -> Pair:
    """Keys and values [B,Hkv,N,D] of a layer as its caches hold them. layer: needed where scales are calibrated."""

    def rounded(x: torch.Tensor, form: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
        return (numbers_of(quantised(x, scale, form)) * scale.to(x.dtype)).to(x.dtype)

    of_keys, of_values = (FORM_TYPES[word] for word in cache_forms(form_of(cache)))
    if isinstance(cache, CalibratedCache):
        assert layer is not None
        scales = cache.of_layer(layer)
        return rounded(key, of_keys, scales[KEY_SCALE]), rounded(value, of_values, scales[VALUE_SCALE])
    return rounded(key, of_keys, row_scales(key, of_keys)), rounded(value, of_values, row_scales(value, of_values))


@contextmanager
def _attending(model: Any, prepare: Callable[[Any, torch.Tensor, torch.Tensor], Pair]) -> Iterator[None]:
    """A transformers model that attends by its own eager attention to prepare(module, key, value)."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, *prepare(module, key, value), *args, **kwargs)

    AttentionInterface.register(PREPARED, attention)
    AttentionMaskInterface.register(PREPARED, eager_mask)
    with implementation(model, PREPARED):
        yield


@contextmanager
def emulated(model: Any, cache: CacheType) -> Iterator[None]:
    """A transformers model that computes, without caches, what it computes over quantised ones: by its own eager attention."""
    with _attending(model, lambda module, key, value: cached(cache, key, value, module.layer_idx)):
        yield


def calibrate(model: torch.nn.Module, tokens: Sequence[Sequence[int]], cache: str, scales: str = "channel") -> CalibratedCache:
    """Scales for keys and values from text that is like what the model will read: the largest magnitude, keys after their
    rotary encoding, over the largest number of the type. What is larger later is held at that number.

    model: a transformers causal LM that export_decoder takes. tokens: rows of token ids; each is run once, from position 0 on.
    cache: of decoder_contract.CACHES. scales: "channel", one for each column of each head, or "tensor", one for all keys of a
    layer and one for all values. A channel that the text leaves at 0 has its head's largest scale. Raises ValueError for other
    words, for no tokens or such as the model does not have, and for a model without softmax layers or with keys or values that
    are not finite.

    Example:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from leanfleet.export import calibrate, export_decoder

        model, tokenizer = AutoModelForCausalLM.from_pretrained("llama"), AutoTokenizer.from_pretrained("llama")
        rows = tokenizer(["Some text.", "More of it."])["input_ids"]
        export_decoder(model, "exported", tokenizer, cache=calibrate(model, rows, "fp8"))
    """
    forms = cache_forms(cache)
    if scales not in CACHE_SCALES:
        raise ValueError(f"calibrate: scales is {scales!r}; expected {' or '.join(CACHE_SCALES)}")
    rows = [list(row) for row in tokens]
    if not rows or not all(rows):
        raise ValueError("calibrate: tokens has a row without tokens, or no row; expected rows of token ids")
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]  # a transformers model
    if wrong := next((token for row in rows for token in row if not 0 <= token < vocabulary), None):
        raise ValueError(
            f"calibrate: token {wrong} is outside the vocabulary of {vocabulary} tokens; is it the model's tokenizer?"
        )
    largest: dict[str, torch.Tensor] = {}

    def note(module: Any, key: torch.Tensor, value: torch.Tensor) -> Pair:
        for part, x in ((KEY, key), (VALUE, value)):
            name, found = cache_name(module.layer_idx, part), x.detach().float().abs().amax((0, 2)).unsqueeze(1)
            if not found.isfinite().all():
                raise ValueError(f"calibrate: {name} of {type(model).__name__} is not finite on this text")
            largest[name] = torch.maximum(largest[name], found) if name in largest else found
        return key, value

    with progress.stage("calibrating") as stage, _attending(model, note), torch.no_grad():
        for number, row in enumerate(rows):
            stage.at(f"{number + 1} of {len(rows)}")
            model(input_ids=torch.tensor([row]), use_cache=False)
    if not largest:
        raise ValueError(f"calibrate: {type(model).__name__} has no layer with keys and values")

    def scale(name: str, seen: torch.Tensor) -> torch.Tensor:
        limit = FORMS[FORM_TYPES[forms[0] if name.endswith(KEY) else forms[1]]][1]
        if scales == "tensor":
            seen = seen.amax().reshape(1)
        seen = torch.where(seen > 0, seen, seen.amax(-1, keepdim=True))
        return torch.where(seen > 0, seen, torch.full_like(seen, limit)) / limit

    return CalibratedCache(cache, scales, {f"{name}_scale": scale(name, seen) for name, seen in largest.items()})
