"""Ranks for processes that another system has started, such as Ray's actors and Spark's tasks.

Each worker calls `offer_store()`. The driver receives all offers, and calls `assign_ranks()` and `plan_variables()`.
Each worker then calls `enter_rank()` with its variables, and `call_function()`.

The ranks communicate over Gloo, and over shared memory inside a host. MPI is not used.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.engine import runtime as engine
from hvdkit.errors import HvdkitError, LaunchError
from hvdkit.gpu_vendors import AMD, NVIDIA, VENDORS, Folders, list_gpus
from hvdkit.launch.function_outcome import Dumps, FunctionOutcome, describe_error
from hvdkit.launch.plan.environment import find_horovod_variables, find_launcher_variables, plan_rank_variables
from hvdkit.startup import begin
from hvdkit.transport.division import keep_places
from hvdkit.transport.gloo.backend import JOB_SECRET
from hvdkit.transport.gloo.library import host_store

_REMOVED = re.compile("HVDKIT_(LAUNCHER_CHANNEL|ELASTIC_COMMAND|HOST_SLOTS)")  # set by hvdrun's agent
_LEFT_OUT = re.compile("(KERAS_DISTRIBUTION|JAX)_.*")  # they need a port, which no process reserves
_LARGEST_PORT = 65535
_SETTLE_S = 30.0

#: See hvdkit.startup.
ALIAS = "HVDKIT_ALIAS_HOROVOD"


@dataclass(frozen=True)
class Offer:
    """A worker's description of itself.

    index: the driver's number for it. node: equal for workers of one host. address, port: of its store, as workers on
    other hosts reach it. gpus: numbers or names of its own GPUs, for the vendor's variable. place: its preferred local
    rank, see keep_places(); -1 for none. gpu_variable: see find_gpu_variable().
    """

    index: int
    node: str
    address: str
    port: int
    gpus: tuple[str, ...] = ()
    place: int = -1
    gpu_variable: str = NVIDIA.shows


@dataclass(frozen=True)
class Assignment:
    """A worker's rank.

    index: of the worker. gpus: of all workers of its node; its own first GPU is at local_rank.
    gpu_variable: of the worker.
    """

    index: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    gpus: tuple[str, ...] = ()
    gpu_variable: str = NVIDIA.shows


class Store:
    """A store that this worker offers to the ranks; a TCPStore of torch's at a free port of all addresses."""

    def __init__(self) -> None:
        self._store: Any = host_store()
        self.port: int = self._store.port

    def close(self) -> None:
        """Stop serving the store; repeated calls do nothing."""
        self._store = None


def offer_store() -> Store:
    """Open this worker's store. Raises MissingDependencyError without torch."""
    return Store()


def find_gpu_variable() -> str:
    """Find the assignment that shows GPUs to this worker, with {} for their numbers, for Offer.

    It replaces the one that shows this worker its own GPUs: on GPUs of AMD that is ROCR_VISIBLE_DEVICES with older
    versions of Ray, and HIP_VISIBLE_DEVICES with newer ones.
    """
    vendor = list_gpus(Folders(), os.environ)[0]
    return f"{vendor.variable}={{}}" if vendor is AMD and vendor.variable in os.environ else vendor.shows


def plan_hidden_gpus() -> dict[str, str]:
    """Plan the variables that hide all GPUs from workers, of whichever vendor theirs are."""
    assignments = [vendor.hides.partition("=") for vendor in VENDORS]
    return {name: value.strip("'") for name, _, value in assignments}


def assign_ranks(offers: Sequence[Offer]) -> list[Assignment]:
    """Number the workers node by node, so that the ranks of a node are consecutive; sorted by rank.

    Nodes come in the order of their first worker, and workers of a node in the order of `offers`: the first worker is
    rank 0.
    """
    if len({offer.index for offer in offers}) < len(offers) or not offers:
        raise LaunchError(
            f"The workers {[offer.index for offer in offers]} cannot be ranks: give each its own number.",
            code="workers-not-numbered",
        )
    nodes: dict[str, list[Offer]] = {}
    for offer in offers:
        nodes.setdefault(offer.node, []).append(offer)
    assignments: list[Assignment] = []
    for node, local in nodes.items():
        places = keep_places([0] * len(local), [offer.place for offer in local])  # as the ranks will do
        gpus = _order_gpus([local[places.index(place)].gpus for place in range(len(local))])
        for local_rank, offer in zip(places, local, strict=True):
            rank = len(assignments)
            size = len(offers)
            assignments.append(
                Assignment(offer.index, rank, size, local_rank, len(local), node, gpus, offer.gpu_variable)
            )
    return assignments


def _order_gpus(owned: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all GPUs of a node, each worker's first GPU in front, so that local rank r uses the r-th."""
    most = max(map(len, owned))
    ordered = [gpus[at] for at in range(most) for gpus in owned if at < len(gpus)]
    return tuple(dict.fromkeys(ordered))


def new_secret() -> str:
    """Make a secret for one job, by which its ranks authenticate each other; hex."""
    return secrets.token_hex(32)


def plan_variables(
    assignments: Sequence[Assignment], address: str, port: int, secret: str, job: str
) -> list[dict[str, str]]:
    """Return the variables of each rank, by rank, for enter_rank().

    If `import horovod` imports hvdkit in this process, it does so on the ranks.

    assignments: of all workers.
    address: of rank 0's offer.
    port: of rank 0's offer.
    secret: see new_secret(); send it to the ranks only.
    job: a name without spaces; torch.distributed's run id.
    """
    if not 0 < port <= _LARGEST_PORT or not address:
        raise LaunchError(
            f"Rank 0 offers its store at {address!r}, port {port}: that is no address of a store.",
            code="store-address-invalid",
        )
    hosts = {each.rank: each.node for each in assignments}
    local_ranks = {each.rank: each.local_rank for each in assignments}
    planned = plan_rank_variables(hosts, address, (), job, {}, local_ranks)
    shared = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store exists: rank 0 does not open another one
        JOB_SECRET: secret,
    }
    if "hvdkit.alias_horovod" in sys.modules:
        shared[ALIAS] = "1"
    variables = []
    for each in assignments:
        own = {name: value for name, value in planned[each.rank].items() if not _LEFT_OUT.fullmatch(name)}
        variables.append({**own, **shared, **_show_gpus(each.gpu_variable, each.gpus)})
    return variables


def _show_gpus(variable: str, gpus: Sequence[str]) -> dict[str, str]:
    name, _, value = variable.partition("=")
    return {name: value.format(",".join(gpus))} if gpus else {}


def enter_rank(variables: Mapping[str, str]) -> None:
    """Make this process the rank described by the variables; hvd.init() then connects it.

    Removes variables of other launchers, which this process has inherited. If hvdkit is initialized for earlier ranks,
    it is shut down; not collective.
    """
    _leave()
    others = {*find_launcher_variables(os.environ), *find_horovod_variables(os.environ)}
    for name in others | set(filter(_REMOVED.fullmatch, os.environ)):
        del os.environ[name]
    os.environ.update(variables)
    begin(variables)


def call_function(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    last: bool,
    dumps: Dumps = pickle.dumps,
) -> FunctionOutcome:
    """Call a function on this rank. If it raises, the ranks that wait for this one raise RankLostError.

    fn: the function.
    args, kwargs: its arguments.
    last: leave the world even if it returns, because the ranks call nothing after it.
    dumps: see describe_error().
    """
    try:
        value = fn(*args, **(kwargs or {}))
        if last:
            engine.wait_for_devices(
                _SETTLE_S
            )  # the other ranks need this rank's part of work that is under way on GPUs
    except BaseException as error:
        outcome = describe_error(error, dumps)
        _leave()
        return outcome
    if last:
        _leave()
    return FunctionOutcome(value)


def _leave() -> None:
    with contextlib.suppress(HvdkitError):  # from ranks that are already gone
        engine.shutdown(idle=False)


def check_call(fn: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check and return the arguments of the function that each rank calls. Raises LaunchError for an invalid call."""
    if not callable(fn):
        raise LaunchError(f"The function to run is {fn!r}, which cannot be called.", code="function-not-callable")
    if args is not None and (isinstance(args, (str, bytes, Mapping)) or not isinstance(args, Iterable)):
        raise LaunchError(
            f"args is {args!r}; pass a list or a tuple of the function's arguments, such as [{args!r}].",
            code="function-args-invalid",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise LaunchError(
            f"kwargs is {kwargs!r}; pass a mapping from the names of arguments to their values.",
            code="function-kwargs-invalid",
        )
    return () if args is None else tuple(args), dict(kwargs or {})
