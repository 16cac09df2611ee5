"""The RocketMQ releases that the tests know."""

VERSIONS = ("4.9.7", "5.1.4", "5.3.3", "5.5.0")
OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]


class CannotRun(Exception):
    """Real brokers cannot run on this machine. The text names the missing program."""
