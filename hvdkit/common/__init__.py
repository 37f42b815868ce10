"""Where Horovod keeps what its adapters share: a script's `horovod.common` is `hvdkit.common`."""
