"""Local SGD: after a fixed number of steps the parameters become their average over all ranks."""

from __future__ import annotations

from hvdkit.engine.api import AllReduce
from hvdkit.strategies.outer import OuterSGD
from hvdkit.strategies.periodic import PeriodicAverage


class LocalSGD(PeriodicAverage):
    """Strategy of local steps on each rank's own gradients; after `every` steps the parameters are averaged.

    Source: S. Stich, "Local SGD Converges Fast and Communicates Little", 2019. With start_after: T. Lin et al., "Don't
    Use Large Mini-Batches, Use Local SGD" (post-local SGD), 2020.

    every: number of steps between two averages.
    start_after: number of first steps on averaged gradients.
    fragments: number of groups of parameters that are averaged at different steps, each group after `every` steps.
    overlap: number of steps for which an average may be under way while the ranks train; a rank's changes meanwhile are
    added to the result.
    gradients: reduces gradients in the first steps; later data is compressed by its options as well.

    Raises ValueError or TypeError for invalid numbers.
    """

    def __init__(
        self,
        every: int = 8,
        *,
        start_after: int = 0,
        fragments: int = 1,
        overlap: int = 0,
        gradients: AllReduce | None = None,
    ) -> None:
        super().__init__(
            every,
            OuterSGD(1.0, 0.0),
            start_after=start_after,
            fragments=fragments,
            overlap=overlap,
            gradients=gradients,
        )
