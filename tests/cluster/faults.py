"""Faults for one host of the lab, each mended when its block ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cluster.lab import Lab


@contextlib.contextmanager
def edited(path: Path, before: str, after: str) -> Iterator[None]:
    """A file of a host's /etc with one text in place of another; in place, as it is mounted."""
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    try:
        yield
    finally:
        path.write_text(text)


def names_of(lab: Lab, host: str) -> Path:
    """A host's /etc/hosts."""
    return lab.folder / "etc" / host / "hosts"


@contextlib.contextmanager
def done(lab: Lab, host: str, do: str, undo: str) -> Iterator[None]:
    """A shell command on a host, and what undoes it."""
    answer = lab.run(host, ["sh", "-c", do])
    assert answer.returncode == 0, answer.stderr
    try:
        yield
    finally:
        answer = lab.run(host, ["sh", "-c", undo])
        assert answer.returncode == 0, answer.stderr


@contextlib.contextmanager
def pinned(lab: Lab, host: str) -> Iterator[None]:
    """All that is started on a host by ssh may use one core only."""
    daemons = [pid for pid, line in lab.hosts[host].processes().items() if "sshd" in line]
    assert daemons
    allowed = os.sched_getaffinity(daemons[0])
    for pid in daemons:
        os.sched_setaffinity(pid, {min(allowed)})
    try:
        yield
    finally:
        for pid in daemons:
            os.sched_setaffinity(pid, allowed)
