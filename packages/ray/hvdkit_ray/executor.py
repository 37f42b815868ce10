"""`RayExecutor` runs functions on ranks that are Ray's actors; `run` does so for one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.integrations.ranks import check_call
from hvdkit.optional_import import optional_import
from hvdkit_ray.elastic import ElasticWorkers
from hvdkit_ray.settings import (
    Demand,
    RaySettings,
    check_env,
    check_resources,
    check_settings,
    plan_elastic,
    plan_workers,
    refuse_nics,
)
from hvdkit_ray.workers import Workers

ray = optional_import("ray")
groups = optional_import("ray.util.placement_group")


class RayExecutor:
    """Ranks as Ray's actors, one each: `executor.start()`, then any number of `run` and `execute`, then `shutdown()`.

    Names and arguments are Horovod's. It can be used in a `with` statement, which starts it and shuts it down.

    settings: from create_settings(); None for the defaults
    num_workers: number of ranks, on as few nodes as possible
    num_hosts: number of nodes; with num_workers_per_host, in place of num_workers
    num_workers_per_host: number of ranks on each of num_hosts nodes
    cpus_per_worker: CPUs of each rank
    use_gpu: give each rank a GPU
    gpus_per_worker: GPUs of each rank, with use_gpu only; on a node a rank uses the GPU whose number is
        hvd.local_rank()
    use_current_placement_group: inside an actor or task that has a placement group (Ray Tune, Ray Train), use that
    min_workers, max_workers, reset_limit, elastic_timeout: an elastic job, see ElasticRayExecutor; num_workers and
        num_hosts are left out then
    cooldown_range, override_discovery: accepted, and not used
    placement_group: use this placement group
    Raises LaunchError for arguments that contradict each other, MissingDependencyError without Ray.
    """

    def __init__(
        self,
        settings: RaySettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[int, int] | None = None,
        elastic_timeout: float | None = None,
        override_discovery: bool = True,
        *,
        placement_group: Any = None,
    ) -> None:
        self.settings = check_settings(settings)
        self._use_current, self._group = use_current_placement_group, placement_group
        self._workers: Workers | ElasticWorkers | None = None
        self._elastic = min_workers is not None
        if self._elastic:
            if num_workers is not None or num_hosts is not None or placement_group is not None:
                raise LaunchError(
                    f"min_workers is {min_workers}, which makes the job elastic, and num_workers, num_hosts or "
                    "placement_group is set too. Leave out these, or min_workers.",
                    code="ray-arguments-contradict",
                )
            self.settings = plan_elastic(self.settings, min_workers, max_workers, reset_limit, elastic_timeout)
            cpus, gpus = check_resources(cpus_per_worker, use_gpu, gpus_per_worker)
            self._demand = Demand(self.settings.min_workers, cpus, gpus)
            return
        given = {"max_workers": max_workers, "reset_limit": reset_limit, "elastic_timeout": elastic_timeout}
        if any(value is not None for value in given.values()):
            raise LaunchError(
                f"{', '.join(name for name, value in given.items() if value is not None)}: for elastic jobs only. Set "
                "min_workers too, or leave it out.",
                code="ray-needs-elastic",
            )
        self._demand = plan_workers(
            num_workers, num_hosts, num_workers_per_host, cpus_per_worker, use_gpu, gpus_per_worker
        )

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = RaySettings.timeout_s,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = RaySettings.placement_group_timeout_s,
        nics: Sequence[str] | None = None,
        *,
        answer_timeout_s: float = RaySettings.answer_timeout_s,
    ) -> RaySettings:
        """Return the settings of a job.

        timeout_s: seconds for all workers to start
        ssh_identity_file, ssh_str: accepted, and not used: Ray starts the workers
        placement_group_timeout_s: seconds for Ray to place the workers
        nics: refused, see the error
        answer_timeout_s: seconds without a sign of life after which a rank counts as lost while a function runs; for
            example, its process is stopped
        """
        refuse_nics(nics)
        return RaySettings(timeout_s, placement_group_timeout_s, answer_timeout_s)

    @property
    def num_workers(self) -> int:
        """Number of ranks; of an elastic job, the least number."""
        return self._demand.workers

    @property
    def workers(self) -> list[Any]:
        """The actors, by rank; [] before start() and after shutdown()."""
        return list(self._workers.actors) if isinstance(self._workers, Workers) else []

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers, and make an object of a class on each.

        executable_cls: the class of the object that execute() passes to functions; None for no object
        executable_args, executable_kwargs: its arguments
        extra_env_vars: variables set before the workers' Python starts
        Raises LaunchTimeoutError, with nothing left behind, if workers do not start within the settings' time limits,
        LaunchError if they die, and any exception of executable_cls().
        """
        if self._workers is not None:
            raise LaunchError("start() was called before. Call shutdown() first.", code="ray-started-before")
        _connect_to_ray()
        env = check_env(extra_env_vars)
        if self._elastic:
            if executable_cls is not None:
                raise LaunchError(
                    "executable_cls is for jobs with a fixed number of workers. In an elastic job make the object in "
                    "the function that run() calls.",
                    code="ray-not-elastic",
                )
            self._workers = ElasticWorkers(self._demand, self.settings, env, inside=self._use_current)
            return
        given = self._group
        if given is None and self._use_current:
            given = groups.get_current_placement_group()
        self._workers = workers = Workers(self._demand, self.settings, given, env)
        try:
            start = (executable_cls, list(executable_args or ()), dict(executable_kwargs or {}))
            workers.collect([actor.start_executable.remote(*start) for actor in workers.actors])
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Call fn(*args, **kwargs) on each rank and return the results, by rank.

        The function calls hvd.init(). The ranks stay connected for the next call, unless it calls hvd.shutdown().
        callbacks: refused, see the error.
        Raises RankLostError, which names the actor, if an actor dies or gives no sign of life for answer_timeout_s; all
        workers are ended then, and the executor can be started again. Raises what the function raises on a rank; the
        ranks are a new world then.
        """
        _refuse_callbacks(callbacks)
        return self.call(_make_call(fn, args, kwargs), last=False)

    def call(self, call: Callable[[Any], Any], *, last: bool) -> list[Any]:
        """Call call(object) on each rank and return the results, by rank.

        last: the ranks leave their world after it.
        """
        workers = self._started("run")
        if isinstance(workers, ElasticWorkers):
            self._workers = None  # they end with this call
            return workers.run(call)
        return self._collect(workers, [actor.execute.remote(call, last) for actor in workers.actors])

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Start run(), and return Ray's references at once, by rank; `ray.get()` waits for them.

        Nothing monitors the ranks meanwhile: if one dies, call shutdown(). Not in an elastic job.
        """
        _refuse_callbacks(callbacks)
        call = _make_call(fn, args, kwargs)
        return [actor.execute.remote(call) for actor in self._fixed("run_remote").actors]

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Any] | None = None) -> list[Any]:
        """Call fn(object) on each rank and return the results, by rank.

        start() has made the object. Raises as run().
        """
        _refuse_callbacks(callbacks)
        self._fixed("execute")
        return self.call(fn, last=False)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call fn(object) on rank 0 and return the result. Raises as run()."""
        workers = self._fixed("execute_single")
        return self._collect(workers, [workers.actors[0].execute.remote(fn)])[0]

    def shutdown(self) -> None:
        """End the workers, and remove the placement group if it was made for them; harmless if done before."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def __enter__(self) -> RayExecutor:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _collect(self, workers: Workers, refs: Sequence[Any]) -> list[Any]:
        try:
            return workers.collect(refs)
        except KeyboardInterrupt:
            self.shutdown()
            raise
        finally:
            if not workers.actors:
                self._workers = None

    def _started(self, call: str) -> Workers | ElasticWorkers:
        if self._workers is None:
            raise LaunchError(
                f"{call}() was called before start(), or after the workers were ended. Call start() first.",
                code="ray-not-started",
            )
        return self._workers

    def _fixed(self, call: str) -> Workers:
        workers = self._started(call)
        if isinstance(workers, ElasticWorkers):
            raise LaunchError(
                f"{call}() is not for elastic jobs, whose workers change. Use run().", code="ray-not-elastic"
            )
        return workers


class ElasticRayExecutor:
    """An elastic job on Ray: `executor.start()`, then `executor.run(fn)` with a function that uses hvd.elastic.run.

    If an actor or a node dies, the other ranks continue from the last commit, in the same processes. The executor
    requests actors from Ray up to the largest number all the time; when Ray has room for one, the training takes it in
    at its next commit. Names and arguments are Horovod's.

    settings: from create_settings(); None for the defaults
    use_gpu, cpus_per_slot, gpus_per_slot: resources of each rank
    env_vars: variables set before the workers' Python starts
    override_discovery: accepted, and not used: Ray knows its nodes
    """

    def __init__(
        self,
        settings: RaySettings | None = None,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        self.settings = check_settings(settings)
        self._env = env_vars
        self._executor = RayExecutor(
            self.settings,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            min_workers=self.settings.min_workers,
        )

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = RaySettings.elastic_timeout,
        timeout_s: float = RaySettings.timeout_s,
        ssh_identity_file: str | None = None,
        nics: Sequence[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> RaySettings:
        """Return the settings of an elastic job.

        min_num_proc: least number of ranks
        max_num_proc: largest number of ranks; None for as many as the nodes have room for
        reset_limit: how often the ranks may change before the job fails
        elastic_timeout: seconds that a change may take, and that the job waits for enough workers
        timeout_s: seconds for the first workers to start, and for each worker to call hvd.init() when others wait for
            it
        ssh_identity_file, and verbose of kwargs: accepted, and not used
        nics, other kwargs: refused, see the error
        min_np, max_np: older names of min_num_proc and max_num_proc
        """
        refuse_nics(nics)
        if unknown := sorted(kwargs.keys() - {"verbose"}):
            raise LaunchError(
                f"{', '.join(unknown)}: no setting of an elastic job on Ray. Leave it out.", code="ray-setting-unknown"
            )
        least, most = min_np if min_np is not None else min_num_proc, max_np if max_np is not None else max_num_proc
        return plan_elastic(RaySettings(timeout_s), least, most, reset_limit, elastic_timeout)

    def start(self) -> None:
        """Request the workers from Ray; returns at once. Raises LaunchError if it was called before."""
        self._executor.start(extra_env_vars=self._env)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Any] | None = None) -> list[Any]:
        """Call worker_fn() on the ranks and return the results of the last world, by rank.

        All workers are ended then, and start() may be called again.
        callbacks: refused, see the error.
        Raises LaunchTimeoutError if too few workers start in time, RankLostError if too few are left, if no worker is
        left that has the last commit or if the reset limit is reached, and what the function raises on a rank.
        """
        return self._executor.run(worker_fn, callbacks=callbacks)

    def shutdown(self) -> None:
        """End the workers; harmless if done before."""
        self._executor.shutdown()


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Any]:
    """Call fn(*args, **kwargs) on each of `num_workers` ranks and return the results, by rank.

    For a script or notebook that uses Ray, or a job of `ray job submit`. Connects to Ray if nothing has yet: to the
    cluster of RAY_ADDRESS, or to a new cluster on this machine. Workers and placement group are removed before it
    returns.

    fn: the function; it calls hvd.init()
    args, kwargs: its arguments
    num_workers: number of ranks
    env: variables of the workers
    options: other arguments of RayExecutor, such as num_hosts, use_gpu, settings, or min_workers for an elastic job
    Raises the errors of RayExecutor.start() and run().
    """
    call = _make_call(fn, args, kwargs)
    executor = RayExecutor(num_workers=num_workers, **options)
    try:
        executor.start(extra_env_vars=env)
        return executor.call(call, last=True)
    finally:
        executor.shutdown()


def _refuse_callbacks(callbacks: Sequence[Any] | None) -> None:
    if callbacks:
        raise LaunchError(
            "callbacks are not supported: they need Horovod's ray_logger. Return the values from the function, or send "
            "them to an actor of your own.",
            code="ray-callbacks",
        )


def _make_call(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    positional, named = check_call(fn, args, kwargs)
    return lambda _: fn(*positional, **named)


def _connect_to_ray() -> None:
    if not ray.is_initialized():
        ray.init()
