"""Run Horovod scripts unchanged: imports of Horovod's modules give hvdkit's, and Keras 3 accepts code for Keras 2.

The names of modules are an alias only. The patches of Keras and TensorFlow (keras2, tensorflow1) are experimental.

hvdkit's adapters and the frameworks are loaded only when the script imports them.
"""

from __future__ import annotations

import sys
from types import ModuleType

from hvdkit.aliasing import keras2, tensorflow1
from hvdkit.aliasing.finder import AliasFinder, is_alias
from hvdkit.errors import AliasError
from hvdkit.startup.after_import import after_import

_FINDER = AliasFinder()


def install() -> None:
    """Make `import horovod...` give hvdkit from now on; a second call has no effect.

    Raises AliasError if Horovod itself has been imported.
    """
    before = sys.modules.get("horovod")
    if before is not None and not is_alias(before):
        raise AliasError(
            f"Horovod is already imported from {_place_of(before)}, so hvdkit cannot replace it. Put "
            f"`import hvdkit.alias_horovod` before the first import of horovod, or start the script with "
            f"`hvdrun --alias-horovod`."
        )
    if _FINDER in sys.meta_path:
        return
    sys.meta_path.insert(0, _FINDER)
    sys.meta_path.insert(0, keras2.FINDER)
    after_import("keras", keras2.apply)
    after_import("hvdkit.keras.callbacks.learning_rate", keras2.learning_rate.apply)
    after_import("tensorflow", tensorflow1.apply)


def _place_of(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or "an unknown place")
