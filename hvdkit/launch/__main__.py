"""`python -m hvdkit.launch` is hvdrun."""

import sys

from hvdkit.launch.cli import main

sys.exit(main())
