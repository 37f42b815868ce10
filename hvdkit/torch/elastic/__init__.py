"""Elastic training: `hvd.elastic.TorchState`, `hvd.elastic.ElasticSampler` and `hvd.elastic.run`.

Worlds shrink and grow under `hvdrun --elastic`, and under `horovodrun --min-np` with Horovod's core as engine. In other
worlds the calls do the same as Horovod's.
"""

from __future__ import annotations

from hvdkit.elastic.run import run, run_fn
from hvdkit.engine.basics import shutdown
from hvdkit.torch.basics import init
from hvdkit.torch.elastic.sampler import ElasticSampler
from hvdkit.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "init", "run", "run_fn", "shutdown"]
