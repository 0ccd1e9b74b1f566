"""Low-rank stand-ins for softmax attention in a pretrained transformers model: linearise.

Rows of query and key become rows of R features, so that exp(q.k) is about dot(phi_q(q), phi_k(k)), and causal attention is a
sum over the tokens before, which CausalLinearDecay carries as a state [R, Dv + 1]: the last column sums phi_k alone and is the
normaliser (FleetAttention, "Efficient Decoding for Long Prompts via Low-Rank Approximation", equation 3). Nothing is trained
again, and without training the error is large: bench/models/linearise.py measures it. HyperAttention has no such rows: it cuts
prompts in halves, and what it knows of a prompt is no state.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from leanfleet.export.linear_attention import register_transformers
from leanfleet.export.support import FEATURES, LAYERS, METHOD, PROMPTS


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


class LaraFeatures(nn.Module):
    """LARA: positive random features whose directions lie where queries and keys do (Zheng, Wang and Kong 2022, arXiv
    2204.04667, section 4: randomised attention with one proposal a landmark, weighed by the balance heuristic of multiple
    importance sampling).

    Queries and keys of a text fall into R chunks of consecutive tokens; the landmark of chunk c is mu_c, the mean of its
    queries plus that of its keys, and the direction w_c is drawn from N(mu_c, I). With N(w; m) the Gaussian's density,

        exp(q.k) ~ sum_c a_c exp(w_c.q - |q|^2 / 2) exp(w_c.k - |k|^2 / 2),    a_c = N(w_c; 0) / sum_c' N(w_c; mu_c').

    The paper's weights depend on the query too, which costs R x R more a head and is left out. Landmarks of the very text that
    is read see all of it, tokens to come included: good for a prompt that is known (FleetAttention, "Landmark-based method for
    prompt decoding"), not for scoring. linearise takes them from a text of calibration, so that nothing reads the future and
    steps carry a state. queries [H,N,D] and keys [Hkv,N,D] of that text, N >= features, are scaled as in FavorFeatures; query
    heads share the directions of their key head. query and key: as in FavorFeatures.

    Raises ValueError for fewer tokens than features.

    Example:
        import torch
        from leanfleet.export.low_rank import LaraFeatures

        queries, keys = torch.randn(2, 2, 300, 8).mul(0.5)
        features = LaraFeatures(queries, keys, features=64, seed=0)
        print(features.query(queries[None]).shape)          # torch.Size([1, 2, 300, 64])
    """

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor, features: int, seed: int) -> None:
        super().__init__()
        heads, count, size = keys.shape
        if count < features:
            raise ValueError(f"{features} landmarks need as many tokens of calibration; there are {count}")
        grouped = queries.view(heads, -1, count, size).mean(1)
        chunks = zip(grouped.tensor_split(features, 1), keys.tensor_split(features, 1))
        landmarks = torch.stack([q.mean(1) + k.mean(1) for q, k in chunks], 1)
        directions = landmarks + torch.stack([orthogonal_gaussian(features, size, seed + head) for head in range(heads)]).to(
            keys
        )
        self.register_buffer("directions", directions)
        # A key's feature is exp(-|w - k|^2 / 2), at most 1; the query's takes |w|^2 / 2 of N(w; 0) back.
        self.register_buffer("weights", -torch.logsumexp(-torch.cdist(directions, landmarks).square() / 2, -1))
        exponents = -torch.cdist(keys, directions).square() / 2
        self.register_buffer("largest", exponents.amax((1, 2)).view(heads, 1, 1))  # a factor that the normaliser takes away
        self.features = features

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Features of queries."""
        x = _wide(x)
        group = x.shape[1] // self.directions.shape[0]
        directions, weights = (t.to(x.dtype).repeat_interleave(group, 0) for t in (self.directions, self.weights))
        exponents = x @ directions.mT + weights.unsqueeze(1)
        return torch.exp(exponents - exponents.amax(-1, keepdim=True))

    def key(self, x: torch.Tensor) -> torch.Tensor:
        """Features of keys."""
        x = _wide(x)
        directions = self.directions.to(x.dtype)
        lengths = x.square().sum(-1, keepdim=True) + directions.square().sum(-1).unsqueeze(1)
        return torch.exp(x @ directions.mT - lengths / 2 - self.largest.to(x.dtype))


def lsh_buckets(x: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """int64 [...]: the bucket of each row of x [...,D], by the signs of its products with directions [P,D].

    Buckets whose numbers follow each other differ in one sign, so that sorting by them puts near rows side by side (Han et al.
    2023, arXiv 2310.05869, definition 1).

    Example:
        import torch
        from leanfleet.export.low_rank import lsh_buckets

        print(lsh_buckets(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.eye(2)))   # tensor([2, 3])
    """
    signs = (x @ directions.to(x).T > 0).long()
    parity = signs.flip(-1).cumsum(-1) % 2  # of a Gray code to its number: each bit is the parity of itself and those above
    return (parity.flip(-1) * 2 ** torch.arange(signs.shape[-1], device=x.device)).sum(-1)


class _Hyper:
    """One call of hyper_attention: its directions and draws. Pairs are (output, log of the softmax's sum)."""

    def __init__(self, size, block, samples, projections, shortest, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.directions = torch.randn(projections, size, generator=self.generator)
        self.block, self.samples, self.shortest = block, samples, shortest

    def causal(self, query, key, value):
        count = query.shape[2]
        if count <= max(self.shortest, 1):
            steps = torch.arange(count, device=query.device)
            return _softmax((query @ key.mT).masked_fill(steps[:, None] < steps, -torch.inf), value)
        half = count // 2
        (q1, q2), (k1, k2), (v1, v2) = ((t[:, :, :half], t[:, :, half:]) for t in (query, key, value))
        first, second, across = self.causal(q1, k1, v1), self.causal(q2, k2, v2), self.unmasked(q2, k1, v1)
        logs = torch.stack([second[1], across[1]], -1)
        shares = logs.softmax(-1).unsqueeze(-2)
        merged = second[0] * shares[..., 0] + across[0] * shares[..., 1]
        return torch.cat([first[0], merged], 2), torch.cat([first[1], logs.logsumexp(-1)], 2)

    def unmasked(self, query, key, value):
        """Exact within blocks of rows sorted by bucket; the other keys by a uniform sample."""
        keys = key.shape[2]
        if keys <= self.block:
            return _softmax(query @ key.mT, value)
        blocks = -(-keys // self.block)
        place_q, place_k = (lsh_buckets(t, self.directions).argsort(dim=-1, stable=True) for t in (query, key))
        chosen = torch.randint(keys, (self.samples,), generator=self.generator).to(key.device)
        block_k = torch.empty_like(place_k).scatter_(2, place_k, _blocks(keys, blocks, key.device).expand_as(place_k))
        outputs, logs = (
            torch.empty_like(query[..., :1].expand(*query.shape[:3], value.shape[3])),
            torch.empty_like(query[..., 0]),
        )
        for b in range(blocks):
            rows, columns = (p[:, :, _blocks(p.shape[2], blocks, p.device) == b] for p in (place_q, place_k))
            q, k, v = _take(query, rows), _take(key, columns), _take(value, columns)
            sampled = q @ key[:, :, chosen].mT + math.log(keys / self.samples)
            sampled = sampled.masked_fill((block_k[:, :, chosen] == b).unsqueeze(2), -torch.inf)
            output, log = _softmax(torch.cat([q @ k.mT, sampled], -1), torch.cat([v, value[:, :, chosen]], 2))
            outputs.scatter_(2, rows.unsqueeze(-1).expand_as(output), output)
            logs.scatter_(2, rows, log)
        return outputs, logs


def _blocks(count, blocks, device):
    """The block of each of `count` sorted rows."""
    return torch.arange(count, device=device) * blocks // count


def _take(x, rows):
    return x.gather(2, rows.unsqueeze(-1).expand(*rows.shape, x.shape[-1]))


def _softmax(scores, value):
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def hyper_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: int = 64,
    samples: int = 64,
    projections: int = 7,
    shortest: int = 64,
    seed: int = 0,
) -> torch.Tensor:
    """HyperAttention of a whole prompt, causal (Han et al. 2023, arXiv 2310.05869, algorithms 1 to 4).

    Softmax attention splits into the two halves' causal attention and that of the second half over the first, which is unmasked
    (FleetAttention, equation 6 and appendix B.3); halves of up to `shortest` tokens are exact. In the unmasked part queries and
    keys are sorted by lsh_buckets and meet exactly within `block` keys; the rest of each query's sum is estimated from
    `samples` keys drawn uniformly, those of its block left out. With n keys and m samples,

        out_i = sum_j w_ij exp(q_i.k_j) v_j / sum_j w_ij exp(q_i.k_j),

    where w_ij is 1 for a key of query i's block, and for others n / m times how often the key was drawn. One uniform sample
    serves numerator and denominator, as in the code of the paper's authors; algorithm 3 draws by the norms of the values, and
    algorithm 2 caps the denominator. Defaults are FleetAttention's (table 5).

    query T [B,H,N,D], key [B,Hkv,N,D], value [B,Hkv,N,Dv], query and key each times the root of the softmax's scale; returns
    [B,H,N,Dv]. Plain PyTorch, O(N log N). It approximates prompts: its sum over keys has no state of fixed rank that later
    tokens could use, so they attend over the prompt's keys by softmax. A query's block depends on the buckets of the queries
    beside it, later ones too, so that scores of a prompt's own tokens are not free of the future. In a model:
    linearise(model, "hyper").

    Raises ValueError for sizes below 1, and for heads that are no multiple of key heads.

    Example:
        import torch
        from leanfleet.export.low_rank import hyper_attention

        query, key, value = torch.randn(3, 1, 2, 300, 16).mul(0.5)
        print(hyper_attention(query, key, value).shape)     # torch.Size([1, 2, 300, 16])
    """
    _check_sizes(block, samples, projections, shortest)
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"hyper_attention: {query.shape[1]} query heads are no multiple of {key.shape[1]} key heads")
    group = query.shape[1] // key.shape[1]
    wide = [_wide(t) for t in (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))]
    return _Hyper(query.shape[3], block, samples, projections, shortest, seed).causal(*wide)[0].to(query.dtype)


def _check_sizes(block, samples, projections, shortest):
    if min(block, samples, projections, shortest) < 1:
        raise ValueError(
            f"hyper_attention: block {block}, samples {samples}, projections {projections}, shortest {shortest}; "
            "each must be 1 or more"
        )


class HyperAttention(nn.Module):
    """hyper_attention with sizes of its own, as linearise puts it into a layer: block, samples and shortest are `features`.

    forward: query, key and value as hyper_attention takes them, of a whole prompt; returns [B,H,N,Dv]. It carries nothing from
    call to call. Raises ValueError for features below 1.

    Example:
        import torch
        from leanfleet.export.low_rank import HyperAttention

        attend = HyperAttention(features=64, seed=0)
        print(attend(*torch.randn(3, 1, 2, 300, 16)).shape)  # torch.Size([1, 2, 300, 16])
    """

    def __init__(self, features: int, seed: int, projections: int = 7) -> None:
        super().__init__()
        _check_sizes(features, features, projections, features)
        self.features, self.seed, self.projections = features, seed, projections

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        sizes = self.features, self.features, self.projections, self.features
        return hyper_attention(query, key, value, *sizes, self.seed)


METHODS = ("favor", "vq", "lara", *PROMPTS)


def linearise(
    model: Any,
    method: str = "favor",
    layers: Sequence[int] = (),
    features: int = 256,
    seed: int = 0,
    calibration: torch.Tensor | None = None,
) -> Any:
    """Replaces softmax in some layers of a transformers model by a low-rank form, in place and without training; returns it.

    method: "favor" (FavorFeatures), "vq" (QuantisedKeys) or "lara" (LaraFeatures); these are causal and carry a state
    [features, Dv + 1] a key head, in running_sums_cache as in export_decoder. Or "hyper" (hyper_attention), which has no state:
    a prompt that comes in one call is approximated, tokens after it attend over the layer's keys by softmax, and export_decoder
    refuses the model. Its scores of a prompt's own tokens have read the future (see hyper_attention): score those after it.

    layers: their numbers; the others keep softmax. features: R, the rank; of "hyper" the sizes of blocks and samples. seed: of
    the random directions and draws, or of k-means. calibration: int64 [1,N], tokens whose keys give the codebooks of "vq", and
    queries and keys the landmarks of "lara"; N >= features. The model's weights stay as they are, in any float type; features
    are float32. save_pretrained does not keep the replacement: linearise the loaded model again. Source: FleetAttention's
    experiment (table 2, appendix A.1), which does this to layers 23 to 30 of 32.

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
    if method in ("vq", "lara") and calibration is None:
        raise ValueError(f"linearise: '{method}' looks at a text's keys: give calibration, int64 [1,N]")
    modules = {m.layer_idx: m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
    made = _made(model, method, {layer: modules[layer] for layer in chosen}, features, seed, calibration)
    for layer, module in made.items():  # only now, so that an error leaves the model as it was
        setattr(modules[layer], FEATURES, module.to(model.device))
    setattr(config, LAYERS, chosen)
    setattr(config, METHOD, method)
    model.set_attn_implementation(register_transformers())
    return model


def _made(
    model: Any, method: str, layers: dict[int, Any], features: int, seed: int, calibration: torch.Tensor | None
) -> dict[int, nn.Module]:
    """{layer: what takes the place of its softmax}, for these attention modules of a model by their layers' numbers."""
    keys = _keys(model, calibration) if method == "vq" else {}
    rows = _queries_and_keys(model, calibration) if method == "lara" else {}
    made: dict[int, nn.Module] = {}
    for layer, module in layers.items():
        if method == "vq":
            made[layer] = QuantisedKeys(codebooks(keys[layer] * module.scaling**0.5, features, seed + layer))
        elif method == "lara":
            q, k = (t * module.scaling**0.5 for t in rows[layer])
            made[layer] = LaraFeatures(q, k, features, seed + layer)
        elif method == "hyper":
            made[layer] = HyperAttention(features, seed + layer)
        else:
            made[layer] = FavorFeatures(module.head_dim, features, seed + layer)
    return made


def _keys(model: Any, calibration: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """{layer: its keys [Hkv,N,D], float32} of a softmax model on the calibration's tokens."""
    from transformers import DynamicCache

    cache = DynamicCache()  # of no configuration, so that layers with windows keep all keys too
    with torch.no_grad():
        model(calibration, past_key_values=cache, use_cache=True)
    return {n: layer.keys[0].float() for n, layer in enumerate(cache.layers)}


def _queries_and_keys(model: Any, calibration: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """{layer: its queries [H,N,D] and keys [Hkv,N,D], float32} of a model on the calibration's tokens, by SDPA attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    implementation = model.config._attn_implementation

    def noted(module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen[module.layer_idx] = query[0].float(), key[0].float()
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, *rest, **options)

    AttentionInterface.register("leanfleet_noted", noted)
    AttentionMaskInterface.register("leanfleet_noted", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("leanfleet_noted")
    try:
        with torch.no_grad():
            model(calibration, use_cache=False)
    finally:
        model.set_attn_implementation(implementation)
    return seen
