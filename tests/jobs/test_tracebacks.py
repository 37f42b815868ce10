"""Tracebacks that ranks have in common are shown once, and any other output as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hvdrun_job import hvdrun, lines

from hvdkit.launch.run.output import Output
from hvdkit.launch.state.tracebacks import Tracebacks

TRACEBACK = b"Traceback (most recent call last):\n  File x\nValueError: bad\n"


def mark(rank: int, text: bytes, *, host: bytes = b"") -> bytes:
    return b"".join(b"[%d%b] %b" % (rank, host, line) for line in text.splitlines(keepends=True))


def show(pieces: Sequence[tuple[int, bool, bytes]], *, prefix: bool = True, hosts: bool = False) -> list[bytes]:
    """Pass pieces of output on; returns what comes out, by call."""
    written: list[bytes] = []

    def prefix_of(rank: int) -> bytes:
        return (b"[%d node%d] " % (rank, rank) if hosts else b"[%d] " % rank) if prefix else b""

    async def pass_on() -> None:
        tracebacks = Tracebacks(lambda rank, is_stderr, data: written.append(data), prefix_of)
        for piece in pieces:
            tracebacks.pass_on(*piece)
        tracebacks.flush()
        tracebacks.flush()

    asyncio.run(pass_on())
    return [each for each in written if each]


def test_equal_ones_are_shown_once_also_in_pieces_and_with_a_rank_in_them() -> None:
    pieces = []
    for rank in (3, 0, 1):
        head = b"hvdkit: rank %d on node%d failed with ValueError; ending the job.\n" % (rank, rank)
        text = mark(rank, b"before\n" + head + TRACEBACK, host=b" node%d" % rank)
        pieces += [(rank, True, text[: 100 + rank]), (rank, True, text[100 + rank :])]
    *before, merged = show(pieces, hosts=True)
    assert before == [b"[%d node%d] before\n" % (rank, rank) for rank in (3, 0, 1)]
    head = b"hvdkit: ranks 0-1,3 failed with ValueError; ending the job.\n"
    assert merged == b"".join(b"[0-1,3] " + line for line in (head + TRACEBACK).splitlines(keepends=True))


def test_those_of_torch_distributed_are_equal_too() -> None:
    texts = {rank: b"".join(b"[rank%d]: " % rank + line for line in TRACEBACK.splitlines(True)) for rank in (0, 1)}
    (merged,) = show([(rank, True, mark(rank, text)) for rank, text in texts.items()])
    assert merged.startswith(b"[0-1] ranks 0-1: Traceback")


def test_others_are_shown_as_they_are_the_first_one_first() -> None:
    other = TRACEBACK.replace(b"bad", b"worse")
    pieces = [(2, True, mark(2, other)), (0, True, mark(0, TRACEBACK)), (1, True, mark(1, TRACEBACK))]
    alone, merged = show(pieces)
    assert alone == mark(2, other) and merged.startswith(b"[0-1] Traceback")


def test_one_in_an_open_line_begins_a_line_and_has_one_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    async def pass_on() -> None:
        output = Output()
        output.prefix_of = lambda rank: b"[%d] " % rank
        tracebacks = Tracebacks(output.write, output.prefix_of)
        for rank in (0, 1):
            tracebacks.pass_on(rank, True, b"[%d] 50 %%" % rank)
        for rank in (0, 1, 2):
            tracebacks.pass_on(rank, True, mark(rank, TRACEBACK)[4 * (rank < 2) :])
        tracebacks.flush()
        tracebacks.pass_on(1, True, b"[1] more\n")

    asyncio.run(pass_on())
    merged = "".join(f"[0-2] {line}" for line in TRACEBACK.decode().splitlines(keepends=True))
    assert capfd.readouterr().err == f"[0] 50 %\n[1] 50 %\n{merged}[1] more\n"


def test_what_is_no_traceback_is_not_held() -> None:
    pieces = [
        (0, True, b"[0] a\n"),
        (0, False, b"[0] Traceback (most recent call last):\n"),
        (1, True, mark(1, TRACEBACK)),
    ]
    pieces.append((1, False, b"[1] out\n"))
    assert show(pieces) == [b"[0] a\n", pieces[1][2], b"[1] out\n", mark(1, TRACEBACK)]
    without = [(rank, True, TRACEBACK) for rank in (0, 1)]
    assert show(without, prefix=False) == [TRACEBACK, TRACEBACK]


#: Ranks come to their errors together, also where one of them starts late.
BARRIER = """
folder = pathlib.Path({folder!r})
(folder / os.environ["RANK"]).touch()
while len(os.listdir(folder)) < 3:
    time.sleep(0.01)
"""


@pytest.mark.ranks
def test_an_error_of_all_ranks_is_read_once(tmp_path: Path) -> None:
    barrier = BARRIER.format(folder=str(tmp_path))
    done = hvdrun(3, f"import os, pathlib, time\nprint('out', file=sys.stderr)\n{barrier}\n[][3]")
    said = lines(done.stderr)
    assert sorted(said[:3]) == ["[0] out", "[1] out", "[2] out"]
    assert said[3] == "[0-2] Traceback (most recent call last):"
    assert "[0-2] IndexError: list index out of range" in said and done.stderr.count(b"IndexError") == 1
