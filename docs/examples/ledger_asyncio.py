"""Orders booked with asyncio, each once, whatever happens to this process: kill it with -9, and start it again.

python ledger_asyncio.py 127.0.0.1:9876 ledger.db
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from pyrocket_consumer import AsyncPushConsumer, Message
from pyrocket_consumer.offsets import DatabaseOffsets


async def book(messages: list[Message], connection: AsyncConnection) -> None:
    """Insert a row for each order; the offset commits with them."""
    rows = [{"id": message.message_id, "body": message.body.decode()} for message in messages]
    await connection.execute(text("INSERT INTO ledger(message_id, body) VALUES (:id, :body)"), rows)
    print(f"{len(rows)} booked", flush=True)


@asynccontextmanager
async def booking(name_server: str, file: str) -> AsyncIterator[AsyncPushConsumer]:
    """Book orders on the running loop, until this is left."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{file}")
    offsets = DatabaseOffsets(engine)
    try:
        await asyncio.to_thread(offsets.create_tables)
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE IF NOT EXISTS ledger(message_id TEXT, body TEXT)"))
        async with AsyncPushConsumer(
            "ledger-asyncio",
            name_server=name_server,
            orderly=True,
            listener_batch_size=64,
            consume_from="first",
            offset_store=offsets,
        ) as consumer:
            await consumer.subscribe("orders", offsets.exactly_once(book))
            yield consumer
    finally:
        await engine.dispose()


async def main(name_server: str, file: str) -> None:
    """Book orders until SIGTERM."""
    async with booking(name_server, file) as consumer:
        await consumer.join()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
