"""Accounts whose balances are right: a session of the ORM, in which each payment counts once.

    python ledger_postgres.py 127.0.0.1:9876 postgresql+psycopg://app@127.0.0.1/app
"""

from __future__ import annotations

import sys

from sqlalchemy import BigInteger, String, create_engine
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
    balance: Mapped[int] = mapped_column(BigInteger, default=0)


engine = create_engine(URL)
offsets = DatabaseOffsets(sessionmaker(engine), inbox_days=7)  # a payment that a producer sent twice counts once


def pay(messages: list[Message], session: Session) -> None:
    """Add each payment, `account:amount`, to its account."""
    for message in messages:
        name, _, amount = message.body.decode().partition(":")
        account = session.get(Account, name, with_for_update=True) or Account(name=name, balance=0)
        account.balance += int(amount)
        session.add(account)
        session.flush()
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
