"""Process groups of torch pass the checks of every transport: Gloo's on the CPU.

Left out of the table: sums of 16-bit numbers in float32 (the backends round after each addition), codings and wire
dtypes (buckets of the host, or the bucket's own dtype), messages with tags (hvdkit sends none by these groups).
"""

from __future__ import annotations

import pytest
from bucket_checks import BUCKET_CHECKS
from group_transport import GroupTransport
from phase_checks import PHASE_CHECKS
from ranks import run_ranks
from test_nccl_conformance import LEFT_OUT, QUICK
from transport_checks import CHECKS

from hvdkit.transport.api import Transport

pytestmark = [pytest.mark.ranks, pytest.mark.native("device memory is reduced by hvdkit's own engine")]

ALL_CHECKS = {**CHECKS, **BUCKET_CHECKS, **PHASE_CHECKS}
TABLE = [name for name in ALL_CHECKS if name not in LEFT_OUT]


def check(transport: Transport, names: list[str]) -> None:
    group = GroupTransport(transport)
    for name in names:
        ALL_CHECKS[name](group)
    group.close()


def test_a_process_group_does_operations_of_unequal_parts_and_phases() -> None:
    run_ranks(3, check, sorted(QUICK), transport="shared_memory")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_process_group_conforms(size: int) -> None:
    run_ranks(size, check, TABLE, transport="shared_memory")
