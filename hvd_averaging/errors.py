"""What can go wrong, as one small hierarchy.

Every message names where it happened (averager, step, process set), what differs (parameter, rank) and what to do
next. Nothing here knows a framework.
"""

from __future__ import annotations

from collections.abc import Iterable


class AveragingError(RuntimeError):
    """Base class: catching it catches every error of this package that is about averaging itself.

    A wrong argument (a bad ``period``, an object that holds no parameters) is a plain ``ValueError`` or
    ``TypeError`` instead, raised where the mistake is.
    """


class HorovodNotInitializedError(AveragingError):
    """Horovod was needed before ``hvd.init()`` was called, or after ``hvd.shutdown()``."""


class ProcessSetError(AveragingError):
    """The process set is not registered with the running Horovod (never was, or not since ``hvd.init()``)."""


class LayoutMismatchError(AveragingError):
    """The ranks did not pass the same parameters, or their averagers are set up differently. Nothing was changed."""


class StepMismatchError(AveragingError):
    """The ranks met in a round at different steps, or one left while another goes on. Nothing was changed."""


class PeerError(AveragingError):
    """Another rank could not take part in this round: its own error is in its log. Nothing was changed here."""


class CollectiveError(AveragingError):
    """A Horovod operation failed, mostly because another process has ended. Nothing was changed.

    The instances that are raised derive from ``horovod.common.exceptions.HorovodInternalError`` as well, so that
    Horovod's elastic mode recognises and handles them.
    """


class AveragingTimeoutError(AveragingError, TimeoutError):
    """A round took longer than ``timeout`` seconds: some rank of the process set never came."""


def collective_error(message: str) -> CollectiveError:
    """A :class:`CollectiveError` that Horovod's elastic mode understands too."""
    from horovod.common.exceptions import HorovodInternalError

    class HorovodCollectiveError(CollectiveError, HorovodInternalError):  # type: ignore[misc]
        pass

    HorovodCollectiveError.__name__ = HorovodCollectiveError.__qualname__ = CollectiveError.__name__
    return HorovodCollectiveError(message)


def list_of_ranks(ranks: Iterable[int]) -> str:
    """``rank 1``, or ``ranks 0, 2 and 3``: how messages name ranks."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
