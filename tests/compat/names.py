"""Compare the public names of a package, read from its sources, with those of another one that replaces it.

The old package is never imported. Its names are read from syntax trees.
"""

from __future__ import annotations

import ast
import enum
import inspect
import keyword
from collections.abc import Callable, Container, Iterator, Mapping
from types import ModuleType

CODES = range(-10, 100)
"""The status codes to try."""
SPECIAL = ("__init__", "__enter__", "__exit__", "__getitem__", "__str__", "__bytes__", "__repr__")


def differences(
    old: Mapping[str, str], ours: Mapping[str, ModuleType], *, omitted: Container[str] = (), added: Container[str] = ()
) -> list[str]:
    """Return a line for each name of `old` that `ours` lacks, and for each name that only `ours` has.

    `old`: the sources by module name. `omitted`: names that `ours` need not have, such as `ffi.dll`; `added`: names
    that only `ours` has. Parameters are named `client.Producer.start.wait`.
    """
    trees = {module: ast.parse(source) for module, source in old.items()}
    found = list(_missing(trees, ours, omitted, added))
    return found + list(_extra_names(trees, ours, added))


def _missing(
    trees: Mapping[str, ast.Module], ours: Mapping[str, ModuleType], omitted: Container[str], added: Container[str]
) -> Iterator[str]:
    for module, tree in trees.items():
        if module not in ours:
            yield f"{module}: there is no such module"
            continue
        for name, node in _top_level(tree):
            where = f"{module}.{name}"
            if where in omitted:
                continue
            if not hasattr(ours[module], name):
                yield f"{where}: is missing"
                continue
            value = getattr(ours[module], name)
            if isinstance(node, ast.ImportFrom):
                origin = ours.get(node.module or "")
                if getattr(origin, name, None) is not value:
                    yield f"{where}: is not the one of {node.module}"
            elif isinstance(node, ast.ClassDef):
                yield from _class_differs(where, node, value, omitted, added)
            elif isinstance(node, ast.FunctionDef):
                yield from _parameters_differ(where, node, value, added)
            else:
                yield from _value_differs(where, node, value)
        yield from _codes_differ(module, tree, trees, ours)


def _top_level(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the public names of a module and their definitions, except imports from other packages."""
    for node in tree.body:
        for each in [*node.body, *node.orelse] if isinstance(node, ast.If) else [node]:
            if isinstance(each, ast.ClassDef | ast.FunctionDef):
                names = [each.name]
            elif isinstance(each, ast.Assign):
                names = [target.id for target in each.targets if isinstance(target, ast.Name)]
            elif isinstance(each, ast.ImportFrom) and each.level:
                names = [alias.asname or alias.name for alias in each.names]
            else:
                continue
            yield from ((name, each) for name in names if not name.startswith("_") or name == "__all__")


def _class_differs(
    where: str, node: ast.ClassDef, ours: type, omitted: Container[str], added: Container[str]
) -> Iterator[str]:
    if not isinstance(ours, type):
        yield f"{where}: is no class"
        return
    for base in map(ast.unparse, node.bases):
        if base not in {each.__name__ for each in ours.__mro__}:
            yield f"{where}: is no {base}"
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and (not each.name.startswith("_") or each.name in SPECIAL):
            inner = f"{where}.{each.name}"
            decorators = [ast.unparse(decorator) for decorator in each.decorator_list]
            if inner in omitted:
                continue
            value = inspect.getattr_static(ours, each.name, None)
            if value is None:
                yield f"{inner}: is missing"
            elif "property" in decorators:
                if not isinstance(value, property):
                    yield f"{inner}: is no property"
            elif isinstance(value, property):
                yield f"{inner}: is a property"
            else:
                yield from _parameters_differ(inner, each, getattr(value, "__func__", value), added)
        elif isinstance(each, ast.Assign) and issubclass(ours, enum.Enum):
            (target,) = each.targets
            member = ours.__members__.get(ast.unparse(target))
            if member is None:
                yield f"{where}.{ast.unparse(target)}: is missing"
            elif repr(member.value) != _normal(each.value):
                yield f"{where}.{member.name}: is {member.value!r}; was {_normal(each.value)}"


def _parameters_differ(
    where: str, node: ast.FunctionDef, ours: Callable[..., object], added: Container[str]
) -> Iterator[str]:
    """Compare names, order, defaults, and kinds of parameters. Added parameters must be optional, and last."""
    signature = inspect.signature(ours)
    mine = list(signature.parameters.values())
    wanted = _parameters(node.args)
    extra = [each for each in mine if f"{where}.{each.name}" in added]
    if any(each.default is inspect.Parameter.empty for each in extra):
        yield f"{where}: what was added must be given"
    found = [_described(each) for each in mine if each not in extra]
    if found != wanted or mine[len(found) :] != extra:
        yield f"{where}: is ({', '.join(map(_described, mine))}); was ({', '.join(wanted)})"


def _parameters(arguments: ast.arguments) -> list[str]:
    assert not (arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs), (
        "the old package has no such parameters"
    )
    without = len(arguments.args) - len(arguments.defaults)
    return [
        each.arg if index < without else f"{each.arg}={_normal(arguments.defaults[index - without])}"
        for index, each in enumerate(arguments.args)
    ]


def _described(parameter: inspect.Parameter) -> str:
    """Return a parameter as the old package would have written it; a parameter of another kind has marks."""
    default = parameter.default
    marks = {
        inspect.Parameter.POSITIONAL_ONLY: "positional only ",
        inspect.Parameter.KEYWORD_ONLY: "keyword only ",
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    name = marks.get(parameter.kind, "") + parameter.name
    if default is inspect.Parameter.empty:
        return name
    text = f"{type(default).__name__}.{default.name}" if isinstance(default, enum.Enum) else repr(default)
    return f"{name}={text}"


def _value_differs(where: str, node: ast.stmt, ours: object) -> Iterator[str]:
    """Compare literals, and fields of named tuples. Of a computed value, only the name counts."""
    assert isinstance(node, ast.Assign)
    if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "namedtuple":
        fields = tuple(ast.literal_eval(node.value.args[1]))
        if getattr(ours, "_fields", None) != fields:
            yield f"{where}: has the fields {getattr(ours, '_fields', None)}; had {fields}"
    elif (literal := _literal(node.value)) is not None and sorted(literal) != sorted(ours):  # type: ignore[call-overload]
        yield f"{where}: is {ours!r}; was {literal!r}"


def _literal(node: ast.expr) -> list[str] | None:
    return ast.literal_eval(node) if isinstance(node, ast.List) else None


def _codes_differ(
    module: str, tree: ast.Module, trees: Mapping[str, ast.Module], ours: Mapping[str, ModuleType]
) -> Iterator[str]:
    """Compare the exception of each status code. In the old package decorators name it; here `ffi_check` raises it."""
    check = next((each for name, each in _top_level(tree) if name == "ffi_check"), None)
    if not isinstance(check, ast.FunctionDef) or not hasattr(ours[module], "ffi_check"):
        return
    codes = {
        f"{each.name}.{ast.unparse(line.targets[0])}": ast.literal_eval(line.value)
        for source in trees.values()
        for each in source.body
        if isinstance(each, ast.ClassDef)
        for line in each.body
        if isinstance(line, ast.Assign) and "CStatus" in each.name
    }
    wanted = dict.fromkeys(CODES, "RocketMQException") | {
        codes[ast.unparse(decorator.args[0])]: each.name
        for each in tree.body
        if isinstance(each, ast.ClassDef)
        for decorator in each.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "_register"
    }
    wanted[codes["_CStatus.OK"]] = "nothing"
    for code, name in wanted.items():
        found = _raised(ours[module].ffi_check, code)
        if found != name:
            yield f"{module}.ffi_check({code}): raises {found}; raised {name}"


def _raised(call: Callable[[int], object], code: int) -> str:
    try:
        call(code)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def _extra_names(
    trees: Mapping[str, ast.Module], ours: Mapping[str, ModuleType], added: Container[str]
) -> Iterator[str]:
    """Yield the classes, functions, enum members, methods and properties that `ours` defines and `trees` do not."""
    for module, loaded in ours.items():
        known = dict(_top_level(trees[module])) if module in trees else {}
        for name, value in vars(loaded).items():
            where = f"{module}.{name}"
            if name.startswith("_") or getattr(value, "__module__", None) != loaded.__name__ or where in added:
                continue
            node = known.get(name)
            if node is None:
                yield f"{where}: was not there"
            elif isinstance(node, ast.ClassDef):
                for member in _members(value) - _old_members(node, trees):
                    if f"{where}.{member}" not in added:
                        yield f"{where}.{member}: was not there"


def _members(ours: type) -> set[str]:
    """Return the public names of a class, without those that every class of its kind has."""
    kinds = (object, BaseException, Exception, enum.Enum, enum.IntEnum, int, str, tuple)
    common = {name for kind in kinds if kind in ours.__mro__ for name in dir(kind)}
    return {name for name in dir(ours) if not name.startswith("_")} - common


def _old_members(node: ast.ClassDef, trees: Mapping[str, ast.Module]) -> set[str]:
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    names |= {ast.unparse(target) for each in node.body if isinstance(each, ast.Assign) for target in each.targets}
    names |= {  # self.error = error
        target.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Attribute)
    }
    for base in map(ast.unparse, node.bases):
        for tree in trees.values():
            for each in tree.body:
                if isinstance(each, ast.ClassDef) and each.name == base:
                    names |= _old_members(each, trees)
    return names


def _normal(node: ast.expr) -> str:
    """Return a default or a value as `repr` would write it; a dotted name as it is."""
    text = ast.unparse(node)
    dotted = all(part.isidentifier() and not keyword.iskeyword(part) for part in text.split("."))
    return text if dotted else repr(ast.literal_eval(node))
