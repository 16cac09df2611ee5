"""Numbers of the protocol and their names: requests, responses, languages, versions, flags."""

from __future__ import annotations

from enum import IntEnum


class RequestCode(IntEnum):
    """The kind of a request. Source: RequestCode."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    CHECK_CLIENT_CONFIG = 46
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    QUERY_CONSUME_TIME_SPAN = 303
    GET_CONSUMER_RUNNING_INFO = 307
    QUERY_CORRECTION_OFFSET = 308
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    CLONE_GROUP_OFFSET = 314
    SEND_BATCH_MESSAGE = 320
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    LITE_PULL_MESSAGE = 361
    QUERY_ASSIGNMENT = 400
    AUTH_CREATE_USER = 3001
    AUTH_CREATE_ACL = 3006
    AUTH_UPDATE_ACL = 3007


class ResponseCode(IntEnum):
    """The result in a response. Source: RemotingSysResponseCode, ResponseCode."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    TRANSACTION_SHOULD_COMMIT = 200
    TRANSACTION_SHOULD_ROLLBACK = 201
    TRANSACTION_STATE_UNKNOW = 202
    TRANSACTION_STATE_GROUP_WRONG = 203
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    POLLING_FULL = 209
    POLLING_TIMEOUT = 210
    BROKER_NOT_EXIST = 211
    BROKER_DISPATCH_NOT_COMPLETE = 212
    BROADCAST_CONSUMPTION = 213
    FLOW_CONTROL = 215
    NOT_LEADER_FOR_QUEUE = 501
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500
    USER_NOT_EXIST = 3001
    POLICY_NOT_EXIST = 3002


class LanguageCode(IntEnum):
    """The programming language of a frame's sender. Source: LanguageCode."""

    JAVA = 0
    CPP = 1
    DOTNET = 2
    PYTHON = 3
    DELPHI = 4
    ERLANG = 5
    RUBY = 6
    OTHER = 7
    HTTP = 8
    GO = 9
    PHP = 10
    OMS = 11
    RUST = 12
    NODE_JS = 13


LANGUAGE_NAMES: dict[int, str] = {language.value: language.name for language in LanguageCode}

CLIENT_VERSION = 401
"""The version that clients send: 4.9.4. From it on, name servers send standard JSON; no server sends GO_AWAY to it."""

_V4_0_0 = (
    213  # from here on each release has two numbers (snapshot, release); a minor has ten patches. Source: MQVersion
)
_HIGHER_VERSION = 612


def version_ordinal(major: int, minor: int, patch: int) -> int:
    """Return the number of a release from 4.0.0 to 5.9.9 in frames.

    Raises:
        ValueError: no such release has a number.
    """
    if major not in (4, 5) or not 0 <= minor <= 9 or not 0 <= patch <= 9:
        raise ValueError(f"version {major}.{minor}.{patch} has no ordinal; 4.0.0 to 5.9.9 have one")
    return _V4_0_0 + 20 * (10 * (major - 4) + minor) + 2 * patch


def version_name(ordinal: int) -> str:
    """Return the Java name of a version number: 513 -> "V5_5_0". Releases before 4.0 have names with the number."""
    if ordinal >= _HIGHER_VERSION:
        return "HIGHER_VERSION"
    if ordinal < _V4_0_0 - 1:
        return f"VERSION_{ordinal}"
    pair = (ordinal - _V4_0_0 + 1) // 2
    name = f"V{4 + pair // 100}_{pair // 10 % 10}_{pair % 10}"
    return name if ordinal % 2 else f"{name}_SNAPSHOT"


_REQUEST_NAMES = {code.value: code.name for code in RequestCode}
_RESPONSE_NAMES = {code.value: code.name for code in ResponseCode}


def request_name(code: int) -> str:
    """Return the name of a request code, "CODE_12345" for an unknown one."""
    return _REQUEST_NAMES.get(code) or f"CODE_{code}"


def response_name(code: int) -> str:
    """Return the name of a response code, "CODE_12345" for an unknown one."""
    return _RESPONSE_NAMES.get(code) or f"CODE_{code}"


class SysFlag:
    """Bits of a stored message's sysFlag. Plain ints are fast to test for each message. Source: MessageSysFlag."""

    COMPRESSED = 0x1
    MULTI_TAGS = 0x2
    TRANSACTION_PREPARED = 0x4
    TRANSACTION_COMMIT = 0x8
    TRANSACTION_ROLLBACK = 0xC
    BORN_HOST_V6 = 0x10
    STORE_HOST_V6 = 0x20
    NEED_UNWRAP = 0x40
    INNER_BATCH = 0x80
    COMPRESSION_LZ4 = 0x100
    COMPRESSION_ZSTD = 0x200
    COMPRESSION_ZLIB = 0x300
    TRANSACTION_MASK = 0xC
    COMPRESSION_MASK = 0x700


class PullFlag:
    """Bits of a pull's sysFlag. Source: PullSysFlag."""

    COMMIT = 1
    SUSPEND = 2
    SUBSCRIPTION = 4
    CLASS_FILTER = 8
    LITE = 16
