"""The recorded names of the Java client match its jars, and the Java code of the page compiles with them."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.migration import java
from tests.migration.__main__ import DOCUMENT
from tests.pages import blocks
from tests.real_brokers.jars import NEWEST, jars, java_tool

pytestmark = pytest.mark.versions(NEWEST)

PACKAGES = (
    "client.consumer",
    "client.consumer.listener",
    "client.producer",
    "client.producer.selector",
    "common.consumer",
    "common.message",
)


def test_the_recorded_names_are_those_of_the_release(real_version):
    assert java.fetched() == java.recorded(), "record them again: python -m tests.migration.java"


def test_the_java_blocks_compile(real_version, tmp_path):
    imports = "".join(f"import org.apache.rocketmq.{package}.*;\n" for package in PACKAGES)
    written = [
        f"static void block{number}() throws Exception {{\n{block}}}\n"
        for number, block in enumerate(blocks(DOCUMENT, "java"))
    ]
    assert written
    source = tmp_path / "Page.java"
    source.write_text(f"{imports}class Page {{\n{''.join(written)}}}\n")
    command = [java_tool("javac"), "-proc:none", "-d", str(tmp_path), "-cp", f"{jars(real_version)}/*", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"deprecat", done.stderr), done.stderr
