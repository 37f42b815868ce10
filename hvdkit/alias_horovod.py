"""`import hvdkit.alias_horovod`, as a script's first line: from then on `import horovod...` gives hvdkit.

`hvdrun --alias-horovod python train.py` does the same without the line. Raises AliasError if it cannot: Horovod itself
has been imported before.
"""

from __future__ import annotations

from hvdkit.aliasing import install

install()
