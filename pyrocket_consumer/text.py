"""Make text from servers and users safe for terminals and logs: one line of bounded length, no control characters."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping, Sequence

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, break a line or change the direction of text, and unpaired surrogates."""

PACKAGE_LOG = logging.getLogger("pyrocket_consumer")
"""The parent of the loggers of all parts. Its level applies to each of them that has no level itself."""

MAX_LINE_CHARS = 4000
_MAX_TRACE_CHARS = 16_000
_MAX_ERROR_CHARS = 2000
_TRACE_PREFIX = "  | "
"""The start of each line of a traceback. No other record starts like this, so an error's text cannot forge a record."""

_MAX_NAME_CHARS = 127


def escape_controls(text: str) -> str:
    r"""Return `text` as one line. Characters that a terminal would obey become escapes such as \x1b or \n."""
    return _CONTROLS.sub(_escape, text) if _CONTROLS.search(text) else text


def truncate(text: str, limit: int) -> str:
    """Return the first `limit` characters of `text`, with the number of omitted ones."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"


def safe_repr(value: object, limit: int = 80) -> str:
    """Return the repr of a user's value as one short line. Some reprs raise, for example that of a huge number."""
    try:
        return escape_controls(truncate(repr(value), limit))
    except BaseException:  # also SystemExit, because code of users must not end the thread that formats it
        return escape_controls(f"<{truncate(type(value).__name__, limit)}, whose repr raises>")


def safe_repr_unless_secret(value: object) -> str:
    """Return `safe_repr`, or only the type of a value that may contain a password: address, settings, engine."""
    if isinstance(value, (str, bytes, Mapping)) or type(value).__module__.partition(".")[0] == "sqlalchemy":
        return f"<{type(value).__name__}, not shown: it may have a password>"
    return safe_repr(value)


def join_truncated(names: Sequence[str], limit: int = 20) -> str:
    """Return the first `limit` of `names`, joined by commas, and the number of the others. Overlong names are cut."""
    joined = ", ".join(truncate(name, _MAX_NAME_CHARS) for name in names[:limit]) or "none"
    return f"{joined} and {len(names) - limit} more" if len(names) > limit else joined


def escape_json_controls(text: str) -> str:
    r"""Return JSON without characters that a terminal would obey. JSON does not escape DEL and those above it."""
    return _CONTROLS.sub(lambda found: "\n" if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def logger(part: str) -> logging.Logger:
    """Return the logger of a part of the package. Each of its records is one line, whatever text it quotes.

    A traceback has several lines, and each of them has a prefix. Handlers get the traceback as text. The record keeps
    the exception for handlers that report errors themselves.
    """
    found = PACKAGE_LOG.getChild(part)
    found.addFilter(_make_one_line)
    return found


def _make_one_line(record: logging.LogRecord) -> bool:
    try:
        message = record.getMessage()
    except (Exception, SystemExit) as error:  # raised by a user's value; KeyboardInterrupt must pass
        message = f"{record.msg} (its arguments cannot be formatted: {type(error).__name__})"
        record.msg, record.args = message, None
    if len(message) > MAX_LINE_CHARS or _CONTROLS.search(message):
        record.msg, record.args = escape_controls(truncate(message, MAX_LINE_CHARS)), None
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = _format_traceback(record.exc_info[1])
    return True


def _format_traceback(error: BaseException) -> str:
    """Return the traceback of an error as lines with a prefix. Long error texts and long tracebacks are shortened."""
    try:
        parts = traceback.format_exception(error)
    except (Exception, SystemExit) as failure:
        parts = [f"{type(error).__name__}, which cannot be formatted: {type(failure).__name__}"]
    text = "\n".join(truncate(part.removesuffix("\n"), _MAX_ERROR_CHARS) for part in parts)
    if (omitted := len(text) - _MAX_TRACE_CHARS) > 0:
        half = _MAX_TRACE_CHARS // 2
        text = f"{text[:half]}\n… ({omitted} more characters)\n{text[-half:]}"
    return "\n".join(f"{_TRACE_PREFIX}{escape_controls(line)}" for line in text.split("\n"))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
