"""Small talk between the ranks of a process set, apart from the parameters: rare, and safe during hvd.join().

Only sums travel, since a rank in ``hvd.join()`` answers those (with zeros) and nothing else. Every wait is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .adapters import Adapter, Pending
from .errors import AveragingError, AveragingTimeoutError, CollectiveError, collective_error, list_of_ranks
from .members import Members

Begun = TypeVar("Begun")

_TEXT_LENGTH = 240  # bytes
UNTOUCHED = "The parameters here are as they were before."


@dataclass(frozen=True)
class Channel:
    """How one averager talks to its peers: through which Horovod, with whom, by which name, for how long.

    ``call`` is what the user calls to have this talk, for messages that say what to do.
    """

    adapter: Adapter
    members: Members
    name: str
    timeout: float | None
    step: int | None = None
    call: str = "average_parameters"

    @property
    def where(self) -> str:
        """What every message starts with."""
        step = "" if self.step is None else f"step {self.step}, "
        return f"{self.name} ({step}process set {self.members})"

    def gather(self, row: Sequence[int], topic: str) -> dict[int, list[int]]:
        """The rows (equally long everywhere) of all ranks but those in ``hvd.join()``, by rank."""
        if self.members.alone:
            return {self.members.rank: list(row)}
        width = len(row) + 1  # a leading 1 tells a row of zeros from the silence of a joined rank
        table = [0] * (width * self.members.size)
        start = width * self.members.position
        table[start : start + width] = [1, *row]
        # Without the averager's name: ranks that call two averagers in another order find out instead of stalling.
        name = f"hvd_averaging.{topic}"
        sums = self.complete(self.begin(lambda: self.adapter.sum_integers(table, name, self.members)))
        rows = [list(sums[start : start + width]) for start in range(0, len(sums), width)]
        return {rank: row[1:] for rank, row in zip(self.members.ranks, rows, strict=True) if row[0]}

    def gather_text(self, text: str, topic: str) -> dict[int, str]:
        """Like :meth:`gather` for a line of text, which is cut where it is too long."""
        line = text.encode()[:_TEXT_LENGTH].ljust(_TEXT_LENGTH, b"\0")
        rows = self.gather(list(line), topic)
        return {rank: bytes(row).rstrip(b"\0").decode(errors="replace") for rank, row in rows.items()}

    def begin(self, begin: Callable[[], Begun]) -> Begun:
        """Begin collectives that are waited for later.

        Raises:
            AveragingError: another averager of the name is at it, with parameters that look the same.
            CollectiveError: Horovod gave up on it.
        """
        from horovod.common.exceptions import HorovodInternalError

        try:
            return begin()
        except ValueError as error:
            if "same name" not in str(error):
                raise
            raise AveragingError(
                f"{self.where}: a round of another averager of this name, over parameters that look the same, is under "
                'way. Give each averager a name of its own, name="critic 1" for example.'
            ) from error
        except HorovodInternalError as error:
            raise self._failed(error) from error

    def complete(self, pending: Pending, aftermath: str = UNTOUCHED) -> Sequence[Any]:
        """Wait for the result of a collective that has begun.

        Args:
            pending: what is waited for.
            aftermath: for messages, what has become of the parameters if it fails.

        Raises:
            AveragingTimeoutError: it took longer than ``timeout`` seconds.
            CollectiveError: Horovod gave up on it.
        """
        from horovod.common.exceptions import HorovodInternalError

        try:
            if not pending.wait(self.timeout):
                raise AveragingTimeoutError(f"{self._late()} {aftermath}")
            return pending.result()
        except HorovodInternalError as error:
            raise self._failed(error, aftermath) from error

    def _failed(self, error: Exception, aftermath: str = UNTOUCHED) -> CollectiveError:
        return collective_error(
            f"{self.where}: this failed, most often because another rank has failed or ended (its log says why). "
            f"{self.advice} {aftermath} Horovod says: {error}"
        )

    def _late(self) -> str:
        others = list_of_ranks(rank for rank in self.members.ranks if rank != self.members.rank)
        return (
            f"{self.where}: rank {self.members.rank} has waited {self.timeout:g} s for {others} to come here, too. "
            f"{self.advice} If a rank is just slow here, raise timeout=."
        )

    @property
    def advice(self) -> str:
        """How ranks come to meet."""
        joins = self.call == "average_parameters"
        fewer = ", or fewer batches: then call averager.join(params) on each rank after its last one" if joins else ""
        return (
            f"Every rank of the process set must call {self.call} equally often (look for a rank-dependent branch, an "
            f"exception that was swallowed{fewer})."
        )
