"""The text of offsets.json as Java clients write and read it: JSON, except that the keys of a map are objects.

A second table has the epochs of resets. Java clients ignore it, and drop it when they write the file. It is in the
same file so that an offset and its epoch are always equally old.

Source: LocalFileOffsetStore, OffsetSerializeWrapper; fastjson 1 (clients up to 5.3) and fastjson 2 (from 5.4).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from sys import intern

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.offsets.base import MAX_NAME_BYTES, MAX_OFFSET, MAX_QUEUE_ID
from pyrocket_consumer.protocol.fastjson import loads

MAIN_FILE = "offsets.json"
BACKUP_FILE = "offsets.json.bak"

_EPOCHS = "resetEpochs"
_CHUNK_ENTRIES = 256

# One entry as Java clients and this package write it, with any white space. Its strings hold no quote and no backslash,
# so no entry can begin inside a name. So findall() finds exactly the entries that the whole pattern has matched.
_TEXT = r'"([^"\\\x00-\x1f]*+)"'
_ENTRY = (
    rf'\{{\s*"brokerName"\s*:\s*{_TEXT}\s*,\s*"queueId"\s*:\s*(-?\d{{1,10}})\s*,\s*"topic"\s*:\s*{_TEXT}\s*\}}'
    r"\s*:\s*(-?\d{1,19})"
)
_ENTRIES = re.compile(_ENTRY)
_UNCAPTURED = re.sub(r"\((?!\?)", "(?:", _ENTRY)
_DOCUMENT = re.compile(
    rf'\s*+\{{\s*+"offsetTable"\s*+:\s*+\{{\s*+(?:(?>{_UNCAPTURED})(?:\s*+,\s*+(?>{_UNCAPTURED}))*+)?\s*+\}}\s*+'
    rf'(?:,\s*+"{_EPOCHS}"\s*+:\s*+(\{{[\s\S]*\}})\s*+)?\}}\s*+'
)


def entry_template(topic: str, broker_name: str) -> bytes:
    """Return the text of an entry, with `%d` for the queue id and the offset."""
    topic, broker_name = (json.dumps(name).replace("%", "%%") for name in (topic, broker_name))
    text = f'{{\n\t\t\t"brokerName":{broker_name},\n\t\t\t"queueId":%d,\n\t\t\t"topic":{topic}\n\t\t}}:%d'
    return text.encode("ascii")


def fill_templates(
    templates: Sequence[bytes], queue_ids: Sequence[int], offsets: Sequence[int], epochs: bytes
) -> bytes:
    """Return the whole text from one template, queue id and offset per entry, and the result of `encode_epochs`.

    It is the text that a Java client with fastjson 1 would write; every Java client reads it.
    """
    begin, end = b'{\n\t"offsetTable":{', b"}" + epochs + b"\n}"
    if not offsets:
        return begin + end
    numbers = [0] * (2 * len(offsets))
    numbers[::2], numbers[1::2] = queue_ids, offsets
    # In chunks, joined once, because each copy of a large text costs as much as filling it in.
    pieces = [
        b",".join(templates[at : at + _CHUNK_ENTRIES]) % tuple(numbers[2 * at : 2 * (at + _CHUNK_ENTRIES)])
        for at in range(0, len(offsets), _CHUNK_ENTRIES)
    ]
    pieces[0] = begin + pieces[0]
    pieces[-1] += b"\n\t" + end
    return b",".join(pieces)


def encode_epochs(epochs: Mapping[MessageQueue, int]) -> bytes:
    """Return the second table as it follows the first one; empty if no queue was reset."""
    if not epochs:
        return b""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for queue, epoch in sorted(epochs.items()):
        table.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = epoch
    return f',\n\t"{_EPOCHS}":{json.dumps(table)}'.encode("ascii")


def decode_checkpoint(text: bytes) -> tuple[dict[MessageQueue, int], dict[MessageQueue, int]]:
    """Return the offsets in an offsets.json that any client wrote, and the epochs of resets.

    This reads both Java layouts, compact text, keys in quotes (Go), any order and white space, and a byte order mark.
    It accepts unknown fields, and a key without brokerName (""). It skips negative offsets, which mean "none".

    Raises:
        ProtocolError: the text is cut short or empty, has trailing text, or is in another format. Such a text never
            counts as one without offsets.
    """
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"offsets.json is not UTF-8 at byte {error.start}") from None
    found, epochs = _read_usual_layout(decoded) or _read_any_layout(decoded)
    if not found:
        return found, epochs
    queue_ids = {queue.queue_id for queue in found}
    if max(found.values()) > MAX_OFFSET or max(queue_ids) > MAX_QUEUE_ID or min(queue_ids) < -1:
        raise ProtocolError("offsets.json has an offset or a queue id that is out of range")
    names = {queue.topic for queue in found} | {queue.broker_name for queue in found}
    if any(len(name.encode()) > MAX_NAME_BYTES for name in names):
        raise ProtocolError(f"offsets.json has a name of more than {MAX_NAME_BYTES} bytes")
    if min(found.values()) < 0:
        found = {queue: offset for queue, offset in found.items() if offset >= 0}
    return found, epochs


def _read_usual_layout(text: str) -> tuple[dict[MessageQueue, int], dict[MessageQueue, int]] | None:
    """Read the text of a Java client or of this package; return None for any other text."""
    document = _DOCUMENT.fullmatch(text)
    if document is None:
        return None
    try:
        epochs = None if document[1] is None else json.loads(document[1])
    except (ValueError, RecursionError):
        return None
    end = len(text) if document[1] is None else document.start(1)
    offsets = {
        MessageQueue(intern(topic), intern(broker_name), int(queue_id)): int(offset)
        for broker_name, queue_id, topic, offset in _ENTRIES.findall(text, 0, end)
    }
    return offsets, _read_epochs(epochs)


def _read_any_layout(text: str) -> tuple[dict[MessageQueue, int], dict[MessageQueue, int]]:
    document = loads(text)
    table = document.get("offsetTable") if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise ProtocolError("offsets.json has no offsetTable")
    offsets = {_queue(key): _whole_number(offset, key) for key, offset in table.items()}
    return offsets, _read_epochs(document.get(_EPOCHS))


def _read_epochs(table: object) -> dict[MessageQueue, int]:
    """Read the table of epochs. Ignore invalid entries, because another program may use the same name."""
    epochs = {}
    try:
        for topic, brokers in table.items() if isinstance(table, dict) else ():
            for broker_name, queues in brokers.items():
                for queue_id, epoch in queues.items():
                    queue = MessageQueue(str(topic), str(broker_name), int(queue_id))
                    if type(epoch) is int and 0 < epoch <= MAX_OFFSET and 0 <= queue.queue_id <= MAX_QUEUE_ID:
                        epochs[queue] = epoch
    except (AttributeError, ValueError):
        pass
    return epochs


def _queue(key: object) -> MessageQueue:
    fields = loads(key) if isinstance(key, str) else key  # the Go client writes the object in quotes
    if isinstance(fields, Mapping):
        topic, broker_name = fields.get("topic"), fields.get("brokerName", "")
        if isinstance(topic, str) and isinstance(broker_name, str):
            return MessageQueue(topic, broker_name, _whole_number(fields.get("queueId"), key))
    raise ProtocolError(f"offsets.json has the key {key!r:.200}, which is not a queue")


def _whole_number(value: object, key: object) -> int:
    if type(value) is not int:
        raise ProtocolError(f"offsets.json has {value!r:.80} at {key!r:.200}, which is not a whole number")
    return value
