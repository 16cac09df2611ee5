"""Run a command with a real RocketMQ cluster: python -m tests.real_brokers --version 5.5.0 -- COMMAND…"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

from tests.real_brokers.cluster import RealCluster
from tests.real_brokers.jars import NEWEST, VERSIONS, CannotRun, check_machine, classes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.real_brokers", description=__doc__)
    parser.add_argument("--version", default=NEWEST, choices=[*VERSIONS, "all"], help="RocketMQ release (%(default)s)")
    parser.add_argument("--brokers", type=int, default=1, help="number of brokers (%(default)s)")
    parser.add_argument("--resolve", action="store_true", help="only download the jars and compile the Java programs")
    parser.add_argument("command", nargs="*", help="run with NAMESRV_ADDR set; without one, wait for Ctrl-C")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check_machine()
        versions = VERSIONS if options.version == "all" else [options.version]
        for version in versions:
            print_status(f"RocketMQ {version}: getting its jars ready")
            classes(version)
        if options.resolve:
            return 0
        return max(run(version, options.brokers, options.command) for version in versions)
    except CannotRun as error:
        print_status(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def run(version: str, brokers: int, command: list[str]) -> int:
    """Start a cluster, run the command, and return its exit code."""
    print_status(f"RocketMQ {version}: starting a name server and {brokers} broker(s)")
    began = time.monotonic()
    with RealCluster(version, brokers) as cluster:
        took = time.monotonic() - began
        print_status(f"RocketMQ {version}: ready after {took:.1f} s, NAMESRV_ADDR={cluster.name_server}")
        if not command:
            signal.pause()
        environment = {**os.environ, "NAMESRV_ADDR": cluster.name_server}
        return subprocess.run(command, env=environment, check=False).returncode


def print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
