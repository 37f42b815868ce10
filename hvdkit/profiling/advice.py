"""Advice: changes that would shorten a step, with the seconds that each saves at most; the largest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvdkit.profiling.scaling import Scaling
from hvdkit.profiling.shares import Shares
from hvdkit.profiling.slow import Slow
from hvdkit.profiling.steps import Steps

_WORTH = 0.03  # of a step: less is not worth a change
_SEVERAL = (2, 4, 8)


@dataclass(frozen=True)
class Advice:
    """One change. name: its kind. saves_s: seconds of a step, at most. text: what was measured and what to do."""

    name: str
    saves_s: float
    text: str


def advise(steps: Steps, shares: Shares, scaling: Scaling, slow: Slow | None) -> tuple[Advice, ...]:
    """All changes that save at least 3 % of a step, the largest first."""
    usual = shares.usual
    step_s = float(shares.step[:, usual].mean())
    candidates = [
        *_about_late(steps, shares, slow),
        *_about_loading(steps, shares, slow),
        *_about_network(steps, scaling),
        *_about_exposed(steps, shares, scaling),
    ]
    worth = [advice for advice in candidates if advice.saves_s >= _WORTH * step_s]
    return tuple(sorted(worth, key=lambda advice: -advice.saves_s))


def _about_late(steps: Steps, shares: Shares, slow: Slow | None) -> Iterator[Advice]:
    late_s = float(shares.late[:, shares.usual].mean())
    if slow is None:
        yield Advice(
            "uneven-work",
            late_s,
            "Ranks take turns in being late, so their steps are of unequal length: give them batches of equal work "
            "(sequences sorted or cut by length), leave a core free for everything else, and see that nothing else "
            "runs on their hosts.",
        )
        return
    who = f"rank {slow.ranks[0]} on {slow.host}" if len(slow.ranks) == 1 else f"the ranks on {slow.host}"
    if slow.loading_s > slow.waited_s / 2:
        cure = (
            f"It is data that {who} waits for ({1e3 * slow.loading_s:.3g} ms longer than the others): see what its "
            f"host reads from, and how evenly the data is shared."
        )
    else:
        cure = (
            f"See what else runs on {slow.host} (top), whether it clocks lower or is swapping, and whether {who} has "
            f"more work: larger batches, logging, checkpoints or evaluation that the others do not have."
        )
    yield Advice("slow-rank", slow.part * slow.waited_s, f"The others wait for {who}. {cure}")


def _about_loading(steps: Steps, shares: Shares, slow: Slow | None) -> Iterator[Advice]:
    by_rank = shares.loading[:, shares.usual].mean(axis=1)
    loading_s = float(by_rank.min())  # the rest is of slow ranks
    loaders, cores = steps.loaders, min(rank.cores for rank in steps.ranks)
    if loaders > 0:
        cure = (
            f"{loaders} process{'es' * (loaders > 1)} a rank load it already: give the DataLoader more num_workers if "
            f"there are cores ({cores:.2g} a rank here), do less for each sample, or store it as training takes it."
        )
    elif loaders == 0:
        workers = max(1, min(8, int(cores) - 1))
        cure = (
            f"Training loads it itself: DataLoader(..., num_workers={workers}) does so meanwhile; with fit(), a "
            f"PyDataset with workers."
        )
    else:
        cure = "Load it while training computes: .prefetch(tf.data.AUTOTUNE), workers, or data kept in memory."
    yield Advice("data-loading", loading_s, f"Training waits for data, {1e3 * loading_s:.3g} ms in each step. {cure}")


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
            f"compression=hvd.Compression.fp16 would halve what crosses between hosts and save about "
            f"{1e3 * halved:.3g} ms of each step.",
        )
    others = {times: now - scaling.step_s(hosts, scaling.merged(times)) for times in _SEVERAL}
    times = max(others, key=others.__getitem__)
    bytes_now = steps.ranks[0].fusion_bytes
    yield Advice(
        "small-buckets",
        others[times],
        f"The buckets are small for this network: HVDKIT_FUSION_BYTES={bytes_now * times // 2**20}m would save about "
        f"{1e3 * others[times]:.3g} ms.",
    )
    others = {times: now - scaling.step_s(hosts, scaling.cut(times)) for times in _SEVERAL}
    times = max(others, key=others.__getitem__)
    yield Advice(
        "large-buckets",
        others[times],
        f"The buckets are few, so that the last one, which nothing hides, is large: HVDKIT_FUSION_BYTES="
        f"{bytes_now // times // 1024}k would save about {1e3 * others[times]:.3g} ms.",
    )


def _about_exposed(steps: Steps, shares: Shares, scaling: Scaling) -> Iterator[Advice]:
    exposed_s = float(shares.exposed[:, shares.usual].mean())
    if scaling.hosts == 1 and not steps.plan.threaded:
        yield Advice(
            "no-spare-core",
            exposed_s / 2,
            f"Communication costs {1e3 * exposed_s:.3g} ms of each step and goes on only while training waits, as no "
            f"core is spare for it: leave one to each rank (OMP_NUM_THREADS, or fewer ranks a host).",
        )
    if exposed_s > 0.2 * float(shares.step[:, shares.usual].mean()):
        yield Advice(
            "larger-batch",
            exposed_s / 2,
            f"Communication that nothing hides takes {1e3 * exposed_s:.3g} ms of each step, whatever the batch: twice "
            f"the samples in a step, or backward_passes_per_step=2, halve it per sample.",
        )
