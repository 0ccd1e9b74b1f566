"""`polygraphy run` with leanfleet nodes: --onnxrt sessions get the library, --pluginref gets the references."""

from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import ModelArgs, OnnxrtSessionArgs, PluginRefRunnerArgs
from polygraphy.tools.args.base import BaseArgs
from polygraphy.tools.script import safe

from leanfleet import spec


class LeanfleetArgs(BaseArgs):
    """
    leanfleet: running leanfleet's operators.

    Depends on:

        - ModelArgs
        - OnnxrtSessionArgs
        - PluginRefRunnerArgs
    """

    def add_parser_args_impl(self):
        self.group.add_argument("--no-leanfleet", action="store_true", default=None,
                                help="Do not register leanfleet's kernels: the model's function bodies run in their place")

    def parse_impl(self, args):
        """Has the groups that write the script for --onnxrt and --pluginref put ours in front of it.

        A model without leanfleet nodes runs as if leanfleet were not installed.
        """
        if not getattr(args, "no_leanfleet", None):
            self._prepend(OnnxrtSessionArgs, "use_library")
        self._prepend(PluginRefRunnerArgs, "use_references")

    def _prepend(self, group_type, function):
        group = self.arg_groups[group_type]
        add_to_script = group.add_to_script_impl

        def add_ours_to_script(script, *args, **kwargs):
            if _has_leanfleet_nodes(self.arg_groups[ModelArgs].path):
                script.add_import(imports=[function], frm=__name__)
                script.append_prefix(safe(f"{function}()"))
            return add_to_script(script, *args, **kwargs)

        group.add_to_script_impl = add_ours_to_script


def _has_leanfleet_nodes(path):
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # not an ONNX file: Polygraphy reads other formats too, and says itself what it cannot read
        return False
    return any(entry.domain == spec.DOMAIN for entry in model.opset_import)


def use_library():
    """Has Polygraphy's SessionFromOnnx register leanfleet's kernels in the sessions that it makes from now on.

    Raises PolygraphyException where the library is missing.
    """
    import onnxruntime
    from polygraphy.backend.onnxrt import loader

    from leanfleet.ort_ops import get_library_path, register

    try:
        get_library_path()
    except FileNotFoundError as error:
        G_LOGGER.critical(str(error))

    class Onnxruntime:
        """onnxruntime as Polygraphy's loader sees it: its SessionOptions come with leanfleet's operators."""

        def __getattr__(self, name):
            return getattr(onnxruntime, name)

        def SessionOptions(self):  # noqa: N802
            return register(onnxruntime.SessionOptions())

    assert hasattr(loader, "onnxrt"), "this version of Polygraphy keeps onnxruntime elsewhere"
    loader.onnxrt = Onnxruntime()


def use_references():
    """Makes the PyTorch references known to PluginRefRunner."""
    from leanfleet.parity import register_references

    register_references()


def LOADER():  # noqa: N802  Polygraphy's name for it
    """The argument groups that leanfleet adds to `polygraphy run`."""
    return [LeanfleetArgs()]
