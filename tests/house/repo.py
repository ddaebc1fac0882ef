"""What the house tests look at: the files of the project and their syntax trees."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("apollo_cli", "weights", "ui", "finetune")


@cache
def project_files() -> tuple[Path, ...]:
    """Every file of the project, relative to its root: what git knows, without stray notes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    names = sorted({Path(name) for name in listed.split("\0") if name})
    return tuple(name for name in names if (ROOT / name).is_file() or (ROOT / name).is_symlink())


def python_files() -> list[Path]:
    """Every Python file of the project, relative to its root."""
    return [path for path in project_files() if path.suffix == ".py"]


def source_files() -> list[Path]:
    """The Python files that are installed."""
    return [path for path in python_files() if path.parts[0] in SOURCE_FOLDERS]


@cache
def syntax_tree(path: Path) -> ast.Module:
    """The syntax tree of a file given relative to the root."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def read(name: str) -> str:
    """The text of a file given relative to the root."""
    return (ROOT / name).read_text(encoding="utf-8")
