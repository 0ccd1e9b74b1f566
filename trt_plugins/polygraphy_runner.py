"""TensorRT with leanfleet's plugins in Polygraphy. Needs polygraphy, onnx and what leanfleet.trt_plugins.running needs."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnx import util as onnx_util

from leanfleet import spec, trt_plugins
from leanfleet.trt_plugins.running import Engine


def engine_loader(model: Any, profiles: Any = None, trt: ModuleType | None = None, **options: Any) -> Callable[[], Any]:
    """A Polygraphy loader: a callable that returns the ICudaEngine of an ONNX model with our plugins, for Polygraphy's own
    TrtRunner and its other loaders. The arguments are those of trt_plugins.build_engine.

    Polygraphy chooses between tensorrt and tensorrt_rtx when it is imported: POLYGRAPHY_USE_TENSORRT_RTX=1 for the latter.

    Example:
        from polygraphy.backend.trt import TrtRunner
        from leanfleet.trt_plugins.polygraphy_runner import engine_loader

        with TrtRunner(engine_loader("layer.onnx", {"batch": (1, 1, 8), "tokens": (1, 10, 64)})) as runner:
            print(runner.get_input_metadata())
    """

    def load() -> Any:
        built = trt_plugins.build_engine(model, profiles, trt=trt, **options)
        return trt_plugins.deserialize(built.engine, trt, host_code=options.get("embed_plugins", False))

    return load


class TrtRunner(BaseRunner):
    """Runs a model with TensorRT or TensorRT-RTX (trt: the module; None: the one that is installed).

    The engine is built for the sizes of the first inputs. bfloat16 inputs are ml_dtypes arrays, bfloat16 outputs come as
    float32. kernels: Counter {(operator, "TensorRT"): runs} of leanfleet's plugins.

    Example:
        import numpy as np
        from leanfleet.trt_plugins.polygraphy_runner import TrtRunner

        with TrtRunner("layer.onnx") as runner:
            outputs = runner.infer({"hidden": np.zeros((1, 10, 64), np.float32)})
        print(runner.kernels)
    """

    library, provider = True, "TensorRT"

    def __init__(self, path: str | Path, name: str | None = None, trt: ModuleType | None = None) -> None:
        super().__init__(name=name, prefix="leanfleet-trt")
        self.path, self.trt = str(path), trt
        self.engine: Engine | None = None
        self.kernels: Counter[tuple[str, str]] = Counter()

    def activate_impl(self) -> None:
        self.trt = trt_plugins.load(self.trt)

    def get_input_metadata_impl(self) -> Any:
        return onnx_util.get_input_metadata(onnx.load(self.path, load_external_data=False).graph)

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
        if self.engine is None:
            shapes = {name: (array.shape,) * 3 for name, array in feed_dict.items()}
            built = trt_plugins.build_engine(self.path, shapes, trt=self.trt)
            self.layers = Counter(op for _, op in built.layers if op in spec.all_specs())
            self.engine = Engine(built.engine, self.trt)
        start = time.perf_counter()
        outputs = self.engine.numpy(self.engine(dict(feed_dict)))
        self.inference_time = time.perf_counter() - start
        self.kernels.update({(op, self.provider): count for op, count in self.layers.items()})
        return OrderedDict(outputs)

    def deactivate_impl(self) -> None:
        self.engine = None
