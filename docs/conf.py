"""How Sphinx builds the site: `sphinx-build -W docs site`; README.md has the command that installs what it needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs" / "extensions"), str(ROOT)]

from hvdkit import __version__  # noqa: E402

project = "hvdkit"
author = "the authors of hvdkit"
version = release = __version__
extensions = ["myst_nb", "hvdkit_reference", "hvdkit_checks", "hvdkit_pages"]
exclude_patterns = ["_generated/*"]
nitpicky = True

# Pages --------------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Code without a language is a command line or an output.
highlight_language = "none"
# Options in texts keep their two dashes.
smartquotes = False
suppress_warnings = ["mystnb.unknown_mime_type"]

# Tutorials are run at each build. A cell that fails, fails the build, and its output is shown.
nb_execution_mode = "force"
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_number_source_lines = False
# What the cells run: the hvdkit and the Python of this build, few threads, and no colours.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
os.environ["PYTHONSTARTUP"] = str(ROOT / "docs" / "extensions" / "tutorial_shell.py")
os.environ.update(NO_COLOR="1", COLUMNS="110", TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")

# HTML ---------------------------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"hvdkit {__version__}"
html_static_path = ["_static"]
html_css_files = ["hvdkit.css"]
html_show_sourcelink = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

# Man pages ----------------------------------------------------------------------------------------------------------

man_pages = [
    ("reference/hvdrun", "hvdrun", "run a training script as several ranks", author, 1),
    ("reference/hvdkit", "hvdkit", "tools for training on many ranks", author, 1),
]
