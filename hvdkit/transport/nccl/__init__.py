"""NCCL for ranks with a GPU each, called through ctypes, on the framework's own device memory."""


def opened_version() -> tuple[int, int, int] | None:
    """Return the version of NCCL in this process's open device groups; None without a group.

    Adapters name this function when they are imported, and it is the call that loads the modules of this package.
    """
    from hvdkit.transport.nccl import groups

    return groups.opened_version()
