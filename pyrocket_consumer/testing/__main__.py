"""Runs an embedded cluster in a separate process, for benchmarks and experiments."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.testing.cluster import EmbeddedCluster
from pyrocket_consumer.testing.config import DEFAULT_RELEASE

_EXAMPLE = """example:
  python -m pyrocket_consumer.testing --brokers 2 --topic orders:4 --topic audit:1 --port 9876

The first line printed is the name server's address. The cluster runs until standard input ends (with
--until-stdin-ends), Ctrl-C or SIGTERM. It keeps everything in memory. Use it for tests, not for production.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a cluster until a signal, or the end of standard input, stops it."""
    options = _options(arguments)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        cluster = EmbeddedCluster(
            options.brokers,
            slaves=options.slaves,
            version=options.version,
            port=options.port,
            delay_scale=options.delay_scale,
            record_limit=0,
        )
        with cluster:
            for name, queues in options.topic:
                cluster.create_topic(name, queues)
                if options.fill:
                    cluster.send(name, b"x" * options.body_bytes, count=options.fill)
            sys.stdout.write(f"{cluster.name_server}\n")
            sys.stdout.flush()
            if options.until_stdin_ends:
                threading.Thread(target=_stop_with_input, args=(stopped,), daemon=True).start()
            stopped.wait()
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _stop_with_input(stopped: threading.Event) -> None:
    sys.stdin.read()
    stopped.set()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pyrocket_consumer.testing",
        description="Run a RocketMQ name server and brokers in memory, for tests.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--brokers", type=int, default=1, help="number of broker names (1)")
    parser.add_argument("--slaves", type=int, default=0, help="slaves of each (0)")
    parser.add_argument(
        "--topic",
        type=_topic,
        action="append",
        default=[],
        metavar="NAME[:QUEUES]",
        help="a topic and its queues on each broker (4); may be repeated",
    )
    parser.add_argument("--fill", type=_count, default=0, metavar="COUNT", help="messages to store in each topic first")
    parser.add_argument("--body-bytes", type=_count, default=256, help="size of their bodies (256)")
    parser.add_argument("--port", type=int, default=0, help="the name server's port (any)")
    parser.add_argument("--version", default=DEFAULT_RELEASE, help=f"the release to behave as ({DEFAULT_RELEASE})")
    parser.add_argument("--delay-scale", type=float, default=1.0, help="delay levels are multiplied by this (1)")
    parser.add_argument("--until-stdin-ends", action="store_true", help="end when standard input is closed")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def _topic(text: str) -> tuple[str, int]:
    name, _, queues = text.partition(":")
    if not name or queues and not queues.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not like orders or orders:4")
    return name, int(queues) if queues else 4


if __name__ == "__main__":
    sys.exit(main())
