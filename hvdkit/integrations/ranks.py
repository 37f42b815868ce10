"""Ranks for processes that another system has started, such as Ray's actors and Spark's tasks.

In each worker, `offer_store()`. All offers go to one place, the driver, which calls `assign_ranks()` and
`plan_variables()`. Each worker then calls `enter_rank()` with its variables, and `call_function()`.

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
from hvdkit.launch.function_outcome import Dumps, FunctionOutcome, describe_error
from hvdkit.launch.plan.environment import find_horovod_variables, find_launcher_variables, plan_rank_variables
from hvdkit.startup import begin
from hvdkit.transport.division import keep_places
from hvdkit.transport.gloo.backend import JOB_SECRET
from hvdkit.transport.gloo.library import host_store

_REMOVED = re.compile("HVDKIT_(LAUNCHER_CHANNEL|ELASTIC_COMMAND|HOST_SLOTS)")  # of hvdrun's agent
_LEFT_OUT = re.compile("(KERAS_DISTRIBUTION|JAX)_.*")  # they need a port that nobody holds
_LARGEST_PORT = 65535
_SETTLE_S = 30.0

#: See hvdkit.startup.
ALIAS = "HVDKIT_ALIAS_HOROVOD"


@dataclass(frozen=True)
class Offer:
    """A worker, as it describes itself.

    index: the driver's number for it. node: equal for workers of one host. address, port: of the store that it offers,
    as workers on other hosts reach it. gpus: values of CUDA_VISIBLE_DEVICES for the GPUs that are its own. place: the
    local rank that it wishes, see keep_places(); -1 for none.
    """

    index: int
    node: str
    address: str
    port: int
    gpus: tuple[str, ...] = ()
    place: int = -1


@dataclass(frozen=True)
class Assignment:
    """A worker's place among the ranks. index: of the worker. gpus: of all workers of its node, its own first one at
    position local_rank.
    """

    index: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    gpus: tuple[str, ...] = ()


class Store:
    """A store that this worker offers to the ranks; a TCPStore of torch's at a free port of all addresses."""

    def __init__(self) -> None:
        self._store: Any = host_store()
        self.port: int = self._store.port

    def close(self) -> None:
        """Stop to serve it; harmless if done before."""
        self._store = None


def offer_store() -> Store:
    """Open the store that this worker offers. Raises MissingDependencyError without torch."""
    return Store()


def assign_ranks(offers: Sequence[Offer]) -> list[Assignment]:
    """Number the workers, node after node, so that the ranks of a node follow each other; by rank.

    Nodes come in the order of their first worker, and workers of a node in the order of `offers`: the first worker is
    rank 0.
    """
    if len({offer.index for offer in offers}) < len(offers) or not offers:
        raise LaunchError(f"The workers {[offer.index for offer in offers]} cannot be ranks: give each its own number.")
    nodes: dict[str, list[Offer]] = {}
    for offer in offers:
        nodes.setdefault(offer.node, []).append(offer)
    assignments: list[Assignment] = []
    for node, local in nodes.items():
        places = keep_places([0] * len(local), [offer.place for offer in local])  # as the ranks will
        gpus = _order_gpus([local[places.index(place)].gpus for place in range(len(local))])
        for local_rank, offer in zip(places, local, strict=True):
            rank = len(assignments)
            assignments.append(Assignment(offer.index, rank, len(offers), local_rank, len(local), node, gpus))
    return assignments


def _order_gpus(owned: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """All GPUs of a node, the first one of each worker in front, so that local rank r uses the r-th."""
    most = max(map(len, owned))
    ordered = [gpus[at] for at in range(most) for gpus in owned if at < len(gpus)]
    return tuple(dict.fromkeys(ordered))


def new_secret() -> str:
    """A secret for one job, by which its ranks know each other; hex."""
    return secrets.token_hex(32)


def plan_variables(
    assignments: Sequence[Assignment], address: str, port: int, secret: str, job: str
) -> list[dict[str, str]]:
    """The variables of each rank, by rank, for enter_rank().

    Where `import horovod` gives hvdkit in this process it does so on the ranks.
    address, port: of rank 0's offer. secret: see new_secret(); to be sent to the ranks only. job: a name without
    spaces, which torch.distributed calls the run's id.
    """
    if not 0 < port <= _LARGEST_PORT or not address:
        raise LaunchError(f"Rank 0 offers its store at {address!r}, port {port}: that is no address of a store.")
    hosts = {each.rank: each.node for each in assignments}
    local_ranks = {each.rank: each.local_rank for each in assignments}
    planned = plan_rank_variables(hosts, address, (), job, {}, local_ranks)
    shared = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: rank 0 does not open one
        JOB_SECRET: secret,
    }
    if "hvdkit.alias_horovod" in sys.modules:
        shared[ALIAS] = "1"
    variables = []
    for each in assignments:
        own = {name: value for name, value in planned[each.rank].items() if not _LEFT_OUT.fullmatch(name)}
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(each.gpus)} if each.gpus else {}
        variables.append({**own, **shared, **gpus})
    return variables


def enter_rank(variables: Mapping[str, str]) -> None:
    """Make this process the rank that the variables say; hvd.init() then connects it.

    Variables of other launchers, which this process has inherited, are removed. If hvdkit is initialized, for ranks
    that were there before, it is shut down; not collective.
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

    last: leave the world also if it returns, because the ranks call nothing after it. dumps: see describe_error().
    """
    try:
        value = fn(*args, **(kwargs or {}))
        if last:
            engine.settle(_SETTLE_S)  # the other ranks need this one's part of what the GPUs have under way
    except BaseException as error:
        outcome = describe_error(error, dumps)
        _leave()
        return outcome
    if last:
        _leave()
    return FunctionOutcome(value)


def _leave() -> None:
    with contextlib.suppress(HvdkitError):  # of ranks that are gone already
        engine.shutdown(idle=False)


def check_call(fn: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the function that each rank is to call. Raises LaunchError for what cannot be called so."""
    if not callable(fn):
        raise LaunchError(f"The function to run is {fn!r}, which cannot be called.")
    if args is not None and (isinstance(args, (str, bytes, Mapping)) or not isinstance(args, Iterable)):
        raise LaunchError(f"args is {args!r}; pass a list or a tuple of the function's arguments, such as [{args!r}].")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise LaunchError(f"kwargs is {kwargs!r}; pass a mapping from the names of arguments to their values.")
    return () if args is None else tuple(args), dict(kwargs or {})
