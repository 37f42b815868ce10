"""Runs a script with TensorFlow hidden where Keras has another backend, and would import it for 4 s just to seed it."""

from __future__ import annotations

import os
import runpy
import sys


def hide_tensorflow() -> None:
    """Let this process find no TensorFlow, unless it is Keras's backend."""
    if os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow" and os.environ.get("TESTS_STAND_INS") != "no":
        sys.modules["tensorflow"] = None  # type: ignore[assignment]


if __name__ == "__main__":
    hide_tensorflow()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
