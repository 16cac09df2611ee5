"""Adapts pages to the site: files outside of docs/ become pages, and links hold on the site, too.

Pages are written for the repository, where a link names a file, such as `../tests/conformance`. On the site the link
leads to the page of that file. If the file has no page, the link leads to the repository that setup.cfg names. If
setup.cfg names none, only the text remains.
"""

from __future__ import annotations

import configparser
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
"""Files of the repository's root, and the pages that they become."""

IN_ROOT = {page: path for path, page in FROM_ROOT.items()}
CODE_BLOCK = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
CODE_IN_HTML = re.compile(r"(?<!<pre>)<code>[^<]*</code>")
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s]+)\)")


def on_config(config: Any) -> Any:
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    config.extra["repository"] = metadata["metadata"].get("url", "").rstrip("/")
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, page in FROM_ROOT.items():
        if (ROOT / path).exists():
            files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    pages = {file.src_uri for file in files if not file.inclusion.is_excluded()}
    return with_links_of_the_site(markdown, page.file.src_uri, pages, config.extra["repository"])


def on_page_content(html: str, **_: Any) -> str:
    """In a cell of a table `\\|` represents a bar, in code too; Python-Markdown leaves the backslash there."""
    return CODE_IN_HTML.sub(lambda code: code[0].replace("\\|", "|"), html)


def with_links_of_the_site(markdown: str, here: str, pages: set[str], repository: str) -> str:
    """Return the text of the page `here` with links as the site needs them; code blocks stay as they are.

    A link to a file that is not there stays, too: mkdocs warns of it.
    """
    path = IN_ROOT.get(here, f"docs/{here}")

    def linked(found: re.Match[str]) -> str:
        target, hash_mark, anchor = found["target"].partition("#")
        if not target or ":" in target:
            return found[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        on_site = FROM_ROOT.get(wanted, wanted.removeprefix("docs/"))
        if on_site in pages and (wanted in FROM_ROOT or wanted.startswith("docs/")):
            target = posixpath.relpath(on_site, posixpath.dirname(here) or ".")
        elif not (ROOT / wanted).exists():
            return found[0]
        elif repository:
            target = f"{repository}/blob/HEAD/{wanted}"
        else:
            return found["text"]
        return f"{found['picture']}[{found['text']}]({target}{hash_mark}{anchor})"

    blocks = CODE_BLOCK.split(markdown)
    return "".join(block if CODE_BLOCK.fullmatch(block) else LINK.sub(linked, block) for block in blocks)
