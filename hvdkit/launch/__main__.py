"""`python -m hvdkit.launch` is hvdrun."""

import sys

from hvdkit.launch.cli.hvdrun import main

sys.exit(main())
