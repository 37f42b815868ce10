"""Builds in a folder that is removed afterwards, and puts the examples into the package; setup.cfg says the rest.

setuptools would keep build/ in the tree, and put files from there that are gone since into the next wheel.
"""

import atexit
import shutil
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """examples/*.py become data of the package, hvdkit/examples/; an editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "hvdkit" / "examples"
            folder.mkdir(parents=True, exist_ok=True)
            for script in Path(__file__).parent.glob("examples/*.py"):
                shutil.copyfile(script, folder / script.name)


folder = tempfile.mkdtemp(prefix="hvdkit-build-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)
setup(options={"build": {"build_base": folder}}, cmdclass={"build_py": BuildWithExamples})
