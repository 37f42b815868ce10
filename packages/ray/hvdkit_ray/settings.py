"""Time limits for Ray, and the resources of workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdkit.errors import LaunchError

_ROUNDING = 1e-6  # 0.3 CPUs have room for three workers of 0.1


@dataclass(frozen=True)
class RaySettings:
    """Settings of a job, returned by create_settings().

    timeout_s: seconds for all workers to start and to import torch; in an elastic job also for each to call hvd.init()
        when others wait for it.
    placement_group_timeout_s: seconds for Ray to place the placement group.
    answer_timeout_s: seconds without a sign of life after which a rank of a fixed job is lost, while a function runs.
    min_workers, max_workers: of an elastic job, the least and the largest number of workers; None: as many as Ray has
        room for.
    reset_limit: of an elastic job, how often the ranks may change before the job fails; None: without limit.
    elastic_timeout: of an elastic job, seconds that a change may take.
    """

    timeout_s: float = 120.0
    placement_group_timeout_s: float = 100.0
    answer_timeout_s: float = 600.0
    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600.0


@dataclass(frozen=True)
class Demand:
    """The requested workers.

    workers: number of workers.
    cpus, gpus: of each worker.
    hosts: number of hosts, with equally many workers each; 0 for any.
    """

    workers: int
    cpus: float = 1
    gpus: float = 0
    hosts: int = 0

    @property
    def worker(self) -> dict[str, float]:
        """The resources of one worker, as Ray names them."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}

    @property
    def strategy(self) -> str:
        """The strategy of the placement group that is made for the workers."""
        return "STRICT_SPREAD" if self.hosts else "PACK"

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles of the placement group that is made for the workers: one a host, or one a worker."""
        if not self.hosts:
            return [self.worker] * self.workers
        each = self.workers // self.hosts
        return [{name: amount * each for name, amount in self.worker.items()}] * self.hosts

    def count_room(self, resources: Mapping[str, float]) -> int:
        """Count the workers that fit in these resources."""
        return min(int(resources.get(name, 0) / need + _ROUNDING) for name, need in self.worker.items())

    def place(self, worker: int) -> int:
        """Return the index of a worker's bundle."""
        return worker * len(self.bundles) // self.workers


def plan_workers(
    num_workers: int | None,
    num_hosts: int | None,
    num_workers_per_host: int,
    cpus_per_worker: float,
    use_gpu: bool,
    gpus_per_worker: float | None,
) -> Demand:
    """Read RayExecutor's arguments. Raises LaunchError for contradictory or invalid arguments."""
    if (num_workers is None) == (num_hosts is None):
        raise LaunchError(
            f"num_workers is {num_workers} and num_hosts is {num_hosts}. Give one of them: num_workers=N, or "
            "num_hosts=H and num_workers_per_host=W.",
            code="ray-arguments-contradict",
        )
    counts = {"num_workers": num_workers, "num_hosts": num_hosts, "num_workers_per_host": num_workers_per_host}
    check_counts({name: count for name, count in counts.items() if count is not None})
    hosts = num_hosts or 0
    cpus, gpus = check_resources(cpus_per_worker, use_gpu, gpus_per_worker)
    return Demand(hosts * num_workers_per_host if hosts else int(num_workers or 0), cpus, gpus, hosts)


def check_counts(counts: dict[str, Any]) -> None:
    """Raise LaunchError for a count that is not a whole number from 1 up, by the name of its argument."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise LaunchError(f"{name} is {count!r}; it must be a whole number from 1 up.", code="ray-number-invalid")


def check_resources(cpus: float, use_gpu: bool, gpus: float | None) -> tuple[float, float]:
    """Return the CPUs and GPUs of a worker. Raises LaunchError for invalid values."""
    if gpus and not use_gpu:
        raise LaunchError(
            f"gpus_per_worker is {gpus}, but use_gpu is False. Set use_gpu=True, or leave it out.",
            code="ray-arguments-contradict",
        )
    needed = (1 if gpus is None else gpus) if use_gpu else 0
    if cpus < 0 or needed < 0 or (use_gpu and not needed) or not (cpus or needed):
        raise LaunchError(
            f"cpus_per_worker is {cpus} and gpus_per_worker is {gpus} (use_gpu={use_gpu}). A worker needs a positive "
            "amount of at least one of them, and with use_gpu some of a GPU.",
            code="ray-resources-invalid",
        )
    return cpus, needed


def plan_elastic(
    settings: RaySettings,
    min_workers: int | None,
    max_workers: int | None,
    reset_limit: int | None,
    elastic_timeout: float | None,
) -> RaySettings:
    """Return the settings of an elastic job; arguments that are None leave them as they are. Raises LaunchError."""
    given: dict[str, Any] = {
        "min_workers": min_workers,
        "max_workers": max_workers,
        "reset_limit": reset_limit,
        "elastic_timeout": elastic_timeout,
    }
    merged = replace(settings, **{name: value for name, value in given.items() if value is not None})
    check_counts({"min_workers": merged.min_workers})
    if merged.max_workers is not None:
        check_counts({"max_workers": merged.max_workers})
        if merged.max_workers < merged.min_workers:
            raise LaunchError(
                f"max_workers is {merged.max_workers}, but min_workers is {merged.min_workers}.",
                code="ray-arguments-contradict",
            )
    if merged.reset_limit is not None and not (isinstance(merged.reset_limit, int) and merged.reset_limit >= 0):
        raise LaunchError(
            f"reset_limit is {merged.reset_limit!r}; it must be a whole number from 0 up, or None.",
            code="ray-number-invalid",
        )
    return check_settings(merged)


def check_settings(settings: Any) -> RaySettings:
    """Return the settings, or the defaults. Raises LaunchError for other objects and for invalid time limits."""
    if settings is None:
        return RaySettings()
    if not isinstance(settings, RaySettings):
        raise LaunchError(
            f"settings is a {type(settings).__name__}. Make it with create_settings() of hvdkit_ray.RayExecutor or "
            "ElasticRayExecutor, or leave it out.",
            code="ray-settings-invalid",
        )
    for name in ("timeout_s", "placement_group_timeout_s", "answer_timeout_s", "elastic_timeout"):
        value = getattr(settings, name)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise LaunchError(
                f"{name} is {value!r}; it must be a number of seconds above 0.", code="ray-number-invalid"
            )
    return settings


def check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables for workers. Raises LaunchError for names and values that are not text."""
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise LaunchError(
                f"The variable {name!r} has the value {value!r}; both must be text.", code="ray-variable-invalid"
            )
    return dict(env or {})


def refuse_nics(nics: Sequence[str] | None) -> None:
    """Raise LaunchError for Horovod's option nics."""
    if nics:
        raise LaunchError(
            f"nics is {nics!r}: the interface is a variable of the workers. Leave nics out, and give "
            'extra_env_vars={"GLOO_SOCKET_IFNAME": "eth0"} to start().',
            code="ray-nics",
        )
