"""Draws the pictures of docs/design.md: `make pictures`, with Graphviz.

Each SVG contains the source that it was drawn from. So a test compares the sources, and needs no Graphviz.
"""

from __future__ import annotations

import re
import subprocess
from html import escape, unescape
from pathlib import Path

from pyrocket_consumer.consumer.assignment.held_queue import TRANSITIONS

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

STYLE = """
svg { background: #ffffff; border-radius: 8px; }
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; fill: #1f2430; }
.cluster > path { fill: #f5f6fa; stroke: #c9cede; }
.cluster > text { fill: #5a6275; }
.node > path { fill: #ffffff; stroke: #3f51b5; stroke-width: 1.5; }
.user > path { fill: #fff4e0; stroke: #b26a00; }
.kept > path { fill: #e6f4ea; stroke: #2e7d4f; }
.edge > path { stroke: #5a6275; stroke-width: 1.3; }
.edge > polygon { fill: #5a6275; stroke: #5a6275; }
.edge text { fill: #454c5e; }
.failed > path { stroke: #b3261e; stroke-dasharray: 5 3; }
.failed > polygon { fill: #b3261e; stroke: #b3261e; }
.failed text { fill: #b3261e; }
@media (prefers-color-scheme: dark) {
  svg { background: #1e2129; }
  text { fill: #e8eaf2; }
  .cluster > path { fill: #272b36; stroke: #434a5c; }
  .cluster > text { fill: #a9b1c6; }
  .node > path { fill: #1e2129; stroke: #8c9eff; }
  .user > path { fill: #3a2f1b; stroke: #ffb74d; }
  .kept > path { fill: #1d3226; stroke: #81c995; }
  .edge > path { stroke: #a9b1c6; }
  .edge > polygon { fill: #a9b1c6; stroke: #a9b1c6; }
  .edge text { fill: #c3c9d9; }
  .failed > path { stroke: #ff8a80; }
  .failed > polygon { fill: #ff8a80; stroke: #ff8a80; }
  .failed text { fill: #ff8a80; }
}
"""
"""Each picture has its own background, so that it is legible on every page."""

HEAD = """
  bgcolor=transparent; pad=0.25; fontname="DejaVu Sans"; fontsize=11;
  node [shape=box, style=rounded, fontname="DejaVu Sans", fontsize=12, margin="0.16,0.1", height=0.6];
  edge [fontname="DejaVu Sans", fontsize=10.5, arrowsize=0.75];
"""


def node(name: str, title: str, text: str = "", kind: str = "") -> str:
    """Return a box: a title, and a line or more of smaller text."""
    lines = f'<br/><font point-size="4"> <br/></font><font point-size="10.5">{text}</font>' if text else ""
    return f'  {name} [class="{kind}", label=<<b>{title}</b>{lines}>];'


def edge(begin: str, end: str, label: str = "", more: str = "") -> str:
    """Return an arrow; a label of several lines is separated by `|`."""
    text = "  " + label.replace("|", "  \\n  ") + "  " if label else ""
    return f'  {begin} -> {end} [label="{text}"{", " + more if more else ""}];'


def group(name: str, title: str, *lines: str, side: str = "l") -> str:
    """Return boxes of one thread or server. The title is on the left or on the right side."""
    inner = "\n".join("  " + line for line in lines)
    return (
        f'  subgraph cluster_{name} {{\n    label="{title}"; labeljust={side}; style=rounded; margin=14;\n{inner}\n  }}'
    )


def graph(name: str, *lines: str, more: str = "") -> str:
    return "\n".join([f"digraph {name} {{{HEAD}  {more}", *lines, "}\n"])


def row(*names: str) -> str:
    """Return boxes in one row, in this order."""
    return f"  {{ rank=same; {' -> '.join(names)} [style=invis]; }}"


def shape_of_a_consumer() -> str:
    return graph(
        "shape_of_a_consumer",
        group(
            "deciders", "decide",
            node("rebalance", "Rebalance", "which queues to hold"),
            node("resets", "Resets", "by brokers, admins,<br/>records and your program"),
            node("corrections", "Corrections", "by responses to pulls"),
            row("rebalance", "resets", "corrections"),
        ),
        group(
            "queue", "HeldQueue: one for each queue, with one state",
            node("pulls", "PullLoop", "decides with PullCore"),
            node("window", "ProcessQueue", "unfinished messages,<br/>and the edge to commit"),
            node("lease", "Lease", "may the next<br/>call begin?"),
            node("record", "CommitRecord", "stored, last known"),
            row("pulls", "window", "lease", "record"),
        ),
        group(
            "doers", "do",
            node("cluster", "Cluster", "BrokerLink, requests", "kept"),
            node("dispatch", "Dispatcher", "chunks and lanes"),
            node("listener", "Your listener", "in a worker", "user"),
            node("commits", "Commits", "broker, file or database", "kept"),
            row("cluster", "dispatch", "listener", "commits"),
        ),
        edge("rebalance", "pulls", "begin, end", "lhead=cluster_queue"),
        edge("resets", "window", "move", "lhead=cluster_queue"),
        edge("corrections", "lease", "move", "lhead=cluster_queue"),
        edge("pulls", "cluster", "pull"),
        edge("pulls", "dispatch", "deliver"),
        edge("dispatch", "listener", "call"),
        edge("window", "listener", "ack", "dir=back"),
        edge("record", "commits", "persist"),
        more="nodesep=0.6; ranksep=0.6; compound=true;",
    )  # fmt: skip


def path_of_a_message() -> str:
    return graph(
        "path_of_a_message",
        group(
            "broker", "Broker",
            node("topic", "Queue of a topic", "messages by offset", "kept"),
            node("retry", "%RETRY% topic", "waits: 10 s, 30 s, 1 min …", "kept"),
            node("dead", "%DLQ% topic", "no longer delivered", "kept"),
            row("topic", "retry", "dead"),
        ),
        group(
            "io", "I/O thread of the consumer",
            node("pull", "Pull loop", "one for each queue"),
            node("window", "ProcessQueue", "the messages that<br/>are not finished"),
            node("chunk", "Chunk", "messages for about<br/>half a millisecond"),
            row("pull", "window", "chunk"),
            side="r",
        ),
        group("worker", "Worker threads", node("listener", "Your listener", "takes one message, or a list", "user")),
        edge("topic", "pull", "pulled"),
        edge("pull", "window", "decoded"),
        edge("window", "chunk", "cut into"),
        edge("chunk", "listener", "handed over"),
        edge("window", "listener", "it returns:|the message|is finished", "dir=back, weight=5"),
        edge("retry", "listener", "it raises:|the message|is sent back", 'class="failed", dir=back, weight=0'),
        edge("retry", "pull", "redelivered"),
        edge("retry", "dead", "failed 16 times", 'class="failed"'),
        more="nodesep=0.6; ranksep=0.6;",
    )  # fmt: skip


def path_of_an_offset() -> str:
    return graph(
        "path_of_an_offset",
        node("store", "Offset store", "the brokers, a local file,<br/>or your database", "kept"),
        node("reset", "Reset or correction", "ends the ProcessQueue;<br/>then a new one begins"),
        node("window", "ProcessQueue", "its lower edge is the<br/>oldest unfinished message"),
        node("memory", "CommitRecord", "of each HeldQueue: what<br/>is stored, and was known"),
        node("listener", "Your listener", "finishes messages<br/>in any order", "user"),
        row("window", "memory"),
        row("reset", "store"),
        edge("reset", "store", "stores the|target first"),
        edge("store", "window", "start offset"),
        edge("window", "listener", "each finished message|may move the edge", "dir=back"),
        edge("window", "memory", "the edge, when asked"),
        edge("store", "memory", "commit: every 5 s,|and when the queue ends", "dir=back"),
        more="nodesep=1; ranksep=0.6;",
    )


STATES = {
    "FREE": "not held by<br/>this member",
    "STARTING": "reads and stores<br/>the start offset",
    "CONSUMING": "pulls messages, and<br/>calls the listener",
    "CHECKING": "calls wait: is the<br/>log still the same?",
    "MOVING": "fenced; stores<br/>the next offset",
    "ENDING": "begins no more calls;<br/>stores the final offset",
}
"""The meaning of each state."""


def states_of_a_queue() -> str:
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), following in TRANSITIONS.items():
        arrows.setdefault((state.name, following.name), []).append(event.value)
    kinds = {"CONSUMING": "user", "FREE": "kept"}
    return graph(
        "states_of_a_queue",
        *(node(name, name, text, kinds.get(name, "")) for name, text in STATES.items()),
        *(edge(begin, end, ", ".join(sorted(events))) for (begin, end), events in sorted(arrows.items())),
        more="rankdir=LR; nodesep=0.4; ranksep=0.5;",
    )


PICTURES = {
    "shape": shape_of_a_consumer,
    "message": path_of_a_message,
    "offset": path_of_an_offset,
    "states": states_of_a_queue,
}


def drawn(source: str) -> str:
    """Return a picture as SVG, with its source in it."""
    answer = subprocess.run(["dot", "-Tsvg"], input=source, capture_output=True, text=True, check=True)
    svg = re.sub(r"<!--.*?-->\n?", "", answer.stdout[answer.stdout.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' (font-family|fill|stroke)="(?!none)[^"]*"', "", svg)  # the style has them
    head, rest = svg.split(">", 1)
    return f"{head}>\n<metadata>{escape(source, quote=False)}</metadata>\n<style>{STYLE}</style>{rest}"


def source_of(svg: str) -> str:
    """Return the source of a picture."""
    found = re.search(r"<metadata>(.*?)</metadata>", svg, re.DOTALL)
    return unescape(found[1]) if found else ""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, source in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(drawn(source()), encoding="utf-8")
        print(FOLDER / f"{name}.svg")
