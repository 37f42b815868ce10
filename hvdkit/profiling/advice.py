"""Advice: the changes that would shorten a step, with the seconds that each saves at most; largest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvdkit.profiling.choice import balanced_s
from hvdkit.profiling.scaling import Scaling
from hvdkit.profiling.slow import Slow
from hvdkit.profiling.steps import Steps
from hvdkit.profiling.time_shares import TimeShares

_WORTH = 0.03  # of a step: a smaller saving is not worth a change
_SEVERAL = (2, 4, 8)


@dataclass(frozen=True)
class Advice:
    """A change. name: its kind. saves_s: seconds of a step saved at most. text: the measurement and the change."""

    name: str
    saves_s: float
    text: str


def advise(steps: Steps, shares: TimeShares, scaling: Scaling, slow: Slow | None) -> tuple[Advice, ...]:
    """Return all changes that save at least 3 % of a step, largest first.

    steps: the recorded steps.
    shares: the shares of their time.
    scaling: the fitted model.
    slow: the straggler; None for none.
    """
    usual = shares.usual
    step_s = float(shares.step[:, usual].mean())
    candidates = [
        *_about_late(steps, shares, slow),
        *_about_balance(steps, shares, slow),
        *_about_loading(steps, shares, slow),
        *_about_network(steps, scaling),
        *_about_exposed(steps, shares, scaling),
    ]
    worth = [advice for advice in candidates if advice.saves_s >= _WORTH * step_s]
    return tuple(sorted(worth, key=lambda advice: -advice.saves_s))


def _about_late(steps: Steps, shares: TimeShares, slow: Slow | None) -> Iterator[Advice]:
    late_s = float(shares.late[:, shares.usual].mean())
    if slow is None:
        yield Advice(
            "uneven-work",
            late_s,
            "Different ranks are slow in different steps, so the work per step is uneven. Give all ranks batches of "
            "equal work (sort or cut sequences by length), leave one core of each host free, and check that no other "
            "processes run on the hosts.",
        )
        return
    who = f"rank {slow.ranks[0]} on {slow.host}" if len(slow.ranks) == 1 else f"the ranks on {slow.host}"
    if slow.loading_s > slow.waited_s / 2:
        cure = (
            f"The reason is data: {who} waits {1e3 * slow.loading_s:.3g} ms longer for it than the other ranks. Check "
            f"the storage that {slow.host} reads from, and whether all ranks load equal amounts of data."
        )
    else:
        cure = (
            f"Check with top what else runs on {slow.host}, whether its clock rate is lower or it is swapping, and "
            f"whether the script does more work there: larger batches, logging, checkpoints or evaluation."
        )
    yield Advice("slow-rank", slow.part * slow.waited_s, f"The other ranks wait for {who}. {cure}")


def _about_balance(steps: Steps, shares: TimeShares, slow: Slow | None) -> Iterator[Advice]:
    if slow is not None and slow.loading_s > slow.waited_s / 2:
        return  # the cure is faster storage
    own = (shares.compute + shares.loading)[:, shares.usual].mean(axis=1).tolist()
    if len(own) < len(steps.plan.ranks) or min(own) <= 0:
        return
    slowest_s, balanced = max(own), balanced_s(own)
    yield Advice(
        "balance-rows",
        slowest_s - balanced,
        f"With equal rows the slowest rank computes {1e3 * slowest_s:.3g} ms in a step and the fastest "
        f"{1e3 * min(own):.3g} ms; with rows by speed all would compute {1e3 * balanced:.3g} ms. If it stays slow, "
        f"train with hvd.data.BalancedSampler (PyTorch) or hvd.BalancedDataset (Keras): the result does not change.",
    )


def _about_loading(steps: Steps, shares: TimeShares, slow: Slow | None) -> Iterator[Advice]:
    by_rank = shares.loading[:, shares.usual].mean(axis=1)
    loading_s = float(by_rank.min())  # more than this is a matter of slow ranks
    loaders, cores = steps.loaders, min(rank.cores for rank in steps.ranks)
    if loaders > 0:
        cure = (
            f"{loaders} process{'es' * (loaders > 1)} per rank already load the data. Increase num_workers if there "
            f"are free cores ({_count_cores(cores)} per rank), do less work per sample, or store preprocessed samples."
        )
    elif loaders == 0:
        workers = max(1, min(8, int(cores) - 1))
        cure = "The training process loads the data itself. "
        if cores < 2:
            cure += (
                f"With {_count_cores(cores)} per rank, DataLoader(..., num_workers=1) helps only if loading waits for "
                f"files; otherwise store preprocessed samples, or start fewer ranks per host."
            )
        else:
            cure += (
                f"Use DataLoader(..., num_workers={workers}) to load during compute, with more workers if they wait "
                f"for files rather than compute; in fit() a PyDataset with workers."
            )
    else:
        cure = "Load the data during compute (.prefetch(tf.data.AUTOTUNE), workers), or keep it in memory."
    yield Advice("data-loading", loading_s, f"Training waits {1e3 * loading_s:.3g} ms per step for data. {cure}")


def _about_network(steps: Steps, scaling: Scaling) -> Iterator[Advice]:
    hosts = scaling.hosts
    if hosts < 2:
        return
    now = scaling.step_s(hosts)
    if steps.plan.wire_bytes == steps.plan.nbytes:
        halved = now - scaling.step_s(hosts, [nbytes / 2 for nbytes in scaling.work.buckets])
        yield Advice(
            "compression",
            halved,
            f"compression=hvd.Compression.fp16 would halve the bytes sent between hosts and save about "
            f"{1e3 * halved:.3g} ms per step.",
        )
    others = {times: now - scaling.step_s(hosts, scaling.merged(times)) for times in _SEVERAL}
    times = max(others, key=others.__getitem__)
    bytes_now = steps.ranks[0].fusion_bytes
    yield Advice(
        "small-buckets",
        others[times],
        f"The buckets are too small for this network. HVDKIT_FUSION_BYTES={bytes_now * times // 2**20}m would save "
        f"about {1e3 * others[times]:.3g} ms per step.",
    )
    others = {times: now - scaling.step_s(hosts, scaling.cut(times)) for times in _SEVERAL}
    times = max(others, key=others.__getitem__)
    yield Advice(
        "large-buckets",
        others[times],
        f"There are few buckets, so the last one, which cannot overlap with compute, is large. HVDKIT_FUSION_BYTES="
        f"{bytes_now // times // 1024}k would save about {1e3 * others[times]:.3g} ms per step.",
    )


def _about_exposed(steps: Steps, shares: TimeShares, scaling: Scaling) -> Iterator[Advice]:
    exposed_s = float(shares.exposed[:, shares.usual].mean())
    if scaling.hosts == 1 and not steps.plan.threaded:
        cores = min(rank.cores for rank in steps.ranks)
        if cores < 2:
            cure = f"Each rank has {_count_cores(cores)}: start fewer ranks per host, so that each has a second one."
        else:
            most = int(cores) - 1
            cure = f"Set OMP_NUM_THREADS to {most} at most, so that each rank has a core free, or start fewer ranks."
        yield Advice(
            "no-spare-core",
            exposed_s / 2,
            f"Communication costs {1e3 * exposed_s:.3g} ms per step and runs only while training waits, because no "
            f"core is free for it. {cure}",
        )
    if exposed_s > 0.2 * float(shares.step[:, shares.usual].mean()):
        yield Advice(
            "larger-batch",
            exposed_s / 2,
            f"Exposed communication takes {1e3 * exposed_s:.3g} ms per step, for any batch size. Twice the batch size, "
            f"or backward_passes_per_step=2, halves it per sample.",
        )


def _count_cores(cores: float) -> str:
    return f"{cores:.2g} core{'s' * (cores != 1)}"
