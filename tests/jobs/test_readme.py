"""The changes of scripts that README.md shows make three ranks train as one process does with the whole batch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hvdrun_job import HVDRUN, ROOT, environment

pytestmark = [pytest.mark.ranks, pytest.mark.group("jobs")]

RANKS = 3
#: What the scripts of the README have before and after the lines that it shows. Each rank draws its own first model,
#: and a rank has all of its training data in one batch, whatever their order.
_PYTORCH = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
inputs = torch.randn(106, 4, generator=torch.Generator().manual_seed(1))
rows = TensorDataset(inputs, (inputs.sum(1) > 0).long())
train, test = torch.utils.data.Subset(rows, range(96)), torch.utils.data.Subset(rows, range(96, 106))
epochs = 4

def make_model():
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    return torch.nn.Linear(4, 2)

"""
_KERAS = """
import os
import keras
import numpy as np

keras.utils.set_random_seed(int(os.environ.get("RANK", "0")))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
images = np.random.default_rng(1).normal(size=(96, 4)).astype("float32")
labels = (images.sum(1) > 0).astype("int64")

"""
_STEP = """\
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
"""
_COUNT = "print('test rows', sum(len(labels) for _, labels in test_loader))\n"
_HISTORY = "for epoch, loss in enumerate(model.history.history['loss']): print(epoch, loss)\n"


def read_change(title: str) -> tuple[str, str]:
    """Read the change below a title of the README: the script before it, and after it."""
    text = (ROOT / "README.md").read_text()
    change = re.search(rf"^{title}.*?^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert change is not None
    lines = change[1].splitlines()
    assert {line[0] for line in lines} == {" ", "+", "-"}
    before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in (" -", " +"))
    return before, after


def start(launcher: list[str], script: str, folder: Path) -> str:
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [*launcher, sys.executable, "train.py"],
        env={**environment(), "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_losses(printed: str) -> list[tuple[int, float]]:
    return [(int(epoch), float(loss)) for epoch, loss in re.findall(r"^(?:\[0\] )?(\d+) (\d\.\d+)$", printed, re.M)]


def with_the_whole_batch(script: str) -> str:
    """The script for one process whose batches are those of all ranks, with the learning rate of that batch."""
    for name, value, whole in (("batch_size", "32", f"{32 * RANKS}"), ("lr|SGD", "0.02", f"{0.02 * RANKS}")):
        script, changed = re.subn(rf"\b({name})([=(]){value}\b", rf"\g<1>\g<2>{whole}", script)
        assert changed == 1, script
    return script


def complete(script: str) -> str:
    """The script for PyTorch with its step, and with the number of test rows as its last line."""
    script, replaced = re.subn(r"^ {8}\.\.\. .*\n", _STEP, script, flags=re.MULTILINE)
    assert replaced == 1, script
    return _PYTORCH + script + _COUNT


def test_the_change_for_pytorch_trains_as_one_process_with_the_whole_batch(tmp_path: Path) -> None:
    before, after = map(complete, read_change("PyTorch"))
    alone = start([], with_the_whole_batch(before), tmp_path)
    together = start([*HVDRUN, "-np", str(RANKS)], after, tmp_path)
    losses = read_losses(alone)
    assert [epoch for epoch, _ in losses] == [0, 1, 2, 3] and losses[-1][1] < losses[0][1]
    assert [epoch for epoch, _ in read_losses(together)] == [0, 1, 2, 3]
    assert [loss for _, loss in read_losses(together)] == pytest.approx([loss for _, loss in losses], rel=1e-4)
    counted = [int(rows) for rows in re.findall(r"test rows (\d+)", together)]
    assert (len(counted), sum(counted)) == (RANKS, 10), "each row of the evaluation counts once"


@pytest.mark.slow
def test_the_change_for_keras_trains_as_one_process_with_the_whole_batch(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    before, after = (_KERAS + script + _HISTORY for script in read_change("Keras 3"))
    alone = read_losses(start([], with_the_whole_batch(before), tmp_path))
    together = read_losses(start([*HVDRUN, "-np", str(RANKS)], after, tmp_path))
    assert len(alone) == 20 and alone[-1][1] < alone[0][1]
    assert [loss for _, loss in together] == pytest.approx([loss for _, loss in alone], rel=1e-4)
