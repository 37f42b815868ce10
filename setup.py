"""Builds in a folder that is removed afterwards; setup.cfg says the rest.

setuptools would keep build/ in the tree, and put files from there that are gone since into the next wheel.
"""

import atexit
import shutil
import tempfile

from setuptools import setup

folder = tempfile.mkdtemp(prefix="hvdkit-build-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)
setup(options={"build": {"build_base": folder}})
