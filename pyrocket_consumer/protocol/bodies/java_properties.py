"""The text format of java.util.Properties, in which brokers send and accept settings."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pyrocket_consumer.errors import ProtocolError

_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_PROPERTY = re.compile(r"((?:[^\\=: \t\f]|\\.)*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)


def encode_java_properties(settings: Mapping[str, str]) -> bytes:
    """Return `key=value` lines that java.util.Properties can read."""
    lines = []
    for name, value in settings.items():
        escaped_value = _escape(value)
        if escaped_value.startswith(" "):
            escaped_value = "\\" + escaped_value
        lines.append(_escape(name, " :=#!") + "=" + escaped_value + "\n")
    return "".join(lines).encode()


def _escape(text: str, marked: str = "") -> str:
    text = text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
    text = text.replace("\f", "\\f")
    return "".join("\\" + each if each in marked else each for each in text) if marked else text


def decode_java_properties(body: bytes) -> dict[str, str]:
    r"""Return the settings in `key=value` lines: comments, `\` escapes and continued lines as in Java.

    Raises:
        ProtocolError: the text is not UTF-8.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"properties are not UTF-8: {error}") from error
    settings = {}
    lines = iter(re.split(r"\r\n|\r|\n", text))
    for line in lines:
        line = line.lstrip(" \t\f")
        if not line or line[0] in "#!":
            continue
        pieces = [line]
        while (
            len(pieces[-1]) - len(pieces[-1].rstrip("\\"))
        ) % 2:  # an odd number of backslashes at the end continues the line
            pieces[-1] = pieces[-1][:-1]
            pieces.append(next(lines, "").lstrip(" \t\f"))
        found = _PROPERTY.match("".join(pieces))
        assert found is not None  # it matches any text
        settings[_unescape(found[1])] = _unescape(found[2])
    return settings


def _unescape(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        code = found[1]
        return chr(int(code[1:], 16)) if len(code) == 5 else _ESCAPES.get(code, code)

    if "\\" not in text:
        return text
    joined = _ESCAPED.sub(plain, text)
    return joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # \uD83D\uDE00 is one character
