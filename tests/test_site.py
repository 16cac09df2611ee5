"""The documentation site: its pages, links, API and pictures. `make docs` builds it and checks all links."""

from __future__ import annotations

import importlib
import importlib.util
import re

import pytest

from pyrocket_consumer import admin, offsets, spark, testing
from tests import pictures, site
from tests.for_each import for_each
from tests.pages import DOCS, ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text()
NAV = re.findall(r"^ +- .*?(\S+\.md)$", CONFIG.split("\nnav:\n")[1].split("\n\n")[0], re.MULTILINE)


def module_of(path):
    """Return a module of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = module_of(DOCS / "hooks.py")


def test_every_page_is_in_the_navigation_once():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if "changelog.d" not in path.parts}
    assert sorted(NAV) == sorted(pages | set(hooks.FROM_ROOT.values()))
    assert all((ROOT / path).exists() for path in hooks.FROM_ROOT)


def test_the_home_page_leads_to_every_page_but_those_of_the_api():
    text = hooks.with_links_of_the_site((DOCS / "index.md").read_text(), "index.md", set(NAV), "")
    wanted = {page for page in NAV if not page.startswith("api/")} - {"index.md"} | {"api/index.md"}
    assert wanted <= set(re.findall(r"\]\(([^)#]+)\)", text))


def test_the_api_has_each_public_name_once():
    found = re.findall(r"^::: (\S+)$", "".join(path.read_text() for path in (DOCS / "api").glob("*.md")), re.MULTILINE)
    modules = [importlib.import_module("pyrocket_consumer"), admin, offsets, spark, testing]
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__ if name != "__version__"}
    elsewhere = {"pyrocket_consumer.Admin", "pyrocket_consumer.ConsumerClosed"}  # in admin; an alias of ClientClosed
    assert sorted(found) == sorted(public - elsewhere)


@for_each("name", pictures.PICTURES)
def test_a_picture_is_drawn_from_its_source(name):
    """Run `make pictures` after a failure."""
    svg = (pictures.FOLDER / f"{name}.svg").read_text()
    assert pictures.source_of(svg) == pictures.PICTURES[name]()
    assert pictures.STYLE in svg
    assert f"](pictures/{name}.svg)" in (DOCS / "design.md").read_text()


def test_the_picture_of_states_has_all_of_them():
    states = {state.name for pair in pictures.TRANSITIONS.items() for state in (pair[0][0], pair[1])}
    assert states == pictures.STATES.keys()


PAGES = {"order.md", "readme.md", "security-policy.md", "api/index.md", "api/errors.md"}
REPOSITORY = "https://example.org/pyrocket"


@for_each(
    "here, written, on_the_site",
    [
        ("order.md", "[a](#b)", "[a](#b)"),
        ("order.md", "[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("order.md", "[a](api/errors.md#b)", "[a](api/errors.md#b)"),
        ("order.md", "[`a`](../README.md#b)", "[`a`](readme.md#b)"),
        ("order.md", "[a](../tests/conformance)", f"[a]({REPOSITORY}/blob/HEAD/tests/conformance)"),
        ("order.md", "[a](../nowhere.md)", "[a](../nowhere.md)"),
        ("readme.md", "[a](docs/order.md#b) and [c](SECURITY.md)", "[a](order.md#b) and [c](security-policy.md)"),
        ("readme.md", "[a](tests/README)", "[a](tests/README)"),
        ("api/index.md", "[a](../order.md)", "[a](../order.md)"),
        ("api/index.md", "[a](../../SECURITY.md)", "[a](../security-policy.md)"),
        ("readme.md", "```\n[a](docs/order.md)\n```\n", "```\n[a](docs/order.md)\n```\n"),
    ],
)
def test_links_become_those_of_the_site(here, written, on_the_site):
    assert hooks.with_links_of_the_site(written, here, PAGES, REPOSITORY) == on_the_site


def test_without_a_repository_a_link_into_it_becomes_text():
    assert hooks.with_links_of_the_site("see [a `b`](../setup.cfg).", "order.md", PAGES, "") == "see a `b`."


@pytest.fixture
def built(tmp_path):
    """A function that writes pages and returns the defects of their links."""

    def build(**pages):
        for name, text in pages.items():
            (tmp_path / f"{name}.html").write_text(text)
        return list(site.wrong(tmp_path))

    return build


def test_links_that_hold(built):
    one = '<a href="two.html#x">two</a> <a href="#y">y</a> <p id="y"> <a href="https://example.org/">far</a>'
    assert built(one=one, two='<h1 id="x"> <a href="./one.html">one</a> <img src="one.html">') == []


@for_each(
    "text, expected",
    [
        ('<a href="three.html">', "one.html links to three.html, which is not there"),
        ('<a href="two.html#x">', "one.html links to two.html#x, but that page has no such anchor"),
        ('<a href="#x">', "one.html links to #x, but that page has no such anchor"),
        ('<img src="a.png">', "one.html links to a.png, which is not there"),
        ('<script src="https://example.org/a.js"></script>', "one.html needs https://example.org/a.js"),
        ('<link rel="preconnect" href="//example.org">', "one.html needs //example.org"),
    ],
)
def test_links_that_do_not_hold(text, expected, built):
    assert built(one=text, two="") == [expected]


def test_a_site_without_pages_is_wrong(built):
    assert len(built()) == 1
