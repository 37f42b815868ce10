"""Modules of Keras 2 under their old paths: `from keras.utils import np_utils`, `keras.layers.core`, ..."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hvdkit.aliasing.keras2.roots import ROOTS

#: Old module below a root -> the modules that have its names now, in the order of the search.
OLD = {
    "utils.np_utils": "utils",
    "utils.generic_utils": "utils saving",
    "utils.data_utils": "utils",
    "utils.vis_utils": "utils",
    "utils.layer_utils": "utils",
    "utils.io_utils": "utils",
    "utils.training_utils": "utils",
    "layers.core": "layers",
    "layers.convolutional": "layers",
    "layers.pooling": "layers",
    "layers.local": "layers",
    "layers.recurrent": "layers",
    "layers.normalization": "layers",
    "layers.merge": "layers",
    "layers.embeddings": "layers",
    "layers.noise": "layers",
    "layers.advanced_activations": "layers",
    "layers.wrappers": "layers",
    "layers.convolutional_recurrent": "layers",
    "layers.cudnn_recurrent": "layers",
    "layers.experimental": "layers",
    "layers.experimental.preprocessing": "layers",
    "engine": "layers models",
    "engine.topology": "layers models",
    "engine.base_layer": "layers",
    "engine.input_layer": "layers",
    "engine.training": "models",
    "engine.network": "models",
    "engine.sequential": "models",
    "backend.tensorflow_backend": "backend",
    "optimizers.experimental": "optimizers",
    "optimizers.adam": "optimizers",
    "optimizers.adam_v2": "optimizers",
    "optimizers.gradient_descent_v2": "optimizers",
    "optimizer_v2": "optimizers",
    "optimizer_v2.adam": "optimizers",
    "optimizer_v2.gradient_descent": "optimizers",
    "optimizer_v2.rmsprop": "optimizers",
    "mixed_precision.experimental": "mixed_precision",
    "preprocessing.sequence": "",
    "preprocessing.text": "",
    "initializers.initializers_v2": "initializers",
    "callbacks.callbacks": "callbacks",
    "experimental": "optimizers.schedules models",
}
#: Old names of classes.
_RENAMED = {
    "CuDNNLSTM": "LSTM",
    "CuDNNGRU": "GRU",
    "Policy": "DTypePolicy",
    "set_policy": "set_global_policy",
    "SyncBatchNormalization": "BatchNormalization",  # in one process they do the same
    "Network": "Model",
}
_KEPT = "keras._tf_keras.keras"


class OldModule(ModuleType):
    """A module that takes its names from other modules."""

    def __init__(self, name: str, places: Sequence[str]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._places = places

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        modules = [importlib.import_module(place) for place in self._places]
        if name == "__all__":
            return [one for module in modules for one in dir(module) if not one.startswith("_")]
        for wanted in (name, _RENAMED.get(name, name)):
            for module in modules:
                if hasattr(module, wanted):
                    return getattr(module, wanted)
        raise AttributeError(
            f"{self.__name__} is a module of Keras 2, and Keras 3 has no replacement for its {name!r}."
        )


class _Finder:
    """Finds the old modules; see importlib.abc.MetaPathFinder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of OLD below a root."""
        made = _split(name) is not None or f"{name}.".startswith(f"{_V1}.")
        return ModuleSpec(name, _Loader(), is_package=True) if made else None  # type: ignore[arg-type]


#: The module path tf.compat.v1.keras; hvdkit resolves its names in Keras 3.
_V1 = "tensorflow.compat.v1.keras"


def _split(name: str) -> tuple[str, str] | None:
    for root in ROOTS:
        old = name.removeprefix(f"{root}.")
        if old != name and old in OLD and not (root != "keras" and not OLD[old]):
            return root, old
    return None


class _Loader:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        found = _split(spec.name)
        if found is None:
            return OldModule(spec.name, [_KEPT + spec.name.removeprefix(_V1)])
        root, old = found
        places = [f"{root}.{place}" for place in OLD[old].split()] or [f"{_KEPT}.{old}"]
        return OldModule(spec.name, places)

    def exec_module(self, module: ModuleType) -> None:
        """See importlib.abc.Loader."""


FINDER = _Finder()


def parents() -> list[str]:
    """Return the packages below a root that had some of the old modules; "" is the root itself."""
    return sorted({old.rpartition(".")[0] for old in OLD if old.rpartition(".")[0] not in OLD})


def add_old_modules(package: ModuleType) -> None:
    """Make the old modules attributes of their package, for scripts that use them without importing them."""
    root = max((one for one in ROOTS if f"{package.__name__}.".startswith(f"{one}.")), key=len)
    for old in OLD:
        parent, _, name = f"{root}.{old}".rpartition(".")
        if parent == package.__name__ and name not in vars(package) and _split(f"{root}.{old}"):
            setattr(package, name, importlib.import_module(f"{root}.{old}"))
            for below in OLD:
                if below.startswith(f"{old}."):
                    importlib.import_module(f"{root}.{below}")


def add_old_layers(layers: ModuleType) -> None:
    """Add layers under their old names for GPUs."""
    for old in ("CuDNNLSTM", "CuDNNGRU"):
        if not hasattr(layers, old):
            setattr(layers, old, getattr(layers, _RENAMED[old]))
