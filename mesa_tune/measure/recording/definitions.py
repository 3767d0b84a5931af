"""The definitions of a script that its model needs: copied source, and the values of other global names.

What is hard: a script trains when it is imported, so nothing can be imported from it. Imports, functions and
classes are copied as they stand; any other global name is taken for what it is when the step is recorded.
"""

from __future__ import annotations

import ast
import symtable
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mesa_tune.errors import RunError
from mesa_tune.workload.instance.recorded import SCRIPT

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Definitions(NamedTuple):
    """Source of imports and of definitions, and the values of further global names."""

    imports: list[str]
    sources: list[str]
    values: dict[str, Any]


def definitions(names: Iterable[str], script: Path | None) -> Definitions:
    """Return what `script`, the running one, defines under `names`, and all that this refers to.

    Raise RunError if it has no file.
    """
    if script is None:
        raise RunError("the script defines classes of its model, and has no file\nput it into a file")
    lines, main = script.read_text("utf-8").splitlines(), sys.modules[SCRIPT]
    known = {name: node for node in _statements(ast.parse("\n".join(lines))) for name in _bound(node)}
    chosen: dict[int, ast.stmt] = {}
    values: dict[str, Any] = {}
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in known:
            node = chosen[known[name].lineno] = known[name]
            waiting += _globals(_text(node, lines))
        elif name in vars(main):
            values[name] = getattr(main, name)
    future = [node for node in known.values() if getattr(node, "module", None) == "__future__"]
    chosen |= {node.lineno: node for node in future}
    nodes = [chosen[line] for line in sorted(chosen)]
    return Definitions(
        [_text(node, lines) for node in nodes if not isinstance(node, _DEFINITIONS)],
        [_text(node, lines) for node in nodes if isinstance(node, _DEFINITIONS)],
        values,
    )


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield imports and definitions at the top of a module, those under `if` and `try` too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom, *_DEFINITIONS)):
            yield child
        elif isinstance(child, (ast.If, ast.Try, ast.ExceptHandler)):
            yield from _statements(child)


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, _DEFINITIONS):
        yield node.name


def _text(node: ast.stmt, lines: list[str]) -> str:
    """Return the source of a statement with its decorators, from the left margin on."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    text = lines[first - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in text)


def _globals(source: str) -> list[str]:
    """Return the global names that `source` refers to."""
    tables = [symtable.symtable(source, SCRIPT, "exec")]
    names: list[str] = []
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        names += [each.get_name() for each in table.get_symbols() if each.is_global() or top]
    return names
