"""`import hvdkit.alias_horovod`, as a script's first line: from then on `import horovod...` gives hvdkit.

`hvdrun --alias-horovod python train.py` does the same without the line. Raises AliasError if it cannot: Horovod itself
has been imported before.
"""

from __future__ import annotations

import importlib

# By name, because what the alias is made of stands on a floor above this one.
importlib.import_module("hvdkit.aliasing").install()
