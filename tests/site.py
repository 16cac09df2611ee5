"""Checks the links of the site that mkdocs has built: `python -m tests.site site`.

Each link between pages must lead to a file and an anchor that exist. A page may link to other hosts, but must not need
them: its scripts, styles and pictures are files of the site.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors, links and files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "__skip"}
        self.links: list[str] = []
        self.needs: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in ("a", "area") and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next") and "href" in values:
            self.needs.append(values["href"])
        elif "src" in values:
            self.needs.append(values["src"])


def wrong(site: Path) -> Iterator[str]:
    """Yield a sentence for each broken link, and for each file of another host that a page needs."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no pages"
    for path, page in pages.items():
        here = path.relative_to(site)
        for link in page.needs:
            if urlsplit(link).netloc:
                yield f"{here} needs {link}"
        for link in page.links + page.needs:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            base = site / parts.path.lstrip("/") if parts.path.startswith("/") else path.parent / unquote(parts.path)
            target = (path if not parts.path else base / "index.html" if base.is_dir() else base).resolve()
            if not target.is_file():
                yield f"{here} links to {link}, which is not there"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{here} links to {link}, but that page has no such anchor"


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    found = list(wrong(site))
    print(*found, sep="\n", end="\n" if found else "")
    pages = len(list(site.rglob("*.html")))
    if not found:
        print(f"{pages} pages, all links hold: {site / 'index.html'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
