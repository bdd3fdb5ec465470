"""Python text made fit for an emitted file, apart from which it stays as it was written.

- Annotations that older Pythons cannot evaluate become strings. (``from __future__ import annotations`` would have to
  be the first line, and KernelBench puts lines of its own before it.)
- Docstrings that KernelBench's patterns take for statements (`polyphase.emit.rules`) become comments.
- Names that two modules define become distinct.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from polyphase.emit.rules import breaks_a_rule

# What any Python evaluates in an emitted file, which imports the last three.
_PLAIN = re.compile(r"int|float|bool|str|bytes|None|Any|torch(\.\w+)+|nn\.\w+")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Scope = (*_Function, ast.ClassDef)


@dataclass(frozen=True)
class _Edit:
    """Lines and columns (in bytes, as `ast` counts them) that become ``text``."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def rewrite(text: str, names: Mapping[str, str] | None = None) -> str:
    """``text``, a piece of Python that parses by itself, with the global ``names`` changed."""
    names = names or {}
    tree = ast.parse(text)
    edits = [*_annotations(tree, names), *_docstrings(tree), *_renamed(tree, text, names)]
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        (first, column), (last, end) = edit.start, edit.end
        lines[first - 1 : last] = [lines[first - 1][:column] + edit.text.encode() + lines[last - 1][end:]]
    return b"".join(lines).decode()


def _replace(node: ast.AST, text: str) -> _Edit:
    return _Edit((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)  # type: ignore


def evaluated_annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Annotations that Python evaluates: of parameters, results, and variables outside of functions."""
    inside = {id(inner) for function in ast.walk(tree) if isinstance(function, _Function) for inner in _body(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, _Function) and node.returns is not None:
            yield node.returns
        elif isinstance(node, ast.AnnAssign) and id(node) not in inside:
            yield node.annotation


def _body(function: ast.AST) -> Iterator[ast.AST]:
    for statement in function.body:  # type: ignore[attr-defined]
        yield from ast.walk(statement)


def _annotations(tree: ast.AST, names: Mapping[str, str]) -> Iterator[_Edit]:
    for annotation in evaluated_annotations(tree):
        written = ast.unparse(annotation).replace('"', "'")
        if isinstance(annotation, ast.Constant) or _PLAIN.fullmatch(written):
            continue
        for old, new in names.items():
            written = re.sub(rf"\b{old}\b", new, written)
        yield _replace(annotation, f'"{written}"')


def _docstrings(tree: ast.AST) -> Iterator[_Edit]:
    for node in ast.walk(tree):
        if not isinstance(node, (*_Scope, ast.Module)) or ast.get_docstring(node) is None:
            continue
        prose = ast.get_docstring(node) or ""
        if len(node.body) == 1 or not breaks_a_rule(prose):
            continue
        statement = node.body[0]
        indent = " " * statement.col_offset
        yield _replace(statement, f"\n{indent}".join(f"# {line}".rstrip() for line in prose.splitlines()))


def _renamed(tree: ast.AST, text: str, names: Mapping[str, str]) -> Iterator[_Edit]:
    quoted = {id(inner) for annotation in evaluated_annotations(tree) for inner in ast.walk(annotation)}
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names and id(node) not in quoted:
            yield _replace(node, names[node.id])
        elif isinstance(node, ast.arg) and node.arg in names:
            raise ValueError(f"{node.arg} is a parameter, and cannot become {names[node.arg]}")
        elif isinstance(node, _Scope) and node.name in names and node in tree.body:  # type: ignore[attr-defined]
            column = len(lines[node.lineno - 1].split(node.name, 1)[0].encode())
            end = column + len(node.name.encode())
            yield _Edit((node.lineno, column), (node.lineno, end), names[node.name])
