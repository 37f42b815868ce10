"""Keeps Keras and TensorFlow from importing packages that they could do more with, and that no test uses through them.

Keras imports scikit-learn for its wrappers, matplotlib for its plots, and JAX for a callback on any backend; TensorFlow
imports JAX for TFLite. That is a third of the time in which they are imported. Whoever else imports these packages gets
them. TESTS_STAND_INS=no keeps nothing away.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes milliseconds
if TYPE_CHECKING:
    from typing import Any

#: Package -> the modules that do not get it. Each of them catches the ImportError.
_REFUSED = {
    "jax": ("keras.src.callbacks.", "tensorflow.lite."),
    "matplotlib": ("keras.src.visualization.",),
    "sklearn": ("keras.src.wrappers.",),
}


class _Finder:
    """Has an import fail if one of these modules asks for it."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        modules = _REFUSED.get(name)
        if modules is None:
            return
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").startswith("importlib."):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith(modules):
            raise ModuleNotFoundError(f"tests/support/without_optional.py keeps {name} away", name=name)


def refuse_optional() -> None:
    """Let Keras and TensorFlow find none of these packages in this process."""
    if os.environ.get("TESTS_STAND_INS") != "no" and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
