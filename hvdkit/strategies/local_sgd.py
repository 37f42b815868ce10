"""Local SGD: the parameters become their average over all ranks after every so many steps."""

from __future__ import annotations

from hvdkit.engine.api import AllReduce
from hvdkit.strategies.outer import OuterSGD
from hvdkit.strategies.periodic import PeriodicAverage


class LocalSGD(PeriodicAverage):
    """Every rank steps by its own gradients; after `every` steps all go on from the average of their parameters.

    Source: S. Stich, "Local SGD Converges Fast and Communicates Little", 2019. With start_after: T. Lin et al., "Don't
    Use Large Mini-Batches, Use Local SGD" (post-local SGD), 2020.

    start_after: so many first steps on averaged gradients. fragments: into how many parts the parameters are divided,
    which are averaged at different steps, each after every `every`. overlap: for how many steps an average may be under
    way while the ranks train on; then what a rank has changed meanwhile is kept. gradients: reduces gradients in the
    first steps; what is sent later is compressed by its options as well.
    Raises ValueError or TypeError for numbers that cannot be used.
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
