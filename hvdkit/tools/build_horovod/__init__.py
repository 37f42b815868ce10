"""hvdkit build-horovod: a wheel of Horovod, patched so that it compiles against current frameworks.

site reads what is installed; gpu and plan decide; requirements lists what is missing; source and wheel act.
"""
