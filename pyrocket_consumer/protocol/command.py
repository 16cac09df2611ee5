"""The header fields of every request and response that a client uses, one frozen dataclass each.

Attributes are the Java field names in snake_case; `broker_name` is `bname` in frames. A field that older or newer peers
omit is `None` if it is absent. Source: the *RequestHeader and *ResponseHeader classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Self, dataclass_transform

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import ONEWAY_FLAG, RemotingCommand

_LONG_DIGITS = 20  # a Java long has at most 19 digits and a sign


class _Part(NamedTuple):
    """The encoding of one attribute."""

    attribute: str
    name: str  # the name of its field
    other_name: str | None  # the name of a second field with the same value
    parse: Callable[[str], str | int | bool] | None  # None: it is text
    absent: object  # the value for a missing field; MISSING if the field is required


def wire(name: str, other_name: str | None = None, *, default: Any = MISSING) -> Any:
    """Declare a field whose name is not its attribute's in camelCase; `other_name` is a second field of its value."""
    return field(default=default, metadata={"names": (name, other_name)})


def _number(text: str) -> int:
    if len(text) > _LONG_DIGITS or not (text.isdecimal() or (text[:1] == "-" and text[1:].isdecimal())):
        raise ValueError(text)
    number = int(text)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(text)
    return number


def _boolean(text: str) -> bool:
    return text.lower() == "true"  # like Boolean.parseBoolean, all other texts are false


_PARSERS: dict[str, Callable[[str], str | int | bool] | None] = {"str": None, "int": _number, "bool": _boolean}

_plans: dict[tuple[type[Header], bool], tuple[_Part, ...]] = {}


def _plan(header: type[Header], long_names: bool = False) -> tuple[_Part, ...]:
    """Return the encoding of each attribute of `header`, in the order of its constructor."""
    known = _plans.get((header, long_names))
    if known is not None:
        return known
    parts = []
    for each in fields(header):  # type: ignore[arg-type]  # every header is a dataclass
        kind, _, optional = str(each.type).partition(" | ")
        first, *others = each.name.split("_")
        name, other_name = "bname" if each.name == "broker_name" else first + "".join(map(str.capitalize, others)), None
        if "names" in each.metadata and not long_names:
            name, other_name = each.metadata["names"]
        parts.append(_Part(each.name, name, other_name, _PARSERS[kind], None if optional else each.default))
    return _plans.setdefault((header, long_names), tuple(parts))


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field, wire))
class Header:
    """Base of all headers. It converts itself to the string map of a frame, and back.

    Each subclass is a frozen dataclass, and `code` is the code of its requests.
    """

    CODE: ClassVar[RequestCode]

    def __init_subclass__(cls, code: RequestCode | None = None) -> None:
        super().__init_subclass__()
        if code is not None:
            cls.CODE = code
        dataclass(frozen=True, eq=False, repr=False)(cls)

    # Defined once for all headers. If dataclasses generated them for each class, imports would take 50 % longer.

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def to_fields(self) -> dict[str, str]:
        """Return the fields as texts, without attributes that are None."""
        written: dict[str, str] = {}
        for attribute, name, other_name, parse, _ in _plan(type(self)):
            value = getattr(self, attribute)
            if value is not None:
                text: str = value if parse is None else _text(value)
                written[name] = text
                if other_name is not None:
                    written[other_name] = text
        return written

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Self:
        """Return the header in `fields`; unknown fields are ignored.

        Raises:
            ProtocolError: a field is missing or is not a number; the text names it.
        """
        return cls._read(fields)

    @classmethod
    def _read(cls, fields: Mapping[str, str], long_names: bool = False) -> Self:
        values: list[Any] = []
        for _, name, other_name, parse, absent in _plan(cls, long_names):
            text = fields.get(name)
            if text is None and other_name is not None:
                text = fields.get(other_name)
            if text is None:
                if absent is MISSING:
                    raise ProtocolError(f"{cls.__name__}: field {name} is missing")
                values.append(absent)
            elif parse is None:
                values.append(text)
            else:
                try:
                    values.append(parse(text))
                except ValueError:
                    raise ProtocolError(f"{cls.__name__}: field {name} is not a number: {text[:40]!r}") from None
        return cls(*values)


def _text(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def request(
    header: Header, body: bytes = b"", opaque: int = 0, oneway: bool = False, *, code: int | None = None
) -> RemotingCommand:
    """Return the request with `header`. `code` replaces the header's usual code (220, 320, 361 …)."""
    return RemotingCommand(
        int(header.CODE if code is None else code), header.to_fields(), body, opaque, ONEWAY_FLAG if oneway else 0
    )


# --- messages: pull, send, look up -----------------------------------------------------------------------------------


class PullMessageHeader(Header, code=RequestCode.PULL_MESSAGE):
    """Pull messages of a queue; also LITE_PULL_MESSAGE. For many pulls of one queue see PullTemplate."""

    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_msg_nums: int
    sys_flag: int
    commit_offset: int = 0
    suspend_timeout_millis: int = 0
    sub_version: int = 0
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: int | None = None
    request_source: int | None = None
    broker_name: str | None = None


class SendMessageHeader(Header, code=RequestCode.SEND_MESSAGE_V2):
    """Store a message. `to_fields` writes the short names of codes 310 and 320; `from_fields_v1` reads those of 10.

    Source: SendMessageRequestHeader, SendMessageRequestHeaderV2.
    """

    producer_group: str = wire("a")
    topic: str = wire("b")
    default_topic: str = wire("c", default="TBW102")
    default_topic_queue_nums: int = wire("d", default=4)
    queue_id: int = wire("e", default=-1)
    sys_flag: int = wire("f", default=0)
    born_timestamp: int = wire("g", default=0)
    flag: int = wire("h", default=0)
    properties: str | None = wire("i", default=None)
    reconsume_times: int | None = wire("j", default=0)
    unit_mode: bool | None = wire("k", default=False)
    max_reconsume_times: int | None = wire("l", default=None)
    batch: bool | None = wire("m", default=False)
    broker_name: str | None = wire("n", default=None)

    @classmethod
    def from_fields_v1(cls, fields: Mapping[str, str]) -> Self:
        """Return the header in `fields` with long names.

        Raises:
            ProtocolError: a field is missing or is not a number; the text names it.
        """
        return cls._read(fields, long_names=True)


class SendMessageResponseHeader(Header):
    """The location of a stored message. `msg_id` is the offset id; a batch has several, joined by commas."""

    msg_id: str
    queue_id: int
    queue_offset: int
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    msg_region: str | None = wire("MSG_REGION", default=None)
    trace_on: bool | None = wire("TRACE_ON", default=None)


class ConsumerSendMsgBackHeader(Header, code=RequestCode.CONSUMER_SEND_MSG_BACK):
    """Have a message redelivered later. `offset` is the commit-log offset of the message."""

    offset: int
    group: str
    delay_level: int
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: int | None = None
    broker_name: str | None = None


class EndTransactionHeader(Header, code=RequestCode.END_TRANSACTION):
    """Commit (8) or roll back (12) a half message; 0 means "not decided yet"."""

    producer_group: str
    tran_state_table_offset: int
    commit_log_offset: int
    commit_or_rollback: int
    from_transaction_check: bool
    msg_id: str
    transaction_id: str | None = None
    topic: str | None = None
    broker_name: str | None = None


class ViewMessageHeader(Header, code=RequestCode.VIEW_MESSAGE_BY_ID):
    """Read the message at a commit-log offset."""

    offset: int
    topic: str | None = None
    broker_name: str | None = None


class QueryMessageHeader(Header, code=RequestCode.QUERY_MESSAGE):
    """Find messages by key, or by UNIQ_KEY, stored between two times."""

    topic: str
    key: str
    max_num: int
    begin_timestamp: int
    end_timestamp: int
    unique_key_query: bool | None = wire("_UNIQUE_KEY_QUERY", default=None)
    index_type: str | None = None


# --- offsets ---------------------------------------------------------------------------------------------------------


class QueryConsumerOffsetHeader(Header, code=RequestCode.QUERY_CONSUMER_OFFSET):
    """Fetch a group's committed offset of a queue."""

    consumer_group: str
    topic: str
    queue_id: int
    set_zero_if_not_found: bool | None = None
    broker_name: str | None = None


class OffsetResponseHeader(Header):
    """One offset: the response to 14, 29, 30 and 31."""

    offset: int


class UpdateConsumerOffsetHeader(Header, code=RequestCode.UPDATE_CONSUMER_OFFSET):
    """Commit an offset. Never send a negative one, because brokers store it and read it as "none"."""

    consumer_group: str
    topic: str
    queue_id: int
    commit_offset: int
    broker_name: str | None = None


class GetMaxOffsetHeader(Header, code=RequestCode.GET_MAX_OFFSET):
    """Fetch the offset that the next message of a queue will have."""

    topic: str
    queue_id: int
    committed: bool | None = None
    broker_name: str | None = None


class GetMinOffsetHeader(Header, code=RequestCode.GET_MIN_OFFSET):
    """Fetch the offset of the oldest message that a queue still has."""

    topic: str
    queue_id: int
    broker_name: str | None = None


class GetEarliestStoreTimeHeader(Header, code=RequestCode.GET_EARLIEST_MSG_STORETIME):
    """Fetch the store time of a queue's oldest message."""

    topic: str
    queue_id: int
    broker_name: str | None = None


class SearchOffsetHeader(Header, code=RequestCode.SEARCH_OFFSET_BY_TIMESTAMP):
    """Fetch the offset of the first message stored at or after a time (4.9: the nearest)."""

    topic: str
    queue_id: int
    timestamp: int
    boundary_type: str | None = None
    broker_name: str | None = None


class ResetOffsetHeader(Header, code=RequestCode.INVOKE_BROKER_TO_RESET_OFFSET):
    """Reset a group's offsets: 222 from an admin to a broker, 220 from a broker to a member."""

    topic: str
    group: str
    timestamp: int
    is_force: bool = False
    queue_id: int | None = None
    offset: int | None = None


# --- membership ------------------------------------------------------------------------------------------------------


class HeartbeatHeader(Header, code=RequestCode.HEART_BEAT):
    """Register this client at a broker; the body has all data."""


class UnregisterClientHeader(Header, code=RequestCode.UNREGISTER_CLIENT):
    """Leave one group. Set exactly one of the two groups."""

    client_id: str = wire("clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class GetConsumerListByGroupHeader(Header, code=RequestCode.GET_CONSUMER_LIST_BY_GROUP):
    """Fetch the client ids of a group's members."""

    consumer_group: str


class NotifyConsumerIdsChangedHeader(Header, code=RequestCode.NOTIFY_CONSUMER_IDS_CHANGED):
    """Broker to client: the members of the group have changed."""

    consumer_group: str


class LockBatchHeader(Header, code=RequestCode.LOCK_BATCH_MQ):
    """Lock queues for an orderly consumer; the body has all data."""


class UnlockBatchHeader(Header, code=RequestCode.UNLOCK_BATCH_MQ):
    """Unlock queues; the body has all data."""


class CheckClientConfigHeader(Header, code=RequestCode.CHECK_CLIENT_CONFIG):
    """Have a broker check a subscription; the body has all data."""


# --- broker to client ------------------------------------------------------------------------------------------------


class CheckTransactionStateHeader(Header, code=RequestCode.CHECK_TRANSACTION_STATE):
    """Broker to producer: has the transaction of this half message (in the body) been committed?"""

    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    topic: str | None = None
    broker_name: str | None = None


class GetConsumerStatusHeader(Header, code=RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS):
    """Fetch members' offsets: 223 from an admin to a broker, 221 from there to the members.

    `client_addr` is compared with the client id; empty or absent means every member.
    """

    topic: str
    group: str
    client_addr: str | None = None


class GetConsumerRunningInfoHeader(Header, code=RequestCode.GET_CONSUMER_RUNNING_INFO):
    """Fetch the running info of a member; brokers relay it."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ConsumeMessageDirectlyHeader(Header, code=RequestCode.CONSUME_MESSAGE_DIRECTLY):
    """Have a member consume one message now. An admin sends its offset id; the broker adds its record as the body."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = wire("brokerName", default=None)
    topic: str | None = None
    topic_sys_flag: int | None = None
    group_sys_flag: int | None = None


# --- name server -----------------------------------------------------------------------------------------------------


class GetRouteInfoHeader(Header, code=RequestCode.GET_ROUTEINFO_BY_TOPIC):
    """Fetch the route of a topic. Source: GetRouteInfoRequestHeader."""

    topic: str
    accept_standard_json_only: bool | None = True


class GetClusterInfoHeader(Header, code=RequestCode.GET_BROKER_CLUSTER_INFO):
    """Fetch all brokers of all clusters."""


class GetAllTopicsHeader(Header, code=RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER):
    """Fetch the names of all topics."""


class PutKvConfigHeader(Header, code=RequestCode.PUT_KV_CONFIG):
    """Set a key at one name server; send it to each."""

    namespace: str
    key: str
    value: str


class GetKvConfigHeader(Header, code=RequestCode.GET_KV_CONFIG):
    """Fetch the value of a key."""

    namespace: str
    key: str


class DeleteKvConfigHeader(Header, code=RequestCode.DELETE_KV_CONFIG):
    """Delete a key at one name server; send it to each."""

    namespace: str
    key: str


class GetKvListHeader(Header, code=RequestCode.GET_KVLIST_BY_NAMESPACE):
    """Fetch all keys and values of a namespace."""

    namespace: str


class DeleteTopicInNameServerHeader(Header, code=RequestCode.DELETE_TOPIC_IN_NAMESRV):
    """Forget a topic's route at one name server; send it to each."""

    topic: str
    cluster_name: str | None = None


# --- administration of brokers ---------------------------------------------------------------------------------------


class CreateTopicHeader(Header, code=RequestCode.UPDATE_AND_CREATE_TOPIC):
    """Create a topic, or change it."""

    topic: str
    default_topic: str = "TBW102"
    read_queue_nums: int = 4
    write_queue_nums: int = 4
    perm: int = 6
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int | None = 0
    order: bool = False
    attributes: str | None = None
    force: bool | None = None


class DeleteTopicHeader(Header, code=RequestCode.DELETE_TOPIC_IN_BROKER):
    """Delete a topic at one broker."""

    topic: str


class CreateSubscriptionGroupHeader(Header, code=RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP):
    """Create a group, or change it; the body has all data."""


class GetAllSubscriptionGroupsHeader(Header, code=RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG):
    """Fetch the settings of all groups of a broker."""


class DeleteSubscriptionGroupHeader(Header, code=RequestCode.DELETE_SUBSCRIPTIONGROUP):
    """Delete a group at one broker. 5.0 renamed the flag, so the request has both names."""

    group_name: str
    clean_offset: bool = wire("cleanOffset", "removeOffset", default=False)


class GetConsumeStatsHeader(Header, code=RequestCode.GET_CONSUME_STATS):
    """Fetch the progress of a group."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class GetTopicStatsInfoHeader(Header, code=RequestCode.GET_TOPIC_STATS_INFO):
    """Fetch the smallest and largest offsets of a topic's queues."""

    topic: str


class GetConsumerConnectionListHeader(Header, code=RequestCode.GET_CONSUMER_CONNECTION_LIST):
    """Fetch the connections and subscriptions of a group."""

    consumer_group: str


class QueryTopicConsumeByWhoHeader(Header, code=RequestCode.QUERY_TOPIC_CONSUME_BY_WHO):
    """Fetch the groups that consume a topic."""

    topic: str


class CloneGroupOffsetHeader(Header, code=RequestCode.CLONE_GROUP_OFFSET):
    """Copy one group's offsets to another."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


class GetBrokerConfigHeader(Header, code=RequestCode.GET_BROKER_CONFIG):
    """Fetch the settings of a broker."""
