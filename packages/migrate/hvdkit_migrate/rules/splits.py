"""Random choices that must be equal on all ranks: which samples are for training, and the order before sharding."""

from __future__ import annotations

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.script import argument, last

_TORCH_SEEDS = (
    "torch.manual_seed",
    "torch.random.manual_seed",
    "keras.utils.set_random_seed",
    "lightning.seed_everything",
)
_NUMPY_SEEDS = ("numpy.random.seed", "keras.utils.set_random_seed", "lightning.seed_everything")
_NUMPY_DRAWS = ("numpy.random.shuffle", "numpy.random.permutation", "numpy.random.choice")
#: Functions in which ranks may draw different numbers.
_OF_SAMPLES = ("__getitem__", "__call__", "forward", "call", "collate", "collate_fn", "augment", "sample", "train_step")
_PYTHON_DRAWS = ("random.shuffle", "random.sample")


def fix_splits(draft: Draft) -> None:
    """Give random splits a seed, so that they are the same on all ranks."""
    script = draft.script
    for call in script.calls("torch.utils.data.random_split"):
        if argument(call, "generator", 2) is None and not _is_seeded(draft, call, *_TORCH_SEEDS):
            torch = script.names.local_name("torch", call)
            edit = draft.add_argument(call, f"generator={torch}.Generator().manual_seed(0)")
            if torch:
                draft.change(call, "all ranks make the same split.", edit)
            else:
                draft.breaks(
                    call, "each rank would make a different split.", "generator=torch.Generator().manual_seed(0)"
                )
    for call in script.calls("sklearn.model_selection.train_test_split"):
        if argument(call, "random_state") is None and not _is_seeded(draft, call, *_NUMPY_SEEDS):
            edit = draft.add_argument(call, "random_state=0")
            draft.change(call, "all ranks make the same split.", edit)
    for names, seeds, write in (
        (_NUMPY_DRAWS, _NUMPY_SEEDS, "numpy.random.seed(0) before it"),
        (_PYTHON_DRAWS, ("random.seed", "keras.utils.set_random_seed"), "random.seed(0) before it"),
        (("torch.randperm",), _TORCH_SEEDS, "torch.manual_seed(0) before it"),
    ):
        for call in script.calls(*names):
            if not _is_seeded(draft, call, *seeds) and not _is_for_a_sample(draft, call):
                draft.breaks(
                    call,
                    f"{last(call)} draws different numbers on every rank; if it selects or orders samples, "
                    "ranks train on samples that others evaluate, or on the same samples.",
                    f"{write}; or the comment `# hvdkit: ok` if ranks should differ here",
                )


def _is_seeded(draft: Draft, call: cst.Call, *seeds: str) -> bool:
    if argument(call, "generator") is not None:
        return True
    return bool(draft.script.calls(*seeds)) or any(
        last(one)
        in ("set_seed", "seed_everything", "set_random_seed", "seed_torch", "setup_seed", "fix_seed", "seed_all")
        for one in draft.script.all(cst.Call)
    )


def _is_for_a_sample(draft: Draft, call: cst.Call) -> bool:
    """Is it drawn for one sample or batch, which may differ between ranks?"""
    function = draft.script.function(call)
    return function is not None and function.name.value in _OF_SAMPLES
