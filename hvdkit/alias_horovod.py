"""Makes `import horovod...` give hvdkit, if `import hvdkit.alias_horovod` is a script's first line.

`hvdrun --alias-horovod python train.py` does the same without the line. Raises AliasError if Horovod itself has been
imported before.
"""

from __future__ import annotations

from hvdkit.aliasing import install

install()
