"""Settings of brokers that require signed requests. ACL 1.0 (4.9) uses a file, ACL 2.0 (5.3 and later) does not.

Both have the same users. Ordinary users have rights on `TOPIC` and `GROUP` only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pyrocket_consumer.protocol.codes import RequestCode
from tests.real_brokers.remoting import Peer

ACCOUNT = ("rocketmq", "12345678")
"""The account with all rights."""

TOPIC, GROUP = "accounts-topic", "accounts-group"


@dataclass(frozen=True, slots=True)
class User:
    """An account and its rights. ACL 1.0 has PUB and SUB only."""

    name: str
    topic: tuple[str, ...] = ()
    group: tuple[str, ...] = ()

    @property
    def rights(self) -> str:
        """The account's rights as a text for people."""
        topic, group = " ".join(self.topic), " ".join(self.group)
        if topic == group:
            return f"{topic} on both" if topic else "no rights"
        return f"{topic} on the topic"

    @property
    def account(self) -> tuple[str, str]:
        return self.name, ACCOUNT[1]


USERS = (
    User("nothing"),
    User("publisher", topic=("PUB",)),
    User("subscriber", topic=("SUB",)),
    User("consumer", topic=("SUB",), group=("SUB",)),
    User("pushconsumer", topic=("SUB", "GET"), group=("SUB", "GET")),
)

ACL_2 = {
    "authenticationEnabled": True,
    "authenticationProvider": "org.apache.rocketmq.auth.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": (
        "org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider"
    ),
    "initAuthenticationUser": '{"username":"rocketmq","password":"12345678"}',
    "innerClientAuthenticationCredentials": '{"accessKey":"rocketmq","secretKey":"12345678"}',
    "authorizationEnabled": True,
    "authorizationProvider": "org.apache.rocketmq.auth.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": (
        "org.apache.rocketmq.auth.authorization.provider.LocalAuthorizationMetadataProvider"
    ),
}


def _plain_acl() -> str:
    """Return the file of ACL 1.0, which is YAML."""
    lines = ["accounts:", f"- accessKey: {ACCOUNT[0]}", f"  secretKey: {ACCOUNT[1]}", "  admin: true"]
    for user in USERS:
        lines += [f"- accessKey: {user.name}", f"  secretKey: {user.account[1]}", "  admin: false"]
        lines += ["  defaultTopicPerm: DENY", "  defaultGroupPerm: DENY"]
        for kind, name, rights in (("topic", TOPIC, user.topic), ("group", GROUP, user.group)):
            known = [right for right in rights if right in ("PUB", "SUB")]
            if known:
                lines += [f"  {kind}Perms:", f"  - {name}={'|'.join(known)}"]
    return "\n".join(lines) + "\n"


ACL_1 = {"conf/plain_acl.yml": _plain_acl()}


def create_users(broker: Peer) -> None:
    """Create the users at a broker with ACL 2.0. ACL 1.0 reads them from its file."""
    for user in USERS:
        made: Mapping[str, str] = {"username": user.name, "password": user.account[1], "userType": "Normal"}
        broker.call(RequestCode.AUTH_CREATE_USER, {"username": user.name}, json.dumps(made).encode())
        entries = [
            {"resource": resource, "actions": list(rights), "decision": "ALLOW"}
            for resource, rights in ((f"Topic:{TOPIC}", user.topic), (f"Group:{GROUP}", user.group))
            if rights
        ]
        if entries:
            subject = f"User:{user.name}"
            rules = {"subject": subject, "policies": [{"policyType": "CUSTOM", "entries": entries}]}
            broker.call(RequestCode.AUTH_CREATE_ACL, {"subject": subject}, json.dumps(rules).encode())
