"""DiLoCo: local SGD with an outer optimizer that steps along the ranks' average change."""

from __future__ import annotations

from hvdkit.engine.api import AllReduce
from hvdkit.strategies.outer import OuterSGD
from hvdkit.strategies.periodic import PeriodicAverage


class DiLoCo(PeriodicAverage):
    """Strategy of local steps, after `every` of which an outer optimizer steps the parameters that all ranks share.

    Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.

    outer: OuterSGD() if None. The other arguments: see LocalSGD.
    """

    def __init__(
        self,
        every: int = 100,
        *,
        outer: OuterSGD | None = None,
        start_after: int = 0,
        fragments: int = 1,
        overlap: int = 0,
        gradients: AllReduce | None = None,
    ) -> None:
        super().__init__(
            every,
            OuterSGD() if outer is None else outer,
            start_after=start_after,
            fragments=fragments,
            overlap=overlap,
            gradients=gradients,
        )
