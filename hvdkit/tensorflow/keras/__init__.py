"""Another name of hvdkit.keras, as Horovod has it: `import hvdkit.tensorflow.keras as hvd`.

hvdkit.keras is in a higher layer than this package, so it is imported by name when this module is used.
"""

from __future__ import annotations

import importlib
import sys

_KERAS = "hvdkit.keras"

sys.modules[__name__] = importlib.import_module(_KERAS)
for _part in ("callbacks", "elastic"):
    sys.modules[f"{__name__}.{_part}"] = importlib.import_module(f"{_KERAS}.{_part}")
