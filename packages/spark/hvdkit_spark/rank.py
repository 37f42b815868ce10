"""`python -m hvdkit_spark.rank DESCRIPTOR HOST`: the process of a rank, started by its task. See task.py."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from hvdkit.errors import DuplicateNameError, HorovodInternalError, HvdkitError, RanksDisagreeError
from hvdkit.integrations.ranks import Store, call_function, enter_rank, offer_store
from hvdkit.launch.function_outcome import pickle_outcome
from hvdkit.transport.addresses import address_towards
from hvdkit_spark.reports import Status


def main(descriptor: int, driver: str) -> int:
    """Offer a store, become the rank that the task assigns, call the function and send its outcome.

    descriptor: file descriptor of the connection to the task. driver: a host that all executors reach.
    """
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as task:
        try:
            store = offer_store()
        except HvdkitError as error:
            task.send(str(error))
            return 1
        task.send((address_towards(driver), store.port))
        variables, function = task.recv()
        status, outcome = _call(variables, function, store)
        task.send((status, outcome))
    return 0


def _call(variables: dict[str, str], function: bytes, store: Store) -> tuple[Status, bytes]:
    enter_rank(variables)
    if variables["RANK"] != "0":
        store.close()
    status: Status = "raised"

    def load_and_call() -> Any:
        nonlocal status
        fn: Callable[..., Any]
        fn, args, kwargs = pickle.loads(function)
        try:
            value = fn(*args, **kwargs)
        except (RanksDisagreeError, DuplicateNameError):
            raise  # as it would after a restart
        except HorovodInternalError:
            status = "lost a rank"
            raise
        status = "returned"
        return value

    outcome = call_function(load_and_call, last=True, dumps=cloudpickle.dumps)
    if outcome.raised and status == "returned":
        status = "lost a rank"  # with the last operations on a GPU
    sys.stderr.write(outcome.traceback)
    outcome, data = pickle_outcome(outcome, cloudpickle.dumps)
    return "raised" if outcome.raised and status == "returned" else status, data


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
