"""Files and functions stay small enough to be read in one go."""

import ast
from pathlib import Path

from tests.house.repo import ROOT, python_files, source_files, syntax_tree

FUNCTION_LINES = 60


def file_budget(path: Path) -> int:
    if path.parts[0] == "tests":
        return 600
    return 450 if path.parts[:2] == ("apollo_cli", "model") else 350


def line_count(path: Path) -> int:
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def test_every_file_keeps_its_budget_of_lines():
    sizes = {path: line_count(path) for path in python_files()}
    assert {str(p): n for p, n in sizes.items() if n > file_budget(p)} == {}


def test_every_function_keeps_its_budget_of_lines():
    too_long = {
        f"{path}:{node.name}": node.end_lineno - node.lineno + 1
        for path in source_files()
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    }
    assert too_long == {}
