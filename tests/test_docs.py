"""The documentation names what there is."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import pyrocket_consumer
from pyrocket_consumer import EventKind, ProducerConfig, errors
from pyrocket_consumer.config import ConsumerConfig

ROOT = Path(__file__).parents[1]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()

OPTIONS = sorted({field.name for kind in (ConsumerConfig, ProducerConfig) for field in fields(kind)})
ERRORS = sorted(name for name, value in vars(errors).items() if isinstance(value, type))


@pytest.mark.parametrize("name", [*OPTIONS, *ERRORS, *(kind.value for kind in EventKind)])
def test_the_reference_has(name):
    assert f"`{name}`" in REFERENCE


@pytest.mark.parametrize("name", [name for name in pyrocket_consumer.__all__ if not name.startswith("_")])
def test_a_public_name_has_a_docstring(name):
    assert getattr(pyrocket_consumer, name).__doc__


def test_the_design_notes_print_the_table_of_states():
    from pyrocket_consumer.consumer.process_queue import QueueState

    notes = (ROOT / "docs" / "design.md").read_text()
    assert all(state.name in notes for state in QueueState)
