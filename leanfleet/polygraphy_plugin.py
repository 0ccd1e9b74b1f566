"""`polygraphy run` with leanfleet nodes: --onnxrt sessions get the kernels, --pluginref gets the references, and random
inputs are such as the nodes take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polygraphy.backend.onnxrt import loader as onnxrt_loader
from polygraphy.comparator import DataLoader
from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import DataLoaderArgs, ModelArgs, OnnxrtSessionArgs, PluginRefRunnerArgs
from polygraphy.tools.args.base import BaseArgs
from polygraphy.tools.script import make_invocable

from leanfleet import spec


class LeanfleetArgs(BaseArgs):
    """
    leanfleet: running leanfleet's operators.

    Depends on:

        - ModelArgs
        - OnnxrtSessionArgs
        - PluginRefRunnerArgs
        - DataLoaderArgs
    """

    def add_parser_args_impl(self) -> None:
        self.group.add_argument(
            "--no-leanfleet",
            action="store_true",
            default=None,
            help="Do not register leanfleet's kernels with ONNX Runtime: the model's function bodies run",
        )

    def parse_impl(self, args: Any) -> None:
        """Extends what the groups of --onnxrt, --pluginref and of the inputs write into the script.

        A model without leanfleet nodes runs as if leanfleet were not installed.
        """
        without_kernels = getattr(args, "no_leanfleet", None)
        session_args, reference_args = self.arg_groups[OnnxrtSessionArgs], self.arg_groups[PluginRefRunnerArgs]
        add_session, add_reference_runner = session_args.add_to_script_impl, reference_args.add_to_script_impl

        def add_session_with_kernels(script, *args, **kwargs):
            session = add_session(script, *args, **kwargs)
            if without_kernels or not self._model_is_ours():
                return session
            script.add_import(imports=["with_kernels"], frm=__name__)
            return script.add_loader(make_invocable("with_kernels", session), "leanfleet_session")

        def add_reference_runner_with_ours(script):
            if self._model_is_ours():
                script.add_import(imports=["register_references"], frm="leanfleet.parity")
                script.add_loader(make_invocable("register_references"), "leanfleet_references")
            return add_reference_runner(script)

        data_args, model_args = self.arg_groups[DataLoaderArgs], self.arg_groups[ModelArgs]
        add_data_loader = data_args.add_to_script_impl

        def add_fitting_data_loader(script, user_input_metadata_str=None):
            if not data_args.is_using_random_data() or not self._model_is_ours():
                return add_data_loader(script, user_input_metadata_str)
            metadata = user_input_metadata_str or model_args.input_shapes or None
            if metadata:
                script.add_import(imports=["TensorMetadata"], frm="polygraphy.common")
            script.add_import(imports=["FittingDataLoader"], frm=__name__)
            return script.set_data_loader(
                make_invocable(
                    "FittingDataLoader",
                    model_args.path,
                    seed=data_args.seed,
                    iterations=data_args.iterations,
                    input_metadata=metadata,
                    val_range=data_args.val_range,
                    data_loader_backend_module=data_args.data_loader_backend_module,
                )
            )

        data_args.add_to_script_impl = add_fitting_data_loader
        session_args.add_to_script_impl = add_session_with_kernels
        reference_args.add_to_script_impl = add_reference_runner_with_ours

    def _model_is_ours(self) -> bool:
        import onnx

        try:
            model = onnx.load(self.arg_groups[ModelArgs].path, load_external_data=False)
        except Exception:  # Polygraphy reads other formats too, and says itself what it cannot read
            return False
        return any(entry.domain == spec.DOMAIN for entry in model.opset_import)


class FittingDataLoader(DataLoader):
    """Polygraphy's random inputs, made into ones that the leanfleet nodes of the model at `path` take: decays are not
    positive, lengths lie within caches. Inputs with a range of their own in val_range, a dict, keep to it."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self._path, ranges = path, options.get("val_range")
        self._ranged = tuple(name for name in ranges if name) if isinstance(ranges, dict) else ()

    def __getitem__(self, index: int) -> Any:
        import numpy as np
        import onnx

        from leanfleet import trial

        feed = super().__getitem__(index)
        model = onnx.load(self._path, load_external_data=False)
        if not all(isinstance(array, np.ndarray) for array in feed.values()):
            return feed
        return trial.fitted(model, feed, self.seed + index, keep=self._ranged)


class _Onnxruntime:
    """onnxruntime, but its SessionOptions come with leanfleet's operators."""

    def __getattr__(self, name: str) -> Any:
        import onnxruntime

        return getattr(onnxruntime, name)

    def SessionOptions(self) -> Any:  # noqa: N802
        import onnxruntime

        from leanfleet.ort_ops import register

        return register(onnxruntime.SessionOptions())


def with_kernels(session_from_onnx: Callable[[], Any]) -> Callable[[], Any]:
    """A loader of the session that Polygraphy's SessionFromOnnx makes, with leanfleet's kernels registered in it.

    SessionFromOnnx takes no session options, so that it is given another onnxruntime while it works. Calling the loader
    raises PolygraphyException where the library is missing.
    """

    def load() -> Any:
        theirs = onnxrt_loader.onnxrt
        onnxrt_loader.onnxrt = _Onnxruntime()
        try:
            return session_from_onnx()
        except FileNotFoundError as error:
            G_LOGGER.critical(str(error))
        finally:
            onnxrt_loader.onnxrt = theirs

    return load


def LOADER() -> list[BaseArgs]:  # noqa: N802  Polygraphy's name for it
    """The argument groups that leanfleet adds to `polygraphy run`."""
    return [LeanfleetArgs()]
