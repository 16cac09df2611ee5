"""The header fields of every request and response that a client uses, one frozen dataclass each.

Their `==`, `hash` and `repr` are those of `Header`.

Attributes are the Java field names in snake_case; `broker_name` is `bname` in frames. A field that older or newer peers
omit is `None` if it is absent. Source: the *RequestHeader and *ResponseHeader classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import ONEWAY_FLAG, RemotingCommand
from pyrocket_consumer.protocol.header import Header as Header
from pyrocket_consumer.protocol.header import wire
from pyrocket_consumer.protocol.pull_template import PullTemplate as PullTemplate


def request(
    header: Header, body: bytes = b"", opaque: int = 0, oneway: bool = False, *, code: int | None = None
) -> RemotingCommand:
    """Return the request with `header`. `code` replaces the header's usual code (220, 320, 361 …)."""
    return RemotingCommand(
        int(header.CODE if code is None else code), header.to_fields(), body, opaque, ONEWAY_FLAG if oneway else 0
    )


# --- messages: pull, send, look up -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PullMessageHeader(Header):
    """Pull messages of a queue; also LITE_PULL_MESSAGE. For many pulls of one queue see PullTemplate."""

    CODE: ClassVar[RequestCode] = RequestCode.PULL_MESSAGE

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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SendMessageHeader(Header):
    """Store a message. `to_fields` writes the short names of codes 310 and 320; `from_fields_v1` reads those of 10.

    Source: SendMessageRequestHeader, SendMessageRequestHeaderV2.
    """

    CODE: ClassVar[RequestCode] = RequestCode.SEND_MESSAGE_V2

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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ConsumerSendMsgBackHeader(Header):
    """Have a message redelivered later. `offset` is the commit-log offset of the message."""

    CODE: ClassVar[RequestCode] = RequestCode.CONSUMER_SEND_MSG_BACK

    offset: int
    group: str
    delay_level: int
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: int | None = None
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EndTransactionHeader(Header):
    """Commit (8) or roll back (12) a half message; 0 means "not decided yet"."""

    CODE: ClassVar[RequestCode] = RequestCode.END_TRANSACTION

    producer_group: str
    tran_state_table_offset: int
    commit_log_offset: int
    commit_or_rollback: int
    from_transaction_check: bool
    msg_id: str
    transaction_id: str | None = None
    topic: str | None = None
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ViewMessageHeader(Header):
    """Read the message at a commit-log offset."""

    CODE: ClassVar[RequestCode] = RequestCode.VIEW_MESSAGE_BY_ID

    offset: int
    topic: str | None = None
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class QueryMessageHeader(Header):
    """Find messages by key, or by UNIQ_KEY, stored between two times."""

    CODE: ClassVar[RequestCode] = RequestCode.QUERY_MESSAGE

    topic: str
    key: str
    max_num: int
    begin_timestamp: int
    end_timestamp: int
    unique_key_query: bool | None = wire("_UNIQUE_KEY_QUERY", default=None)
    index_type: str | None = None


# --- offsets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class QueryConsumerOffsetHeader(Header):
    """Fetch a group's committed offset of a queue."""

    CODE: ClassVar[RequestCode] = RequestCode.QUERY_CONSUMER_OFFSET

    consumer_group: str
    topic: str
    queue_id: int
    set_zero_if_not_found: bool | None = None
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OffsetResponseHeader(Header):
    """One offset: the response to 14, 29, 30 and 31."""

    offset: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UpdateConsumerOffsetHeader(Header):
    """Commit an offset. Never send a negative one, because brokers store it and read it as "none"."""

    CODE: ClassVar[RequestCode] = RequestCode.UPDATE_CONSUMER_OFFSET

    consumer_group: str
    topic: str
    queue_id: int
    commit_offset: int
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetMaxOffsetHeader(Header):
    """Fetch the offset that the next message of a queue will have."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_MAX_OFFSET

    topic: str
    queue_id: int
    committed: bool | None = None
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetMinOffsetHeader(Header):
    """Fetch the offset of the oldest message that a queue still has."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_MIN_OFFSET

    topic: str
    queue_id: int
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetEarliestStoreTimeHeader(Header):
    """Fetch the store time of a queue's oldest message."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_EARLIEST_MSG_STORETIME

    topic: str
    queue_id: int
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SearchOffsetHeader(Header):
    """Fetch the offset of the first message stored at or after a time (4.9: the nearest)."""

    CODE: ClassVar[RequestCode] = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP

    topic: str
    queue_id: int
    timestamp: int
    boundary_type: str | None = None
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ResetOffsetHeader(Header):
    """Reset a group's offsets: 222 from an admin to a broker, 220 from a broker to a member."""

    CODE: ClassVar[RequestCode] = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET

    topic: str
    group: str
    timestamp: int
    is_force: bool = False
    queue_id: int | None = None
    offset: int | None = None


# --- membership ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class HeartbeatHeader(Header):
    """Register this client at a broker; the body has all data."""

    CODE: ClassVar[RequestCode] = RequestCode.HEART_BEAT


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UnregisterClientHeader(Header):
    """Leave one group. Set exactly one of the two groups."""

    CODE: ClassVar[RequestCode] = RequestCode.UNREGISTER_CLIENT

    client_id: str = wire("clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetConsumerListByGroupHeader(Header):
    """Fetch the client ids of a group's members."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_CONSUMER_LIST_BY_GROUP

    consumer_group: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NotifyConsumerIdsChangedHeader(Header):
    """Broker to client: the members of the group have changed."""

    CODE: ClassVar[RequestCode] = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED

    consumer_group: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LockBatchHeader(Header):
    """Lock queues for an orderly consumer; the body has all data."""

    CODE: ClassVar[RequestCode] = RequestCode.LOCK_BATCH_MQ


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UnlockBatchHeader(Header):
    """Unlock queues; the body has all data."""

    CODE: ClassVar[RequestCode] = RequestCode.UNLOCK_BATCH_MQ


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckClientConfigHeader(Header):
    """Have a broker check a subscription; the body has all data."""

    CODE: ClassVar[RequestCode] = RequestCode.CHECK_CLIENT_CONFIG


# --- broker to client ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckTransactionStateHeader(Header):
    """Broker to producer: has the transaction of this half message (in the body) been committed?"""

    CODE: ClassVar[RequestCode] = RequestCode.CHECK_TRANSACTION_STATE

    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    topic: str | None = None
    broker_name: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetConsumerStatusHeader(Header):
    """Fetch members' offsets: 223 from an admin to a broker, 221 from there to the members.

    `client_addr` is compared with the client id; empty or absent means every member.
    """

    CODE: ClassVar[RequestCode] = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS

    topic: str
    group: str
    client_addr: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetConsumerRunningInfoHeader(Header):
    """Fetch the running info of a member; brokers relay it."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_CONSUMER_RUNNING_INFO

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ConsumeMessageDirectlyHeader(Header):
    """Have a member consume one message now. An admin sends its offset id; the broker adds its record as the body."""

    CODE: ClassVar[RequestCode] = RequestCode.CONSUME_MESSAGE_DIRECTLY

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = wire("brokerName", default=None)
    topic: str | None = None
    topic_sys_flag: int | None = None
    group_sys_flag: int | None = None


# --- name server -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetRouteInfoHeader(Header):
    """Fetch the route of a topic. Source: GetRouteInfoRequestHeader."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_ROUTEINFO_BY_TOPIC

    topic: str
    accept_standard_json_only: bool | None = True


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetClusterInfoHeader(Header):
    """Fetch all brokers of all clusters."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_BROKER_CLUSTER_INFO


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetAllTopicsHeader(Header):
    """Fetch the names of all topics."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PutKvConfigHeader(Header):
    """Set a key at one name server; send it to each."""

    CODE: ClassVar[RequestCode] = RequestCode.PUT_KV_CONFIG

    namespace: str
    key: str
    value: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetKvConfigHeader(Header):
    """Fetch the value of a key."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_KV_CONFIG

    namespace: str
    key: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeleteKvConfigHeader(Header):
    """Delete a key at one name server; send it to each."""

    CODE: ClassVar[RequestCode] = RequestCode.DELETE_KV_CONFIG

    namespace: str
    key: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetKvListHeader(Header):
    """Fetch all keys and values of a namespace."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_KVLIST_BY_NAMESPACE

    namespace: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeleteTopicInNameServerHeader(Header):
    """Forget a topic's route at one name server; send it to each."""

    CODE: ClassVar[RequestCode] = RequestCode.DELETE_TOPIC_IN_NAMESRV

    topic: str
    cluster_name: str | None = None


# --- administration of brokers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CreateTopicHeader(Header):
    """Create a topic, or change it."""

    CODE: ClassVar[RequestCode] = RequestCode.UPDATE_AND_CREATE_TOPIC

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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeleteTopicHeader(Header):
    """Delete a topic at one broker."""

    CODE: ClassVar[RequestCode] = RequestCode.DELETE_TOPIC_IN_BROKER

    topic: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CreateSubscriptionGroupHeader(Header):
    """Create a group, or change it; the body has all data."""

    CODE: ClassVar[RequestCode] = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetAllSubscriptionGroupsHeader(Header):
    """Fetch the settings of all groups of a broker."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeleteSubscriptionGroupHeader(Header):
    """Delete a group at one broker. 5.0 renamed the flag, so the request has both names."""

    CODE: ClassVar[RequestCode] = RequestCode.DELETE_SUBSCRIPTIONGROUP

    group_name: str
    clean_offset: bool = wire("cleanOffset", "removeOffset", default=False)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetConsumeStatsHeader(Header):
    """Fetch the progress of a group."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_CONSUME_STATS

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetTopicStatsInfoHeader(Header):
    """Fetch the smallest and largest offsets of a topic's queues."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_TOPIC_STATS_INFO

    topic: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetConsumerConnectionListHeader(Header):
    """Fetch the connections and subscriptions of a group."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_CONSUMER_CONNECTION_LIST

    consumer_group: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class QueryTopicConsumeByWhoHeader(Header):
    """Fetch the groups that consume a topic."""

    CODE: ClassVar[RequestCode] = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO

    topic: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CloneGroupOffsetHeader(Header):
    """Copy one group's offsets to another."""

    CODE: ClassVar[RequestCode] = RequestCode.CLONE_GROUP_OFFSET

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GetBrokerConfigHeader(Header):
    """Fetch the settings of a broker."""

    CODE: ClassVar[RequestCode] = RequestCode.GET_BROKER_CONFIG
