"""One broker: requests in, responses out. It uses no sockets, and reads the time from its clock only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyrocket_consumer.errors import ConfigError, ProtocolError
from pyrocket_consumer.protocol.codes import ResponseCode
from pyrocket_consumer.protocol.frame import JSON_HEADER, RemotingCommand
from pyrocket_consumer.testing.acl import Accounts
from pyrocket_consumer.testing.admin_requests import AdminRequests
from pyrocket_consumer.testing.broker_state import BrokerState, Refused
from pyrocket_consumer.testing.clock import Clock, Timer
from pyrocket_consumer.testing.config import BrokerConfig, Timing
from pyrocket_consumer.testing.connection import Connection
from pyrocket_consumer.testing.handlers import Handlers, error_response
from pyrocket_consumer.testing.intake import Intake
from pyrocket_consumer.testing.membership import Membership
from pyrocket_consumer.testing.offset_requests import OffsetRequests
from pyrocket_consumer.testing.pulls import Pulls
from pyrocket_consumer.testing.relays import Relays
from pyrocket_consumer.testing.release import Release
from pyrocket_consumer.testing.sends import Sends
from pyrocket_consumer.testing.transactions import Transactions


class Broker:
    """A master or slave: its state, and the handlers of its requests. Everything runs on the clock's loop.

    `handle` returns the response, or returns None and responds later through the connection (held pulls, relays).
    `start` and `stop` act like a process on the same "disk". Topics, groups, messages and offsets survive a stop;
    members, locks and reset marks do not.
    """

    def __init__(
        self,
        config: BrokerConfig,
        timing: Timing,
        release: Release,
        clock: Clock,
        address: str,
        *,
        seed: int = 0,
        accounts: Accounts | None = None,
    ) -> None:
        self.on_topics_changed: Callable[[], None] = lambda: None  # updates the routes
        self.on_timer: Callable[[], None] = lambda: None  # called after changes that no request caused
        self.state = BrokerState(
            config, timing, release, clock, address, seed=seed, topics_changed=lambda: self.on_topics_changed()
        )
        self.pulls = Pulls(self.state)
        self.intake = Intake(self.state, self.pulls.arrived, lambda: self.on_timer())
        self.sends = Sends(self.state, self.intake)
        self.membership = Membership(self.state)
        self.transactions = Transactions(self.state, self.intake)
        self.admin = AdminRequests(self.state)
        self.master: Broker | None = None
        self.running = False
        self._accounts = accounts
        self._handlers: Handlers = {}
        for part in (
            self.pulls,
            self.sends,
            self.membership,
            self.transactions,
            self.admin,
            OffsetRequests(self.state),
            Relays(self.state),
        ):
            self._handlers.update(part.handlers())
        self._timers = [
            self._timer(lambda: config.flush_consumer_offset_interval / 1000, self.state.offsets.flush),
            self._timer(lambda: timing.scan_interval_s, self.membership.expire),
            self._timer(lambda: config.transaction_check_interval / 1000, self.transactions.check),
            self._timer(lambda: timing.slave_sync_s, self.sync_with_master),
        ]

    def _timer(self, interval_s: Callable[[], float], action: Callable[[], None]) -> Timer:
        def fire() -> None:
            action()
            self.on_timer()

        return Timer(self.state.clock, interval_s, fire)

    @property
    def name(self) -> str:
        return self.state.config.broker_name

    def handle(self, command: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        """Return the response to a request; None if the broker sends it later."""
        handler = self._handlers.get(command.code)
        try:
            if handler is None:
                raise Refused(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {command.code} not supported")
            if self._accounts is not None:
                self._accounts.check(command, self.state.release)
            response = handler(command, connection)
        except Refused as refused:
            response = error_response(command, refused)
        except (ProtocolError, ConfigError) as error:  # brokers respond with the text of a Java exception here
            response = command.make_response(ResponseCode.SYSTEM_ERROR, str(error))
        if response is not None:
            response.language, response.version = "JAVA", self.state.release.ordinal
            response.header_type = command.header_type if self.state.release.mirrors_header_type else JSON_HEADER
        return response

    def lost(self, connection: Connection) -> None:
        """Remove the members and held pulls of a connection that ended."""
        self.pulls.long_poll.lost(connection)
        if self.running:
            self.membership.lost(connection)

    def start(self) -> None:
        self.running = True
        self.pulls.long_poll.start()
        self.intake.schedule.start()
        self.sync_with_master()
        for timer in self._timers:
            timer.start()

    def stop(self, *, lose_unflushed: bool = False) -> None:
        """Stop. A killed broker may lose the offsets that were not flushed. It always loses the rest of its memory."""
        self.running = False
        self.pulls.long_poll.stop()
        self.intake.schedule.stop()
        for timer in self._timers:
            timer.stop()
        state = self.state
        if not lose_unflushed:
            state.offsets.flush()
        state.offsets.restart(lose_unflushed)
        state.members.clear()
        state.locks.clear()

    def take_over(self, old: Broker) -> None:
        """Become the master in place of `old`, which becomes a slave with this id."""
        mine, its = self.state.config, old.state.config
        mine.broker_id, its.broker_id = 0, mine.broker_id
        self.master, old.master = None, self
        self.state.store.promote()
        self.intake.schedule.take_over(old.intake.schedule)
        self.transactions.take_over(old.transactions)
        old.state.store.replicas = []
        old.state.store.copy_from(self.state.store)
        old.sync_with_master()

    def sync_with_master(self) -> None:
        """Copy the master's topics, groups and offsets. The store replicates messages separately."""
        master = self.master
        if master is not None and self.state.is_slave:
            self.state.topics.copy_from(master.state.topics)
            self.state.groups = {name: replace(group) for name, group in master.state.groups.items()}
            self.state.offsets.copy_from(master.state.offsets)
