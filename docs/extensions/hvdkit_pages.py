"""Changes pages that have been read.

The cells of a tutorial become files and commands: `%%writefile NAME` is a caption, `!command` follows a prompt. A page
that is in one list of contents is not repeated by the `*` of a later one.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes


def show_cells(_: Any, page: nodes.document) -> None:
    """Change the cells of a page that has been read and run."""
    for cell in page.findall(lambda node: isinstance(node, nodes.container) and node.get("nb_element") == "cell_code"):
        for block in list(cell.findall(nodes.literal_block)):
            if block.parent.get("nb_element") == "cell_code_source":
                _show(page, cell, block)


def _show(page: nodes.document, cell: nodes.Element, block: nodes.literal_block) -> None:
    lines = block.astext().split("\n")
    if lines[0].startswith("%%writefile "):
        name = nodes.literal(text=lines[0].removeprefix("%%writefile "))
        _set(block, lines[1:], "python")
        file = nodes.container("", literal_block=True, classes=["literal-block-wrapper"])
        block.replace_self(file)
        page.set_id(file)  # which Sphinx expects of what has a caption
        file += [nodes.caption("", "", name), block]
        for output in [part for part in cell.children if part.get("nb_element") == "cell_code_output"]:
            cell.remove(output)  # "Writing NAME"
    elif all(line.startswith("!") for line in lines):
        _set(block, [f"$ {line[1:]}" for line in lines], "console")


def _set(block: nodes.literal_block, lines: list[str], language: str) -> None:
    block.rawsource = "\n".join(lines)
    block["language"] = language
    block.children = []
    block += nodes.Text(block.rawsource)


def list_once(_: Any, page: nodes.document) -> None:
    """Remove from each list of contents what an earlier one on the page has."""
    listed: set[str] = set()
    for contents in page.findall(addnodes.toctree):
        contents["entries"] = [(title, name) for title, name in contents["entries"] if name not in listed]
        contents["includefiles"] = [name for name in contents["includefiles"] if name not in listed]
        listed.update(contents["includefiles"])


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("doctree-read", show_cells)
    app.connect("doctree-read", list_once, priority=100)  # before Sphinx collects the contents
    return {"parallel_read_safe": True, "parallel_write_safe": True}
