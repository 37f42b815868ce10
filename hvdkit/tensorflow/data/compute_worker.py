"""The compute job: hvdrun -np 4 python -m hvdkit.tensorflow.data.compute_worker FILE."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hvdkit.engine.basics import rank, size
from hvdkit.tensorflow.basics import init
from hvdkit.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn
from hvdkit.tensorflow.data.registration import ComputeService
from hvdkit.tensorflow.state import broadcast_object


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Serve until shutdown() of the configuration's client is called.

    dispatchers: number of dispatchers.
    dispatcher_side: compute or training.
    configfile: written for the training; removed at the end.
    timeout: seconds.

    Raises ValueError for ranks that cannot be divided.
    """
    init()
    if dispatchers < 1 or size() % dispatchers:
        raise ValueError(
            f"{size()} ranks cannot be divided among {dispatchers} dispatchers. Start a number of ranks that is a "
            "multiple of --dispatchers, which is 1 or more."
        )
    service, config = None, None
    try:
        if rank() == 0:
            key = os.urandom(32)
            service = ComputeService(dispatchers, size() // dispatchers, key)
            config = TfDataServiceConfig(
                dispatchers, size() // dispatchers, dispatcher_side, service.addresses(), key, timeout
            )
            config.write(configfile)
        config = broadcast_object(config, name="TfDataServiceConfig")
        assert config is not None
        compute_worker_fn(config)
    finally:
        if service is not None:
            Path(configfile).unlink(missing_ok=True)
            service.shutdown()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Workers of tf.data service, one each rank.")
    parser.add_argument("configfile", help="file by which the training finds this job")
    parser.add_argument("--dispatchers", type=int, default=1, help="1 for all training ranks, or one for each of them")
    parser.add_argument("--dispatcher-side", choices=("compute", "training"), default="compute", help="where they run")
    parser.add_argument("--timeout", type=int, default=60, help="seconds until all servers have to be there")
    return parser.parse_args()


if __name__ == "__main__":
    options = _parse()
    main(options.dispatchers, options.dispatcher_side, options.configfile, options.timeout)
