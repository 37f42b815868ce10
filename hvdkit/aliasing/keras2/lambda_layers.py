"""Load Lambda layers of named functions by the function's module, if it is imported, as in Keras 2.

Keras 3 writes only the name, and finds only functions that are registered or among custom_objects.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any


def apply(keras: ModuleType) -> None:
    """Patch Lambda to write the function's module, and to search it on loading."""
    kind = keras.layers.Lambda
    kind.get_config = _get_config(kind.get_config)
    kind.from_config = classmethod(_from_config(kind.from_config.__func__, keras.saving.get_registered_object))


def _get_config(own: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def get_config(self: Any) -> dict[str, Any]:
        config = own(self)
        written, module = config["function"], getattr(self.function, "__module__", None)
        if (
            isinstance(written, dict)
            and written["class_name"] == "function"
            and _find(module, written["config"]) is self.function
        ):
            config["function"] = {**written, "module": module}
        return config

    return get_config


def _from_config(own: Callable[..., Any], registered: Callable[..., Any]) -> Callable[..., Any]:
    def from_config(cls: Any, config: dict[str, Any], custom_objects: Any = None, **options: Any) -> Any:
        written = config["function"]
        if isinstance(written, dict) and written["class_name"] == "function":
            name = written["config"]
            found = _find(written.get("module"), name)
            if found is not None and registered(name, custom_objects) is None:
                custom_objects = {**(custom_objects or {}), name: found}
        return own(cls, config, custom_objects, **options)

    return from_config


def _find(module: object, name: object) -> Any:
    """Find the function of this name in an imported module of the script's own; None without such a function.

    Functions of Python's library and of installed packages are not found, because Keras calls the function that a file
    names.
    """
    found = getattr(sys.modules.get(str(module)), str(name), None)
    if not isinstance(found, FunctionType) or found.__module__ != module:
        return None
    installed = tuple(sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib"))
    return None if found.__code__.co_filename.startswith(installed) else found
