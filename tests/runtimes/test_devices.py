"""Sessions, decoders and batches on a GPU that is not the first: what they ask onnxruntime for, and, with two GPUs, that they work."""

import numpy as np
import onnxruntime
import pytest

from leanfleet import cli, driver
from leanfleet.driver import Device
from leanfleet.ort_ops import generate, load_decoder, make_session, sessions
from leanfleet.ort_ops.serving import ContinuousBatch
from leanfleet.export import export_decoder
from leanfleet.export.serving import add_serving
from support.decoders import byte_tokenizer, make

GPUS = 0 if driver.why_no_gpu() else len(driver.gpus())
TWO = pytest.mark.skipif(
    GPUS < 2 or sessions.CUDA not in onnxruntime.get_available_providers(), reason="needs two GPUs and onnxruntime-gpu"
)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(driver, "why_no_gpu", lambda: None)
    monkeypatch.setattr(driver, "gpus", lambda: [driver.Gpu("a GPU", "9.0")] * 2)


def test_names_of_devices(two_gpus):
    assert Device.named("cpu") == Device("cpu") and Device.named("cuda") == Device("cuda", 0)
    assert Device.named("cuda:1") == Device("cuda", 1) and str(Device("cuda", 1)) == "cuda:1"
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "CUDA", "", "cuda:1 ", 1, None):
        with pytest.raises(ValueError, match="it is cpu, cuda .the first GPU., or cuda: and a GPU's number, such as cuda:1"):
            Device.named(wrong)
    with pytest.raises(ValueError, match=r"device is cuda:2, and this process sees 2: cuda:0 to cuda:1"):
        Device.named("cuda:2")


def test_a_device_goes_into_the_options_of_the_provider(two_gpus):
    cuda, cpu = sessions.CUDA, "CPUExecutionProvider"
    assert sessions.on_device(None, None) is None and sessions.on_device([cuda], None) == [cuda]
    assert sessions.on_device(None, "cpu") == [cpu] and sessions.on_device([cpu], "cpu") == [cpu]
    assert sessions.on_device(None, "cuda:1") == [(cuda, {"device_id": "1"})]
    given = [(cuda, {"enable_cuda_graph": "1", "device_id": 1}), cpu]
    assert sessions.on_device(given, "cuda:1") == [(cuda, {"enable_cuda_graph": "1", "device_id": "1"}), cpu]
    for providers, device in (([cuda], "cpu"), ([cpu], "cuda:1"), ([(cuda, {"device_id": "0"})], "cuda:1")):
        with pytest.raises(ValueError, match="give one of the two"):
            sessions.on_device(providers, device)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("devices") / "decoder", make("llama")
    export_decoder(model, folder, byte_tokenizer(), verify=False)
    add_serving(model, folder, verify=False)
    return folder


@pytest.fixture
def asked(monkeypatch, two_gpus):
    """The providers that sessions are made with; none is made."""
    found = []

    def refuse(path, options, providers, **kwargs):
        found.append(providers)
        raise RuntimeError("no session in this test")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [sessions.CUDA, "CPUExecutionProvider"])
    return found


def test_sessions_decoders_batches_and_commands_ask_for_their_gpu(folder, asked, capsys):
    first = folder / "model.onnx"
    for call in (
        lambda: make_session(first, device="cuda:1"),
        lambda: load_decoder(folder, device="cuda:1"),
        lambda: load_decoder(folder, device="cuda:1", cuda_graph=True),
        lambda: ContinuousBatch(folder, pages=8, device="cuda:1"),
    ):
        with pytest.raises(RuntimeError, match="no session in this test"):
            call()
    assert cli.main(["generate", str(folder), "x", "--device", "cuda:1"]) == 2
    assert [dict(p)[sessions.CUDA].get("device_id") for p in asked] == ["1"] * len(asked) and len(asked) == 5
    assert dict(asked[2])[sessions.CUDA]["enable_cuda_graph"] == "1"
    assert cli.main(["generate", str(folder), "x", "--device", "cuda:7"]) == 2
    assert "device is cuda:7, and this process sees 2" in capsys.readouterr().err
    assert cli.main(["generate", str(folder), "x", "--device", "cpu", "--cuda-graph"]) == 2
    assert "leave --device cpu out" in capsys.readouterr().err


def test_options_of_the_provider_stay_with_cuda_graphs(folder, asked):
    with pytest.raises(RuntimeError, match="no session"):
        load_decoder(folder, [(sessions.CUDA, {"device_id": "1", "gpu_mem_limit": "5"})], cuda_graph=True)
    assert asked == [[(sessions.CUDA, {"device_id": "1", "gpu_mem_limit": "5", "enable_cuda_graph": "1"})]]


@TWO
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_two_gpus_in_one_process(folder, cuda_graph):
    prompts = [[1, 2, 3], [4, 5]]
    expected = generate(load_decoder(folder, device="cpu"), prompts, 8, stop_tokens=[])[0]
    decoders = [load_decoder(folder, device=f"cuda:{index}", cuda_graph=cuda_graph) for index in (1, 0)]
    assert [d.device.index for d in decoders] == [1, 0]
    for decoder in decoders + decoders:
        assert generate(decoder, prompts, 8, stop_tokens=[])[0] == expected
    batches = [ContinuousBatch(folder, pages=16, device=f"cuda:{index}", cuda_graph=cuda_graph) for index in (1, 0)]
    requests = [[batch.add(p, 8, stop_tokens=[]) for p in prompts] for batch in batches]
    while not all(batch.idle for batch in batches):
        for batch in batches:
            batch.step()
    assert [[r.tokens for r in row] for row in requests] == [expected] * 2
    assert np.isfinite(requests[0][0].logprobs).all()
