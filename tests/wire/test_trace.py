from __future__ import annotations

from pyrocket_consumer.wire.trace import SUCCESS, TracedMessage, encode_sub_after, encode_sub_before

MESSAGES = [TracedMessage("0A000009126718B4AAC200000000002A", "k1 k2"), TracedMessage("ID2")]
REQUEST_ID = "0A000009126718B4AAC2000000000001"


def seen(text: str) -> str:
    return text.replace("\x01", "⟨01⟩").replace("\x02", "⟨02⟩")


def test_the_worked_example_of_a_beginning():
    text = encode_sub_before(
        MESSAGES, request_id=REQUEST_ID, group="GID_demo", region="DefaultRegion", timestamp_ms=1700000000000
    )
    assert seen(text) == (
        "SubBefore⟨01⟩1700000000000⟨01⟩DefaultRegion⟨01⟩GID_demo⟨01⟩0A000009126718B4AAC2000000000001⟨01⟩"
        "0A000009126718B4AAC200000000002A⟨01⟩0⟨01⟩k1 k2⟨02⟩SubBefore⟨01⟩1700000000000⟨01⟩DefaultRegion⟨01⟩GID_demo"
        "⟨01⟩0A000009126718B4AAC2000000000001⟨01⟩ID2⟨01⟩0⟨01⟩null⟨02⟩"
    )


def test_the_worked_example_of_an_end():
    text = encode_sub_after(
        MESSAGES, request_id=REQUEST_ID, group="GID_demo", elapsed_ms=15, success=True, context_code=SUCCESS,
        timestamp_ms=1700000000007,
    )
    assert seen(text) == (
        "SubAfter⟨01⟩0A000009126718B4AAC2000000000001⟨01⟩0A000009126718B4AAC200000000002A⟨01⟩7⟨01⟩true⟨01⟩k1 k2⟨01⟩0"
        "⟨01⟩1700000000007⟨01⟩GID_demo⟨02⟩SubAfter⟨01⟩0A000009126718B4AAC2000000000001⟨01⟩ID2⟨01⟩7⟨01⟩true⟨01⟩null⟨01⟩0"
        "⟨01⟩1700000000007⟨01⟩GID_demo⟨02⟩"
    )
