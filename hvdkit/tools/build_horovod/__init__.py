"""hvdkit build-horovod: a wheel of Horovod, patched so that it compiles against current frameworks.

versions, gpu and site read what is installed; plan decides; requirements lists what is missing; source and wheel act.
"""
