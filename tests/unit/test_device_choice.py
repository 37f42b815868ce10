"""The choice, from the findings of all ranks, between device memory and host memory."""

from __future__ import annotations

import re

import pytest

from hvdkit.transport.device_choice import Finding, find_problem

OWN = [
    Finding("", "node1", "a", "GPU 0", "NCCL", (2, 29, 7)),
    Finding("", "node1", "b", "GPU 1", "NCCL", (2, 29, 7)),
]


@pytest.mark.parametrize(
    "change, problem",
    [
        (OWN[1], ""),
        (Finding("", "node2", "b", "GPU 0", "NCCL", (2, 29, 9)), ""),
        (
            Finding("", "node2", "b", "GPU 0", "NCCL", (2, 28, 3)),
            "rank 0 on node1 has NCCL 2.29.7 and rank 2 on node2 has NCCL 2.28.3",
        ),
        (
            Finding("", "node2", "b", "GPU 0", "RCCL", (2, 29, 7)),
            "rank 0 on node1 has NCCL 2.29.7 and rank 2 on node2 has RCCL 2.29.7",
        ),
        (Finding("", "node2", "c", "GPU 0", "XCCL"), "rank 0 on node1 has NCCL 2.29.7 and rank 2 on node2 has XCCL"),
        (Finding("", "node1", "a", "GPU 0", "NCCL", (2, 29, 7)), "ranks 0 and 2 on node1 use the same device"),
        (Finding("", "node1", "a", "GPU 0", "NCCL", (2, 29, 7), True), ""),
        (Finding("no libcuda", "node2"), "rank 2 on node2: no libcuda"),
        (Finding("", "node2"), "rank 2 on node2: its tensors are not all on one GPU"),
    ],
)
def test_a_rank_that_keeps_all_from_device_memory_is_named(change: Finding, problem: str) -> None:
    ranks = [OWN[0], Finding("", "node3", "d", "GPU 0", "NCCL", (2, 29, 7)), change]
    found = find_problem(ranks)
    assert bool(found) == bool(problem) and re.search(problem, found)
