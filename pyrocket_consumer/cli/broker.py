"""`pyrocket broker`: the embedded cluster, for trying things out."""

from __future__ import annotations

import argparse
import threading

from pyrocket_consumer.cli.arguments import add_command, positive

_EXAMPLES = """\
  pyrocket broker --topic orders:4                      # prints the name server's address; Ctrl-C ends it
  pyrocket broker --brokers 2 --topic orders --topic payments:8
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = add_command(
        commands, "broker", "run a name server and brokers in memory on this host, for tests only", _EXAMPLES, run
    )
    command.add_argument("--brokers", type=positive, default=1, help="how many brokers (default: 1)")
    command.add_argument(
        "--topic", action="append", default=[], metavar="NAME[:QUEUES]", help="create a topic (4 queues); repeatable"
    )


def run(options: argparse.Namespace) -> int:
    from pyrocket_consumer.testing import EmbeddedCluster

    with EmbeddedCluster(brokers=options.brokers) as cluster:
        for topic in options.topic:
            name, _, queues = topic.partition(":")
            cluster.create_topic(name, queues=int(queues) if queues.isdigit() else 4)
        print(f"name server: {cluster.name_server}   (messages are kept in memory; Ctrl-C ends)", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
    return 0
