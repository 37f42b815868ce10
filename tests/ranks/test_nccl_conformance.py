"""NCCL over the stand-in passes the checks of every transport, with work that is done late, in chance order of ranks.

Left out of the table: sums of 16-bit numbers in float32 (NCCL rounds after each addition), codings and wire dtypes
(buckets of the host, or the bucket's own dtype), messages with tags (NCCL has none; see nccl_checks.messages).
"""

from __future__ import annotations

import pytest
from bucket_checks import BUCKET_CHECKS
from nccl_transport import NcclTransport
from phase_checks import PHASE_CHECKS
from ranks import run_ranks
from stand_in import find_compiler
from transport_checks import CHECKS

from hvdkit.transport.api import Transport

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler for the stand-in; run: apt-get install gcc"),
]

LEFT_OUT = {
    "halves_are_summed_in_float32",
    "buckets_halves_are_summed_in_float32",
    "buckets_narrow_wires_are_near",
    "buckets_numbers_too_large_for_the_wire_are_clamped",
    "buckets_coded_sums_arrive_in_time",
    "buckets_a_round_that_is_not_finite_leaves_no_trace",
    "buckets_codings_send_less",
    "buckets_matrices_of_low_rank_are_sent_whole",
}
ALL_CHECKS = {**CHECKS, **BUCKET_CHECKS, **PHASE_CHECKS}
TABLE = [name for name in ALL_CHECKS if name not in LEFT_OUT]
QUICK = {"reducescatter_even_and_uneven", "alltoall_uneven", "phases_phases_and_allreduces_in_one_plan"}


def check(transport: Transport, names: list[str]) -> None:
    nccl = NcclTransport(transport)
    for name in names:
        ALL_CHECKS[name](nccl)
    nccl.close()


def test_what_is_left_out_is_there() -> None:
    assert set(ALL_CHECKS) >= LEFT_OUT


def test_nccl_conforms_where_late_work_matters() -> None:
    run_ranks(3, check, sorted(QUICK), transport="shared_memory", env={"STAND_IN_PAUSE_US": "300"})


@pytest.mark.slow
@pytest.mark.parametrize("size, late", [(2, "0"), (3, "300"), (4, "300")])
def test_nccl_conforms(size: int, late: str) -> None:
    run_ranks(size, check, TABLE, transport="shared_memory", env={"STAND_IN_PAUSE_US": late})
