"""`python -m hvdkit` is the hvdkit command."""

import sys

from hvdkit.cli import main

sys.exit(main())
