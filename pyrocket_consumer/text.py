"""Text that others wrote, made fit for people, terminals and logs: one line that moves no cursor and has an end."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What controls a terminal, breaks a line, has text read in another order than written, or is half a character."""

PACKAGE_LOG = logging.getLogger("pyrocket_consumer")
"""The log above those of all parts of the package: its level holds for each that has none of its own."""

MOST_OF_A_LINE = 4000
_MOST_OF_A_NAME = 127


def printable(text: str) -> str:
    r"""Return `text` as one line that can be shown: what a terminal would obey is an escape, like \x1b or \n."""
    return _UNFIT.sub(_escaped, text) if _UNFIT.search(text) else text


def cut(text: str, most: int) -> str:
    """Return the first `most` characters of `text`, and how many are left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def shown(value: object, most: int = 80) -> str:
    """Return how a user's value shows itself, cut; some cannot be shown, as whole numbers of thousands of digits."""
    try:
        return f"{value!r:.{most}}"
    except Exception:
        return f"<{type(value).__name__}, whose repr raises>"


def shown_unless_secret(value: object) -> str:
    """Return the same, but the type alone of what may have a password in it: addresses, settings, engines."""
    if isinstance(value, (str, bytes, Mapping)) or type(value).__module__.partition(".")[0] == "sqlalchemy":
        return f"<{type(value).__name__}, not shown: it may have a password>"
    return shown(value)


def some_of(names: Sequence[str], most: int = 20) -> str:
    """Return the first `most` of `names`, each cut where no name goes on, and how many there are besides."""
    shown = ", ".join(cut(name, _MOST_OF_A_NAME) for name in names[:most]) or "none"
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def as_json_strings(text: str) -> str:
    r"""Return JSON whose strings hold nothing a terminal would obey: JSON's own escapes leave out DEL and all above."""
    return _UNFIT.sub(lambda found: "\n" if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def logger(part: str) -> logging.Logger:
    """Return the log of a part of the package: each of its records is one line, whatever is told in it."""
    found = PACKAGE_LOG.getChild(part)
    found.addFilter(_one_line)
    return found


def _one_line(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if len(message) > MOST_OF_A_LINE or _UNFIT.search(message):
        record.msg, record.args = printable(cut(message, MOST_OF_A_LINE)), None
    return True


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
