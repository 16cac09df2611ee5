"""Signing of requests. Source: AclClientRPCHook, AclUtils, AclSigner; the same for ACL 1.0 and 2.0."""

from __future__ import annotations

import base64
import hashlib
import hmac

ACCESS_KEY = "AccessKey"
SECURITY_TOKEN = "SecurityToken"  # noqa: S105  # the name of a field
SIGNATURE = "Signature"
SIGNED = frozenset({ACCESS_KEY, SECURITY_TOKEN, SIGNATURE})
"""The fields that signing adds. No text shows their values."""


def sign(
    fields: dict[str, str], body: bytes, access_key: str, secret_key: str, security_token: str | None = None
) -> dict[str, str]:
    """Return `fields` with the access key and the signature. Call this last before a request is encoded.

    A field that is added later invalidates the signature. With the binary header, no field may be empty.
    """
    signed = {name: value for name, value in fields.items() if name != SIGNATURE}
    signed[ACCESS_KEY] = access_key
    if security_token:
        signed[SECURITY_TOKEN] = security_token
    signed[SIGNATURE] = signature(signed, body, secret_key)
    return signed


def signature(fields: dict[str, str], body: bytes, secret_key: str) -> str:
    """Return the signature of a request: HMAC-SHA1 over the values, sorted by name, and the body."""
    text = "".join(fields[name] for name in sorted(fields, key=_utf16) if name != SIGNATURE).encode()
    return base64.b64encode(hmac.new(secret_key.encode(), text + body, hashlib.sha1).digest()).decode()


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be")  # Java sorts by UTF-16 units
