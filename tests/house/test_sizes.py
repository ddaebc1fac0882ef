"""Files, functions, folders and the whole stay small enough for one person to carry.

Code lines hold code: no blank line, comment or docstring. A limit is what was reached; whoever
gets below it lowers it, and nobody raises it without taking something else away.
"""

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.house.repo import python_files, read, source_files, syntax_tree

FUNCTION_LINES = 60
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
FIGURES = ("modules", "code", "functions", "dataclasses", "private, used once")
BUDGETS = {
    "apollo_cli": (23, 3050, 259, 34, 31),
    "apollo_cli/commands": (16, 2150, 112, 2, 32),
    "apollo_cli/model": (9, 950, 107, 10, 9),
    "apollo_cli/video": (15, 2400, 165, 9, 27),
    "finetune": (11, 1750, 101, 13, 42),
    "finetune/data": (6, 1050, 63, 8, 8),
    "finetune/training": (12, 2050, 176, 9, 45),
    "ui": (23, 3000, 267, 23, 71),
    "weights": (16, 3100, 208, 25, 57),
}
WITHOUT_THE_PAGE = (108, 16300, 1191, 110, 251)
TESTS_WITHOUT_THE_PAGE = 13100
# Modules of under 60 code lines, and why each stands alone.
SMALL = {
    "apollo_cli/__main__.py": "`python -m apollo_cli` runs this file",
    "apollo_cli/_version.py": "read by setuptools without an import of the package",
    "apollo_cli/errors.py": "the one family of errors, below everything else",
}


def file_budget(path: Path) -> int:
    if path.parts[0] == "tests":
        return 600
    return 400 if path.parts[:2] == ("apollo_cli", "model") else 300


@cache
def code_lines(path: Path) -> frozenset[int]:
    """The numbers of the lines that hold code."""
    documentation: set[int] = set()
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and ast.get_docstring(node):
            first = node.body[0]
            documentation.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(read(str(path))).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return frozenset(code - documentation)


def figures(path: Path) -> Counter[str]:
    """What a module adds to each of ``FIGURES``."""
    found: Counter[str] = Counter(modules=1, code=len(code_lines(path)))
    nodes = list(ast.walk(syntax_tree(path)))
    names: Counter[str] = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    names.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            is_private = node.name.startswith("_") and not node.name.startswith("__")
            found["functions"] += 1
            found["private, used once"] += is_private and names[node.name] == 1
        if isinstance(node, ast.ClassDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            found["dataclasses"] += "dataclass" in decorators
    return found


@cache
def folders() -> dict[str, Counter[str]]:
    """The figures of each folder of the product and of lab."""
    found: dict[str, Counter[str]] = {}
    for path in source_files():
        found.setdefault(path.parent.as_posix(), Counter()).update(figures(path))
    return found


def test_every_file_keeps_its_budget_of_code():
    sizes = {path: len(code_lines(path)) for path in python_files()}
    assert {str(p): n for p, n in sizes.items() if n > file_budget(p)} == {}


def test_every_function_keeps_its_budget_of_code():
    too_long = {}
    for path in source_files():
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, FUNCTIONS):
                size = len(code_lines(path) & set(range(node.lineno, (node.end_lineno or 0) + 1)))
                if size > FUNCTION_LINES:
                    too_long[f"{path}:{node.name}"] = size
    assert too_long == {}


@pytest.mark.parametrize("folder", BUDGETS)
def test_every_folder_keeps_its_budget(folder: str):
    found = folders()[folder]
    over = {
        name: found[name]
        for name, most in zip(FIGURES, BUDGETS[folder], strict=True)
        if found[name] > most
    }
    assert over == {}


def test_every_folder_has_a_budget():
    assert set(folders()) == set(BUDGETS)


def test_the_product_without_the_page_and_its_tests_keep_their_budgets():
    whole: Counter[str] = Counter()
    for folder, found in folders().items():
        if folder not in ("ui", "lab"):
            whole.update(found)
    over = {
        name: whole[name]
        for name, most in zip(FIGURES, WITHOUT_THE_PAGE, strict=True)
        if whole[name] > most
    }
    assert over == {}
    tests = [p for p in python_files() if p.parts[0] == "tests" and p.parts[1] != "ui"]
    assert sum(len(code_lines(path)) for path in tests) <= TESTS_WITHOUT_THE_PAGE


def test_a_small_module_has_a_reason():
    small = {
        path.as_posix()
        for path in source_files()
        if path.name != "__init__.py" and path.parts[0] != "ui" and len(code_lines(path)) < 60
    }
    assert small == set(SMALL)
