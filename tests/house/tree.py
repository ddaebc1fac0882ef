"""The file tree of the README: which paths it shows, and what it says of each."""

import ast
import re
from pathlib import Path

from tests.house.repo import project_files, read, syntax_tree

# Their files get a line each; any other folder is one line.
OPENED = (".", "apollo_cli", "weights", "ui", "finetune", "docs", "benchmarks", "tests")
BLOCK = re.compile(r"(^## Files\n\n```text\n)(.*?)(^```$)", re.MULTILINE | re.DOTALL)
NAME_WIDTH = 28


def shown_paths() -> list[Path]:
    """Folders and files that the tree shows; in each folder the folders come first."""
    shown = set()
    for path in project_files():
        for entry in (path, *path.parents):
            if entry != Path() and entry.parent.as_posix() in OPENED:
                shown.add(entry)
    files = set(project_files())

    def order(path: Path) -> list[tuple[bool, str]]:
        steps = [*[*reversed(path.parents)][1:], path]
        return [(step in files, step.name) for step in steps]

    return sorted(shown - {path for path in shown if path.name == "__init__.py"}, key=order)


def written_lines() -> dict[Path, str]:
    """What the README says now: description by path."""
    match = BLOCK.search(read("README.md"))
    assert match, "README.md has no section Files with a text block"
    lines: dict[Path, str] = {}
    parents: list[str] = []
    for line in match.group(2).splitlines():
        depth = (len(line) - len(line.lstrip())) // 4
        name, _, words = line.strip().partition(" ")
        parents = [*parents[:depth], name.rstrip("/")]
        lines[Path(*parents)] = words.strip()
    return lines


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring; an empty module needs none."""
    tree = syntax_tree(path)
    docstring = ast.get_docstring(tree)
    assert docstring or not tree.body, f"{path} has no docstring"
    first = (docstring or "Makes the folder a package.").split("\n\n")[0]
    return " ".join(first.split()).rstrip(".")


def build_tree() -> str:
    """The tree with the descriptions it has; a new Python file is described by its docstring."""
    written, files = written_lines(), set(project_files())
    lines = []
    for path in shown_paths():
        name = path.name if path in files else f"{path.name}/"
        described = written.get(path) or (first_sentence(path) if path.suffix == ".py" else "")
        indented = "    " * (len(path.parts) - 1) + name
        lines.append(f"{indented:{NAME_WIDTH}} {described}".rstrip())
    return "\n".join(lines) + "\n"


def build_readme() -> str:
    """README.md with its tree brought up to date."""
    return BLOCK.sub(lambda match: match[1] + build_tree() + match[3], read("README.md"))
