"""Orders as rows of a Django model, each once, whatever happens to this process: kill it with -9, and start it again.

python ledger_django.py 127.0.0.1:9876 ledger.db
"""

from __future__ import annotations

import sys

import django
from django.conf import settings
from django.db import connection, models

from pyrocket_consumer import Message, PushConsumer
from pyrocket_consumer.offsets import DatabaseOffsets

NAME_SERVER, FILE = sys.argv[1:3]
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": FILE}})
django.setup()
offsets = DatabaseOffsets.django("default")


class Entry(models.Model):
    """An order that was booked."""

    message_id = models.CharField(max_length=255)
    body = models.TextField()

    class Meta:
        app_label = db_table = "ledger"


def book(messages: list[Message]) -> None:
    """Insert a row for each order, within transaction.atomic(); the offset commits with them."""
    Entry.objects.bulk_create(Entry(message_id=each.message_id, body=each.body.decode()) for each in messages)
    print(f"{len(messages)} booked", flush=True)


if __name__ == "__main__":
    offsets.create_tables()
    if "ledger" not in connection.introspection.table_names():  # in a project, a migration makes it
        with connection.schema_editor() as editor:
            editor.create_model(Entry)
    with PushConsumer(
        "ledger-django",
        name_server=NAME_SERVER,
        orderly=True,
        listener_batch_size=64,
        consume_from="first",
        offset_store=offsets,
    ) as consumer:
        consumer.subscribe("orders", offsets.exactly_once(book))
        consumer.join()
