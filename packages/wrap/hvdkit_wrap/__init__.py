"""`hvdrun --wrap python train.py`: a script for one process trains on all ranks, with nothing changed in it.

Experimental: it patches classes of PyTorch and Keras in each rank and reads autograd's internals, so that a new release
of a framework may break it. A script that cannot be wrapped exactly gets an error with the line.
"""

__version__ = "0.1.0"
