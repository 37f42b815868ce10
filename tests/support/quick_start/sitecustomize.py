"""Python imports this at its start, in each process that the tests start: conftest puts the folder on PYTHONPATH."""

from __future__ import annotations

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from without_compiler import put_compiler_off
from without_optional import refuse_optional

del sys.path[-1]
put_compiler_off()
refuse_optional()
