"""The protocol between the ranks of a pipeline, as data: kinds of messages, tags, credit, and keys of the shared store.

`str(PROTOCOL)` prints the tables. `mailboxes` sends and receives the messages, `status_board` reads and writes the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "ABORT",
    "CALLS",
    "CHANGED",
    "CREDIT",
    "ENDED",
    "EXCHANGE",
    "EXCHANGE_BEGUN",
    "FAILED",
    "HANDLING",
    "HEAD_LENGTH",
    "LARGE",
    "LAYOUT",
    "LEFT",
    "MAIN",
    "NEW",
    "OUTCOME",
    "PIPELINES",
    "PROCESS",
    "PROTOCOL",
    "READERS",
    "ROW",
    "SAVE",
    "SMALL",
    "STAYS",
    "THREAD",
    "TIMELINES",
    "WAITS",
    "Credit",
    "HeadField",
    "MessageKind",
    "Protocol",
    "StoreKey",
    "Tag",
    "tag_of",
]  # fmt: skip


class Tag(IntEnum):
    """Tags of one use of a backend, as offsets from its first tag. Messages of one tag between two ranks arrive in order."""

    REPEATED = 0
    NEW = 1
    ABORT = 2
    LAYOUT = 3
    ROW = 4


_N_TAGS = len(Tag)


def tag_of(use: int, tag: Tag) -> int:
    """Return the tag in the process group. Pipelines use one group under different numbers, hence with different tags."""
    return _N_TAGS * use + tag


@dataclass(frozen=True, slots=True)
class MessageKind:
    """A kind of message: its tag, the tensors that are sent for it, whether receives are posted ahead, and its use."""

    name: str
    tag: Tag
    parts: tuple[str, ...]
    is_posted_ahead: bool
    use: str


SMALL = MessageKind(
    "small", Tag.REPEATED, ("head + payload",), True, "a value with the layout of the last one of its name"
)
LARGE = MessageKind(
    "large", Tag.REPEATED, ("head", "payload"), True, "the same, for a payload of more than small_bytes"
)
CHANGED = MessageKind("changed", Tag.REPEATED, ("as small or large",), True, "payload is padding; a new one follows")
NEW = MessageKind(
    "new", Tag.NEW, ("name + header", "payload"), False, "no layout known: first value, object, sent once"
)
ABORT = MessageKind("abort", Tag.ABORT, (), False, "never sent: a receive that times out closes the connections")

LAYOUT = MessageKind(
    "layout",
    Tag.LAYOUT,
    ("name + header", "object"),
    False,
    "before a value on a link of GPUs, if its layout is not agreed",
)

ROW = MessageKind("row", Tag.ROW, ("numbers",), True, "before a call: what a rank is asked for, or the verdict on all")


class HeadField(IntEnum):
    """Positions in the head of a message; the numbers are int64."""

    NAME = 0
    IS_SAME = 1
    RECEIVED = 2


HEAD_LENGTH = 8
"""Length of a head in int64 numbers: 64 bytes, so that the payload behind it is aligned for every dtype."""

_HEAD_FIELDS = {
    HeadField.NAME: "CRC-32 of the name of the value",
    HeadField.IS_SAME: "1 for small and large, 0 for changed",
    HeadField.RECEIVED: "messages that the sender has received from this peer: an acknowledgement",
}


@dataclass(frozen=True, slots=True)
class Credit:
    """Bounds on the messages between two ranks that are not received yet."""

    small_bytes: int = 1 << 17
    """Payload bytes up to which a copy costs less time than a second message."""

    posted_ahead: int = 16
    """Receives of REPEATED messages that a rank posts before it needs the values: a message without one takes three ways, not one."""

    large_ahead: int = 2
    """Receives of large values among them. Each has memory of its own."""

    unsent: int = 8
    """Values of two parts that a rank may have begun to send. A program is proven to end with any bound, even 0."""


CREDIT = Credit()


@dataclass(frozen=True, slots=True)
class StoreKey:
    """A key of the shared store: its template, the rank that writes it, and its value."""

    template: str
    writer: str
    value: str

    def at(self, *numbers: int) -> str:
        """Return the key with numbers in the place of its fields, in order."""
        parts = iter(numbers)
        return "/".join(str(next(parts)) if field.startswith("{") else field for field in self.template.split("/"))


TIMELINES = "timelines to gather"
"""The topic of the one exchange that begins no run."""

EXCHANGE_BEGUN = StoreKey("begun/{rank}", "the rank", "its last exchange: first member, run, place in the run, topic")
EXCHANGE = StoreKey("exchange/{first}/{exchange}/{member}", "the member", "topic, newline, text")
FAILED = StoreKey("failed", "first failing rank", "FailureReport")
READERS = StoreKey("readers", "each other rank", "number of ranks that have read FAILED")
WAITS = StoreKey("waits/{rank}", "the rank", "AwaitedMessage, or empty")


PROCESS = StoreKey("process/{rank}", "the rank", "boot, namespace, number and start time of its process, or empty")
ENDED = StoreKey("ended/{rank}", "the rank", "how its script has ended")
PIPELINES = StoreKey(
    "pipelines/{rank}", "the rank", "number of pipelines that it has made; of all pipelines of its ranks"
)
THREAD = StoreKey(
    "thread/{rank}", "the rank", "how one of its threads has ended by an exception; of all pipelines of its ranks"
)
HANDLING = StoreKey(
    "handling/{rank}", "the rank", "the exception that its main thread handles, or empty; of all pipelines of its ranks"
)
MAIN = StoreKey(
    "main/{rank}", "the rank", "that its main thread has ended, and which threads run on; of all pipelines of its ranks"
)
CALLS = StoreKey(
    "calls/{rank}", "the rank", "pipeline in which it waits, awaited rank, serial number; of all pipelines of its ranks"
)
SAVE = StoreKey("save/{rank}", "the rank", "the checkpoint that it saves; of all pipelines of its ranks")
OUTCOME = StoreKey(
    "outcome/{first}/{run}", "the first to know", "done, or the FailureReport with which a call is undone"
)
STAYS = StoreKey("stays/{rank}", "the rank", "yes if it goes on without the copy of the rank that failed, else no")
LEFT = StoreKey("left", "the first to know", "numbers of the copies that go on")


@dataclass(frozen=True, slots=True)
class Protocol:
    """All tables of the protocol."""

    kinds: tuple[MessageKind, ...]
    credit: Credit
    keys: tuple[StoreKey, ...]

    def __str__(self) -> str:
        tag = {tag: "n".join((str(len(Tag)), f" + {int(tag)}" if tag else "")) for tag in Tag}
        kinds = [
            (kind.name, tag[kind.tag], " ".join(f"[{p}]" for p in kind.parts), "yes" if kind.is_posted_ahead else "no", kind.use)
            for kind in self.kinds
        ]  # fmt: skip
        head = [(str(int(field)), meaning) for field, meaning in _HEAD_FIELDS.items()]
        bounds = [
            ("small_bytes", f"{self.credit.small_bytes} bytes of payload in one part with the head"),
            ("posted_ahead", f"{self.credit.posted_ahead} receives per peer"),
            ("large_ahead", f"{self.credit.large_ahead} of them of large values"),
            ("unsent", f"{self.credit.unsent} values of two parts per peer"),
        ]
        keys = [(key.template, key.writer, key.value) for key in self.keys]
        return "\n\n".join((
            _table(("message", "tag", "parts", "ahead", "use"), kinds),
            _table(("head", f"{HEAD_LENGTH} int64"), head),
            _table(("credit", "bound"), bounds),
            _table(("store key", "writer", "value"), keys),
        ))  # fmt: skip


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns of equal width, under their titles."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return "\n".join(_lines([titles, *rows], widths))


def _lines(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    for row in rows:
        yield "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


PROTOCOL = Protocol(
    (SMALL, LARGE, CHANGED, NEW, ABORT, LAYOUT, ROW),
    CREDIT,
    (
        EXCHANGE_BEGUN,
        EXCHANGE,
        FAILED,
        READERS,
        WAITS,
        PROCESS,
        ENDED,
        PIPELINES,
        THREAD,
        HANDLING,
        MAIN,
        CALLS,
        SAVE,
        OUTCOME,
        STAYS,
        LEFT,
    ),
)
