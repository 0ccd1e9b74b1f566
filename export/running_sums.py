"""The cache of transformers models whose attention is linear: running sums in place of keys and values."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from leanfleet.export.support import SUMS, check_linear_layers, keeps_keys, linear_layers


class RunningSums(CacheLayerMixin):
    """What one linear layer carries: sums of k^T v [B,Hkv,D,Dv], of k, of v, and the number of tokens [B]; or, of a layer that
    low_rank.linearise changed, one sum [B,Hkv,R,Dv+1]. Before the first token there is none.

    update() hands the new keys and values on as they are, with a reference to itself; the attention function adds them.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.seen = layer, 0
        self.sums: tuple[torch.Tensor, ...] = ()
        self.waiting = False  # for attention to add what update() got

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the attention function makes the first sums, and knows what it sums."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys [B,Hkv,N,D] and values, as they are. Raises ValueError where attention did not take the last ones."""
        if self.waiting:
            raise ValueError(
                f"attention layer {self.layer} did not add its tokens to the running sums: this cache is for linear attention "
                "(register_transformers) alone, and for models that hand its keys to their attention as they are"
            )
        self.waiting = True
        self.seen += key_states.shape[-2]
        marked = key_states.view_as(key_states)
        setattr(marked, SUMS, self)
        return marked, value_states

    def replace(self, sums: tuple[torch.Tensor, ...]) -> None:
        """Puts the sums with the new tokens in the place of those without."""
        self.sums, self.waiting = sums, False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that a mask is for: those of all tokens, though none is kept."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen, padding included: where the next one stands."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def offload(self) -> None:
        """Sums stay where they are: they are small."""

    def prefetch(self) -> None:
        """See offload."""

    def reset(self) -> None:
        """Back to before the first token."""
        self.sums, self.seen, self.waiting = (), 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError: what a token added to sums cannot be told from the rest."""
        if tokens_to_remove:
            raise ValueError("running sums cannot be cropped: assisted generation needs a cache that keeps its tokens")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """The rows of these numbers, for beam search."""
        self.sums = tuple(t.index_select(0, beam_idx.to(t.device)) for t in self.sums)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times."""
        self.sums = tuple(t.repeat_interleave(repeats, 0) for t in self.sums)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The rows of these numbers."""
        self.sums = tuple(t[indices] for t in self.sums)


def running_sums_cache(config: PreTrainedConfig) -> DynamicCache:
    """A cache for a transformers model whose attention is register_transformers(): a step costs the same at any length.

    Linear layers carry the sums of NormalizedLinearAttention, float32 (float64 in a float64 model); softmax layers of a mixed
    model (config.leanfleet_linear_layers) keys and values as transformers keeps them, as do layers with HyperAttention, which
    has no sums (low_rank.linearise). Padding, on whichever side, is left out
    of the sums where the model gets an attention_mask. Sums carry no gradient. Source: "Linear Attention Optimized GPU Kernel
    Implementation", equation 4, whose sums over n <= i are those over n <= i - 1 and one more term.

    Raises ValueError for layers in config.leanfleet_linear_layers that the model does not have; crop() on it raises ValueError.

    Example:
        import torch
        from transformers import AutoModelForCausalLM
        from leanfleet.export.linear_attention import register_transformers
        from leanfleet.export.running_sums import running_sums_cache

        model = AutoModelForCausalLM.from_pretrained("llama", attn_implementation=register_transformers())
        cache = running_sums_cache(model.config)
        tokens = model.generate(torch.tensor([[1, 2, 3]]), past_key_values=cache, max_new_tokens=4)
    """
    config = config.get_text_config(decoder=True)
    check_linear_layers(config)
    cache = DynamicCache(config=config)
    for layer in () if keeps_keys(config) else linear_layers(config):
        cache.layers[layer] = RunningSums(layer)
    return cache
