"""Training that can be taken up again: `hvd.elastic.TorchState`, `hvd.elastic.ElasticSampler` and `hvd.elastic.run`.

Worlds shrink and grow under `hvdrun --elastic`, and where Horovod's core is the engine under `horovodrun --min-np`. In
others they do what Horovod's do there.
"""

from __future__ import annotations

from hvdkit.elastic.run import run, run_fn
from hvdkit.engine.basics import shutdown
from hvdkit.torch.basics import init
from hvdkit.torch.elastic.sampler import ElasticSampler
from hvdkit.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "init", "run", "run_fn", "shutdown"]
