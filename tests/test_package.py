"""The effects of `pip install` and `import` for a user."""

from __future__ import annotations

import configparser
import email.message
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import pyrocket_consumer
from tests.for_each import for_each
from tests.speed import slowness

ROOT = Path(pyrocket_consumer.__file__).parent.parent

PACKAGES = ("pyrocket_consumer", "pyspark_rocketmq")  # Spark finds the data source by the second

LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")

SIDE_EFFECTS = """
import logging, os, sys, threading
sys.dont_write_bytecode = True  # files of Python's cache do not count
before = dict(os.environ), threading.enumerate(), list(logging.root.handlers), logging.root.level
touched = []
sys.addaudithook(lambda name, arguments: touched.append((name, arguments)) if watched(name, arguments) else None)

FORBIDDEN = {"socket.connect", "socket.bind", "subprocess.Popen", "os.fork", "os.putenv", "signal.signal"}

def watched(name, arguments):
    if name in ("open", "os.mkdir", "os.rename") and "__pycache__" not in str(arguments[0]):
        return name != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return name in FORBIDDEN

import pyrocket_consumer
for name in pyrocket_consumer.__all__:
    getattr(pyrocket_consumer, name)
assert not touched, touched
after = dict(os.environ), threading.enumerate(), list(logging.root.handlers), logging.root.level
assert before == after, (before, after)
handlers = [each for each in logging.root.manager.loggerDict.values() if getattr(each, "handlers", None)]
assert not [each for each in handlers if each.name.startswith("pyrocket")], handlers
"""


def run_python(code: str, *, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    answer = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.live
def test_importing_has_no_side_effects():
    run_python(SIDE_EFFECTS)


@pytest.mark.slow("starts seventeen interpreters")
@pytest.mark.live
def test_importing_is_quick(tmp_path):
    """An import takes at most 100 ms more than a bare interpreter, at the usual speed, by the best of several runs."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)  # compiled once, as pip does

    def seconds(code: str) -> float:
        began = os.times()
        run_python(code, environment=environment)
        ended = os.times()  # CPU time, because the machine may be busy
        return ended.children_user + ended.children_system - began.children_user - began.children_system

    seconds("import pyrocket_consumer")
    pairs = [(seconds("pass"), seconds("import pyrocket_consumer")) for _ in range(8)]
    bare, imported = (min(column) for column in zip(*pairs, strict=True))
    assert (imported - bare) / slowness() < 0.1


OPTIONAL = {"django", "lz4", "numpy", "pyarrow", "pyspark", "rich", "rocketmq", "sqlalchemy", "zstandard"}
NEVER = {"decimal", "email", "http", "multiprocessing", "sqlite3", "unittest", "urllib.request", "xml", *OPTIONAL}


@pytest.mark.live
@pytest.mark.slow("starts an interpreter for each module")
@for_each(
    "code, unused",
    [
        ("import pyrocket_consumer", {"asyncio", "concurrent", "filelock", "hashlib", "json", "orjson", "uuid"}),
        ("from pyrocket_consumer import PushConsumer, AsyncPushConsumer, Message", {"filelock"}),
        ("from pyrocket_consumer import Producer, AsyncProducer", {"filelock"}),
        ("from pyrocket_consumer import Admin", {"filelock"}),
    ],
)
def test_heavy_modules_are_imported_when_they_are_used(code, unused):
    """Only offset stores in files use `filelock`, and only broadcasting groups have these."""
    imported = set(run_python(f"{code}\nimport sys\nprint(*sys.modules)").split())
    assert imported & (NEVER | unused) == set()


def test_every_public_name_is_there_and_no_other():
    assert len(set(pyrocket_consumer.__all__)) == len(pyrocket_consumer.__all__)
    for name in pyrocket_consumer.__all__:
        assert getattr(pyrocket_consumer, name) is not None
    known = {"Message", "MessageQueue", "PushConsumer", "Producer", "ConsumeResult", "RocketError"}
    assert known <= set(pyrocket_consumer.__all__)
    with pytest.raises(AttributeError, match="PushConsumr"):
        pyrocket_consumer.PushConsumr  # noqa: B018


def test_each_extra_is_used():
    """A target of make installs each extra, or a page names it."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    made = set(re.findall(r"\.venv/\.(\w+)", (ROOT / "Makefile").read_text()))
    pages = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    shown = {name for names in re.findall(r"pip install '[\w.-]+\[([\w,]+)\]'", pages) for name in names.split(",")}
    sentences = re.findall(r"[Tt]he extras? (`.*?) adds?\s", pages)
    named = {name for sentence in sentences for name in re.findall(r"`(\w+)`", sentence)}
    assert set(metadata["options.extras_require"]) == made | shown | named


@for_each(
    "extra, package",
    [("cli", "rich"), ("lz4", "lz4"), ("sql", "sqlalchemy"), ("zstd", "zstandard"), ("spark", "pyarrow")],
)
def test_the_product_imports_the_package_of_each_extra(extra, package):
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    assert package in metadata["options.extras_require"][extra].lower()
    sources = (file.read_text() for file in (ROOT / "pyrocket_consumer").rglob("*.py"))
    assert any(re.search(rf"^\s*(from|import) {package}\b", source, re.MULTILINE) for source in sources)


def test_the_version_is_the_one_of_the_metadata():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    assert pyrocket_consumer.__version__ == metadata["metadata"]["version"]


class Built:
    """The source distribution, and the wheel built from it, by `python -m build` in a copy of the sources."""

    def __init__(self, folder: Path) -> None:
        left_out = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "site")
        shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*left_out, "*.egg-info", "*.so"))
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "tree")]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        (self.wheel,), (self.source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
        self.names = zipfile.ZipFile(self.wheel).namelist()
        self.metadata = email.message_from_bytes(self.read("METADATA"))

    def read(self, name: str) -> bytes:
        """Return a file of the wheel's metadata."""
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(next(each for each in self.names if each.endswith(f".dist-info/{name}")))


def the_wheel_is_small_and_serves_every_python(built):
    assert re.fullmatch(rf"pyrocket_consumer-{pyrocket_consumer.__version__}-cp311-abi3-\w+\.whl", built.wheel.name)
    assert built.wheel.stat().st_size < 700_000
    with zipfile.ZipFile(built.wheel) as archive:
        (compiled,) = [each for each in archive.infolist() if each.filename.endswith((".so", ".pyd"))]
        assert compiled.filename.startswith("pyrocket_consumer/protocol/_accelerator.")
        assert compiled.file_size < 200_000
        assert not [each for each in archive.namelist() if each.endswith(".c")]


def the_wheel_holds_the_package_and_nothing_else(built):
    names = built.names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert "pyrocket_consumer/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    modules = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert modules <= set(names)


def the_wheel_runs_alone(built):
    """Runs the archive itself, outside the sources."""
    code = f"import sys; sys.path.insert(0, {str(built.wheel)!r}); import pyrocket_consumer as p; print(p.__file__)"
    assert str(built.wheel) in run_python(code, cwd=built.wheel.parent)


def the_source_distribution_has_what_the_readme_speaks_of(built):
    with tarfile.open(built.source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    linked = {path.partition("#")[0] for _, path in LINK.findall((ROOT / "README.md").read_text())}
    spoken_of = {path for path in linked if "://" not in path}
    assert len(spoken_of) > 8
    assert spoken_of | {"Makefile", "pyproject.toml", ".ci/run", "tests/golden/5.5.0.zip"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def on_a_package_index_no_link_of_the_readme_leads_nowhere(built):
    """An index has no other files, so a link to the sources becomes the file's name."""
    shown, readme = built.metadata.get_payload(decode=True).decode(), (ROOT / "README.md").read_text()
    assert [path for _, path in LINK.findall(shown) if not path.startswith("https://")] == []
    assert "docs/spark.md" in shown
    assert "compiles a part (docs/reference.md#the-compiled-part)" in shown
    block = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    assert block.findall(shown) == block.findall(readme)


def the_metadata_names_commands_extras_and_dependencies(built):
    metadata, entry_points = built.metadata, built.read("entry_points.txt").decode()
    needed = [each for each in metadata.get_all("requires-dist") if ";" not in each]
    assert sorted(re.split("[ >]", each)[0] for each in needed) == ["filelock", "orjson"]
    assert metadata["requires-python"] == ">=3.11"
    assert metadata["description-content-type"] == "text/markdown"
    assert set(metadata.get_all("provides-extra")) == {
        "spark",
        "cli",
        "lz4",
        "zstd",
        "sql",
        "native",
        "test",
        "dev",
        "docs",
        "all",
    }
    assert "pyrocket = pyrocket_consumer.cli:main" in entry_points
    assert "pyrocket_consumer = pyrocket_consumer.testing.pytest_plugin" in entry_points


def the_metadata_names_the_authors_and_where_the_project_is(built):
    assert built.metadata["author"] == "pyrocket_consumer contributors"
    assert "author-email" not in built.metadata
    urls = dict(each.split(", ") for each in built.metadata.get_all("project-url"))
    assert urls.keys() >= {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Source"]) for url in urls.values()), urls
    assert urls["Source"].startswith("https://")
    named = {path.removesuffix("/") for url in urls.values() for path in re.findall(r"/(?:blob|tree)/main/(.+)", url)}
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


CHECKS = (
    the_wheel_is_small_and_serves_every_python,
    the_wheel_holds_the_package_and_nothing_else,
    the_wheel_runs_alone,
    the_source_distribution_has_what_the_readme_speaks_of,
    on_a_package_index_no_link_of_the_readme_leads_nowhere,
    the_metadata_names_commands_extras_and_dependencies,
    the_metadata_names_the_authors_and_where_the_project_is,
)


@pytest.mark.live
@pytest.mark.slow("builds the package")
def test_the_built_distributions(tmp_path, subtests):
    built = Built(tmp_path)
    for check in CHECKS:
        with subtests.test(check.__name__):
            check(built)
