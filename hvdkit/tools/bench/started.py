"""`python -m hvdkit.tools.bench.started PLAN`: a rank that start.py has started; rank 0 tells it what comes of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from hvdkit.tools.bench.here import measure_here
from hvdkit.tools.bench.plan import Plan
from hvdkit.tools.bench.report import encode_report
from hvdkit.tools.bench.start import MARK
from hvdkit.world import read_world


def main(plan: str) -> None:
    """Measure. plan: in JSON."""
    first = read_world().rank == 0

    def tell(told: Mapping[str, object]) -> None:
        if first:
            print(MARK + json.dumps(told), flush=True)

    report = measure_here(Plan(**json.loads(plan)), lambda what, done, of: tell({"progress": [what, done, of]}))
    tell({"report": encode_report(report)})


if __name__ == "__main__":
    main(sys.argv[1])
