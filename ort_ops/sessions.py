"""Sessions of onnxruntime that know leanfleet's operators. Importing this module needs neither onnxruntime nor numpy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanfleet import driver, model_file, native, ort_library, spec
from leanfleet.decoder_contract import MODEL_FILE
from leanfleet.ort_library import register

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, SessionOptions

Providers = Sequence[str | tuple[str, dict[str, Any]]]
CUDA = "CUDAExecutionProvider"


def default_providers(available: Sequence[str]) -> list[str]:
    """Those that a session gets where nothing is said, of what onnxruntime has."""
    if CUDA in available and "cuda" in native.build_info():
        return [CUDA, "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


def on_device(providers: Providers | None, device: str | driver.Device | None) -> Providers | None:
    """Providers that run on a device, see driver.Device.named. providers: None: the device's own. device: None: as they are.

    Raises ValueError for a device that is not here, and for one that the providers contradict.
    """
    if device is None:
        return providers
    device = driver.Device.named(device)
    if device.kind == "cpu":
        given = next(map(_name, providers or ()), "CPUExecutionProvider")
        if given != "CPUExecutionProvider":
            raise ValueError(f"device is cpu, and the first provider is {given}: give one of the two")
        return ["CPUExecutionProvider"] if providers is None else providers
    wanted = [CUDA] if providers is None else list(providers)
    if not any(_name(p) == CUDA for p in wanted):
        raise ValueError(f"device is {device}, and {CUDA} is not among the providers: give one of the two")
    return [(CUDA, _with_index(p, device.index)) if _name(p) == CUDA else p for p in wanted]


def _name(provider: str | tuple[str, dict[str, Any]]) -> str:
    return provider if isinstance(provider, str) else provider[0]


def _with_index(provider: str | tuple[str, dict[str, Any]], index: int) -> dict[str, Any]:
    """A CUDA provider's options with the number of a GPU. Raises ValueError where they have another."""
    options = {} if isinstance(provider, str) else provider[1]
    if int(options.get("device_id", index)) != index:
        raise ValueError(f"device is cuda:{index}, and the providers' device_id is {options['device_id']}: give one of the two")
    return options | {"device_id": str(index)}


def cuda_options(providers: Providers | None) -> dict[str, Any]:
    """The CUDA provider's options among providers; none where it is not there."""
    return next((dict(p[1]) for p in providers or () if not isinstance(p, str) and p[0] == CUDA), {})


def device_of(session: InferenceSession) -> driver.Device:
    """Where a session's first provider runs."""
    if session.get_providers()[0] != CUDA:
        return driver.Device("cpu")
    return driver.Device("cuda", int(session.get_provider_options()[CUDA].get("device_id", 0)))


def _explained(error):
    """The error with the types that the operator in it takes, where onnxruntime refuses a node's types. What onnxruntime says
    of a damaged model may hold its bytes, which Python then fails to decode."""
    if isinstance(error, UnicodeDecodeError):
        return RuntimeError(f"onnxruntime refuses the model: {error.object.decode(errors='replace')}")
    refusals = r"of operator \((\w+)\) in node .* is invalid|no kernel def matches node inputs for Op: (\w+)"
    found = re.search(refusals, str(error))
    op = found and spec.all_specs().get(found[1] or found[2])
    if not op:
        return error
    types = ", ".join(f"{t.name} {t.type}" for t in op.inputs)
    return type(error)(
        f"{error}\n{op.name} takes {types}; T is {', '.join(spec.TYPES['T'][:-1])} or "
        f"{spec.TYPES['T'][-1]}, the same for all of them, F is float32, I is int32, L is int64"
    )


def _overridden(model, override, options):
    """The bytes of a model in which nodes of these operators are leanfleet's, where the meaning is the same.

    External weights stay in their files; `options` tells onnxruntime where these are.
    """
    import onnx_ir
    from leanfleet.export.rewrite import rewrite

    if isinstance(model, str):
        found = onnx_ir.load(model)
        folder = os.path.dirname(os.path.abspath(model))
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    else:
        import onnx

        found = onnx_ir.from_proto(onnx.load_from_string(model))
    rewrite(found, operators=override, bodies=False)
    return onnx_ir.to_proto(found).SerializeToString()


def make_session(
    model: str | os.PathLike[str] | bytes | Any,
    providers: Providers | None = None,
    session_options: SessionOptions | None = None,
    *,
    override: str | Iterable[str] = (),
    device: str | driver.Device | None = None,
    **kwargs: Any,
) -> InferenceSession:
    """An onnxruntime.InferenceSession that knows leanfleet's operators.

    model: a path, the bytes of a model, or an onnx.ModelProto. providers: as InferenceSession takes them; None: CUDA
    where onnxruntime and this build of leanfleet both have it, then the CPU. session_options: gets the operators
    registered, see register; None: new ones. kwargs go to InferenceSession.
    override: other operators whose nodes our kernels serve, such as "com.microsoft.LinearAttention", in a model that
    stays as it is on disk; leanfleet.export.rewrite says which there are. A node that means something that ours do not
    is left to onnxruntime. Needs onnx and onnx-ir.
    device: "cpu", "cuda" (the first GPU) or "cuda:1"; it goes into the CUDA provider's options, which may hold its device_id
    as well.

    Raises what register raises, ValueError for a device that is not here or that providers contradict, for a provider that the
    installed onnxruntime does not have, for an attribute that our operators do not have (which onnxruntime itself would ignore)
    and for another version of them, and RuntimeError for a provider that was asked for and does not start. Errors in the model
    are onnxruntime's; those about our nodes name operator, node, argument, and the values found and allowed.

    Example:
        import numpy as np
        from leanfleet.ort_ops import make_session

        session = make_session("layer.onnx", providers=["CPUExecutionProvider"])
        hidden = np.zeros((1, 10, 64), np.float32)
        output, = session.run(None, {session.get_inputs()[0].name: hidden})
        print(output.shape)  # (1, 10, 64)
    """
    ort = ort_library.onnxruntime()
    providers = on_device(providers, device)
    available = ort.get_available_providers()
    wanted = [_name(p) for p in providers or ()]
    for name in wanted:
        if name not in available:
            raise ValueError(
                f"provider {name} is not in the installed onnxruntime {ort.__version__}, which has "
                f"{', '.join(available)}"
                + ("; CUDA needs the package onnxruntime-gpu in place of onnxruntime" if name.startswith("CUDA") else "")
            )
    if hasattr(model, "SerializeToString"):
        model = model.SerializeToString()
    elif not isinstance(model, bytes):
        model = os.fspath(model)
    options = register(session_options if session_options is not None else ort.SessionOptions())
    model_file.check(model)
    if override:
        model = _overridden(model, [override] if isinstance(override, str) else list(override), options)
    try:
        session = ort.InferenceSession(model, options, providers=providers or default_providers(available), **kwargs)
    except Exception as error:
        raise _explained(error) from None
    if missing := [name for name in wanted if name not in session.get_providers()]:
        raise RuntimeError(
            f"provider {missing[0]} did not start, so that the session would run on "
            f"{', '.join(session.get_providers())}; onnxruntime's log above says why. Leave it out of "
            "providers, or mend its installation"
        )
    return session


def new_options(providers: Providers) -> SessionOptions:
    """Options for these providers. On CUDA without memory patterns: onnxruntime would keep a plan of its memory, in one
    block, for each length of a prompt, up to twice the peak."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = CUDA not in map(_name, providers)
    return options


@contextmanager
def onnxruntime_errors(action: str) -> Iterator[None]:
    """onnxruntime's exceptions, which have no base class of their own, as RuntimeError: "onnxruntime cannot `action`: ..."."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        raise RuntimeError(f"onnxruntime cannot {action}: {error}") from None


def open_exported(
    folder: Path, providers: Providers | None, session_options: SessionOptions | None, library: bool, file: str = MODEL_FILE
) -> InferenceSession:
    """A session of a model in an exported folder. library: see generation.load_decoder. Raises RuntimeError where
    onnxruntime cannot load the model."""
    import onnxruntime

    path = str(folder / file)
    if session_options is None:
        session_options = new_options(
            providers or (default_providers(onnxruntime.get_available_providers()) if library else ())
        )
    with onnxruntime_errors(f"load {path}"):
        return (
            make_session(path, providers, session_options)
            if library
            else onnxruntime.InferenceSession(path, session_options, providers or ["CPUExecutionProvider"])
        )
