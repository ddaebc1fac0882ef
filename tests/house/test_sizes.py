"""Files and functions stay small enough to be read in one go; documentation is not counted."""

import ast
import io
import tokenize
from pathlib import Path

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


def file_budget(path: Path) -> int:
    if path.parts[0] == "tests":
        return 600
    return 400 if path.parts[:2] == ("apollo_cli", "model") else 300


def code_lines(path: Path) -> set[int]:
    """The numbers of the lines that hold code: no blank line, comment or docstring."""
    documentation: set[int] = set()
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and ast.get_docstring(node):
            first = node.body[0]
            documentation.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(read(str(path))).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - documentation


def test_every_file_keeps_its_budget_of_code():
    sizes = {path: len(code_lines(path)) for path in python_files()}
    assert {str(p): n for p, n in sizes.items() if n > file_budget(p)} == {}


def test_every_function_keeps_its_budget_of_code():
    too_long = {}
    for path in source_files():
        code = code_lines(path)
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, FUNCTIONS):
                size = len(code & set(range(node.lineno, (node.end_lineno or 0) + 1)))
                if size > FUNCTION_LINES:
                    too_long[f"{path}:{node.name}"] = size
    assert too_long == {}
