"""Builds in a folder that is removed afterwards; puts examples and pages into the package; setup.cfg says the rest.

setuptools would keep build/ in the tree, and put files from there that are gone since into the next wheel.
"""

import atexit
import shutil
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithData(build_py):
    """Examples and pages become data of the package; an editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        root, package = Path(__file__).parent, Path(self.build_lib) / "hvdkit"
        copies = {script: package / "examples" / script.name for script in root.glob("examples/*.py")}
        for page in root.glob("docs/**/*.md"):
            copies[page] = package / "documents" / page.relative_to(root / "docs")
        for source, target in copies.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


folder = tempfile.mkdtemp(prefix="hvdkit-build-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)
setup(options={"build": {"build_base": folder}}, cmdclass={"build_py": BuildWithData})
