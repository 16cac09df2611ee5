"""Accounts: which signed requests a broker accepts. Source: PlainAccessValidator, DefaultAuthenticationHandler."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from pyrocket_consumer.protocol.acl import ACCESS_KEY, SIGNATURE, signature
from pyrocket_consumer.protocol.frame import RemotingCommand
from pyrocket_consumer.testing.broker_state import Refused
from pyrocket_consumer.testing.release import Release

_UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
_SIGNS_WITHOUT_UNTIL = 399


class Accounts:
    """Secret keys by access key. The broker checks the signature only; every account may do everything."""

    def __init__(self, secret_keys: Mapping[str, str]) -> None:
        self._secret_keys = dict(secret_keys)

    def check(self, command: RemotingCommand, release: Release) -> None:
        """Refuse a request without the signature of a known account."""
        access_key = command.fields.get(ACCESS_KEY)
        old = release.number < (5, 3, 3)
        if access_key is None:
            raise Refused(
                release.refused_by_acl, _acl_1("No accessKey is configured") if old else "username cannot be null."
            )
        secret_key = self._secret_keys.get(access_key)
        if secret_key is None:
            raise Refused(
                release.refused_by_acl,
                _acl_1(f"No acl config for {access_key}") if old else f"User:{access_key} is not found.",
            )
        signed = command.fields
        if not release.is_v5 or old and command.version <= _SIGNS_WITHOUT_UNTIL:
            signed = {name: value for name, value in signed.items() if name != _UNIQUE_KEY_QUERY}
        expected = signature(signed, command.body, secret_key)
        if not hmac.compare_digest(expected, command.fields.get(SIGNATURE, "")):
            raise Refused(
                release.refused_by_acl,
                _acl_1(f"Check signature failed for accessKey={access_key}") if old else "check signature failed.",
            )


def _acl_1(text: str) -> str:
    return f"org.apache.rocketmq.acl.common.AclException: {text}, null"
