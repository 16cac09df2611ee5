"""Text that others wrote, made fit for people, terminals and logs: one line that moves no cursor and has an end."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping, Sequence

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What controls a terminal, breaks a line, has text read in another order than written, or is half a character."""

PACKAGE_LOG = logging.getLogger("pyrocket_consumer")
"""The log above those of all parts of the package: its level holds for each that has none of its own."""

MAX_LINE_CHARS = 4000
_MAX_TRACE_CHARS = 16_000
_MAX_ERROR_CHARS = 2000
_TRACE_PREFIX = "  | "
"""Before each line of a traceback: no record begins like this, whatever an error says."""

_MAX_NAME_CHARS = 127


def escape_controls(text: str) -> str:
    r"""Return `text` as one line that can be shown: what a terminal would obey is an escape, like \x1b or \n."""
    return _CONTROLS.sub(_escape, text) if _CONTROLS.search(text) else text


def truncate(text: str, limit: int) -> str:
    """Return the first `limit` characters of `text`, and how many are left out."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"


def safe_repr(value: object, limit: int = 80) -> str:
    """Return how a user's value shows itself, fit and cut; some cannot be shown, as numbers of thousands of digits."""
    try:
        return escape_controls(truncate(repr(value), limit))
    except BaseException:  # SystemExit of a user's must end nothing of ours
        return escape_controls(f"<{truncate(type(value).__name__, limit)}, whose repr raises>")


def safe_repr_unless_secret(value: object) -> str:
    """Return the same, but the type alone of what may have a password in it: addresses, settings, engines."""
    if isinstance(value, (str, bytes, Mapping)) or type(value).__module__.partition(".")[0] == "sqlalchemy":
        return f"<{type(value).__name__}, not shown: it may have a password>"
    return safe_repr(value)


def join_truncated(names: Sequence[str], limit: int = 20) -> str:
    """Return the first `limit` of `names`, each cut where no name goes on, and how many there are besides."""
    joined = ", ".join(truncate(name, _MAX_NAME_CHARS) for name in names[:limit]) or "none"
    return f"{joined} and {len(names) - limit} more" if len(names) > limit else joined


def escape_json_controls(text: str) -> str:
    r"""Return JSON whose strings hold nothing a terminal would obey: JSON's own escapes leave out DEL and all above."""
    return _CONTROLS.sub(lambda found: "\n" if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def logger(part: str) -> logging.Logger:
    """Return the log of a part of the package: each of its records is one line, whatever is told in it.

    A traceback has more, and each shows that it is one's. Handlers have it as text; the error stays for those that
    report errors by themselves.
    """
    found = PACKAGE_LOG.getChild(part)
    found.addFilter(_make_one_line)
    return found


def _make_one_line(record: logging.LogRecord) -> bool:
    try:
        message = record.getMessage()
    except (Exception, SystemExit) as error:  # of a user's value; Ctrl-C is for whoever runs us
        message = f"{record.msg} (what goes into it cannot be shown: {type(error).__name__})"
        record.msg, record.args = message, None
    if len(message) > MAX_LINE_CHARS or _CONTROLS.search(message):
        record.msg, record.args = escape_controls(truncate(message, MAX_LINE_CHARS)), None
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = _format_traceback(record.exc_info[1])
    return True


def _format_traceback(error: BaseException) -> str:
    """Return the traceback of an error as text that is fit: of what errors say the beginning, and no end of it all."""
    try:
        parts = traceback.format_exception(error)
    except (Exception, SystemExit) as failure:
        parts = [f"{type(error).__name__}, which cannot be shown: {type(failure).__name__}"]
    text = "\n".join(truncate(part.removesuffix("\n"), _MAX_ERROR_CHARS) for part in parts)
    if (left_out := len(text) - _MAX_TRACE_CHARS) > 0:
        half = _MAX_TRACE_CHARS // 2
        text = f"{text[:half]}\n… ({left_out} more characters)\n{text[-half:]}"
    return "\n".join(f"{_TRACE_PREFIX}{escape_controls(line)}" for line in text.split("\n"))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
