"""One optimizer step of several averagers at once, so that their rounds wait for the network together."""

from __future__ import annotations

from .adapters import outside_autograph
from .averagers import ModelAverager
from .round import Meeting, Round


@outside_autograph
def average_together(*pairs: tuple[ModelAverager, object]) -> list[Round | None]:
    """Call ``averager.average_parameters(params)`` for each pair, and begin all their rounds before waiting for one.

    For several averagers in one optimizer step, such as those of a generator and a discriminator, or of layers that
    different process sets share: the rounds then wait for the network together instead of one after another. Averagers
    with a ``delay`` or ``fragments`` take their turn as in ``average_parameters``.

    Args:
        pairs: each an averager and what it averages; in the same order on every rank.

    Returns:
        What ``average_parameters`` of each would have returned.

    Raises:
        AveragingError, TypeError, ValueError: as ``average_parameters``, the first if there are several; the rounds of
            the other averagers are brought to their end before.

    Example, after the steps of two optimizers::

        average_together((generator_averager, generator), (critic_averager, critic))
    """
    takings = [_Taking(averager, params) for averager, params in pairs]
    while sum(taking.go_on() for taking in takings):
        """All go on to their next pause, until none has one."""
    for taking in takings:
        if taking.error is not None:
            raise taking.error
    return [taking.outcome for taking in takings]


class _Taking:
    """One of several steps that are taken together."""

    def __init__(self, averager: ModelAverager, params: object) -> None:
        self.outcome: Round | None = None
        self.error: Exception | None = None
        self._meeting: Meeting[Round | None] | None = None
        try:
            self._meeting = averager._step(params)
        except Exception as error:
            self.error = error

    def go_on(self) -> bool:
        """Go on to the next pause; false at the end, which an error is as well."""
        if self._meeting is None:
            return False
        try:
            next(self._meeting)
        except StopIteration as end:
            self.outcome = self.outcome or end.value  # the end comes again each time
            return False
        except Exception as error:
            self.error = error
            return False
        return True
