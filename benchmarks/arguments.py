"""Argument types of all programs. They check numbers, paths and checkouts before anything runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def one_or_more(text: str) -> int:
    """Read the number of rounds: one or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give a whole number of 1 or more")
    return number


def new_file(text: str) -> Path:
    """Read the path of an output file in a directory that exists."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; name a file in a directory that exists")
    return path


def checkout(text: str) -> Path:
    """Read the path of an earlier checkout."""
    path = Path(text)
    if not (path / "pyrocket_consumer" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no checkout: it has no folder pyrocket_consumer")
    return path
