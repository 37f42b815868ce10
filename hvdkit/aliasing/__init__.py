"""Scripts for Horovod, run as they are: its modules' names give hvdkit's, and habits that Keras 3 ended are put back.

The names of modules are an alias only. The patches of Keras and TensorFlow (keras2, tensorflow1) are experimental.

Nothing is loaded before the script imports it: not hvdkit's adapters, and no framework.
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
    """Make `import horovod...` give hvdkit from now on; again is nothing new.

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
