from __future__ import annotations

import pytest

from pyrocket_consumer.protocol import codes
from tests.for_each import for_each

RELEASES = [
    ((4, 0, 0), 213),
    ((4, 1, 0), 233),
    ((4, 2, 0), 253),
    ((4, 4, 0), 293),
    ((4, 5, 0), 313),
    ((4, 6, 0), 333),
    ((4, 9, 0), 393),
    ((4, 9, 3), 399),
    ((4, 9, 4), 401),
    ((4, 9, 7), 407),
    ((4, 9, 8), 409),
    ((5, 0, 0), 413),
    ((5, 1, 0), 433),
    ((5, 1, 4), 441),
    ((5, 2, 0), 453),
    ((5, 3, 3), 479),
    ((5, 4, 0), 493),
    ((5, 5, 0), 513),
]


@for_each("release, ordinal", RELEASES)
def test_a_release_has_a_number_and_a_name(release, ordinal):
    assert codes.version_ordinal(*release) == ordinal
    assert codes.version_name(ordinal) == "V{}_{}_{}".format(*release)


@for_each(
    "ordinal, name", [(232, "V4_1_0_SNAPSHOT"), (212, "V4_0_0_SNAPSHOT"), (121, "VERSION_121"), (612, "HIGHER_VERSION")]
)
def test_other_version_numbers_have_a_name_too(ordinal, name):
    assert codes.version_name(ordinal) == name


@for_each("release", [(3, 2, 6), (6, 0, 0), (5, 10, 0), (5, 0, 10)])
def test_a_release_outside_the_list_has_no_number(release):
    with pytest.raises(ValueError, match="has no ordinal"):
        codes.version_ordinal(*release)


def test_codes_have_names_known_or_not():
    assert (codes.request_name(11), codes.request_name(200050)) == ("PULL_MESSAGE", "CODE_200050")
    assert (codes.response_name(22), codes.response_name(-1006)) == ("QUERY_NOT_FOUND", "CODE_-1006")
    assert codes.LANGUAGE_NAMES[codes.LanguageCode.PYTHON] == "PYTHON"
    assert codes.version_ordinal(4, 9, 4) == codes.CLIENT_VERSION, "it gets standard JSON and no GO_AWAY"
