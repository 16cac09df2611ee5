"""Escapes from servers and messages are shown on the terminal, and never executed."""

from __future__ import annotations

import json
import os
import pty
import subprocess

import pytest

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import answer
from tests.cli.shell import COMMAND, environment, run
from tests.consuming import consuming

pytestmark = pytest.mark.live

NAUGHTY = "\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u202etxt\u2028next\rover"
FORGED = "first\norders/broker-a/0@99  paid  forged"


class AlwaysPrintable(str):
    """Makes a member with a name that no option allows, as another client's members may have."""

    def isprintable(self):
        return True


def on_a_terminal(cluster, *arguments, code=0):
    """Run the command with stdout and stderr on a terminal; return the lines that the terminal got."""
    terminal, process_end = pty.openpty()
    wide = environment(PYTHONUTF8="1", COLUMNS="300", TERM="dumb")
    command = [*COMMAND, *arguments, "-n", cluster.name_server]
    process = subprocess.Popen(command, stdin=process_end, stdout=process_end, stderr=process_end, env=wide)
    os.close(process_end)
    shown = b""
    try:
        while piece := os.read(terminal, 65536):
            shown += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)
    assert process.wait(60) == code, shown.decode()
    lines = [line.removesuffix("\r") for line in shown.decode().split("\n")]
    assert not any("Traceback" in line for line in lines), shown.decode()
    return lines[:-1]


def through_a_pipe(cluster, *arguments, code=0):
    done = run(*arguments, "-n", cluster.name_server, env={"PYTHONUTF8": "1"})
    assert done.returncode == code, done.stderr
    return done.stdout.decode(), done.stderr.decode()


def assert_harmless(lines):
    for line in lines:
        assert line.isprintable(), repr(line)


def test_a_message_moves_no_cursor_and_makes_no_line_of_its_own(cluster):
    for body in (NAUGHTY, FORGED, "naïve 订单"):
        cluster.send("orders", body.encode(), tags=NAUGHTY)
    lines = on_a_terminal(cluster, "consume", "orders")
    assert_harmless(lines)
    assert len(lines) == 3, lines
    assert r"\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u202etxt\u2028next\rover" in lines[0], "it is shown"
    assert r"first\norders/broker-a/0@99" in lines[1]
    assert lines[2].endswith("naïve 订单"), "what harms nobody stays as it is"


def test_bodies_are_unchanged_for_programs_and_with_raw(cluster):
    for body in (FORGED, NAUGHTY):
        cluster.send("orders", body.encode(), tags="\x1b[31m")
    shown, _ = through_a_pipe(cluster, "consume", "orders")
    assert FORGED in shown and NAUGHTY in shown
    assert r"\x1b[31m" in shown and "\x1b[31m" not in shown, "tags have nothing to do there"
    assert "\x1b[2J" in "\n".join(on_a_terminal(cluster, "consume", "orders", "--raw"))
    _, stderr = through_a_pipe(cluster, "consume", "orders", "--raw", "-o", "json", code=2)
    assert "--raw is for text" in stderr


def test_json_has_escapes_for_all_a_terminal_obeys(cluster):
    cluster.send("orders", NAUGHTY.encode(), tags=NAUGHTY, keys="key\x1b[2J\x9b2J\x7f")
    shown, _ = through_a_pipe(cluster, "consume", "orders", "-o", "json")
    assert_harmless(shown.splitlines())
    found = json.loads(shown)
    assert (found["body"], found["tag"], found["keys"]) == (NAUGHTY, NAUGHTY, ["key\x1b[2J\x9b2J\x7f"])


def test_escapes_in_names_of_members_are_shown(cluster, tmp_path):
    cluster.send("orders", b"one")
    member = AlwaysPrintable("[red]" + NAUGHTY + "\n")
    options = {"message_model": "broadcasting", "client_ip": "a", "instance_name": member, "offset_store_dir": tmp_path}
    with consuming(cluster, "orders", "g", **options) as (_, seen):
        seen.wait_for(1)
        for command in (["show", "g", "orders"], ["reset", "g", "orders", "--to", "earliest"]):
            lines = on_a_terminal(cluster, "offsets", *command)
            assert_harmless(lines)
            assert any(r"a@[red]\x1b]" in line for line in lines), lines


@pytest.mark.parametrize("output", ["table", "json"])
def test_an_error_of_a_server_is_one_line_on_stderr(cluster, output):
    cluster.broker("broker-a").on(RequestCode.SEND_MESSAGE_V2, answer(13, NAUGHTY + "\n" + "x" * 10_000), times=None)
    lines = on_a_terminal(cluster, "produce", "orders", "one", "-o", output, code=1)
    assert_harmless(lines)
    assert len("".join(lines)) < 3000
