"""hvdrun says at its end that ranks have not met each other, and accuses nobody who has, or may have."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hvdrun_job import HVDRUN, environment, lines

from hvdkit.launch.state.outcome import conclude
from hvdkit.launch.state.ranks import End, Ranks
from hvdkit.launcher_channel import LONE, READY
from hvdkit.startup import SITE

SEPARATE = (
    "hvdrun: no rank called hvd.init(), init_process_group() or MPI: these were 3 separate runs of the whole script. "
    "Call hvd.init() in the script, or start it with --wrap; for Lightning set devices."
)
MEETS_BY_TORCH = """
import torch.distributed
torch.distributed.init_process_group("gloo")
torch.distributed.destroy_process_group()
"""

#: As torchrun, which imports torch, and whose child processes meet.
TRAINS_IN_A_CHILD = """
import subprocess, sys, torch
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"], check=True)
"""

#: Lightning's Trainer on CPUs without `devices=`.
TRAINS_BY_LIGHTNING = """
import lightning, os, torch, hvdkit.lightning
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset

class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.set_num_threads(1)
trainer = lightning.Trainer(
    accelerator="cpu", strategy=STRATEGY, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Regression(), DataLoader(TensorDataset(torch.ones(12, 2)), 2))
Path(os.environ["RANK"]).write_text(f"{trainer.world_size} ranks, {trainer.global_step} steps")
"""


def run(script: str, folder: Path, *options: str, stand_in: bool = True) -> list[str]:
    """Run it on 3 ranks; returns what hvdrun says. stand_in: an empty module takes torch's place."""
    (folder / "script.py").write_text(script)
    if stand_in:
        (folder / "torch.py").touch()
    done = subprocess.run(
        [*HVDRUN, "-np", "3", *options, sys.executable, "script.py"],
        env=environment(),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=100,
        check=True,
    )
    return [line for line in lines(done.stderr) if line.startswith("hvdrun: ")]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import torch", [SEPARATE]),
        pytest.param("import json", [], marks=pytest.mark.slow),
        ("import torch\nfrom hvdkit.engine import runtime\nruntime.init()", []),
        pytest.param("import torch\nfrom mpi4py import MPI", [], marks=pytest.mark.slow),
        pytest.param(TRAINS_IN_A_CHILD, [], marks=pytest.mark.slow),
        pytest.param("import os\nif os.environ['RANK'] == '0': import torch", [], marks=pytest.mark.slow),
        pytest.param("import torch, ctypes, os\nctypes.CDLL(os.environ['MPI'])", [], marks=pytest.mark.slow),
    ],
    ids=["separate", "no framework", "hvdkit", "mpi4py", "a child", "one rank", "MPI by another library"],
)
def test_ranks_that_trained_separately_are_reported(
    script: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Path(sys.prefix) / "lib" / "libmpi.so.40"
    if "ctypes" in script and not library.exists():
        pytest.skip("no Open MPI in this environment")
    monkeypatch.setenv("MPI", str(library))
    assert run(script, tmp_path) == said


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_of_torch_distributed_have_met(tmp_path: Path) -> None:
    assert run(MEETS_BY_TORCH, tmp_path, stand_in=False) == []


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "devices", "trained", "said"),
    [
        ("auto", None, "1 ranks, 6 steps", [SEPARATE]),
        ("auto", "3", "3 ranks, 2 steps", []),
        ("hvdkit", None, "3 ranks, 2 steps", []),
    ],
    ids=["separate", "Lightning's variable", "hvdkit"],
)
def test_lightning_without_devices_on_cpus_is_reported_if_its_ranks_trained_separately(
    strategy: str, devices: str | None, trained: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    if devices is not None:
        monkeypatch.setenv("PL_TRAINER_DEVICES", devices)
    assert run(TRAINS_BY_LIGHTNING.replace("STRATEGY", repr(strategy)), tmp_path, stand_in=False) == said
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [trained] * 3


@pytest.mark.slow
@pytest.mark.ranks
def test_elastic_without_elastic_run_is_reported(tmp_path: Path) -> None:
    (line,) = run("import torch\nfrom hvdkit.engine import runtime\nruntime.init()", tmp_path, "--elastic")
    assert line.startswith("hvdrun: --elastic had no effect: no rank ran its training by hvd.elastic.run")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_function_of_elastic_run_may_end_the_script(tmp_path: Path) -> None:
    script = "import sys, hvdkit.torch as hvd\nhvd.init()\n"
    script += "hvd.elastic.run(lambda state: sys.exit())(hvd.elastic.TorchState())"
    assert run(script, tmp_path, "--elastic", stand_in=False) == []


def test_a_rank_that_stayed_out_is_named_only_where_others_have_met() -> None:
    def say(lone: tuple[int, ...], joined: tuple[int, ...], *, elastic: bool = False, trained: bool = False) -> str:
        ranks = Ranks(3)
        for rank in range(3):
            ranks.register(rank, "a")
            ranks.hear(rank, [LONE] * (rank in lone) + [READY] * (rank in joined))
            ranks.end(rank, End(0))
        ranks.training_ended = trained
        return " ".join(conclude(ranks, 0, elastic=elastic).lines)

    assert "these were 3 separate runs of the whole script. Call hvd.init()" in say((0, 1, 2), ())
    assert say((2,), (0, 1)).startswith("rank 2 did not call hvd.init()")
    assert (
        say((), (), elastic=True) == "" and say((), (0, 1, 2), elastic=True, trained=True) == ""
    )  # no training of ours
    assert "--elastic had no effect" in say((), (0, 1, 2), elastic=True)
    assert say((0, 2), ()) == "" and say((0, 1, 2), (0, 1, 2)) == ""


def test_a_process_that_a_rank_has_forked_or_started_reports_nothing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    here, there = socket.socketpair()
    with here, there:
        channel = f"{there.fileno()}:{os.fstat(there.fileno()).st_ino}"
        environ = {**os.environ, "PYTHONPATH": f"{SITE}:{tmp_path}", "HVDKIT_LAUNCHER_CHANNEL": channel}
        script = "import os, subprocess, sys, torch\nsubprocess.run([sys.executable, '-c', 'import torch'])\nos.fork()"
        subprocess.run([sys.executable, "-c", script], env=environ, pass_fds=[there.fileno()], check=True)
        there.close()
        assert here.recv(100) == f"{LONE}\n".encode() and here.recv(100) == b""
