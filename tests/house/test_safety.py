"""Nothing from a checkpoint or a file is executed, and no error is swallowed unseen."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.repo import python_files, source_files, syntax_tree

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "numpy.load", "np.load"}
FORBIDDEN_KEYWORDS = {"trust_remote_code", "allow_pickle"}
EDGE = Path("apollo_cli/cli.py")


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def dangers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
                yield node.module or ""
        elif isinstance(node, ast.Call):
            if dotted(node.func) in FORBIDDEN_CALLS:
                yield dotted(node.func)
            yield from (k.arg for k in node.keywords if k.arg in FORBIDDEN_KEYWORDS)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from dill import loads", ["dill"]),
        ("eval('1')", ["eval"]),
        ("torch.load('x')", ["torch.load"]),
        ("from_pretrained('x', trust_remote_code=False)", ["trust_remote_code"]),
        ("model.eval()", []),
    ],
)
def test_the_search_for_dangers_finds_them(code: str, found: list[str]):
    assert list(dangers(ast.parse(code))) == found


def test_no_source_file_can_run_code_from_a_checkpoint():
    assert {str(p): d for p in source_files() if (d := list(dangers(syntax_tree(p))))} == {}


def swallowing_handlers(tree: ast.Module) -> list[int]:
    """Lines of handlers that catch everything and do not end by raising an error again."""
    blind = {"Exception", "BaseException"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or dotted(kind) in blind for kind in kinds):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    ("handler", "lines"),
    [
        ("except Exception: pass", [2]),
        ("except: x = 1", [2]),
        ("except (ValueError, BaseException): pass", [2]),
        ("except Exception as e: raise OSError from e", []),
        ("except ValueError: pass", []),
    ],
)
def test_the_search_for_swallowed_errors_finds_them(handler: str, lines: list[int]):
    assert swallowing_handlers(ast.parse(f"try: f()\n{handler}")) == lines


def test_only_the_edge_swallows_an_unknown_exception():
    files = [path for path in python_files() if path != EDGE]
    assert {str(p): n for p in files if (n := swallowing_handlers(syntax_tree(p)))} == {}
