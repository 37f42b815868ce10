"""Where tests keep what is slow to make, from one run to the next."""

import os
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hvdkit" / "tests"
