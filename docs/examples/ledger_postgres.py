"""Accounts whose balances are right: a session of the ORM, in which each payment counts once.

    python ledger_postgres.py 127.0.0.1:9876 postgresql+psycopg://app@127.0.0.1/app

A payment is a message of the topic `payments` whose body is `account:amount`.
"""

from __future__ import annotations

import sys
from collections import Counter

from sqlalchemy import BigInteger, String, create_engine
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pyrocket_consumer import Message, PushConsumer
from pyrocket_consumer.offsets import DatabaseOffsets

NAME_SERVER, URL = sys.argv[1:3]


class Base(DeclarativeBase):
    """The tables of this program."""


class Account(Base):
    """What an account has."""

    __tablename__ = "accounts"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    balance: Mapped[int] = mapped_column(BigInteger)


engine = create_engine(URL)
offsets = DatabaseOffsets(sessionmaker(engine), inbox_days=7)  # a payment that a producer sent twice counts once


def pay(messages: list[Message], session: Session) -> None:
    """Add each payment to its account. Other queues pay at the same time, so all lock accounts in one order."""
    sums = Counter[str]()
    for message in messages:
        name, _, amount = message.body.decode().partition(":")
        sums[name] += int(amount)
    new = insert(Account).values([{"name": name, "balance": sums[name]} for name in sorted(sums)])
    added = {"balance": Account.balance + new.excluded.balance}
    session.execute(new.on_conflict_do_update(index_elements=[Account.name], set_=added))
    print(f"{len(messages)} paid", flush=True)


if __name__ == "__main__":
    Base.metadata.create_all(engine)
    offsets.create_tables()
    with PushConsumer(
        "ledger-postgres",
        name_server=NAME_SERVER,
        orderly=True,
        listener_batch_size=64,
        consume_from="first",
        offset_store=offsets,
    ) as consumer:
        consumer.subscribe("payments", offsets.exactly_once(pay))
        consumer.join()
    engine.dispose()
