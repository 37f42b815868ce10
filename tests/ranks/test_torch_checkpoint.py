"""hvd.checkpoint for torch: what is resumed goes on as if nothing had been, on any number of ranks."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_world import joined

import hvdkit.torch as hvd
from hvdkit.checkpoint.directory import CheckpointDirectory
from hvdkit.errors import CheckpointError
from hvdkit.log import logger
from hvdkit.torch.checkpoint import TorchKept

pytestmark = pytest.mark.ranks

NEVER = 1000  # steps; on two ranks there are twelve, in two epochs
NUMBERS = TensorDataset(torch.arange(48, dtype=torch.float32).reshape(48, 1))


def things(seed: int) -> dict[str, Any]:
    """A model with dropout, and all that belongs to its training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": hvd.data.ShardedSampler(NUMBERS)}


def train(
    directory: Path, steps: int, *, resume: bool = False, workers: int = 0, every_s: float = 1e9
) -> tuple[list[list[float]], list[float]]:
    """Take so many steps, then save if the training is not over; returns parameters, and the samples of this rank."""
    with joined():
        kept = things(hvd.rank() + 10 * resume)
        model, plain, schedule, sampler = kept.values()
        kept["optimizer"] = optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict())
        checkpoints = hvd.checkpoint.Checkpoints(directory, every_s=every_s, best=0.25 if not resume else 0.0, **kept)
        assert checkpoints.load() == resume
        assert checkpoints.values == {"best": 0.25}
        seen: list[float] = []
        taken = 0
        for epoch in range(sampler.epoch, 2):
            sampler.set_epoch(epoch)
            # A loader without a generator of its own draws a random number of torch's each time it begins.
            own = torch.Generator()
            for (batch,) in DataLoader(NUMBERS, 4, sampler=sampler, num_workers=workers, generator=own):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                seen += batch.flatten().tolist()
                taken += 1
                if taken == steps:
                    os.kill(os.getpid(), signal.SIGUSR1 if hvd.rank() == hvd.size() - 1 else 0)
                checkpoints._agreement._due = 1  # ask after each step: a test of what is saved is none of when
                checkpoints.step(len(batch))
            schedule.step()
        checkpoints.close()
        return [one.detach().flatten().tolist() for one in model.parameters()], seen


def train_and_be_told_to_end(directory: Path, steps: int, workers: int = 0) -> Any:
    """The same, ended by a signal to the last rank; returns the exit code, and how many steps there were."""
    before = signal.getsignal(signal.SIGUSR1)
    try:
        train(directory, steps, workers=workers)
    except SystemExit as ended:
        hvd.shutdown()
        assert isinstance(ended, hvd.checkpoint.Preempted)
        return ended.code
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    return None


@pytest.mark.parametrize(("steps", "workers"), [(4, 0), (6, 1)])
def test_a_training_that_was_ended_goes_on_to_the_same_bits(tmp_path: Path, steps: int, workers: int) -> None:
    whole = run_ranks(2, train, tmp_path / "never", NEVER)
    assert run_ranks(2, train_and_be_told_to_end, tmp_path / "a", steps, workers=workers) == [75, 75]
    resumed = run_ranks(2, train, tmp_path / "a", NEVER, resume=True)
    for (parameters, seen), (expected, all_seen) in zip(resumed, whole, strict=True):
        assert parameters == expected
        assert seen == all_seen[4 * steps :]


def test_another_number_of_ranks_goes_on_with_the_samples_that_are_left(tmp_path: Path) -> None:
    assert run_ranks(2, train_and_be_told_to_end, tmp_path, 3) == [75, 75]
    used = 3 * 4 * 2
    for size in (1, 3):
        results = run_ranks(size, train, tmp_path, NEVER, resume=True)
        assert all(parameters == results[0][0] for parameters, _ in results)
        first_epoch = [one for _, seen in results for one in seen[: (48 - used) // size]]
        order = hvd.data.ShardedSampler(NUMBERS, rank=0, size=1)
        assert sorted(first_epoch) == sorted(float(one) for one in list(order)[used:])


def saved_and_loaded(directory: Path) -> list[float]:
    """Parameters and moments of Adam, after a load into a fresh model, and what hvd.checkpoint.load() returned."""
    with joined():
        one, other = things(1), things(2 + hvd.rank())
        for _ in range(2):
            one["model"](torch.ones(3, 1)).square().mean().backward()
            one["optimizer"].step()
        assert hvd.checkpoint.load(directory, **other, best=0.0) is None
        hvd.checkpoint.save(directory, **one, best=0.5)
        assert hvd.checkpoint.load(directory, **other, best=0.0) == {"best": 0.5}
        hvd.checkpoint.save(directory, **other, best=1.5)
        if hvd.rank() == 0:
            path = directory / "checkpoint-000002" / "state.pt"
            path.write_bytes(path.read_bytes()[:-1])
        hvd.barrier()
        assert hvd.checkpoint.load(directory, **other, best=0.0) == {"best": 0.5}
        moments = [state["exp_avg"] for state in other["optimizer"].state.values()]
        return [float(tensor.double().sum()) for tensor in (*other["model"].parameters(), *moments)]


def test_what_is_loaded_is_the_same_on_all_ranks_and_a_cut_file_is_passed_over(tmp_path: Path) -> None:
    first, second = run_ranks(2, saved_and_loaded, tmp_path)
    assert first == second
    assert len(first) == 8


class Odd:
    """Its state is of a class of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For hasattr()."""


def errors_of(directory: Path) -> list[str]:
    """What is said of checkpoints that cannot be loaded, or made; the first that is there is whole."""
    said = []
    with joined():
        kept: dict[str, Any] = {"model": nn.Linear(2, 2)}
        hvd.checkpoint.save(directory, **kept)

        def load(**other: Any) -> None:
            with pytest.raises(CheckpointError) as error:
                hvd.checkpoint.load(directory, **other)
            said.append(str(error.value))

        load(model=nn.Linear(3, 2))
        load(model=nn.Linear(2, 2), other=nn.Linear(2, 2))
        load(**kept, best=1)
        different = nn.Linear(2, 2)
        if hvd.rank() == 1:  # it says that it has taken what it was given
            different.state_dict = lambda: {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}  # type: ignore
        load(model=different)
        if hvd.rank() == 0:  # who writes
            with pytest.raises(ValueError, match="'odd' cannot be saved"):
                TorchKept({"odd": Odd()}).copy(directory, during_epoch=False)
        checkpoints = hvd.checkpoint.Checkpoints(directory, sampler=hvd.data.ShardedSampler(NUMBERS))
        with pytest.raises(ValueError, match=r"the sampler 'sampler' needs .* Call step\(len\(batch\)\)"):
            checkpoints.step()
        checkpoints.close()
    return said


@pytest.mark.native("rank 0 and its disk, whatever the engine")
def test_what_does_not_fit_is_an_error_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, errors_of, tmp_path)
    assert first == second
    place = f"{tmp_path}/checkpoint-000001"
    for text, words in zip(
        first,
        (
            "cannot be loaded: RuntimeError",
            "only one of the two has other",
            "different values: best",
            "'model' differs between rank 0",
        ),
        strict=True,
    ):
        assert text.startswith(place)
        assert words in text


class Evil:
    """What runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def load_evil(directory: Path) -> str:
    """What is said of a file that wants to be executed, and whose manifest is right."""
    with joined():
        model = nn.Linear(2, 2)
        if hvd.rank() == 0:
            for number in range(5):
                shelf = CheckpointDirectory(directory / str(number))
                folder = shelf.begin()
                torch.save({"model": Evil()}, folder / "state.pt")
                if number == 1:  # torch's older form is a pickle as it is
                    (folder / "state.pt").write_bytes(pickle.dumps({"model": Evil()}))
                elif number == 2:
                    with zipfile.ZipFile(folder / "state.pt", "w", zipfile.ZIP_DEFLATED) as archive:
                        archive.writestr("archive/data.pkl", bytes(1 << 20))
                elif number == 3:
                    torch.save({"model": {"weight": torch.zeros(1).expand(10**6, 10**6)}}, folder / "state.pt")
                elif number == 4:
                    torch.save({"model": model.state_dict()}, folder / "state.pt")
                values: dict[str, Any] = {"values": {}, "random": [{}] * (number == 4)}  # of rank 0 only
                (folder / "values.json").write_text(json.dumps(values))
                shelf.commit(folder, {})
        hvd.barrier()
        said = ""
        for number in range(5):
            with pytest.raises(CheckpointError) as error:
                hvd.checkpoint.load(directory / str(number), model=model)
            said += str(error.value)
        return said


@pytest.mark.native("rank 0 and its disk, whatever the engine")
def test_a_file_from_anybody_executes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for said in run_ranks(2, load_evil, tmp_path, fresh=True):
        assert said.count("cannot be loaded: UnpicklingError") == 2
        assert "archive/data.pkl in state.pt is compressed" in said
        assert "a tensor of shape [1000000, 1000000] with less data" in said
        assert "the random state of rank 0 cannot be restored: KeyError" in said
    pickle.loads(pickle.dumps(Evil()))
    assert (tmp_path / "executed").exists(), "the test itself is not able to see it"
    (tmp_path / "executed").unlink()
    assert not list(tmp_path.rglob("executed"))


def overwritten_while_it_is_saved(directory: Path) -> tuple[str, str]:
    """Hashes of the parameters that were there at save(), and of those that came to be in the file."""
    with joined():
        model = nn.Linear(1000, 1000)
        there = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
        checkpoints = hvd.checkpoint.Checkpoints(directory, model=model)
        checkpoints.save()
        with torch.no_grad():
            model.weight.zero_()
        checkpoints.close()
        hvd.barrier()
        saved = torch.load(directory / "checkpoint-000001" / "state.pt", weights_only=True)["model"]["weight"]
        return there, hashlib.sha256(np.ascontiguousarray(saved.numpy()).tobytes()).hexdigest()


@pytest.mark.native("rank 0 and its disk, whatever the engine")
def test_training_may_go_on_while_it_is_saved(tmp_path: Path) -> None:
    there, saved = run_ranks(2, overwritten_while_it_is_saved, tmp_path)[0]
    assert there == saved


@pytest.mark.parametrize("elastic", [False, True])
def test_a_disk_that_takes_nothing_ends_the_training_unless_others_would_go_on_and_meet_it_too(
    elastic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HVDKIT_ELASTIC", "HVDKIT_ELASTIC_RESTARTS"):
        monkeypatch.setenv(name, str(int(elastic)))
    monkeypatch.setattr(logger, "handlers", [caplog.handler])  # an init() before may have set up another
    directory = tmp_path / "file" / "kept"
    directory.parent.write_text("no folder")
    with joined():
        checkpoints = hvd.checkpoint.Checkpoints(directory, every_s=0, model=nn.Linear(1, 1))
        checkpoints._agreement._due = 1
        if not elastic:
            with pytest.raises(CheckpointError, match="saving a checkpoint to"):
                checkpoints.step()
            checkpoints.close()
            return
        checkpoints.step()
        assert "saving a checkpoint to" in caplog.text
        directory.parent.unlink()
        checkpoints._agreement._due = 1
        checkpoints.step()
        checkpoints.close()
        assert CheckpointDirectory(directory).numbers() == [1]
