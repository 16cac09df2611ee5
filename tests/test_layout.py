"""Imports point one way: lower layers do not import higher ones."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pyrocket_consumer
from tests.for_each import for_each

PACKAGE = "pyrocket_consumer"
ROOT = Path(pyrocket_consumer.__file__).parent

LAYERS = (
    {"text"},
    {"model", "errors"},
    {"config", "protocol"},
    {"transport"},
    {"cluster"},
    {"offsets", "producer"},
    {"consumer", "admin"},
    {"spark", "compat"},
    {"cli"},
)
"""A part imports only itself and parts above its line."""

INSIDE_CONSUMER = (
    "listener",
    "window",
    "context",
    "commits",
    "dispatch",
    "assignment",
    "resets",
    "membership",
    "member",
    "lifecycle",
    "push_consumer",
)
"""The layers of the packages in consumer/."""

EXCEPTIONS = {
    "testing": {"text", "model", "errors", "config", "protocol"},  # so that it shares no mistakes with what it tests
    "testing/server.py": {"transport"},  # only transport.forks, for sockets that a forked child must close
    "testing/cluster.py": {"transport"},  # only transport.io_thread, the thread of an asyncio loop
    "cli": {"testing"},  # the demo's embedded cluster
    "spark/demo.py": {"cli", "testing"},  # the same, and its table
}
EXTRAS = (
    "spark/",
    "testing/",
    "protocol/columns.py",
    "offsets/database/sqlalchemy_access.py",
    "offsets/database/statements.py",
    "offsets/database/django_access.py",
)
"""Modules that import more than the two dependencies at the top; no other module may import these at the top."""
EVERYTHING = frozenset().union(*LAYERS)


def allowed(part: str) -> frozenset[str]:
    """Return the parts that a part of the package may import: the layers below it, and itself."""
    if part == "testing":
        return frozenset(EXCEPTIONS["testing"] | {"testing"})
    below = frozenset[str]()
    for layer in LAYERS:
        if part in layer:
            return below | {part} | EXCEPTIONS.get(part, set())
        below |= layer
    raise AssertionError(f"{part!r} is not on the map in this test; put it into its layer")


@cache
def imports_of(module: Path) -> list[tuple[str, str, bool]]:
    """Return the source module, the name, and whether it is at the top, for each import of a module."""
    tree, found = ast.parse(module.read_text()), []
    at_top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, alias.name, node in at_top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import; write the whole name"
            found += [(str(node.module), f"{node.module}.{alias.name}", node in at_top) for alias in node.names]
    return found


def parts_imported(module: Path) -> set[str]:
    """Return the parts of the package that a module imports."""
    return {name.split(".")[1] for _, name, _ in imports_of(module) if name.startswith(f"{PACKAGE}.")}


MODULES = sorted(ROOT.rglob("*.py"))


def name_of(module: Path) -> str:
    return module.relative_to(ROOT).as_posix()


@pytest.mark.slow("parses all modules")
@for_each("module", MODULES, ids=name_of)
def test_imports_point_one_way(module):
    part = module.relative_to(ROOT).parts[0].removesuffix(".py")
    known = EVERYTHING - {"cli"} if part == "__init__" else allowed(part)
    known |= EXCEPTIONS.get(name_of(module), set())
    wrong = parts_imported(module) - known - {"__version__"}
    assert not wrong, f"{name_of(module)} imports {sorted(wrong)}, which are not below {part}"


def imports_within(folder: Path) -> dict[str, set[str]]:
    """Return each module or package in `folder` -> those of the same folder that it imports, also for types only."""
    prefix = ".".join([PACKAGE, *folder.relative_to(ROOT).parts]) + "."
    found: dict[str, set[str]] = {}
    for module in sorted(folder.rglob("*.py")):
        child = module.relative_to(folder).parts[0].removesuffix(".py")
        names = {name for each in imports_of(module) for name in each[:2]}  # the last is a module, or a name in it
        inside = {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}
        found.setdefault(child, set()).update(inside - {child})
    return {child: names & found.keys() for child, names in found.items()}


CIRCULAR = {"cluster", "testing"}
"""Folders with circular imports: a cluster returns brokers or nodes, whose calls use the cluster."""
FOLDERS = sorted(
    folder
    for folder in {module.parent for module in MODULES} - {ROOT}
    if folder.relative_to(ROOT).as_posix() not in CIRCULAR
)


@for_each("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_no_import_is_circular(folder):
    TopologicalSorter(imports_within(folder)).prepare()  # raises CycleError, which names the circle


def test_imports_inside_consumer_point_one_way():
    imports = imports_within(ROOT / "consumer")
    assert set(imports) == {*INSIDE_CONSUMER, "__init__"}
    for level, child in enumerate(INSIDE_CONSUMER):
        assert imports[child] <= set(INSIDE_CONSUMER[:level]), child


def test_every_folder_is_a_package():
    folders = {module.parent for module in MODULES}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_core_needs_only_its_two_dependencies():
    """An installation without extras imports everything except the modules of the extras."""
    core = [module for module in MODULES if not name_of(module).startswith(EXTRAS)]
    heads = {name.split(".")[0] for module in core for name, _, at_the_top in imports_of(module) if at_the_top}
    assert heads - set(sys.stdlib_module_names) - {PACKAGE, "filelock", "orjson"} == set()


def test_only_the_spark_source_imports_the_columns():
    importers = {name_of(module) for module in MODULES if "protocol.columns" in module.read_text()}
    assert {name.partition("/")[0] for name in importers} <= {"spark"}
