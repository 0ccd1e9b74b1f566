"""The operators in ONNX Runtime's CUDA provider: on its stream, in its memory, in its CUDA graphs."""

import threading

import onnxruntime
import pytest
import torch

from leanfleet import spec
from leanfleet.export import reference
from leanfleet.export.reference import FORMS
from support import ort_models, ort_nodes
from support.kernels import TORCH_DTYPES
from support.ort_models import bound
from support.ort_nodes import CASES, PROVIDERS, check_variant, make_session, same_bits, shapes_of, variant

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Widths that the tensor-core kernels take; the others have tests of their own.
SIZES = {**ort_nodes.SIZES, "D": 64, "R": 32, "Dv": 64, "N": 70, "S": 140, "Nq": 5, "block": 16, "M": 3, "total": 190}
HEADS, KV_HEADS, HEAD_SIZE = 12, 3, 64


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    assert PROVIDERS["cuda"] in onnxruntime.get_available_providers(), "install onnxruntime-gpu to test on this GPU"
    monkeypatch.setattr(ort_nodes, "SIZES", SIZES)
    torch.manual_seed(5)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name, index, dtype", [c for c in CASES if c.values[0] in spec.all_specs()])
def test_kernel_through_onnxruntime(name, index, dtype, tmp_path):
    """Bit for bit what the C interface gives, in place and not, and near the float64 reference."""
    check_variant(name, index, dtype, tmp_path, "cuda")
    op, inputs, attrs = variant(name, index, dtype)
    inputs = {n: t if t is None else t.cuda() for n, t in inputs.items()}

    def doubled(t):
        return t.double() if t is not None and t.is_floating_point() and t.dtype not in FORMS else t

    double = {n: doubled(t) for n, t in inputs.items()}
    judge = [t for t in getattr(reference, op.snake_name)(**double, **attrs) if t is not None]
    plain = [t for t in getattr(reference, op.snake_name)(**inputs, **attrs) if t is not None]
    model = ort_models.node_model(op, shapes_of(inputs), attrs, dtype, forms=ort_models.forms_of(inputs))
    session = make_session(model, "cuda")
    found = ort_models.run_node(session, op, inputs, attrs)
    # What the plain float32 form of the reference loses, and four roundings to the type.
    step = {"float32": 2.0**-22, "float16": 2.0**-9, "bfloat16": 2.0**-6}[dtype]
    for (key, value), exact, baseline in zip(found.items(), judge, plain, strict=True):
        if value.dtype in FORMS:  # the nearest of two numbers may be either: tests of quantised caches say how often
            continue
        if value.is_floating_point():
            finite = exact.isfinite()
            assert torch.equal(finite, value.isfinite()), key
            size = exact[finite].abs().max().item() if finite.any() else 0.0
            error = (value.double() - exact)[finite].abs().max().item() if finite.any() else 0.0
            own = (baseline.double() - exact)[finite].abs().max().item() if finite.any() else 0.0
            # Gradients of a head's decay are sums over tokens of terms that are hundreds of times as large and cancel.
            cancelled = 1 if key != "grad_log_decay" else 32 if dtype == "float32" else 8
            assert error <= 4 * own + cancelled * step * size, f"{key}: error {error:.2e}, size {size:.2e}"
        else:
            assert torch.equal(value, exact.to(value.dtype)), key


def decode_step(batch, capacity, dtype="float16"):
    """(model, inputs) of a decode step that appends to dense caches of `capacity` tokens."""
    d = HEAD_SIZE
    shapes = {
        "query": [batch, HEADS, 1, d],
        "key_cache": [batch, KV_HEADS, capacity, d],
        "value_cache": [batch, KV_HEADS, capacity, d],
        "seq_lens": [batch],
        "new_key": [batch, KV_HEADS, 1, d],
        "new_value": [batch, KV_HEADS, 1, d],
    }
    model = ort_models.node_model(spec.all_specs()["LeanAttention"], shapes, {"append": 1}, dtype)
    inputs = {n: torch.randn(s, device="cuda").to(TORCH_DTYPES[dtype]) for n, s in shapes.items() if n != "seq_lens"}
    inputs["seq_lens"] = torch.full((batch,), capacity, dtype=torch.int32, device="cuda")
    return model, inputs


def in_place(session, inputs):
    """A binding of a decode step with its caches in place, and the output's tensor."""
    output = torch.empty_like(inputs["query"])
    lse = torch.empty(output.shape[:3], device="cuda")
    return bound(
        session,
        inputs,
        {"output": output, "lse": lse, "key_cache_out": inputs["key_cache"], "value_cache_out": inputs["value_cache"]},
    ), output


def expected_step(inputs):
    double = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    return reference.lean_attention(**double, append=1)


def assert_step(output, inputs, before):
    judge = expected_step(before)
    assert (output.double() - judge[0]).abs().max() < 4e-3
    assert same_bits(inputs["key_cache"], judge[2].to(inputs["key_cache"].dtype))


def test_kernel_name_and_nothing_else_on_the_gpu():
    """A decode step in place is our kernel alone: no copy of a cache, no memset."""
    model, inputs = decode_step(2, 4096)
    session = make_session(model, "cuda")
    binding, _ = in_place(session, inputs)
    for _ in range(3):
        session.run_with_iobinding(binding)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        session.run_with_iobinding(binding)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1 and "leanfleet::lean_attention::" in kernels[0], kernels


def memory_of_a_step(capacity):
    """Bytes of the device that a session's first runs take."""
    model, inputs = decode_step(2, capacity)
    session = make_session(model, "cuda", arena_extend_strategy="kSameAsRequested")
    binding, _ = in_place(session, inputs)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        session.run_with_iobinding(binding)
    torch.cuda.synchronize()
    return before - torch.cuda.mem_get_info()[0]


def test_memory_of_a_step_does_not_grow_with_the_cache():
    few = memory_of_a_step(1024)
    # The device's count has other processes in it, which may allocate meanwhile: one undisturbed run of a few is enough.
    many = []
    while len(many) < 5 and not (many and many[-1] <= few + (1 << 20)):
        many.append(memory_of_a_step(131072))
    assert many[-1] <= few + (1 << 20), (few, many)


def test_cuda_graph_with_lengths_changed_between_replays():
    """One captured step serves every length; the runs before the capture, which repeat the step, leave no trace."""
    capacity, batch = 700, 3
    model, inputs = decode_step(batch, capacity)
    session = make_session(model, "cuda", enable_cuda_graph="1")
    binding, output = in_place(session, inputs)
    inputs["seq_lens"].copy_(torch.tensor([1, 64, 65], dtype=torch.int32))
    generator = torch.Generator(device="cuda").manual_seed(3)
    for step in range(200):
        before = {n: t.clone() for n, t in inputs.items()}
        output.fill_(float("nan"))
        torch.cuda.synchronize()
        session.run_with_iobinding(binding)  # the first one captures
        torch.cuda.synchronize()
        if step % 20 < 3:
            assert_step(output, inputs, before)
        inputs["seq_lens"].add_(torch.tensor([3, 1, 2], dtype=torch.int32, device="cuda"))
        inputs["new_key"].normal_(generator=generator)
        inputs["query"].normal_(generator=generator)


def test_sessions_on_several_threads():
    """Each thread has its session, all at once; results are those of a single run."""
    failures = []

    def work(seed):
        try:
            torch.manual_seed(seed)
            model, inputs = decode_step(2, 300 + 64 * seed)
            before = {n: t.clone() for n, t in inputs.items()}
            session = make_session(model, "cuda")
            binding, output = in_place(session, inputs)
            torch.cuda.synchronize()
            for _ in range(50):
                session.run_with_iobinding(binding)
            torch.cuda.synchronize()
            assert_step(output, inputs, before)
        except Exception as error:  # a thread's exception would vanish
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures


def test_lengths_on_the_device_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    model, inputs = decode_step(2, 100)
    inputs["seq_lens"][1] = 101
    session = make_session(model, "cuda")
    binding, _ = in_place(session, inputs)
    before = inputs["key_cache"].clone()
    with pytest.raises(Exception, match=r"LeanAttention.*seq_lens.*101.*100"):
        session.run_with_iobinding(binding)
    assert same_bits(before, inputs["key_cache"])
