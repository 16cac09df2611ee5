"""docs/hazards.md matches the tests, and has every hazard."""

from __future__ import annotations

from tests.for_each import for_each
from tests.hazards.__main__ import DOCUMENT, HAZARDS, REMARKS, document, hazard_tests


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run: python -m tests.hazards --write"


@for_each("number", HAZARDS, ids="H{:02}".format)
def test_a_hazard_has_tests_or_a_reason_why_not(number: int) -> None:
    about = [test for test in hazard_tests() if number in test.numbers]
    if REMARKS.get(number, "").startswith("No test: "):
        assert not about, f"H{number:02} has a test after all: {about[0].name}"
        return
    assert any(test.text for test in about), f"no test of H{number:02} describes our behaviour"
    assert any(test.faulty for test in about), f"no test of H{number:02} describes the fault that it catches"
