"""A rank's way into what measures, with the framework that it needs or an error that says how to get it."""

from __future__ import annotations

import importlib.util

from hvdkit.errors import MissingDependencyError
from hvdkit.tools.bench.plan import Plan, Tell
from hvdkit.tools.bench.report import Report


def check_framework(plan: Plan) -> None:
    """Raise MissingDependencyError if what the plan trains or sends with is not installed. Loads nothing."""
    name = "keras" if plan.keras else "torch"
    if importlib.util.find_spec(name) is None:
        raise MissingDependencyError(f"hvdkit bench needs {name} here. Run: pip install 'hvdkit[{name}]'")


def measure_here(plan: Plan, tell: Tell) -> Report:
    """Measure the plan as one of the ranks; see rank.measure."""
    check_framework(plan)
    if plan.keras:
        from hvdkit.tools.bench.keras_rank import measure as measure_keras

        return measure_keras(plan, tell)
    from hvdkit.tools.bench.rank import measure

    return measure(plan, tell)
