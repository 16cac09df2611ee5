"""The differences between broker releases that a client can observe."""

from __future__ import annotations

import re
from typing import Final

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.codes import ResponseCode, version_ordinal

DEFAULT_RELEASE: Final = "5.5.0"


class Release:
    """A RocketMQ release, for example "4.9.7" or "5.5.0", and its behaviour.

    Source: observed on real brokers 4.9.7, 5.1.4, 5.3.3 and 5.5.0.
    """

    def __init__(self, name: str) -> None:
        found = re.fullmatch(r"(\d)\.(\d)\.(\d)", name) if isinstance(name, str) else None
        number = tuple(int(part) for part in found.groups()) if found else ()
        if len(number) != 3 or not (4, 9, 4) <= number <= (5, 5, 9):
            raise ConfigError(f"version {name!r} is not a release from 4.9.4 to 5.5.x, such as '4.9.7' or '5.5.0'")
        self.name = name
        self.number = number
        self.ordinal = version_ordinal(*number)

        v5 = number >= (5, 0, 0)
        self.is_v5 = v5
        self.faq = (
            "\nSee "
            + ("https://rocketmq.apache.org/docs/bestPractice/06FAQ" if v5 else "http://rocketmq.apache.org/docs/faq/")
            + " for further details."
        )
        # frames, texts and name server
        self.mirrors_header_type = not v5  # responds to a binary header with a binary one, unless the pull was held
        self.names_bad_topics = number >= (5, 5, 0)
        self.name_server_refuses_unknown_code = v5
        self.routes_have_acting_master = v5
        # membership
        self.heartbeat_v2 = number >= (5, 1, 3)
        self.skips_members_of_unknown_groups = number >= (5, 1, 4)
        self.notifies_broadcasting_groups = number < (5, 3, 1)
        self.longest_group = 120 if number >= (5, 5, 0) else 255
        # pulls
        self.lite_pull = v5
        self.pull_returns_sys_flags = v5
        self.negative_pull_is_error = not v5
        self.bad_queue_id = ResponseCode.INVALID_PARAMETER if number >= (5, 3, 2) else ResponseCode.SYSTEM_ERROR
        self.bad_topic_name = self.bad_queue_id
        self.slave_refuses_pulls = v5  # when slaveReadEnable=false
        self.slave_stores_commit_bit = v5
        # offsets
        self.zero_for_empty_queues = number < (5, 1, 0)
        self.set_zero_if_not_found = v5
        self.commit_checks_topic = number >= (5, 1, 0)
        self.commit_checks_group = number >= (5, 3, 0)
        self.commit_missing_field = self.bad_queue_id
        self.searches_nearest_time = number < (5, 1, 1)
        self.boundary_type = number >= (5, 1, 4)
        self.deletes_offsets_with_topic = v5
        # resets
        self.has_server_side_reset = number >= (5, 1, 0)
        self.server_side_reset_by_default = number >= (5, 2, 0)
        self.reset_always_commits = number >= (5, 3, 2)
        self.reset_unknown_topic = ResponseCode.TOPIC_NOT_EXIST if number >= (5, 3, 2) else ResponseCode.SYSTEM_ERROR
        # sends
        self.adds_own_properties = number >= (5, 1, 0)  # MSG_REGION, TRACE_ON, WAIT and a missing UNIQ_KEY
        self.ends_properties = number >= (5, 2, 0)  # the last property is followed by 0x02, too
        self.returns_transaction_id = v5
        self.refuses_empty_body = number >= (5, 1, 0)
        self.slave_refuses_sends_as_busy = v5
        self.batch_properties_in_items = number < (5, 5, 0)
        self.locked_groups_retry_to_dlq = number >= (5, 1, 4)
        self.retry_send_beyond_max = v5  # dead letter when times > max; before: times >= max
        self.long_retry_topics = number >= (5, 1, 0)
        self.retry_keeps_store_host = not v5
        self.committed_keeps_real_topic = number < (5, 5, 0)
        self.timers = v5
        self.recall_handle = number >= (5, 3, 2)
        # administration
        self.returns_pull_offset = v5
        self.topic_stats_cover_read_queues = number >= (5, 3, 0)
        self.topic_stats_put_tps = number >= (5, 3, 0)
        self.lists_topic_as_group = number == (5, 3, 3)
        self.query_assignment = v5
        self.clean_offset_field = "cleanOffset" if v5 else "removeOffset"
        self.checks_group_names = number >= (5, 5, 0)
        self.black_list = (
            frozenset(("brokerConfigPath", "rocketmqHome", "configBlackList"))
            if (number >= (5, 2, 0))
            else frozenset(("brokerConfigPath", "configBlackList"))
            if v5
            else frozenset[str]()
        )
        self.refused_by_acl = ResponseCode.NO_PERMISSION if number >= (5, 3, 3) else ResponseCode.SYSTEM_ERROR

    def __repr__(self) -> str:
        return f"Release({self.name!r})"
