"""Another name of hvdkit.keras, as Horovod has it: `import hvdkit.tensorflow.keras as hvd`.

hvdkit.keras stands above this floor, so it is looked up by name when somebody asks for this module.
"""

from __future__ import annotations

import importlib
import sys

_KERAS = "hvdkit.keras"

sys.modules[__name__] = importlib.import_module(_KERAS)
for _part in ("callbacks", "elastic"):
    sys.modules[f"{__name__}.{_part}"] = importlib.import_module(f"{_KERAS}.{_part}")
