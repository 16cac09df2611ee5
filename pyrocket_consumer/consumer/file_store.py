"""The local store of a broadcasting member: which directory is ours."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pyrocket_consumer.config import ConsumerConfig
from pyrocket_consumer.errors import OffsetStoreLocked
from pyrocket_consumer.model import ConsumerEvent, EventKind
from pyrocket_consumer.offsets import LocalFileOffsetStore
from pyrocket_consumer.offsets.directories import base_directory, find_orphans, slot_ids, store_directory

log = logging.getLogger("pyrocket_consumer.consumer")

DEFAULT_INSTANCE = "DEFAULT"


def open_file_store(
    config: ConsumerConfig, client_id: str, on_event: Callable[[ConsumerEvent], None]
) -> tuple[LocalFileOffsetStore, str]:
    """Open the store of this member, and return it with the client id it belongs to.

    A second process of the group on this host takes the next slot (`ip@DEFAULT-1`), and finds it again when both are
    restarted. With an instance name of the user's own there is one place only.

    Raises:
        OffsetStoreLocked: the instance name is the user's own, and another process has it; names the holder.
        OffsetStoreError: the store cannot be read or made.
    """
    base = base_directory(config.offset_store_dir)
    for candidate in slot_ids(client_id):
        directory = store_directory(base, candidate, config.group)
        store = LocalFileOffsetStore(directory, config.durability, config.on_unreadable_store, on_event=on_event)
        try:
            store.load()
        except OffsetStoreLocked:
            if config.instance_name != DEFAULT_INSTANCE:
                raise
            continue
        log.info("group=%s offset_store=%s found=%s", config.group, directory, store.found)
        if not store.found.queues:
            for orphan in find_orphans(base, candidate, config.group):
                text = f"a store of this group is at {orphan.directory}, under another client id; this one begins empty"
                log.warning("group=%s %s", config.group, text)
                on_event(ConsumerEvent(EventKind.STORE_ORPHANED, text, None, {"directory": str(orphan.directory)}))
        return store, candidate
    raise OffsetStoreLocked(
        f"every slot of {store_directory(base, client_id, config.group)} is taken by another process"
    )
