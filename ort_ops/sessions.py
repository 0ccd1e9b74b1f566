"""Sessions of onnxruntime that know leanfleet's operators. Importing this module needs neither onnxruntime nor numpy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanfleet import model_file, native, ort_library, spec
from leanfleet.decoder_contract import MODEL_FILE
from leanfleet.ort_library import register

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, SessionOptions

Providers = Sequence[str | tuple[str, dict[str, Any]]]


def default_providers(available: Sequence[str]) -> list[str]:
    """Those that a session gets where nothing is said, of what onnxruntime has."""
    if "CUDAExecutionProvider" in available and "cuda" in native.build_info():
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


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
    **kwargs: Any,
) -> InferenceSession:
    """An onnxruntime.InferenceSession that knows leanfleet's operators.

    model: a path, the bytes of a model, or an onnx.ModelProto. providers: as InferenceSession takes them; None: CUDA
    where onnxruntime and this build of leanfleet both have it, then the CPU. session_options: gets the operators
    registered, see register; None: new ones. kwargs go to InferenceSession.
    override: other operators whose nodes our kernels serve, such as "com.microsoft.LinearAttention", in a model that
    stays as it is on disk; leanfleet.export.rewrite.OPERATORS lists them. A node that means something that ours do not
    is left to onnxruntime. Needs onnx and onnx-ir.

    Raises what register raises, ValueError for a provider that the installed onnxruntime does not have, for an attribute
    that our operators do not have (which onnxruntime itself would ignore) and for another version of them, and
    RuntimeError for a provider that was asked for and does not start. Errors in the model are onnxruntime's; those about our
    nodes name operator, node, argument, and the values found and allowed.

    Example:
        import numpy as np
        from leanfleet.ort_ops import make_session

        session = make_session("layer.onnx", providers=["CPUExecutionProvider"])
        hidden = np.zeros((1, 10, 64), np.float32)
        output, = session.run(None, {session.get_inputs()[0].name: hidden})
        print(output.shape)  # (1, 10, 64)
    """
    ort = ort_library.onnxruntime()
    available = ort.get_available_providers()
    wanted = [p if isinstance(p, str) else p[0] for p in providers or ()]
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
    options.enable_mem_pattern = "CUDAExecutionProvider" not in (p if isinstance(p, str) else p[0] for p in providers)
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
