"""docs/fidelity.md matches the tests."""

from __future__ import annotations

from tests.conformance.__main__ import DIFFERENCES, DOCUMENT, document, marked_tests


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run: python -m tests.conformance --write"


def test_each_difference_is_shown_by_a_test() -> None:
    assert {key for _, _, differs in marked_tests() for key in differs} == set(DIFFERENCES)
