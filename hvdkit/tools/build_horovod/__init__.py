"""hvdkit build-horovod: a wheel of Horovod, patched so that it compiles against current frameworks.

site reads what is installed, plan decides and lists what is missing, wheel acts.
"""
