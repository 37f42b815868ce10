"""torch's own collectives between the ranks that hvdkit knows, to compare with."""

from __future__ import annotations

import os
import socket
import tempfile
from typing import Any

import torch.distributed as dist

import hvdkit.torch as hvd
from hvdkit.config import read_environment
from hvdkit.transport.addresses import address_of
from hvdkit.transport.gloo.library import TcpStores
from hvdkit.transport.gloo.rendezvous_store import read_interface


def join_gloo() -> None:
    """Let torch.distributed have the same ranks; collective."""
    if hvd.cross_size() > 1:
        store = _open_store()
        dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
        return
    path = hvd.broadcast_object(os.path.join(tempfile.mkdtemp(), "store") if hvd.rank() == 0 else "")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=hvd.rank(), world_size=hvd.size())


def _open_store() -> Any:
    """A store on rank 0's host that the ranks of all hosts reach, on the interface that Gloo is told to use."""
    if hvd.rank() == 0:
        store = TcpStores().host()
        interface = read_interface(read_environment())
        hvd.broadcast_object((address_of(interface) if interface else socket.gethostname(), store.port))
        return store
    address, port = hvd.broadcast_object(("", 0))
    return TcpStores().join(address, port, timeout_s=60.0)
