"""Where wheels, Horovod's source and the logs are kept: outside of any source tree."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.tools.build_horovod.plan import Plan
from hvdkit.tools.build_horovod.release import HOROVOD


@dataclass(frozen=True)
class Cache:
    """The folders below one that the user may choose."""

    home: Path

    @property
    def sources(self) -> Path:
        """Holds Horovod's archive."""
        return self.home / "source"

    def source(self) -> Path | None:
        """Find Horovod's archive."""
        return next(iter(sorted(self.sources.glob(f"horovod-{HOROVOD}.tar.gz"))), None)

    def folder(self, plan: Plan) -> Path:
        """Holds the wheel of this plan, and what it depends on."""
        return self.home / "wheels" / plan.key

    def log(self, plan: Plan) -> Path:
        """Takes the whole output of the build."""
        return self.home / "logs" / f"{plan.key}.log"

    def wheel(self, plan: Plan) -> Path | None:
        """Find the wheel of this plan."""
        return next(iter(sorted(self.folder(plan).glob("*.whl"))), None)

    def keep(self, plan: Plan, wheel: Path) -> Path:
        """Take in a wheel; another build of the same plan may do the same at the same time."""
        folder = self.folder(plan)
        self.make(folder)
        text = json.dumps(plan.bindings, indent=2, sort_keys=True)
        (folder / "built_for.json").write_text(text + "\n")
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
            part.write(wheel.read_bytes())
        Path(part.name).chmod(0o644)
        os.replace(part.name, folder / wheel.name)
        return folder / wheel.name

    def make(self, folder: Path) -> None:
        """Make a folder of the cache, or raise BuildError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(
                f"{folder} cannot be made: {error.strerror}. Choose another folder with --cache-dir."
            ) from None


def open_cache(chosen: str, environ: Mapping[str, str]) -> Cache:
    """Take the folder that was chosen, or the usual place: $XDG_CACHE_HOME/hvdkit, ~/.cache/hvdkit without it."""
    if chosen:
        return Cache(Path(chosen).absolute())
    base = environ.get("XDG_CACHE_HOME", "")  # the standard wants a relative one ignored
    return Cache((Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hvdkit" / "horovod")
