"""The documentation names what there is."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

import pyrocket_consumer
from pyrocket_consumer import EventKind, ProducerConfig, admin, consumer, errors, offsets, producer, testing
from pyrocket_consumer.config import ConsumerConfig

ROOT = Path(__file__).parents[1]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()

OPTIONS = sorted({field.name for kind in (ConsumerConfig, ProducerConfig) for field in fields(kind)})
ERRORS = sorted(name for name, value in vars(errors).items() if isinstance(value, type))


@pytest.mark.parametrize("name", [*OPTIONS, *ERRORS, *(kind.value for kind in EventKind)])
def test_the_reference_has(name):
    assert f"`{name}`" in REFERENCE


PUBLIC = {
    getattr(module, name)
    for module in (pyrocket_consumer, admin, consumer, offsets, producer, testing)
    for name in module.__all__
    if not name.startswith("_") and inspect.isroutine(getattr(module, name)) | inspect.isclass(getattr(module, name))
}


@pytest.mark.parametrize("public", sorted(PUBLIC, key=repr), ids=lambda public: public.__qualname__)
def test_what_is_public_has_a_docstring_of_its_own_and_so_have_its_methods_and_properties(public):
    methods = vars(public).items() if inspect.isclass(public) else ()
    told = {"": public.__doc__} | {
        name: inspect.getdoc(getattr(public, name))
        for name, value in methods
        if not name.startswith("_")
        and (isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value))
    }
    assert [name for name, text in told.items() if not text or text.startswith(f"{public.__name__}(")] == []


def test_the_design_notes_print_the_table_of_states():
    from pyrocket_consumer.consumer.process_queue import QueueState

    notes = (ROOT / "docs" / "design.md").read_text()
    assert all(state.name in notes for state in QueueState)
