"""Make callbacks accept arguments that Keras 3 removed or renamed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hvdkit.aliasing.said import warn_once

#: Class -> arguments to ignore. _RENAMED: class -> (old, new) argument.
_GONE: dict[str, tuple[str, ...]] = {
    "TensorBoard": ("batch_size", "write_grads", "embeddings_layer_names", "embeddings_data", "profile_batch_size"),
}
_RENAMED = {"ReduceLROnPlateau": ("epsilon", "min_delta")}


def apply(keras: ModuleType) -> None:
    """Patch the classes to accept their old arguments."""
    for name in {*_GONE, *_RENAMED}:
        _patch(getattr(keras.callbacks, name), name)


def _patch(kind: Any, name: str) -> None:
    own = kind.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for gone in _GONE.get(name, ()):
            if gone in kwargs:
                warn_once(f"{name}({gone}=...) was removed in Keras 3; the argument is ignored.")
                del kwargs[gone]
        if name in _RENAMED:
            old, new = _RENAMED[name]
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
        own(self, *args, **kwargs)

    kind.__init__ = __init__
