"""Low-rank stand-ins for softmax attention in a pretrained transformers model: linearise.

Rows of query and key become rows of R features, so that exp(q.k) is about dot(phi_q(q), phi_k(k)), and causal attention is a
sum over the tokens before, which CausalLinearDecay carries as a state [R, Dv + 1]: the last column sums phi_k alone and is the
normaliser (FleetAttention, "Efficient Decoding for Long Prompts via Low-Rank Approximation", equation 3). Nothing is trained
again, and without training the error is large: bench/models/linearise.py measures it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from leanfleet.export.linear_attention import register_transformers
from leanfleet.export.support import FEATURES, LAYERS, METHOD


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In float32, or in float64 where it is: features are exponentials, which 16 bits do not hold."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def orthogonal_gaussian(rows: int, columns: int, seed: int) -> torch.Tensor:
    """float32 [rows,columns]: rows are orthogonal in blocks of `columns`, each as long as a Gaussian vector (Choromanski et al.
    2021, arXiv 2009.14794, section 2.4).

    Example:
        from leanfleet.export.low_rank import orthogonal_gaussian

        rows = orthogonal_gaussian(8, 4, seed=0)
        print((rows[0] @ rows[1]).abs() < 1e-5)              # tensor(True)
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = [torch.linalg.qr(torch.randn(columns, columns, generator=generator))[0].T for _ in range(-(-rows // columns))]
    lengths = torch.randn(rows, columns, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:rows] * lengths


class FavorFeatures(nn.Module):
    """FAVOR+: orthogonal positive random features of exp(q.k) (Choromanski et al. 2021, arXiv 2009.14794, lemma 1, equation 5).

    phi(x)_r = exp(w_r.x - |x|^2 / 2) / sqrt(R) with w_r of orthogonal_gaussian; the mean of phi(q).phi(k) over w is exp(q.k).
    Query features are divided by the largest of their row, which the normaliser takes away again. Key features need no such
    factor: w.k - |k|^2 / 2 is |w|^2 / 2 at most. So a state of earlier tokens stays as it is, and decode steps carry it.

    query and key: T [B,H,N,D], each times the root of the softmax's scale (which is where the error is least: it grows with the
    lengths of both), to float32 [B,H,N,R], float64 for float64. forward is not used.

    Example:
        import torch
        from leanfleet.export.low_rank import FavorFeatures

        features = FavorFeatures(head_dim=16, features=4096, seed=0)
        q, k = torch.rand(2, 1, 1, 5, 16).mul(0.5).unbind()
        scores = features.query(q) @ features.key(k).mT      # rows are proportional to exp(q k^T)
        print((scores / scores.sum(-1, True) - (q @ k.mT).softmax(-1)).abs().max() < 0.1)  # tensor(True)
    """

    def __init__(self, head_dim: int, features: int, seed: int) -> None:
        super().__init__()
        self.register_buffer("directions", orthogonal_gaussian(features, head_dim, seed))
        self.features = features

    def _exponents(self, x: torch.Tensor) -> torch.Tensor:
        x = _wide(x)
        return x @ self.directions.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Features of queries."""
        exponents = self._exponents(x)
        return torch.exp(exponents - exponents.amax(-1, keepdim=True)) * self.features**-0.5

    def key(self, x: torch.Tensor) -> torch.Tensor:
        """Features of keys."""
        return torch.exp(self._exponents(x)) * self.features**-0.5


def codebooks(keys: torch.Tensor, codes: int, seed: int, rounds: int = 10) -> torch.Tensor:
    """k-means centres [Hkv,codes,D] of keys [Hkv,N,D], N >= codes, from random keys on (Lloyd's algorithm, `rounds` times).

    Raises ValueError for fewer keys than codes.

    Example:
        import torch
        from leanfleet.export.low_rank import codebooks

        print(codebooks(torch.randn(2, 50, 8), codes=4, seed=0).shape)  # torch.Size([2, 4, 8])
    """
    heads, count, _ = keys.shape
    if count < codes:
        raise ValueError(f"{codes} codes need as many tokens of calibration; there are {count}")
    generator = torch.Generator().manual_seed(seed)
    centres = keys[:, torch.randperm(count, generator=generator)[:codes]].clone()
    for _ in range(rounds):
        nearest = torch.cdist(keys, centres).argmin(-1)
        chosen = nn.functional.one_hot(nearest, codes).to(keys.dtype)
        sizes = chosen.sum(1).unsqueeze(-1)
        centres = torch.where(sizes > 0, chosen.mT @ keys / sizes.clamp(min=1), centres)  # a code of no key stays
    return centres


class QuantisedKeys(nn.Module):
    """Transformer-VQ's attention over quantised keys (Lingle 2023, arXiv 2309.16354, definition 2.1 and section 3.2).

    A key k becomes the codeword c_z nearest to it, and softmax attention over codewords is exact: phi_k(k) is the one-hot
    row of z, phi_q(q)_r = exp(q.c_r), so that the state holds each codeword's count and sum of values. The paper learns the
    codebook with the model, and keeps the last block of keys unquantised; here it is the k-means of a calibration text's keys,
    and all keys are quantised.

    codebook: [Hkv,R,D]. query and key as in FavorFeatures; query heads share the codebook of their key head.

    Example:
        import torch
        from leanfleet.export.low_rank import QuantisedKeys, codebooks

        keys = torch.randn(2, 200, 8)                       # of 2 heads
        features = QuantisedKeys(codebooks(keys, codes=16, seed=0))
        print(features.key(keys[None]).sum(-1).unique())    # tensor([1.])
    """

    def __init__(self, codebook: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("codebook", codebook)
        self.features = codebook.shape[1]

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Features of queries."""
        x = _wide(x)
        codebook = self.codebook.to(x.dtype)
        scores = x @ codebook.repeat_interleave(x.shape[1] // codebook.shape[0], 0).mT
        return torch.exp(scores - scores.amax(-1, keepdim=True))

    def key(self, x: torch.Tensor) -> torch.Tensor:
        """Features of keys."""
        x = _wide(x)
        codebook = self.codebook.to(x.dtype)
        nearest = (x @ codebook.mT - codebook.square().sum(-1).unsqueeze(1) / 2).argmax(-1)
        return (nearest.unsqueeze(-1) == torch.arange(self.features, device=x.device)).to(x.dtype)


METHODS = ("favor", "vq")


def linearise(
    model: Any,
    method: str = "favor",
    layers: Sequence[int] = (),
    features: int = 256,
    seed: int = 0,
    calibration: torch.Tensor | None = None,
) -> Any:
    """Replaces softmax in some layers of a transformers model by a low-rank form, in place and without training; returns it.

    method: "favor" (FavorFeatures) or "vq" (QuantisedKeys); both are causal and carry a state [features, Dv + 1] a key head, in
    running_sums_cache as in export_decoder. layers: their numbers; the others keep softmax. features: R, the rank. seed: of the
    random directions, or of k-means. calibration: int64 [1,N], tokens for "vq" whose keys give the codebooks, N >= features.
    The model's weights stay as they are, in any float type; features are float32. save_pretrained does not keep the
    replacement: linearise the loaded model again. Source: FleetAttention's experiment (table 2, appendix A.1), which does this
    to layers 23 to 30 of 32. Its other methods, LARA and HyperAttention, are not here.

    Raises ValueError for an unknown method, layers that are not there, a missing or short calibration, a model whose softmax is
    not transformers' own, and for one that is linear already.

    Example:
        from transformers import AutoModelForCausalLM
        from leanfleet.export.low_rank import linearise

        model = AutoModelForCausalLM.from_pretrained("llama").eval()
        linearise(model, "favor", layers=[0], features=64)
    """
    from leanfleet.export.support import check_implementation, linear_layers_of

    config = model.config.get_text_config(decoder=True)
    if method not in METHODS:
        raise ValueError(f"linearise: method is {method!r}; it is one of {', '.join(METHODS)}")
    check_implementation(model)
    if linear_layers_of(model):
        raise ValueError(f"linearise: {type(model).__name__} has linear attention already")
    chosen, count = sorted(set(layers)), config.num_hidden_layers
    if any(not 0 <= layer < count for layer in chosen):
        raise ValueError(f"linearise: layers are {chosen}; expected numbers from 0 to {count - 1}")
    keys = _keys(model, calibration) if method == "vq" else {}
    modules = {m.layer_idx: m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
    made: dict[int, nn.Module] = {}
    for layer in chosen:
        if method == "vq":
            made[layer] = QuantisedKeys(codebooks(keys[layer] * modules[layer].scaling ** 0.5, features, seed + layer))
        else:
            made[layer] = FavorFeatures(modules[layer].head_dim, features, seed + layer)
    for layer, module in made.items():  # only now, so that an error leaves the model as it was
        setattr(modules[layer], FEATURES, module.to(model.device))
    setattr(config, LAYERS, chosen)
    setattr(config, METHOD, method)
    model.set_attn_implementation(register_transformers())
    return model


def _keys(model: Any, calibration: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """{layer: its keys [Hkv,N,D], float32} of a softmax model on the calibration's tokens."""
    from transformers import DynamicCache

    if calibration is None:
        raise ValueError("linearise: 'vq' takes its codebooks from keys: give calibration, int64 [1,N]")
    cache = DynamicCache()  # of no configuration, so that layers with windows keep all keys too
    with torch.no_grad():
        model(calibration, past_key_values=cache, use_cache=True)
    return {n: layer.keys[0].float() for n, layer in enumerate(cache.layers)}
