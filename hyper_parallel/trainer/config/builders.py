"""Whether a call of a user's function can work, read from its source: nothing is imported, no framework is loaded."""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

__all__ = ["problems_of_call"]

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((float, int), "a number"),
    "str": ((str,), "a text"),
    "bool": ((bool,), "true or false"),
}


def problems_of_call(where: str, args: Mapping[str, Any]) -> Iterator[tuple[str | None, str]]:
    """What is wrong with calling ``"package.module:function"`` with ``args``: (the argument or None, what)."""
    module, colon, name = where.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        yield None, f'must be of the form "package.module:function", got {where!r}'
        return
    spec = _find(module)
    if spec is None:
        yield None, f"there is no module {module!r} in this folder or on Python's path, got {where!r}"
        return
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # Compiled code says nothing about its functions.
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except SyntaxError as error:
        yield None, f"{spec.origin}:{error.lineno}: {error.msg}"
        return
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        yield None, f"{spec.origin} cannot be read as Python: {error}"
        return
    functions, others, has_star = _top_level(tree)
    if name in functions:
        yield from _problems_of_arguments(name, functions[name], args)
    elif name not in others and not has_star:
        near = difflib.get_close_matches(name, [*functions, *others], 1)
        hint = f"; did you mean {module + ':' + near[0]!r}?" if near else ""
        yield None, f"{spec.origin} has no function {name!r}{hint}"


def _find(module: str) -> ModuleSpec | None:
    """The module's file, by its name; `importlib.util.find_spec` would run the packages above it."""
    places: list[str] | None = ["", *sys.path]
    spec = None
    for depth in range(1, module.count(".") + 2):
        if places is None:
            return None
        name = ".".join(module.split(".")[:depth])
        spec = PathFinder.find_spec(name, [place or str(Path.cwd()) for place in places])
        if spec is None:
            return None
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    return spec


def _top_level(tree: ast.Module) -> tuple[dict[str, ast.arguments | None], set[str], bool]:
    """Functions and classes with their arguments (None: unknown), other names, and whether `import *` may give more."""
    functions: dict[str, ast.arguments | None] = {}
    others: set[str] = set()
    has_star = False
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = None if node.decorator_list else node.args
        elif isinstance(node, ast.ClassDef):
            made = [inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"]
            functions[node.name] = made[0].args if made else None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            others |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
            has_star |= any(alias.name == "*" for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending += [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)]
            pending += [inner for handler in getattr(node, "handlers", ()) for inner in handler.body]
        else:
            others |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return functions, others, has_star


def _problems_of_arguments(
    name: str, arguments: ast.arguments | None, args: Mapping[str, Any]
) -> Iterator[tuple[str | None, str]]:
    if arguments is None:
        return
    positional = [*arguments.posonlyargs, *arguments.args]
    if positional and positional[0].arg == "self":
        positional = positional[1:]
    known = {argument.arg: argument for argument in [*positional, *arguments.kwonlyargs]}
    num_required = len(positional) - len(arguments.defaults)
    required = [argument.arg for argument in positional[: max(num_required, 0)]]
    required += [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    for key, value in args.items():
        if key in known:
            annotation = known[key].annotation
            kinds, words = _KINDS.get(ast.unparse(annotation) if annotation else "", ((object,), ""))
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds not in ((bool,), (object,))):
                yield key, f"must be {words}, got {value!r}: {name} says so"
        elif arguments.kwarg is None:
            near = difflib.get_close_matches(key, known, 1)
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            yield key, f"{name} has no such argument; " + (f"did you mean {near[0]!r}?" if near else takes)
    for key in required:
        if key not in args:
            yield key, f"is missing: {name} needs it"
