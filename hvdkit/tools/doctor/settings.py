"""hvdkit doctor --settings: every setting, its value, and the origin of that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from hvdkit.engine.tuning.saved import read_entries
from hvdkit.package_settings import read_all_settings
from hvdkit.setting import Setting


def show_settings(*, as_json: bool) -> None:
    """Print all settings. Raises ConfigError for invalid variables or an invalid file of --tuned."""
    settings = with_tuned(read_all_settings())
    if as_json:
        print(json.dumps([_describe(setting) for setting in settings], indent=2))
    else:
        _print_table(settings)


def with_tuned(settings: Sequence[Setting]) -> list[Setting]:
    """Replace defaults of settings by the values of the file of --tuned; each plan uses its own entry."""
    path = next(setting.value for setting in settings if setting.name == "tuned")
    entries = read_entries(path) if path else []
    found = []
    for setting in settings:
        tuned = sorted(
            {getattr(entry.settings, setting.name) for entry in entries if hasattr(entry.settings, setting.name)}
        )
        if tuned and setting.origin == "default":
            value = tuned[0] if len(tuned) == 1 else " or ".join(map(str, tuned))
            setting = replace(setting, value=value, origin=path)
        found.append(setting)
    return found


def _describe(setting: Setting) -> dict[str, object]:
    return {
        "name": setting.name,
        "value": setting.shown,
        "origin": setting.origin,
        "default": setting.default,
        "variable": setting.variable,
        "horovod": setting.horovod or None,
        "flag": setting.flag or None,
        "help": setting.help,
    }


def _print_table(settings: Sequence[Setting]) -> None:
    from rich.box import SIMPLE  # importing rich takes longer than --version needs
    from rich.console import Console
    from rich.table import Table

    # The last column gets the width that the others leave: with four minimum widths rich makes the table wider than the
    # console, which then loses the ends of lines.
    table = Table(title="hvdkit settings", box=SIMPLE, expand=True)
    longest = max(len(setting.variable) for setting in settings)  # a long value is wrapped, a name never is
    for title, width in (("variable", longest), ("value", 8), ("from", 11)):
        table.add_column(title, min_width=width, overflow="fold")
    table.add_column("meaning", ratio=1, overflow="fold")
    for setting in settings:
        origin = "environment" if setting.origin == setting.variable else setting.origin
        style = "" if setting.origin == "default" else "bold"
        table.add_row(setting.variable, str(setting.shown), origin, setting.help, style=style)
    Console(width=max(80, Console().width)).print(table)
