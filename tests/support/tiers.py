"""The tier of a test, and the process of pytest-xdist that it runs in.

`pytest` runs the quick tier: one case of everything that matters. Beside the marks in the files, tests are marked here:
`slow` those on the other backends of Keras, in the other modes of TensorFlow and on 2 or 4 ranks where 3 do the same,
`horovod_core` those on Horovod's core, `cluster` those on several hosts.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from engines import backend_of, engine_of

#: Parameter -> values that the quick tier leaves out.
_SLOW = {"backend": ("jax", "tensorflow"), "mode": ("eager", "session")}
#: Tests that the quick tier has on these backends too: one that all have, and those of one backend alone.
_QUICK = (
    "test_ranks_train_as_one_process[native-SGD-jax",
    "test_memory_of_jax[native-two_lists_on_jax",
    "test_all_frameworks_are",
)
#: File -> parts of the names of tests that take seconds, mostly to start ranks or to trace graphs. The quick tier has
#: another case of each.
_SLOW_OF_FILE = {
    "test_between": "[5- [3-gloo- many_segments",
    "test_built": "mpi4py; the_script_may_too use_gloo_say_so",
    "test_compare_run": "a_planted_mistake_is_named[-",
    "test_examples": "any_number_of_ranks two_ranks[keras_ two_ranks[pytorch_a two_ranks[pytorch_b two_ranks[pytorch_d "
    "two_ranks[pytorch_e two_ranks[pytorch_l two_ranks[pytorch_m two_ranks[pytorch_t "
    "two_ranks[pytorch_u two_ranks[pytorch_z",
    "test_garbage": "[1--True] [1-gc.disable()-False]",
    "test_gloo": "[large_ [half_ [allgather- [barrier- [reduce_ [all_ [small_and_ message-shared",
    "test_hvdrun": "keeps_none_of_them[mpi- keeps_none_of_them[gloo- keeps_none_of_them[auto-[[1",
    "test_jobs": "stopped[75] stopped[130]",
    "test_keras_checkpoint": "was_ended_goes_on elastic_states",
    "test_keras_example": "learned_on_two_ranks",
    "test_keras_gpu": "stay_on_the_gpu",
    "test_keras_training": "a_compiled_step[native-torch",
    "test_keras_strategy": "LateAverage [native-AllReduce [native-2- 1-True test_a_tape_with that_a_tape_refuses",
    "test_lazy_groups": "[hierarchical_pairs] wants_that[mpi] is_removed[shared_memory]",
    "test_liveness": "[wait_for_a_reduce_scatter] [wait_for_an_all_gather] [wait_for_gradients_in_a_thread]",
    "test_memory": "buckets[mpi] leaves_nothing_behind goes_with_all_it_had no_more_memory[mpi] no_more_memory[hier",
    "test_migrate_run": "test_keras_scripts test_torch_scripts",
    "test_mpi_threads": "take_turns wants_that[shared_memory]",
    "test_power_sgd": "of_tensorflow of_keras",
    "test_preemption": "and_then_told_to_end",
    "test_replicas": "fit_finds_it_too",
    "test_tensorflow_behaviour": "adasum batch_norm different_models missing_gradients too_early _particular torch",
    "test_tensorflow_gpu": "train_as_one_process",
    "test_tensorflow_ops": "other_collectives slices process_sets join sessions of_horovod any_order errors_name",
    "test_tensorflow_training": "compression accumulation _particular joined while_the_engine_is_tuned all_ranks_skip",
    "test_torch_adasum_optimizer": "[native-Adam] 1-none 2-fp16 4-bf16",
    "test_torch_behaviour": "compiled_modules[native-False what_waits_to_be_collected",
    "test_torch_communicators": "failure_in_one_part",
    "test_torch_compression": "on_every_rank_alike PowerSGD Sign",
    "test_torch_fork": "fork-thread workers-",
    "test_torch_scripts": "fsdp2",
    "test_torch_stalls": "-thread] the_time_that_was_set [native-broadcast_parameters-mpi plan-shared gradients-mpi",
    "test_small_operations": "read_them[2] read_them[4] give[2] give[4] meet[2] meet[4] once[2]",
    "test_soak": "whatever_hypothesis_draws",
    "test_torchrun": "horovodruns_variables under_torchrun[gloo] that_was_killed nobody_ends_the_others[auto] "
    "starts_again plain_form",
    "test_tuning": "several_hosts",
    "test_wrapped_examples": "learns_what_its_twin_does",
}
#: Files whose tests start jobs with a framework on each rank, by group: two cores run one job of a group at a time.
_JOBS = {
    "elastic jobs": "test_asynchronous_elastic test_elastic_keras test_elastic_world test_lives test_preemption",
    "jobs": "test_wrap test_wrap_keras test_wrapped_examples test_migrate_run test_torch_scripts test_keras_example "
    "test_tensorflow_example test_horovodrun test_run test_torchrun "
    "test_jax_distribution test_readme",
}
_GROUP_OF_FILE = {file: group for group, files in _JOBS.items() for file in files.split()}


def marks_of(item: pytest.Item) -> set[str]:
    """The marks that a test has because of its folder or its parameters."""
    marks = {"cluster"} if "cluster" in item.path.parts else set()
    if engine_of(item) == "horovod":
        marks.add("horovod_core")
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    if any(params.get(name) in values for name, values in _SLOW.items()) and not any(
        name in item.nodeid for name in _QUICK
    ):
        marks.add("slow")
    if any(name in item.name for name in _SLOW_OF_FILE.get(item.path.stem, "").split()):
        marks.add("slow")
    return marks


def find_other_sizes(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests of the adapters on 2 or 4 ranks of which there is the same on 3 ranks."""
    cells: dict[str, dict[int, pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and {"engine", "size"} <= set(callspec.params):
            others = {name: repr(value) for name, value in callspec.params.items() if name != "size"}
            cells.setdefault(f"{item.nodeid.partition('[')[0]} {sorted(others.items())}", {})[
                callspec.params["size"]
            ] = item
    return [item for sizes in cells.values() if 3 in sizes for size, item in sizes.items() if size in (2, 4)]


def group_of(item: pytest.Item) -> str:
    """The group of a test: those of one group are to run one after the other, in one process of pytest-xdist.

    Those that call run_ranks() share the ranks that wait for work: a group for each backend of Keras, and without Keras
    for PyTorch and the rest, by engine; trainings of Keras in the slow tier are so many that they have groups of their
    own. Those that start large jobs of hvdrun's are two groups.
    """
    if item.path.stem in _GROUP_OF_FILE:
        return _GROUP_OF_FILE[item.path.stem]
    module = getattr(item, "module", None)
    if any(hasattr(module, name) for name in ("run_ranks", "run_check")):
        framework = backend_of(item) or ("PyTorch" if item.path.stem.startswith("test_torch_") else "")
        trains = item.path.stem == "test_keras_training" and item.get_closest_marker("slow") is not None
        return f"ranks {framework} {engine_of(item)}{' training' * trains}"
    return item.path.stem


def begins_early(item: pytest.Item) -> bool:
    """Is the test of a group that takes long? One process would be left with it at the end."""
    return group_of(item).startswith(("ranks", "jobs", "elastic jobs"))
