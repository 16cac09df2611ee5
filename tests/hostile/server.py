"""A name server and a broker that work on bytes. They respond as real ones do, until an attack replaces responses."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.frame import RemotingCommand, decode_command, encode_command

BROKER = "broker-hostile"
QUEUES = 4
HOLD_S = 2.0
MAX_OFFSET = 10

Response = RemotingCommand | bytes | list[bytes] | None
"""A command, a frame of any bytes, several of them, or None for no response."""


@dataclass(eq=False)
class Peer:
    """One client's connection."""

    writer: asyncio.StreamWriter
    is_broker: bool
    client_id: str = ""
    opaque: int = 0

    def send(self, data: bytes) -> None:
        """Write, unless many earlier bytes are unread."""
        if not self.writer.is_closing() and self.writer.transport.get_write_buffer_size() < 64 << 20:
            self.writer.write(data)

    def ask(self, code: int, fields: dict[str, str], body: bytes = b"", flag: int = 0) -> None:
        """Send a request to the client."""
        self.opaque += 1
        self.send(encode_command(RemotingCommand(code, fields, body, self.opaque, flag)))


class Attack:
    """The base of attacks, which does nothing. Each attack overrides some methods."""

    at_name_server = False
    """Whether the name server attacks, and not the broker."""
    codes: tuple[int, ...] = ()
    """The codes of the requests that it responds to; if it is empty, all."""
    turn = 0
    """The number of responses so far."""

    def respond(self, peer: Peer, command: RemotingCommand) -> Response:
        """Return the response of the attack; NotImplemented for that of an honest server."""
        return NotImplemented

    async def act_on(self, peer: Peer) -> None:
        """Act on an open connection for as long as the attack lasts."""


class HostileServer:
    """Both servers, on a thread of their own. `honest` is the address of the honest broker.

    Routes contain the queues of both brokers. `attack` may be changed at any time.
    """

    def __init__(self, topic: str, honest: tuple[str, str], honest_queues: int = QUEUES) -> None:
        self.topic = topic
        self.honest = honest  # broker name, address
        self.honest_queues = honest_queues
        self.name_server = self.broker = ""
        self.client_ids: set[str] = set()
        self.offsets: dict[tuple[str, int], int] = {}
        self.commits: list[int] = []
        self.requests: Counter[int] = Counter()  # to the broker
        self._attack: Attack = Attack()
        self._peers: dict[Peer, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="hostile", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> HostileServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    async def _listen(self) -> None:
        for role in ("broker", "name_server"):
            server = await asyncio.start_server(
                lambda reader, writer, role=role: self._serve(reader, writer, role == "broker"), "127.0.0.1", 0
            )
            self._servers.append(server)
            setattr(self, role, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for peer in list(self._peers):
            peer.writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)

    def do(self, attack: Attack) -> None:
        """Start this attack on new connections. The former attack continues on its connections until they end."""

        def change() -> None:
            self._attack = attack
            for peer in list(self._peers):
                peer.writer.transport.abort()

        self._loop.call_soon_threadsafe(change)

    def _begin(self, peer: Peer) -> asyncio.Task[None]:
        attack = self._attack
        if attack.at_name_server == peer.is_broker:
            attack = Attack()

        async def act_on() -> None:
            try:
                await attack.act_on(peer)
            except (ConnectionError, RuntimeError):
                pass  # the client has closed it

        return self._loop.create_task(act_on())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_broker: bool) -> None:
        peer = Peer(writer, is_broker)
        self._peers[peer] = self._begin(peer)
        try:
            while True:
                prefix = await reader.readexactly(4)
                command = decode_command(prefix + await reader.readexactly(int.from_bytes(prefix)))
                if command.is_response:
                    continue
                if is_broker:
                    self.requests[command.code] += 1
                response: Response = NotImplemented
                attack = self._attack
                if attack.at_name_server != is_broker and command.code in (attack.codes or [command.code]):
                    attack.turn += 1
                    response = attack.respond(peer, command)
                if response is NotImplemented:
                    self._respond_honestly(peer, command)
                else:
                    self._send(peer, command, response)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._peers.pop(peer).cancel()
            writer.close()

    def _send(self, peer: Peer, command: RemotingCommand, response: Response) -> None:
        if isinstance(response, RemotingCommand):
            response = encode_command(response)
        for frame in response if isinstance(response, list) else [response]:
            if frame is not None and not command.is_oneway:
                peer.send(frame)

    # --- the honest responses

    def _respond_honestly(self, peer: Peer, command: RemotingCommand) -> None:
        if command.code == RequestCode.PULL_MESSAGE:
            task = self._loop.create_task(self._hold(peer, command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._send(peer, command, self.honest_response(peer, command))

    async def _hold(self, peer: Peer, command: RemotingCommand) -> None:
        await asyncio.sleep(HOLD_S)
        self._send(peer, command, found_nothing(command))

    def honest_response(self, peer: Peer, command: RemotingCommand) -> RemotingCommand:
        """Return the response of a broker or name server with few messages."""
        fields = command.fields
        queue = (fields.get("topic", ""), int(fields.get("queueId", 0) or 0))
        match command.code:
            case RequestCode.GET_ROUTEINFO_BY_TOPIC:
                return command.make_response(body=self.route(fields["topic"]))
            case RequestCode.HEART_BEAT:
                peer.client_id = json.loads(command.body)["clientID"]
                self.client_ids.add(peer.client_id)
                return command.make_response()
            case RequestCode.GET_CONSUMER_LIST_BY_GROUP:
                return command.make_response(body=json.dumps({"consumerIdList": sorted(self.client_ids)}).encode())
            case RequestCode.QUERY_CONSUMER_OFFSET:
                if queue not in self.offsets:
                    return command.make_response(ResponseCode.QUERY_NOT_FOUND, "not found")
                return command.make_response(fields={"offset": str(self.offsets[queue])})
            case RequestCode.UPDATE_CONSUMER_OFFSET:
                self.offsets[queue] = int(fields["commitOffset"])
                self.commits.append(self.offsets[queue])
                return command.make_response()
            case RequestCode.GET_MAX_OFFSET:
                return command.make_response(fields={"offset": str(MAX_OFFSET)})
            case RequestCode.GET_MIN_OFFSET | RequestCode.SEARCH_OFFSET_BY_TIMESTAMP:
                return command.make_response(fields={"offset": "0"})
            case RequestCode.LOCK_BATCH_MQ:
                return command.make_response(
                    body=json.dumps({"lockOKMQSet": json.loads(command.body)["mqSet"]}).encode()
                )
            case _:
                return command.make_response()

    def route(self, topic: str) -> bytes:
        """Return the route of a topic: both brokers for the topic of the test, the honest one for all others."""
        name, address = self.honest
        queues = [queue_data(name, self.honest_queues if topic == self.topic else 1)]
        brokers = [broker_data(name, address)]
        if topic == self.topic:
            queues.append(queue_data(BROKER, QUEUES))
            brokers.append(broker_data(BROKER, self.broker))
        return route(queues, brokers)


def route(queues: list[dict[str, Any]], brokers: list[dict[str, Any]]) -> bytes:
    return json.dumps({"queueDatas": queues, "brokerDatas": brokers, "filterServerTable": {}}).encode()


def queue_data(broker_name: str, queues: int) -> dict[str, Any]:
    numbers = {"readQueueNums": queues, "writeQueueNums": queues, "perm": 6, "topicSysFlag": 0}
    return {"brokerName": broker_name, **numbers}


def broker_data(name: str, address: str) -> dict[str, Any]:
    return {"cluster": "DefaultCluster", "brokerName": name, "brokerAddrs": {"0": address}}


def found_nothing(command: RemotingCommand, **changed: object) -> RemotingCommand:
    """Return the response to a pull without messages."""
    return pulled(command, ResponseCode.PULL_NOT_FOUND, **changed)


def pulled(
    command: RemotingCommand, code: int, body: bytes = b"", remark: str | None = None, **changed: object
) -> RemotingCommand:
    """Return a response to a pull; `changed` are fields of its header by name."""
    here = command.fields.get("queueOffset", "0")
    fields = {"nextBeginOffset": here, "minOffset": "0", "maxOffset": str(max(int(here), MAX_OFFSET))}
    fields |= {"suggestWhichBrokerId": "0", **{name: str(value) for name, value in changed.items()}}
    return command.make_response(code, remark, fields, body)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
