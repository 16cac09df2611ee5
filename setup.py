"""What setup.cfg cannot say: on a package index, the README names files in place of links, which would lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

LINK_INTO_THE_SOURCES = re.compile(r"\[([^]]+)\]\((?!https?://)([^)]+)\)")


def as_a_name(link: re.Match[str]) -> str:
    text, path = link.groups()
    return text if text == path else f"{text} ({path})"


readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(long_description=LINK_INTO_THE_SOURCES.sub(as_a_name, readme))
