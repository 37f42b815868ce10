"""Cases of several parameters, of which the quick tier has those that show something new."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def quick_ones(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Make every one of these values a case, marked as slow unless it is one of `quick`."""
    return [pytest.param(each, marks=() if each in quick else pytest.mark.slow) for each in values]


def product(*values: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Make every combination of these values a case, marked as slow unless quick(*combination)."""
    return [pytest.param(*each, marks=() if quick(*each) else pytest.mark.slow) for each in itertools.product(*values)]
