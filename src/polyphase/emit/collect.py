"""The part of the package that given definitions use, as the text it is written in.

What a definition uses is read off its syntax tree: names, through the imports of its module, and of a class those
methods alone whose name is used as an attribute anywhere in what is collected. Comments above a definition belong to
it. So an emitted file carries the package's own code and no copy of it is kept by hand.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from polyphase.emit.rewrite import evaluated_annotations, rewrite

PACKAGE = "polyphase"
Key = tuple[str, str]  # module and name


@dataclass(frozen=True)
class _Module:
    """A module of the package: its lines, its definitions, and what its names stand for."""

    name: str
    lines: list[str]
    docstring: str
    definitions: dict[str, ast.stmt]
    ours: dict[str, Key]  # names that it imports from the package
    theirs: dict[str, str]  # and from elsewhere, as import statements


@cache
def _module(name: str) -> _Module:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    tree = ast.parse(text)
    module = _Module(name, text.splitlines(), ast.get_docstring(tree) or "", {}, {}, {})
    for statement in _unconditional(tree.body):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                module.theirs[(alias.asname or alias.name).split(".")[0]] = "import " + _aliased(alias)
        elif isinstance(statement, ast.ImportFrom):
            source = statement.module or ""
            for alias in statement.names:
                local = alias.asname or alias.name
                if source.split(".")[0] == PACKAGE:
                    module.ours[local] = source, alias.name
                else:
                    module.theirs[local] = f"from {source} import {_aliased(alias)}"
        else:
            for defined in _defined(statement):
                module.definitions[defined] = statement
    return module


def _unconditional(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield from statement.body
        else:
            yield statement


def _aliased(alias: ast.alias) -> str:
    return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a statement gives a value."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [
            node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        return [statement.target.id]
    return []


@dataclass
class Found:
    """What was collected: definitions in the order of their modules and lines."""

    keys: set[Key] = field(default_factory=set)
    types: set[Key] = field(default_factory=set)  # named by annotations alone
    attributes: set[str] = field(default_factory=set)
    imports: dict[str, str] = field(default_factory=dict)


def collect(roots: Collection[Key], attributes: Collection[str] = (), given: Collection[Key] = ()) -> Found:
    """Everything that ``roots`` use but what is ``given``; ``attributes`` are names of methods that are called too."""
    found = Found(attributes=set(attributes))
    wanted = set(roots)
    while True:
        before = len(found.keys), len(found.attributes)
        found.keys |= wanted
        wanted = set()
        for module_name, name in sorted(found.keys):
            module = _module(module_name)
            for piece in _kept(module.definitions[name], found.attributes):
                used = _uses(piece)
                found.attributes |= used.attributes
                if used.imports:
                    raise ValueError(f"{module_name}.{name} imports {used.imports[0]} where an emitted file cannot")
                for used_name, as_type in used.names:
                    key = _resolve(module, used_name, found)
                    if key is not None and key not in given:
                        (found.types if as_type else wanted).add(key)
        wanted -= found.keys
        if not wanted and before == (len(found.keys), len(found.attributes)):
            found.types = {key for key in found.types - found.keys if isinstance(_statement(key), ast.Assign)}
            return found


def _statement(key: Key) -> ast.stmt:
    return _module(key[0]).definitions[key[1]]


@dataclass(frozen=True)
class _Uses:
    """What a piece of a definition uses: attributes, modules of ours that it imports, names and whether as types."""

    attributes: frozenset[str]
    imports: tuple[str, ...]
    names: tuple[tuple[str, bool], ...]


@cache
def _uses(piece: ast.AST) -> _Uses:
    nodes = list(ast.walk(piece))
    annotations = [
        *evaluated_annotations(piece),
        *(each.annotation for each in nodes if isinstance(each, ast.AnnAssign)),
    ]
    types = {id(node) for annotation in annotations for node in ast.walk(annotation)}
    sources = (node.module or "" for node in nodes if isinstance(node, ast.ImportFrom))
    return _Uses(
        frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)),
        tuple(source for source in sources if source.startswith(PACKAGE)),
        tuple(dict.fromkeys((node.id, id(node) in types) for node in nodes if isinstance(node, ast.Name))),
    )


def _resolve(module: _Module, name: str, found: Found) -> Key | None:
    if name in module.definitions:
        return module.name, name
    if name in module.ours:
        return _origin(module.ours[name])
    statement = module.theirs.get(name)
    if statement is not None and found.imports.setdefault(name, statement) != statement:
        raise ValueError(f"{name} is {found.imports[name]!r} in one module and {statement!r} in another")
    return None


def _origin(key: Key) -> Key:
    """Where a name is defined that a module may only pass on."""
    module = _module(key[0])
    return key if key[1] in module.definitions else _origin(module.ours[key[1]])


def _kept(statement: ast.stmt, attributes: set[str]) -> list[ast.AST]:
    """The parts of a definition that are used: of a class not every method."""
    if not isinstance(statement, ast.ClassDef):
        return [statement]
    members = [member for member in statement.body if _is_used(member, attributes)]
    return [*statement.bases, *statement.decorator_list, *members]


def _is_used(member: ast.stmt, attributes: set[str]) -> bool:
    if not isinstance(member, ast.FunctionDef):
        return True
    return member.name in attributes or (member.name.startswith("__") and member.name.endswith("__"))


def modules_in_order(names: Collection[str]) -> list[str]:
    """Modules behind those that they import from."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in order:
            return
        for source, _ in _module(name).ours.values():
            visit(source)
        order[name] = None

    for name in sorted(names):
        visit(name)
    return [name for name in order if name in names]


def distinct_names(found: Found, taken: Collection[str]) -> dict[Key, str]:
    """New names for what is ``taken`` or defined in several modules: the module's name before its own.

    Where modules of several folders have that name, so do their folders' names.
    """
    modules = defaultdict(set)
    for module, name in found.keys | found.types:
        modules[name].add(module)
    clashing = {name for name, where in modules.items() if len(where) > 1 or name in taken}
    names = {}
    for name in clashing:
        leaves = [module.rsplit(".", 1)[1] for module in modules[name]]
        for module in modules[name]:
            *_, folder, leaf = module.split(".")
            owner = leaf if leaves.count(leaf) == 1 else f"{folder}_{leaf}"
            names[module, name] = "_" * name.startswith("_") + f"{owner}_{name.lstrip('_')}"
    return names


def text_of(module_name: str, found: Found, names: dict[Key, str]) -> str:
    """What was collected of a module, definitions two lines apart where they are more than one line."""
    module = _module(module_name)
    renamed = _renamed(module, names)
    statements = {name: module.definitions[name] for owner, name in found.keys if owner == module_name}
    pieces = []
    for statement in sorted(dict.fromkeys(statements.values()), key=lambda statement: statement.lineno):
        pieces.append(rewrite(_text(module, statement, found.attributes), renamed).strip("\n"))
    text = ""
    for before, piece in zip([None, *pieces], pieces):
        short = before is not None and "\n" not in before + piece
        text += ("" if before is None else "\n" if short else "\n\n\n") + piece
    return text


def types_of(found: Found, names: dict[Key, str]) -> str:
    """The aliases that annotations name."""
    lines = []
    for key in sorted(found.types):
        statement, module = _statement(key), _module(key[0])
        text = "\n".join(module.lines[statement.lineno - 1 : statement.end_lineno])
        lines.append(rewrite(text, _renamed(module, names)).strip("\n"))
    return "\n".join(lines)


def _renamed(module: _Module, names: dict[Key, str]) -> dict[str, str]:
    """New names by those that a module uses."""
    keys = [*((name, (module.name, name)) for name in module.definitions), *module.ours.items()]
    return {local: names[key] for local, key in keys if key in names}


def docstring_of(module_name: str) -> str:
    """What a module says of itself."""
    return _module(module_name).docstring


def _text(module: _Module, statement: ast.stmt, attributes: set[str]) -> str:
    lines = module.lines
    first, last = _span(lines, statement)
    dropped: set[int] = set()
    if isinstance(statement, ast.ClassDef):
        for member in statement.body:
            if not _is_used(member, attributes):
                start, end = _span(lines, member)
                while not lines[start - 1].strip():  # the blank lines before it
                    start -= 1
                dropped.update(range(start, end))
    return "\n".join(lines[index] for index in range(first, last) if index not in dropped)


def _span(lines: list[str], statement: ast.stmt) -> tuple[int, int]:
    """The lines of a statement, counted from 0, with its decorators and the comment above it."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    indent = statement.col_offset
    while first > 0 and lines[first - 1].startswith(" " * indent + "#"):
        first -= 1
    assert statement.end_lineno is not None
    return first, statement.end_lineno
