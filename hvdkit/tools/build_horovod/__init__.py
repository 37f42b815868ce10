"""hvdkit build-horovod: a wheel of Horovod, mended so that it compiles against the frameworks installed here.

versions, gpu, mpicxx and site look at what there is; plan decides; parts tells what is missing; source, compile and
install act; steps calls them in order.
"""
