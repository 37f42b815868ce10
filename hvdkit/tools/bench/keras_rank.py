"""What every rank of `hvdkit bench step --keras` does; rank.py for Keras, and torch is not needed."""

from __future__ import annotations

from collections.abc import Callable

import hvdkit.keras as hvd
from hvdkit.tools.bench.figures import NO_COMMUNICATION
from hvdkit.tools.bench.keras_step import join, make_peers
from hvdkit.tools.bench.machine import describe_machine
from hvdkit.tools.bench.plan import STEPS, Plan, Tell
from hvdkit.tools.bench.report import Case, Report
from hvdkit.tools.bench.turns import count_rounds, take_turns


def measure(plan: Plan, tell: Tell) -> Report:
    """Measure the step; see rank.measure."""
    work = join(plan.threads)
    case = measure_keras_step(plan, work, count_rounds(tell, work, plan.rounds, of=plan.rounds))
    return Report("step", NO_COMMUNICATION, hvd.size(), "", hvd.describe(), describe_machine(), [], [case])


def measure_keras_step(plan: Plan, work: str, progress: Callable[[], object] = lambda: None) -> Case:
    """Measure the step beside all peers. work: its name."""
    turns = make_peers(alone=plan.alone)
    return Case(work, 0, take_turns(turns, dict.fromkeys(turns, STEPS), plan.rounds, progress))
