"""CUDA kernels of GatedDeltaRule and GatedDeltaRuleGrad against the float64 reference; tolerances are those of support.delta_cases."""

from itertools import product

import pytest
import torch

from leanfleet.export import gated_delta_rule
from support import key_decay_cases
from support.delta_cases import GRAD, NAME, PLAIN, assert_near, long_keys, make, with_decays_of_keys, with_grads
from support.kernels import Launches, run_kernel

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = ("float32", "float16", "bfloat16")
# Hq, Hk, Hv: all alike, inverse grouping, grouped queries, both kinds of sharing at once.
HEADS = ((2, 2, 2), (2, 2, 6), (6, 2, 2), (4, 2, 8), (8, 2, 4))
# D, Dv: whole tiles, ends of them, rows that no vector fits, one element, the widest keys.
WIDTHS = ((128, 128), (64, 64), (32, 24), (20, 50), (5, 7), (1, 1), (96, 72), (256, 40), (130, 20))


def check(inputs, attrs, in_place=False, factor=PLAIN):
    given = {name: x.clone().to(DEVICE) for name, x in inputs.items()}
    found = run_kernel(NAME, given, attrs, in_place=in_place)
    assert_near(found, inputs, attrs, factor)
    for name, x in inputs.items():
        if not (in_place and name == "initial_state" and attrs.get("return_state")):
            assert torch.equal(given[name].cpu().nan_to_num(), x.nan_to_num()), name
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_widths_and_types(widths, dtype):
    for n, v_first, decay in product((1, 4, 33), (0, 1), ("token", "key")):
        inputs = make(n, d=widths[0], dv=widths[1], dtype=dtype, decay=decay, state=True, v_first=v_first)
        check(inputs, {"return_state": 1, "state_v_first": v_first})


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads(heads):
    for n, (decay, layout) in product((1, 40), product((None, "token", "key"), ("bhnd", "bnhd"))):
        inputs = make(n, heads=heads, d=32, dv=48, decay=decay, layout=layout, state=True, unit=False)
        check(inputs, {"normalize_qk": 1, "return_state": 1, "layout": layout, "scale": 0.7})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (1, 2, 15, 16, 17, 63, 64, 65, 128, 200))
def test_lengths(n, dtype):
    for state, v_first in product((False, True), (0, 1)):
        inputs = make(n, b=1, d=128, dv=64, dtype=dtype, state=state, v_first=v_first)
        check(inputs, {"return_state": 1, "state_v_first": v_first, "normalize_qk": 1})
    check(inputs, {"state_v_first": 1})  # the last state is not asked for


def kernels_of(inputs, attrs, name=NAME):
    """Names of the kernels that a call launches."""
    launches = Launches(name, {name: x.to(DEVICE) for name, x in inputs.items()}, attrs)
    launches.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        launches.run()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())


def test_which_kernel_runs():
    """Steps go token by token, prompts in chunks; with decays of each key dimension or D above 128 on Hopper only, and not in
    float32."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for n, options, chunks in (
        (200, {"dtype": "bfloat16"}, True),
        (200, {"dtype": "float16"}, True),
        (4, {"dtype": "bfloat16"}, False),
        (200, {"dtype": "float32"}, True),
        (4, {"dtype": "float32"}, False),
        (200, {"dtype": "float32", "d": 256}, False),
        (200, {"dtype": "float32", "decay": "key"}, False),
        (200, {"dtype": "bfloat16", "decay": "key"}, hopper),
        (4, {"dtype": "bfloat16", "decay": "key"}, False),
        (200, {"dtype": "bfloat16", "d": 256}, hopper),
        (200, {"dtype": "bfloat16", "d": 136, "decay": "key"}, hopper),
        (200, {"dtype": "bfloat16", "heads": (4, 1, 2), "decay": "key"}, hopper),
    ):
        names = kernels_of(make(n, **{"d": 128, "dv": 128} | options), {"normalize_qk": 1})
        in_float = chunks and options["dtype"] == "float32"
        assert ("StepsKernel" in names) == (n == 4), names
        assert ("RecurrenceKernel" in names) == (n != 4 and not chunks), names
        assert ("FloatChunksKernel" in names) == in_float, names
        assert ("StatesKernel" in names) == (chunks and hopper and not in_float), names
        for kernel in ("PrepareKeysKernel", "PrepareSteepKeysKernel"):
            assert (kernel in names) == (chunks and hopper and options.get("decay") == "key"), names
        assert ("ChunkedKernel" in names) == (chunks and not hopper and not in_float), names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", ("token", "key", "edge"))
@pytest.mark.parametrize("heads", ((4, 1, 2), (8, 2, 4), (2, 2, 6), (1, 1, 5)), ids=str)
def test_prompts(heads, decay, dtype):
    """Long ones, of whole and of cut widths, in both layouts."""
    for n, d, dv, layout in (
        (700, 128, 128, "bhnd"),
        (130, 128, 256, "bnhd"),
        (129, 72, 104, "bnhd"),
        (65, 64, 8, "bhnd"),
        (260, 256, 128, "bhnd"),
        (130, 136, 72, "bnhd"),
        (330, 160, 88, "bnhd"),
        (129, 200, 184, "bhnd"),
        (300, 240, 136, "bhnd"),
    ):
        inputs = make(n, heads=heads, d=d, dv=dv, dtype=dtype, decay=decay, layout=layout, state=True, unit=False)
        check(inputs, {"normalize_qk": 1, "return_state": 1, "layout": layout})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", ("token", "key", "edge"))
@pytest.mark.parametrize("in_place", (False, True))
def test_packed_prompts(in_place, decay, dtype):
    """Of 0, 1, 63, 64, 65 and 200 tokens between tokens of none, with states in a pool."""
    for heads, d, dv in (((2, 2, 6), 128, 128), ((4, 1, 2), 64, 40), ((2, 1, 2), 192, 64)):
        packed = [3, 3, 4, 67, 131, 196, 396]
        inputs = make(400, packed=packed, heads=heads, d=d, dv=dv, dtype=dtype, decay=decay, pool=True)
        inputs["state_index"][2] = 17
        found = check(inputs, {"normalize_qk": 1, "return_state": 1}, in_place=in_place)
        others = [row for row in range(9) if row not in inputs["state_index"].tolist()]
        assert torch.equal(found["final_state"][others].cpu(), inputs["initial_state"][others])


@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
def test_packed_requests(layout):
    """Also requests without tokens, and tokens of no request, which are NaN and have output 0."""
    for offsets in (True, [0, 1, 2, 80], [0, 0, 0], [3, 8, 85], [0, 0, 70, 70]):
        for decay, pool in product(("token", "key"), (False, True)):
            inputs = make(90, packed=offsets, d=32, dv=40, decay=decay, pool=pool, state=True, layout=layout)
            check(inputs, {"return_state": 1, "layout": layout})


def test_wrong_offsets_stay_inside():
    inputs = make(20, packed=[0, 8, 20], state=True)
    inputs["cu_seqlens"] = torch.tensor([-5, 8, 1000], dtype=torch.int32)
    check(inputs, {"return_state": 1})


@pytest.mark.parametrize("in_place", (False, True))
def test_pools(in_place):
    """Rows that no request names stay as they are; one outside the pool is zeros and is written nowhere."""
    for n, v_first in product((1, 3, 70), (0, 1)):
        inputs = make(n, b=3, d=64, dv=32, pool=True, v_first=v_first)
        inputs["state_index"][1] = 17
        found = check(inputs, {"return_state": 1, "state_v_first": v_first}, in_place=in_place)
        others = [row for row in range(6) if row not in inputs["state_index"].tolist()]
        assert torch.equal(found["final_state"][others].cpu(), inputs["initial_state"][others])


def test_tensors_that_are_not_aligned():
    """No vectors then: each tensor begins one element late."""

    def late(x):
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape)
        return moved.copy_(x)

    for dtype, decay, v_first in product(DTYPES, ("token", "key"), (0, 1)):
        inputs = make(70, d=32, dv=48, dtype=dtype, decay=decay, state=True, v_first=v_first)
        attrs = {"return_state": 1, "state_v_first": v_first}
        assert_near(run_kernel(NAME, {k: late(x) for k, x in inputs.items()}, attrs), inputs, attrs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_key", (False, True))
def test_adversarial_inputs(per_key, dtype):
    parallel = make(300, b=1, d=64, dv=64, dtype=dtype, decay=0.0 if per_key else None, state=True)
    key = parallel["key"].float()
    near = key[:, :, :1] + 1e-2 * key
    parallel["key"] = (near / near.norm(dim=-1, keepdim=True)).to(parallel["key"].dtype)
    for inputs in (
        make(1500, b=1, d=64, dv=64, dtype=dtype, decay=-1e-5, state=True),
        make(200, b=1, d=64, dv=64, dtype=dtype, decay=-100.0, state=True),
        make(100, b=1, d=64, dv=64, dtype=dtype, decay=float("-inf"), state=True),
        parallel,
    ):
        if per_key:
            inputs = with_decays_of_keys(inputs)
        check(inputs, {"return_state": 1, "normalize_qk": 1}, factor=8.0)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("d", (128, 240))
def test_key_dimensions_that_decay_unlike_each_other(d, dtype):
    """Some keep all, some forget a little each token, some nearly all, some all at once."""
    inputs = make(1000, b=1, d=d, dv=64, dtype=dtype, decay="key", state=True)
    rates = torch.tensor((0.0, 1e-5, 1e-2, 1.0, 20.0, 103.0, 105.0, float("inf")))
    inputs["log_decay"] = -rates.repeat(d // 8).expand(1, 4, 1000, d).contiguous()
    check(inputs, {"return_state": 1, "normalize_qk": 1})


@pytest.mark.parametrize("size", (1e-12, 1e12))
@pytest.mark.parametrize("d", (128, 192))
def test_rows_of_unusual_size(d, size):
    """Of queries, and of keys that are short: products of ratios would leave float32's range."""
    inputs = make(200, heads=(2, 2, 2), d=d, dv=64, dtype="bfloat16", decay="edge", state=True)
    inputs["query"] = inputs["query"] * size
    if size < 1:
        inputs["key"] = inputs["key"] * size
    check(inputs, {"return_state": 1}, factor=8.0)


def test_a_graph_replays_it():
    """A step in place, captured: each replay takes the state one token further."""
    inputs = {k: x.to(DEVICE) for k, x in make(1, b=4, d=128, dv=128, dtype="bfloat16", pool=True).items()}
    attrs = {"return_state": 1}
    expected = inputs["initial_state"].clone()
    for _ in range(3):
        expected = run_kernel(NAME, inputs | {"initial_state": expected}, attrs)["final_state"]
    launches = Launches(NAME, inputs, attrs, in_place=True)
    before = inputs["initial_state"].clone()
    graph = launches.capture()
    inputs["initial_state"].copy_(before)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(inputs["initial_state"], expected)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="needs a GPU from 9.0 on")
@pytest.mark.parametrize("packed", (None, [0, 1, 2, 3, 4, 5]))
@pytest.mark.parametrize(
    "name, decay, v_first", ((NAME, "token", 0), (NAME, "token", 1), (NAME, "key", 0), ("CausalLinearDecay", "head", 0))
)
def test_steps_behind_kernels_that_write_late(name, decay, v_first, packed):
    """They are launched before what is before them has ended, and ask for their states then."""
    from support.late_writer import check_behind_late_writes

    facts = dict(b=5, d=64, dv=64, dtype="float16", packed=packed, pool=True, v_first=v_first)
    n, make_one = (1 if packed is None else 5), make if name == NAME else key_decay_cases.make
    cases = [make_one(n, decay=decay, seed=seed, **facts) for seed in range(3)]
    attrs = {"return_state": 1, "state_v_first": v_first} | ({"normalize_qk": 1} if name == NAME else {})
    check_behind_late_writes(name, cases, attrs)


def test_keys_that_are_too_wide():
    inputs = {k: x.to(DEVICE) for k, x in make(2, d=257).items()}
    with pytest.raises(Exception, match="query has D = 257; on CUDA D goes up to 256"):
        run_kernel(NAME, inputs)


@pytest.mark.parametrize("grad", (False, True), ids=("forward", "grad"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_for_which_states_grow_without_end(monkeypatch, dtype, grad):
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    name = GRAD if grad else NAME
    for inputs, attrs, said in long_keys(dtype, grad=grad):
        inputs = {k: x.to(DEVICE) for k, x in inputs.items()}
        if said is None:
            run_kernel(name, inputs, attrs)
            continue
        with pytest.raises(ValueError, match=f"{name}: {said}"):
            run_kernel(name, inputs, attrs)


def check_grad(inputs, attrs, last=True, factor=PLAIN):
    inputs, attrs = with_grads(inputs, attrs, last)
    given = {name: x.clone().to(DEVICE) for name, x in inputs.items()}
    found = run_kernel(GRAD, given, attrs)
    assert_near(found, inputs, attrs, factor)
    for name, x in inputs.items():
        assert torch.equal(given[name].cpu().nan_to_num(), x.nan_to_num()), name
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_grad_widths_and_types(widths, dtype):
    for n, v_first, decay in product((1, 16, 33), (0, 1), ("token", "key")):
        inputs = make(n, d=widths[0], dv=widths[1], dtype=dtype, decay=decay, state=True, v_first=v_first)
        check_grad(inputs, {"state_v_first": v_first})


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_grad_heads(heads):
    for n, (decay, layout) in product((1, 40), product((None, "token", "key"), ("bhnd", "bnhd"))):
        inputs = make(n, heads=heads, d=32, dv=48, decay=decay, layout=layout, state=True, unit=False)
        check_grad(inputs, {"normalize_qk": 1, "layout": layout, "scale": 0.7})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (1, 15, 16, 17, 64, 200))
def test_grad_lengths(n, dtype):
    for state, decay in product((False, True), ("token", "key")):
        check_grad(make(n, b=1, d=128, dv=64, dtype=dtype, decay=decay, state=state), {"normalize_qk": 1}, last=state)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("decay", ("token", "key", "edge", "mixed"))
@pytest.mark.parametrize("heads", ((4, 1, 2), (8, 2, 4), (2, 2, 6), (1, 1, 5)), ids=str)
def test_grad_prompts(heads, decay, dtype):
    """Long ones, of whole and of cut widths, of whole vectors and not, in both layouts."""
    for n, d, dv, layout in (
        (700, 128, 128, "bhnd"),
        (130, 128, 256, "bnhd"),
        (129, 72, 104, "bnhd"),
        (64, 64, 8, "bhnd"),
        (127, 33, 50, "bnhd"),
    ):
        inputs = make(n, heads=heads, d=d, dv=dv, dtype=dtype, decay=decay, layout=layout, state=True, unit=False)
        check_grad(inputs, {"normalize_qk": 1, "layout": layout})


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("decay", ("token", "key", "edge"))
def test_grad_packed_prompts(decay, dtype):
    """Of 0, 1, 63, 64, 65 and 200 tokens between tokens of none."""
    for heads, d, dv in (((2, 2, 6), 128, 128), ((4, 1, 2), 64, 40)):
        packed = [3, 3, 4, 67, 131, 196, 396]
        inputs = make(400, packed=packed, heads=heads, d=d, dv=dv, dtype=dtype, decay=decay, state=True)
        check_grad(inputs, {"normalize_qk": 1})


@pytest.mark.parametrize("per_key", (False, True))
def test_grad_of_more_chunks_than_a_window_has(per_key):
    """More than 1.5 GiB of what is kept: two windows, the first gone through twice."""
    inputs = make(8000, b=1, heads=(16, 16, 64), d=128, dv=128, dtype="bfloat16", decay=-1e-3)
    if per_key:
        inputs = with_decays_of_keys(inputs)
    inputs, attrs = with_grads(inputs, {"normalize_qk": 1}, last=False)
    given = {name: x.to(DEVICE) for name, x in inputs.items()}
    found = run_kernel(GRAD, given, attrs)
    few = {name: x[:, :1] if name in ("query", "key") else x[:, :4] for name, x in inputs.items()}
    alone = run_kernel(GRAD, {name: x.contiguous().to(DEVICE) for name, x in few.items()}, attrs)
    for name, x in alone.items():
        assert torch.equal(found[name][:, : x.shape[1]], x), name


def test_grad_which_kernel_runs():
    """16-bit prompts go on tensor cores, where a CTA gets enough shared memory."""
    shared = torch.cuda.get_device_properties(DEVICE).shared_memory_per_block_optin
    for n, options, chunks in (
        (200, {"dtype": "bfloat16"}, True),
        (200, {"dtype": "float16"}, True),
        (31, {"dtype": "bfloat16"}, False),
        (200, {"dtype": "float32"}, False),
        (200, {"dtype": "bfloat16", "decay": "key"}, True),
        (200, {"dtype": "float16", "decay": "mixed", "heads": (4, 1, 2)}, True),
        (31, {"dtype": "bfloat16", "decay": "key"}, False),
        (200, {"dtype": "float32", "decay": "key"}, False),
        (200, {"dtype": "bfloat16", "d": 136}, False),
        (200, {"dtype": "bfloat16", "d": 136, "decay": "key"}, False),
    ):
        inputs, attrs = with_grads(make(n, **{"d": 128, "dv": 128} | options), {"normalize_qk": 1})
        names, per_key = kernels_of(inputs, attrs, GRAD), "decay" in options
        assert ("GradChunksKernel" in names) == (chunks and not per_key and shared >= 182_784), names
        assert ("KeyChunksKernel" in names) == (chunks and per_key and shared >= 230_528), names


@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
def test_grad_packed_requests(layout):
    """Also requests without tokens, and tokens of no request, which are NaN and have gradients of 0."""
    for offsets in (True, [0, 1, 2, 80], [0, 0, 0], [3, 8, 85], [0, 0, 70, 70]):
        for decay, heads in product(("token", "key"), ((2, 2, 4), (4, 1, 2))):
            inputs = make(90, packed=offsets, d=32, dv=40, heads=heads, decay=decay, state=True, layout=layout)
            check_grad(inputs, {"layout": layout, "normalize_qk": 1})
    inputs = make(20, packed=[0, 8, 20], state=True)
    inputs["cu_seqlens"] = torch.tensor([-5, 8, 1000], dtype=torch.int32)
    check_grad(inputs, {})


def test_grad_of_more_chunks_than_states_are_held():
    """More than 512 MiB of them: spans of chunks are gone through twice."""
    inputs = make(1000, b=32, heads=(1, 1, 1), d=256, dv=256, dtype="bfloat16", decay=-1e-3, state=True)
    check_grad(inputs, {"normalize_qk": 1})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_key", (False, True))
def test_grad_adversarial_inputs(per_key, dtype):
    parallel = make(300, b=1, d=64, dv=64, dtype=dtype, decay=0.0 if per_key else None, state=True)
    key = parallel["key"].float()
    near = key[:, :, :1] + 1e-2 * key
    parallel["key"] = (near / near.norm(dim=-1, keepdim=True)).to(parallel["key"].dtype)
    for inputs in (
        make(1500, b=1, d=64, dv=64, dtype=dtype, decay=-1e-5, state=True),
        make(200, b=1, d=64, dv=64, dtype=dtype, decay=-20.0, state=True),
        make(200, b=1, d=64, dv=64, dtype=dtype, decay=-100.0, state=True),
        make(100, b=1, d=64, dv=64, dtype=dtype, decay=float("-inf"), state=True),
        parallel,
        parallel | {"beta": torch.full_like(parallel["beta"], 2.0)},
    ):
        if per_key:
            inputs = with_decays_of_keys(inputs)
        check_grad(inputs, {"normalize_qk": 1}, factor=8.0)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_grad_of_key_dimensions_that_decay_unlike_each_other(dtype):
    """Some keep all, some forget a little each token, some nearly all, some all at once."""
    inputs = make(500, b=1, d=128, dv=64, dtype=dtype, decay="key", state=True)
    rates = torch.tensor((0.0, 1e-5, 1e-2, 1.0, 20.0, 103.0, 105.0, float("inf")))
    inputs["log_decay"] = -rates.repeat(16).expand(1, 4, 500, 128).contiguous()
    check_grad(inputs, {"normalize_qk": 1})


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("token", (0, 5, 16, 24, 47, 63, 64, 90))
def test_grad_of_a_token_that_forgets_all(token, dtype):
    """Between tokens that forget little: the gradient of its decays is 0, not nearly."""
    for heads, d in (((2, 2, 4), 64), ((4, 1, 2), 128)):
        inputs = with_decays_of_keys(make(200, heads=heads, d=d, dv=64, dtype=dtype, decay=-0.01, state=True))
        inputs["log_decay"][:, :, token] = float("-inf")
        found = check_grad(inputs, {"normalize_qk": 1})
        assert found["grad_log_decay"][:, :, token].eq(0).all()


@pytest.mark.parametrize("scale", (1e-4, 4e5))
def test_grad_prompts_of_unusual_scale(scale):
    """Queries times scale would leave float16's range."""
    inputs = make(200, d=128, dv=64, dtype="float16", decay="key", state=True)
    inputs, attrs = with_grads(inputs, {"normalize_qk": 1, "scale": scale})
    inputs["grad_output"] = inputs["grad_output"] * min(1e3, 1 / scale)
    found = run_kernel(GRAD, {name: x.to(DEVICE) for name, x in inputs.items()}, attrs)
    assert_near(found, inputs, attrs)


@pytest.mark.parametrize("decay", ("token", "key"))
def test_grad_has_the_same_bits_every_time(decay):
    inputs = make(500, heads=(8, 1, 4), d=64, dv=80, dtype="bfloat16", decay=decay, state=True)
    inputs, attrs = with_grads(inputs, {"normalize_qk": 1})
    given = {name: x.to(DEVICE) for name, x in inputs.items()}
    first = run_kernel(GRAD, given, attrs)
    for _ in range(5):
        for name, x in run_kernel(GRAD, given, attrs).items():
            assert torch.equal(x, first[name]), name


def test_grad_in_pytorch():
    """backward() on the GPU, by a captured graph's replay too, gives what it gives on the CPU."""
    inputs = make(70, heads=(2, 2, 4), d=32, dv=32, state=True)
    grads = {}
    for device in ("cpu", DEVICE):
        given = {name: x.to(device).requires_grad_() for name, x in inputs.items()}
        output, state = gated_delta_rule(**given, normalize_qk=True, return_state=True)
        grads[device] = torch.autograd.grad(output.square().sum() + state.square().sum(), list(given.values()))
    for ours, right in zip(grads[DEVICE], grads["cpu"], strict=True):
        assert torch.allclose(ours.cpu(), right, atol=1e-3 * right.abs().max().item())
    given, attrs = with_grads(inputs, {})
    launches = Launches(GRAD, {name: x.to(DEVICE) for name, x in given.items()}, attrs)
    launches.run()
    before = {name: x.clone() for name, x in launches.outputs.items()}
    graph = launches.capture()
    for x in launches.outputs.values():
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for name, x in launches.outputs.items():
        assert torch.equal(x, before[name]), name
