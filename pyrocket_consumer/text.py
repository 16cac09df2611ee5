"""Text that others wrote, made fit for people, terminals and logs: one line that moves no cursor and has an end."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping, Sequence

_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What controls a terminal, breaks a line, has text read in another order than written, or is half a character."""

PACKAGE_LOG = logging.getLogger("pyrocket_consumer")
"""The log above those of all parts of the package: its level holds for each that has none of its own."""

MOST_OF_A_LINE = 4000
_MOST_OF_A_TRACE = 16_000
_MOST_OF_AN_ERROR = 2000
_OF_A_TRACE = "  | "
"""Before each line of a traceback: no record begins like this, whatever an error says."""

_MOST_OF_A_NAME = 127


def printable(text: str) -> str:
    r"""Return `text` as one line that can be shown: what a terminal would obey is an escape, like \x1b or \n."""
    return _UNFIT.sub(_escaped, text) if _UNFIT.search(text) else text


def cut(text: str, most: int) -> str:
    """Return the first `most` characters of `text`, and how many are left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def shown(value: object, most: int = 80) -> str:
    """Return how a user's value shows itself, fit and cut; some cannot be shown, as numbers of thousands of digits."""
    try:
        return printable(cut(repr(value), most))
    except BaseException:  # SystemExit of a user's must end nothing of ours
        return printable(f"<{cut(type(value).__name__, most)}, whose repr raises>")


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
    """Return the log of a part of the package: each of its records is one line, whatever is told in it.

    A traceback has more, and each shows that it is one's. Handlers have it as text; the error stays for those that
    report errors by themselves.
    """
    found = PACKAGE_LOG.getChild(part)
    found.addFilter(_fit)
    return found


def _fit(record: logging.LogRecord) -> bool:
    try:
        message = record.getMessage()
    except (Exception, SystemExit) as error:  # of a user's value; Ctrl-C is for whoever runs us
        message = f"{record.msg} (what goes into it cannot be shown: {type(error).__name__})"
        record.msg, record.args = message, None
    if len(message) > MOST_OF_A_LINE or _UNFIT.search(message):
        record.msg, record.args = printable(cut(message, MOST_OF_A_LINE)), None
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = _traced(record.exc_info[1])
    return True


def _traced(error: BaseException) -> str:
    """Return the traceback of an error as text that is fit: of what errors say the beginning, and no end of it all."""
    try:
        parts = traceback.format_exception(error)
    except (Exception, SystemExit) as failure:
        parts = [f"{type(error).__name__}, which cannot be shown: {type(failure).__name__}"]
    text = "\n".join(cut(part.removesuffix("\n"), _MOST_OF_AN_ERROR) for part in parts)
    if (left_out := len(text) - _MOST_OF_A_TRACE) > 0:
        half = _MOST_OF_A_TRACE // 2
        text = f"{text[:half]}\n… ({left_out} more characters)\n{text[-half:]}"
    return "\n".join(f"{_OF_A_TRACE}{printable(line)}" for line in text.split("\n"))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
