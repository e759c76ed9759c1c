"""What all callbacks here have in common: they meet their peers on the other ranks when training starts.

A callback that one rank has and another has not would leave a rank waiting in the middle of training. So ranks compare
their callbacks at the start, where the mistake can be named.
"""

from __future__ import annotations

from typing import Any

import keras

from ..adapters import Adapter, loaded_adapters
from ..averagers import DEFAULT_TIMEOUT
from ..channel import Channel
from ..errors import (
    AveragingError,
    AveragingTimeoutError,
    CollectiveError,
    LayoutMismatchError,
    PeerError,
    collective_error,
    list_of_ranks,
)
from ..layout import fingerprint
from ..members import check_process_set, members
from .optimizer import averages_gradients

START_TIMEOUT = 60.0
"""Seconds that a rank waits for its peers at the start of training."""


class MeetingCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that every rank of a process set has.

    Args:
        process_set: a ``horovod.ProcessSet``; ``None`` is all ranks. On a rank outside it the callback does nothing.
        start_timeout: seconds to wait for the other ranks at the start of training; ``None`` waits for ever.
    """

    def __init__(self, process_set: Any, start_timeout: float | None) -> None:
        super().__init__()
        check_process_set(process_set)
        if start_timeout is not None and not start_timeout > 0:
            raise ValueError(f"start_timeout is a positive number of seconds, or None; not {start_timeout!r}.")
        self.process_set = process_set
        self.start_timeout = start_timeout

    def describe(self) -> str:
        """What must be the same on every rank, as text."""
        return type(self).__name__

    def check(self) -> None:
        """Raise an error if this callback cannot work with the model."""
        if getattr(self.model, "optimizer", None) is None:
            raise ValueError(
                f"{type(self).__name__} needs a compiled model: call model.compile(optimizer=..., loss=...) on every "
                "rank before training."
            )

    def state(self) -> int:
        """A number that the other ranks want to know at the start."""
        return 0

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        # Keras calls this before it makes the train function. XLA, its default on GPUs, cannot compile Horovod.
        if averages_gradients(getattr(model, "optimizer", None)) and model.jit_compile:
            model.jit_compile = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.meet()

    def channel(self, timeout: float | None = DEFAULT_TIMEOUT) -> Channel | None:
        """How to talk to the other ranks; ``None`` on a rank outside the process set."""
        adapter = _adapter()
        channel = Channel(adapter, members(self.process_set, adapter.hvd), type(self).__name__, timeout, call="fit")
        return channel if channel.members.included else None

    def meet(self) -> list[int]:
        """Compare with the other ranks who has this callback.

        Returns:
            What :meth:`state` says on every rank.

        Raises:
            LayoutMismatchError: ranks have other callbacks, or in another order, or set up differently.
            AveragingTimeoutError: a rank did not come within ``start_timeout`` seconds.
            PeerError: the callback cannot work on another rank; that rank itself raises its own error.
        """
        channel = self.channel(self.start_timeout)
        if channel is None:
            return []
        failure = _error_of(self.check)
        state = self.state() if failure is None else 0
        try:
            rows = channel.gather([fingerprint(self.describe()), failure is not None, state], "keras.start")
        except AveragingTimeoutError:
            waited = f"has waited {self.start_timeout:g} s at the start of training"
            raise AveragingTimeoutError(self._alone(channel, waited)) from None
        except CollectiveError as error:
            raise collective_error(self._alone(channel, "has waited, until a rank failed or ended,")) from error
        self._check_same({rank: row[0] for rank, row in rows.items()}, channel)
        if failure is not None:
            raise failure
        if failed := [rank for rank, row in rows.items() if row[1]]:
            raise PeerError(f"{channel.where}: training cannot start on {list_of_ranks(failed)}, see the log there.")
        return [row[2] for row in rows.values()]

    def _check_same(self, fingerprints: dict[int, int], channel: Channel) -> None:
        if len(set(fingerprints.values())) <= 1:
            return
        texts = channel.gather_text(self.describe(), "keras.start.text")
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise LayoutMismatchError(
            f"{channel.where}: the ranks start training with different callbacks: {listed}. Give every rank the same "
            "callbacks, with the same arguments, in the same order."
        )

    def _alone(self, channel: Channel, waited: str) -> str:
        others = list_of_ranks(rank for rank in channel.members.ranks if rank != channel.members.rank)
        return (
            f"{channel.where}: rank {channel.members.rank} {waited} for {others} to start training with the same "
            "callback. Give the callback to every rank, not to one only; if a rank just starts late, raise "
            "start_timeout=."
        )


def _adapter() -> Adapter:
    framework = keras.backend.backend()
    for adapter in loaded_adapters():
        if adapter.framework == framework:
            return adapter
    raise AveragingError(
        f"Keras runs on the {framework!r} backend here, but Horovod only on 'tensorflow' and 'torch': set the "
        "environment variable KERAS_BACKEND=tensorflow before Keras is imported."
    )


def _error_of(check: Any) -> Exception | None:
    try:
        check()
    except (TypeError, ValueError) as error:
        return error
    return None
