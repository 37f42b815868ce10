"""hvdkit migrate: a name stands for what Python's scopes say, and a person is asked where that is not certain."""

from __future__ import annotations

import pytest

pytest.importorskip("libcst", reason="libcst is not installed")

from hvdkit_migrate.plan import plan

OWN_LOADER = """\
class DataLoader:
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)
"""
TRAIN = """\
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    model(x).sum().backward()
    optimizer.step()
"""


def test_an_own_class_hides_an_import_of_another_function() -> None:
    text = f"""\
import torch

{OWN_LOADER}
def evaluate(model):
    from torch.utils.data import DataLoader
    for x in DataLoader(held_out, batch_size=2):
        model(x)

loader = DataLoader(data)
{TRAIN}"""
    result = plan(text, "train.py")
    assert "\nloader = DataLoader(data)\n" in result.after
    assert [one.what for one in result.of("break") if "do not come from a DataLoader" in one.what]


def test_an_import_of_a_function_is_known_in_that_function_only() -> None:
    text = f"""\
import torch

def make(data):
    from torch.utils.data import DataLoader
    return DataLoader(data, shuffle=True)

def DataLoader(data):
    return data

loader = make(data)
{TRAIN}
"""
    result = plan(text, "train.py")
    assert "    return DataLoader(data, sampler=hvd.data.ShardedSampler(data))" in result.after
    assert result.of("break") == []


def test_a_parameter_hides_an_import() -> None:
    text = f"""\
import torch
from torch.utils.data import DataLoader

def write(torch, x):
    torch.save(x, "x")

loader = DataLoader(data, shuffle=True)
{TRAIN}"""
    assert 'def write(torch, x):\n    torch.save(x, "x")\n' in plan(text, "train.py").after


def test_a_parameter_stands_for_the_functions_that_calls_give() -> None:
    text = f"""\
import torch
from torch.utils.data import DataLoader

def step(x):
    model(x).sum().backward()
    optimizer.step()

def run(function, loader):
    for x in loader:
        function(x)

{TRAIN.partition("for x")[0]}
run(step, DataLoader(data, shuffle=True))
"""
    assert "ShardedSampler(data)" in plan(text, "train.py").after


@pytest.mark.parametrize(
    "binding",
    [
        "from torch.utils.data import DataLoader\n" + OWN_LOADER,
        "from torch.utils.data import DataLoader\nDataLoader = choose()\n",
        "if fast:\n    from mine import DataLoader\nelse:\n    from torch.utils.data import DataLoader\n",
        "try:\n    from mine import DataLoader\nexcept ImportError:\n    from torch.utils.data import DataLoader\n",
        "from torch.utils.data import *\n",
    ],
    ids=["own class", "assigned again", "if", "try", "star"],
)
def test_a_name_with_several_meanings_is_left_to_a_person(binding: str) -> None:
    text = f"import torch\n{binding}loader = DataLoader(data, shuffle=True)\n{TRAIN}"
    result = plan(text, "train.py")
    line = text.splitlines().index("loader = DataLoader(data, shuffle=True)") + 1
    asked = [one for one in result.of("break") if one.what.startswith("`DataLoader` ")]
    assert [one.line for one in asked] == [line]
    assert "\nloader = DataLoader(data, shuffle=True)\n" in result.after


@pytest.mark.parametrize(
    "binding",
    [
        "from torch.utils.data import DataLoader\nimport torch\n",
        "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n",
        "try:\n    import cPickle as pickle\nexcept ImportError:\n    import pickle\n",
        "from math import *\nfrom torch.nn import *\nlayer = Linear(1, 1)\n",
    ],
    ids=["twice the same", "or None", "nothing hangs on it", "star of nothing that changes"],
)
def test_a_name_is_not_asked_about_where_nothing_depends_on_it(binding: str) -> None:
    text = f"""\
import torch
from torch.utils.data import DataLoader
{binding}
loader = DataLoader(data, shuffle=True)
{TRAIN}
if log:
    wandb.log({{}})
"""
    result = plan(text, "train.py")
    assert result.of("break") == []
    assert "ShardedSampler(data)" in result.after
    if "wandb" in binding:
        assert "if hvd.rank() == 0:\n        wandb.log" in result.after


def test_changes_use_the_name_that_a_module_has_where_they_are() -> None:
    text = f"""\
import torch as t
from torch.utils.data import DataLoader, random_split

def split(t, data):
    import torch
    return random_split(data, [6, 2])

def split_again(t, data):
    return random_split(data, [6, 2])

parts = random_split(data, [6, 2])
loader = DataLoader(parts[0], shuffle=True)
{TRAIN.replace("torch.", "t.")}"""
    result = plan(text, "train.py")
    assert "generator=torch.Generator().manual_seed(0))" in result.after.partition("def split_again")[0]
    assert "parts = random_split(data, [6, 2], generator=t.Generator().manual_seed(0))" in result.after
    assert [one.line for one in result.of("break")] == [9], "t is a parameter there"


def test_an_import_inside_a_function_does_not_spare_one_at_the_top() -> None:
    text = """\
import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel

def clean():
    import contextlib
    return contextlib

init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with model.no_sync():
    model(x).sum().backward()
"""
    after = plan(text, "train.py").after
    assert "\nimport contextlib\n" in after
    assert "with contextlib.nullcontext():" in after


def test_a_print_of_its_own_is_no_output() -> None:
    text = f"import torch\ndef print(x):\n    return x\n{TRAIN}print(1)\n"
    assert plan(text, "train.py").after.endswith("\nprint(1)\n")


def test_a_horovod_name_is_renamed_where_it_is_horovods() -> None:
    text = "import horovod.torch\nhorovod.torch.init()\ndef f(horovod):\n    return horovod.torch\n"
    after = plan(text, "train.py").after
    assert after == "import hvdkit.torch\nhvdkit.torch.init()\ndef f(horovod):\n    return horovod.torch\n"
