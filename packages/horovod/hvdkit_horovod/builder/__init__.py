"""hvdkit build-horovod: a wheel of Horovod, patched for current frameworks. site reads, plan decides, wheel acts."""
