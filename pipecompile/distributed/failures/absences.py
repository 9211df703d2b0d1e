"""Notes of a rank about itself, for ranks that wait for it: the number of pipelines that it has made, the checkpoint that it
saves, the exception that has ended one of its threads or that its script handles, and the threads that outlive its script.

    rank 0   compile   compile   waits ──► "rank 1 has made 1 pipeline on ranks 0, 1; this is number 2 of rank 0"
    rank 1   compile   step

A thread that ends by an exception does not end its process, so it is not a failure: other ranks read the note if the rank is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from pipecompile.distributed.failures.board_watch import at_handling, at_main_end
from pipecompile.distributed.failures.crossed_waits import CrossedWaits
from pipecompile.distributed.protocol import HANDLING, MAIN, PIPELINES, SAVE, THREAD
from pipecompile.errors import described, encodable

__all__ = ["Absences"]

_LENGTH = 500
"""Length to which the text of an exception is cut."""


class Absences:
    """The notes of ranks about themselves. `store` is that of all pipelines of `members`; this rank is in its pipeline `number`."""

    def __init__(self, store: Store, members: Sequence[int], rank: int, number: int) -> None:
        self.store, self.members, self.rank, self.number = store, members, rank, number
        self._set(PIPELINES.at(rank), str(number))

    def begin(self) -> None:
        """Note from now on what the main thread of this rank handles, and its end."""
        at_main_end(self.note_main_end)
        at_handling(self)

    def crossed(self) -> CrossedWaits:
        """Return what finds waits in this pipeline that those in others of these ranks keep from their end."""
        return CrossedWaits(self.store, self.rank, self.number)

    def note_thread(self, name: str, error: BaseException) -> None:
        """Note that a thread of this rank has ended by an exception."""
        self._set(THREAD.at(self.rank), encodable(f"its thread {name} has ended by {described(error)}"[:_LENGTH]))

    def note_handling(self, error: str) -> None:
        """Note the exception that the script of this rank handles, since when it makes no call; with "", that it does so no longer."""
        self._set(HANDLING.at(self.rank), encodable(error[:_LENGTH]))

    def note_main_end(self, others: Sequence[str]) -> None:
        """Note that the main thread of this rank has ended, and that the `others` keep its process."""
        threads = f"its thread{'s' * (len(others) > 1)} {', '.join(others)} run{'s' * (len(others) == 1)} on"
        self._set(MAIN.at(self.rank), encodable(f"its script has ended, and {threads}"[:_LENGTH]))

    def of_exchange(self, rank: int) -> str:
        """Return why a rank may not come to an exchange of this pipeline."""
        made = self._get(PIPELINES.at(rank))
        on = f"on ranks {', '.join(map(str, self.members))}"
        here = f"this is number {self.number} of rank {self.rank}"
        if made and int(made) < self.number:
            counted = f"has made {made} pipeline{'s' * (made != '1')} {on}, and {here}"
            return f"it {counted}: it has not called compile, or not as often"
        if made and int(made) > self.number:
            return f"it has made {made} pipelines {on}, and {here}: ranks that call them in another order wait for each other"
        return f"it has made no pipeline {on}: it has not called compile" if not made else ""

    def note_save(self, path: str) -> None:
        """Note that this rank saves a checkpoint; with "", that it does so no longer."""
        self._set(SAVE.at(self.rank), encodable(path[:_LENGTH]))

    def of_wait(self, rank: int) -> str:
        """Return what keeps a rank from a call, as far as is known: a save that waits for all ranks, a thread of it that has ended."""
        path = self._get(SAVE.at(rank))
        saves = f"it saves the checkpoint {path}, and waits there for all ranks" if path else ""
        error = self._get(HANDLING.at(rank))
        handles = f"it is handling {error}" if error else ""
        return "; ".join(filter(None, [saves, handles, self._get(THREAD.at(rank)), self._get(MAIN.at(rank))]))

    def _set(self, key: str, text: str) -> None:
        with suppress(RuntimeError):
            self.store.set(key, text)

    def _get(self, key: str) -> str:
        with suppress(RuntimeError):
            if self.store.check([key]):
                return str(self.store.get(key).decode())
        return ""
