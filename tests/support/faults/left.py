"""What a job must leave behind, and what not."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from cluster.lab import Lab, wait_until
from elastic_world_script import batch_of, learn, make_model, make_optimizer, summary

from faults.run import Run
from hvdkit.checkpoint.manifest import find_flaw

#: Of a host that was cut off: its agents notice that hvdrun is gone.
_END_S = 15.0
#: A sum of float64 in another order, and thousands of steps of Adam after that.
_ROUNDING = 1e-9


class _Alone:
    """The training of one process that nothing happens to, as far as somebody has asked for it."""

    def __init__(self) -> None:
        self._model = make_model()
        self._optimizer = make_optimizer(self._model)
        self._seen = [summary(self._model)]

    def after(self, steps: int) -> list[float]:
        torch.set_num_threads(1)
        while len(self._seen) <= steps:
            learn(self._model, self._optimizer, batch_of(len(self._seen) - 1))
            self._seen.append(summary(self._model))
        return self._seen[steps]


_alone = _Alone()


def check_parameters(run: Run) -> None:
    """They are alike on all ranks, and those that one process comes to with the same batches."""
    result = run.result()
    assert result["alike"], run.output
    wanted = _alone.after(result["step"])
    off = [abs(mine - one) for mine, one in zip(result["summary"], wanted, strict=True)]
    assert max(off) < _ROUNDING, f"off by {off}\n{run.output}"


def check_processes(lab: Lab, run: Run) -> None:
    """None is left on any host."""
    wait_until(lambda: not lab.strays(), _END_S)
    assert not lab.strays(), f"left: {lab.strays()}\n{run.output}"


def check_shared_memory(lab: Lab, run: Run) -> None:
    """None is left on any host, whoever made it."""
    for name, host in lab.hosts.items():
        left = [path.name for path in Path("/proc", str(host.pid), "root", "dev", "shm").iterdir()]
        assert not left, f"left in /dev/shm of {name}: {left}\n{run.output}"


def check_checkpoints(folder: Path, damaged: set[str]) -> None:
    """Each is whole, but for those that were damaged, and nothing else is there."""
    for path in folder.iterdir():
        assert re.fullmatch(r"checkpoint-\d{6}", path.name), f"left among the checkpoints: {path.name}"
        flaw = find_flaw(path)
        assert not flaw or path.name in damaged, f"{path.name}: {flaw}"
