"""Writes the pages of the reference that follow from the code: commands, settings, errors, findings and the API.

The functions return Markdown for MyST. Sphinx calls `write_pages` before it reads the sources.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import hvdkit.errors
import hvdkit.tools.doctor
from hvdkit.cli import build_parser as build_tools_parser
from hvdkit.launch.cli.options import build_parser as build_hvdrun_parser
from hvdkit.package_settings import read_all_settings

#: The modules whose public names the reference describes.
MODULES = (
    "hvdkit",
    "hvdkit.torch",
    "hvdkit.torch.elastic",
    "hvdkit.tensorflow",
    "hvdkit.tensorflow.data",
    "hvdkit.tensorflow.elastic",
    "hvdkit.keras",
    "hvdkit.keras.callbacks",
    "hvdkit.keras.elastic",
    "hvdkit.parallel",
    "hvdkit_federated",
)

_DOCTOR = Path(next(iter(hvdkit.tools.doctor.__path__)))


def settings_table() -> list[str]:
    """The rows of the table of settings, one a setting."""
    rows = []
    for item in read_all_settings({}):
        flag, default, horovod = (f"`{word}`" if str(word) else "" for word in (item.flag, item.default, item.horovod))
        rows.append(f"| `{item.variable}` | {flag} | {default} | {item.help} | {horovod} |")
    return rows


def settings_page() -> str:
    """The table of settings."""
    head = ["| variable | flag of hvdrun | default | meaning | Horovod's |", "|---|---|---|---|---|"]
    return "\n".join([*head, *settings_table()])


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Describe the options of a command, by groups, as tables."""
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if not _is_hidden(each)]
        if not actions:
            continue
        yield f"**{(group.title or 'options').capitalize()}**\n"
        if group.description:
            yield f"{group.description}\n"
        yield "| option | meaning |\n|---|---|"
        for action in actions:
            yield f"| {_usage(action)} | {_help(parser, action)} |"
        yield ""


def _is_hidden(action: argparse.Action) -> bool:
    return action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction)


def _usage(action: argparse.Action) -> str:
    metavar = action.metavar if action.metavar is not None else (action.dest or "").upper()
    value = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    if not action.option_strings:
        return f"`{value}`"
    takes_value = action.nargs != 0
    shown = [f"`{flag}{f' {value}' if takes_value else ''}`".replace("|", "\\|") for flag in action.option_strings]
    return ", ".join(shown)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    values = {**vars(action), "prog": parser.prog}
    text = (action.help or "") % {name: value for name, value in values.items() if value is not argparse.SUPPRESS}
    if action.choices is not None and not isinstance(action, argparse._SubParsersAction):
        names = [str(choice) for choice in action.choices]
        if not all(name in text for name in names):
            text += f" ({', '.join(names)})"
    return _escape(text).replace("|", "\\|")


def hvdrun_page() -> str:
    """Describe hvdrun."""
    parser = build_hvdrun_parser(everything=True)
    return "\n".join([f"    {(parser.usage or '').strip()}\n", *options_of(parser)])


def tools_page() -> str:
    """Describe every command of hvdkit."""
    parser = build_tools_parser()
    lines: list[str] = []
    for name, summary in sorted(parser.commands.summaries.items()):
        command = parser.commands.choices.get(name)
        if not isinstance(command, argparse.ArgumentParser):
            continue
        lines += _describe(command, f"hvdkit {name}", summary, 2)
    return "\n".join(lines)


def _describe(command: argparse.ArgumentParser, title: str, summary: str, level: int) -> list[str]:
    usage = " ".join(command.format_usage().removeprefix("usage:").split())
    lines = [f"{'#' * level} {title}\n", f"{_sentence(command.description or summary)}\n", f"```\n{usage}\n```\n"]
    lines += options_of(command)
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                lines += _describe(inner, f"{title} {name}", "", level + 1)
    return lines


def _sentence(text: str) -> str:
    text = text.strip()
    return _escape(text[:1].upper() + text[1:].rstrip(".") + ".") if text else ""


def errors_page() -> str:
    """Describe each class of error."""
    lines: list[str] = []
    for name, kind in vars(hvdkit.errors).items():
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__module__ == hvdkit.errors.__name__:
            bases = ", ".join(base.__name__ for base in kind.__bases__)
            lines += [
                f"## {name}\n",
                f"A kind of {bases}.\n",
                _docstring(kind),
                "",
            ]
    return "\n".join(lines)


def findings() -> dict[str, list[tuple[str, str, str]]]:
    """The findings of hvdkit doctor, read from its source: name -> (severity, what was seen, cure)."""
    found: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for path in sorted(_DOCTOR.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            kind, _, severity = ast.unparse(node.func).partition(".")  # Finding(severity, ...), or Finding.error(...)
            words = [ast.Constant(severity), *node.args] if severity else node.args
            if kind == "Finding" and len(words) >= 4 and isinstance(words[1], ast.Constant):
                severity, name, seen, cure = (_text_of(word) for word in words[:4])
                found[name].append((severity, seen, cure))
    return dict(sorted(found.items()))


def _text_of(node: ast.expr) -> str:
    """A string of the source, with the names of what is filled in, in capitals."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        words = re.findall(r"[a-z_]+", ast.unparse(node.value))
        return (words[-1] if words else "").upper().strip("_")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text_of(node.left) + _text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_text_of(node.body)} or {_text_of(node.orelse)}"
    return ""


def findings_page() -> str:
    """Describe the findings of hvdkit doctor, each under an anchor of its own."""
    lines: list[str] = []
    for name, cases in findings().items():
        lines += [f"(finding-{name})=", f"## {name}\n"]
        for severity, seen, cure in cases:
            kind = f"**{severity}:** " if severity else ""
            lines.append(f"- {kind}{_escape(seen) or 'The message says what was seen.'} {_escape(cure)}".rstrip())
        lines.append("")
    return "\n".join(lines)


def api_page(module: ModuleType) -> str:
    """Describe the public names of a module by their signatures and docstrings."""
    lines = [f"# {module.__name__}\n", f"```{{py:module}} {module.__name__}\n```\n", _docstring(module), ""]
    for name in _public(module):
        value = getattr(module, name, None)
        if inspect.isclass(value):
            lines += _class(name, value)
        elif callable(value):
            lines += _directive("function", name + _signature(value), _docstring(value))
        elif not inspect.ismodule(value):
            lines += _directive("data", name, "")
    return "\n".join(lines)


def _public(module: ModuleType) -> list[str]:
    names: Sequence[str] = getattr(module, "__all__", ())
    return sorted(names, key=str.lower)


def _class(name: str, kind: type[Any]) -> list[str]:
    body = [_docstring(kind), ""]
    if kind.__module__.startswith("hvdkit"):
        for member, value in sorted(vars(kind).items()):
            if member.startswith("_"):
                continue
            if isinstance(value, property):
                body += _directive("property", member, _docstring(value), colons=4)
            elif callable(value) or isinstance(value, (classmethod, staticmethod)):
                function = getattr(kind, member)
                body += _directive("method", member + _signature(function), _docstring(function), colons=4)
    return _directive("class", name + _signature(kind), "\n".join(body), colons=5)


def _directive(kind: str, signature: str, body: str, colons: int = 3) -> list[str]:
    fence = ":" * colons
    return [f"{fence}{{py:{kind}}} {signature}", "", body, fence, ""]


def _signature(function: Any) -> str:
    """The parameters and their defaults, without annotations, which the docstring says in words."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    shown = [
        each.replace(annotation=inspect.Parameter.empty) for each in parameters if each.name not in ("self", "cls")
    ]
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", str(inspect.Signature(shown)))
    return re.sub(r"<([\w.]+)[^>]*>", r"\1", text)


#: A line that begins with parameters or attributes: `name: what it is`.
_PARAMETER = re.compile(r"(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*): (.+)")
#: The first word of a line that ends such a list.
_END_OF_LIST = re.compile(r"(Raises|Returns) ")


def _docstring(thing: Any) -> str:
    """A docstring of hvdkit's as Markdown: lines of the form `name: what it is` become a list."""
    text = inspect.getdoc(thing) or ""
    return "\n\n".join(
        paragraph if paragraph.startswith("    ") else _paragraph(paragraph.splitlines())
        for paragraph in text.split("\n\n")
    )


def _paragraph(lines: list[str]) -> str:
    blocks: list[list[str]] = []
    for line in lines:
        parameter = _PARAMETER.match(line)
        if parameter:
            blocks.append([f"- `{parameter[1]}`:", _escape(parameter[2])])
        elif not blocks or _END_OF_LIST.match(line):
            blocks.append(["\n" * bool(blocks) + _escape(line)])
        else:
            blocks[-1].append(_escape(line.strip()))
    return "\n".join(" ".join(block) for block in blocks)


def _escape(text: str) -> str:
    """Keep Markdown from reading names with stars and underscores, and angle brackets, as markup."""
    return re.sub(r"([*_<>\[\]{}#$])", r"\\\1", text)


def _import(names: Iterable[str]) -> Iterator[ModuleType]:
    for name in names:
        yield importlib.import_module(name)


def readme_page(folder: Path) -> str:
    """The README of a folder of the repository, without its title; its links become the paths of the files."""
    text = (folder / "README.md").read_text().partition("\n")[2]
    return re.sub(r"\[[^\]]*\]\((?!https?:|#)([^)\s]+)\)", rf"`{folder.name}/\1`", text)


def write_pages(app: Any) -> None:
    """Write the generated pages below docs/_generated and docs/reference/api."""
    source = Path(app.srcdir)
    pages = {
        "_generated/settings.md": settings_page(),
        "_generated/hvdrun.md": hvdrun_page(),
        "_generated/hvdkit.md": tools_page(),
        "_generated/errors.md": errors_page(),
        "_generated/findings.md": findings_page(),
    }
    for folder in ("examples", "hostfiles", "benchmarks"):
        pages[f"_generated/{folder}.md"] = readme_page(source.parent / folder)
    for module in _import(MODULES):
        pages[f"reference/api/{module.__name__}.md"] = api_page(module)
    for name, text in pages.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text + "\n":
            path.write_text(text + "\n")


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
