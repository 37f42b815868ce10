"""hvdkit doctor --settings: every setting, its value, and where that comes from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from hvdkit.config import read_settings
from hvdkit.engine.tuning.saved import read_entries
from hvdkit.setting import Setting


def show_settings(*, as_json: bool) -> None:
    """Print all settings. Raises ConfigError for variables, or a file of --tuned, that cannot be understood."""
    settings = with_tuned(read_settings())
    if as_json:
        print(json.dumps([_describe(setting) for setting in settings], indent=2))
    else:
        _print_table(settings)


def with_tuned(settings: Sequence[Setting]) -> list[Setting]:
    """The settings, with those of the file of --tuned in place of defaults; each plan uses its own entry."""
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
    from rich.box import SIMPLE  # rich takes longer to load than --version takes to answer
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="hvdkit settings", box=SIMPLE)
    longest = max(len(setting.variable) for setting in settings)  # a long value is folded, a name never is
    widths = {"variable": longest, "value": 12, "from": 11}
    between = 2 * 4 + 3 + 2  # spaces around the four columns, between them and at the edges
    widths["meaning"] = max(16, console.width - sum(widths.values()) - between)
    for title, width in widths.items():
        table.add_column(title, width=width, overflow="fold")
    console.width = sum(widths.values()) + between  # what is wider than a narrow terminal is not cut off
    for setting in settings:
        origin = "environment" if setting.origin == setting.variable else setting.origin
        style = "" if setting.origin == "default" else "bold"
        table.add_row(setting.variable, str(setting.shown), origin, setting.help, style=style)
    console.print(table)
