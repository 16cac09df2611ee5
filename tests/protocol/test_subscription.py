from __future__ import annotations

import pytest

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.model import Subscription
from pyrocket_consumer.protocol.subscription import java_string_hash, matches, parse_subscription, tag_hash
from tests.for_each import for_each


@for_each(
    "expression, tags",
    [
        ("TagA", {"TagA"}),
        ("TagA||TagB", {"TagA", "TagB"}),
        (" TagA || || TagB ||", {"TagA", "TagB"}),
        ("\tTagA\n||\x1fTagA ", {"TagA"}),
        ("\u3000TagA", {"\u3000TagA"}),  # Java trims ASCII blanks only
        ("*||TagA", {"*", "TagA"}),
        ("Tag|A ||", {"Tag|A"}),  # the final "||" confirms a tag that looks like a mistake
        ("price > 5||", {"price > 5"}),
        ("a,b", {"a,b"}),
        ("a=1", {"a=1"}),
        ("bed and breakfast", {"bed and breakfast"}),
        ("R&D", {"R&D"}),
        ("a-->b", {"a-->b"}),
        ("标签 || 😀", {"标签", "😀"}),
    ],
)
def test_an_expression_names_tags_and_is_kept_as_it_is(expression, tags):
    assert parse_subscription("T", expression, 5) == Subscription("T", expression, frozenset(tags), "TAG", 5)


@for_each(
    "expression, meant",
    [
        ("paid | refunded", "'paid || refunded'"),
        ("paid|refunded", "'paid || refunded'"),
        ("paid, refunded", "'paid || refunded'"),
        ("paid; refunded", "'paid || refunded'"),
        ("paid OR refunded", "'paid || refunded'"),
        ("paid | refunded | open", "'paid || refunded || open'"),
        ("new || paid | refunded", "'new || paid || refunded'"),
        ("price > 5", "sql"),
        ("price >= 5 || paid", "sql"),
        ("region = 'eu'", "sql"),
        ("region='eu'", "sql"),
        ("TAGS IS NOT NULL", "sql"),
        ("price between 5 and 9", "sql"),
        ("region IN ('eu', 'us')", "sql"),
        ("a AND b", "sql"),
        ("paid && open", "sql"),
    ],
)
def test_an_expression_that_selects_nothing_is_refused_with_a_remedy(expression, meant):
    with pytest.raises(ConfigError) as raised:
        parse_subscription("T", expression)
    assert repr(expression) in str(raised.value)
    assert meant in str(raised.value).lower()
    assert f"end it with '||': '{expression} ||'" in str(raised.value).replace('"', "'")


def test_a_message_passes_by_its_own_tag_only():
    subscription = parse_subscription("T", "AaAa || TagB")
    assert tag_hash("AaAa") == tag_hash("BBBB")  # a broker lets both pass
    passing = {tag: matches(subscription, tag) for tag in ("AaAa", "TagB", "BBBB", None, "")}
    assert passing == {"AaAa": True, "TagB": True, "BBBB": False, None: False, "": False}
    assert matches(Subscription("T", "a > 1", expression_type="SQL92"), "any"), "SQL is left to the broker"
    assert not matches(Subscription("T", " || "), "TagA")


def test_empty_and_star_select_all_and_no_tag_is_refused():
    for expression in (None, "", "*"):
        subscription = parse_subscription("T", expression)
        assert subscription == Subscription("T", "*")
        assert matches(subscription, None) and matches(subscription, "any")
    for expression in ("||", " || ", "||||", " "):
        with pytest.raises(ConfigError, match="names no tag; use '\\*'"):
            parse_subscription("T", expression)


@for_each("expression", ["a\udcff", "\ud83d", "a || \ude00"])
def test_an_expression_that_no_request_can_have_is_refused(expression):
    with pytest.raises(ConfigError, match=r"has an unpaired surrogate at position \d.*; remove it") as raised:
        parse_subscription("T", expression)
    assert ascii(expression) in str(raised.value)


@for_each(
    "text, number",
    [
        ("", 0),
        ("a", 97),
        ("TagA", 2598919),
        ("TagB", 2598920),
        ("TAG_LONG_ENOUGH_TO_OVERFLOW", -1945996843),
        ("中文", 646394),
        ("😀", 1772899),
    ],
)
def test_texts_hash_as_in_java(text, number):
    assert java_string_hash(text) == number
    assert tag_hash(text) == number
