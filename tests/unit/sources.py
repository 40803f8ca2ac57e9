"""The package's files as syntax trees, each parsed once for all tests that look at them."""

import ast
from functools import cache
from pathlib import Path


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, the outermost first."""
    return tuple(ast.walk(ast.parse(path.read_text())))
