"""A fault that shows in commits and in resets."""

from __future__ import annotations

from pyrocket_consumer.protocol.codes import PullFlag, RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand
from tests.hazards.naive import NaiveMember, Window


class PullsCarryCommits(NaiveMember):
    """Makes each pull store the commit offset, too, as the protocol allows."""

    def pull(self, window: Window) -> RemotingCommand:
        hold_s, queue = self.options["pull_hold_s"], window.queue
        fields = {
            "consumerGroup": self.group,
            "topic": queue.topic,
            "queueId": queue.queue_id,
            "queueOffset": window.next_offset,
            "maxMsgNums": 32,
            "sysFlag": int(PullFlag.SUSPEND | PullFlag.COMMIT),
            "commitOffset": self.offsets.get(queue, 0),
            "suspendTimeoutMillis": int(hold_s * 1000),
            "subVersion": self.sub_version,
            "expressionType": "TAG",
        }
        return self.wire(self.master(queue)).call(RequestCode.PULL_MESSAGE, fields, timeout_s=hold_s + 30)
