"""Post-local SGD as one optimizer: average gradients at first, then parameters."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .. import process_sets
from ..adapters import Adapter
from ..averagers import ModelAverager
from ..channel import Channel
from ..companions import Together
from ..errors import AveragingError
from ..members import check_process_set, members
from ..round import Round
from .gradients import BUCKET_BYTES, GradientRounds
from .state import OPTIMIZER_STATE, begin, companions, reset

Closure = Callable[[], Any]


class _Wrapper(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose parameters, state and options are those of another one."""

    inner: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer: the same list, whatever either of them does to it."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of the wrapped optimizer."""
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def step(self, closure: Closure | None = None) -> Any:
        """Make the state that a first step would make, and move nothing.

        ``horovod.torch.broadcast_optimizer_state`` asks a wrapper's base class for such a step on ranks whose
        optimizer has no state yet. It is no step of the training, and other ranks may not take it.
        """
        begin(self.inner)
        self.inner.zero_grad()


class PostLocalSGDOptimizer(_Wrapper):
    """Averages gradients during warm-up, and then trains locally and averages parameters now and then.

    Post-local SGD (Lin et al., 2020, arXiv:1808.07217), after ``torch.distributed.optim.PostLocalSGDOptimizer``; but
    there gradients are averaged by a communication hook with a ``start_localSGD_iter`` of its own, while here one
    number, the averager's ``warmup_steps``, serves both. Up to that step gradients are averaged over the averager's
    process set at every step; afterwards within ``gradient_process_set``, and parameters by the averager's schedule.

    Gradients set out during backward, in buckets, from the last layer to the first. Replicas must start equal: call
    :func:`hvd_averaging.broadcast_parameters` first. The loop stays what it was; besides,

    * to clip, call :meth:`synchronize` between ``backward()`` and clipping, so that the mean is clipped;
    * to accumulate gradients, put all but the last ``backward()`` of a step into ``with optimizer.no_sync():``;
    * with ``torch.amp.GradScaler``, a step that overflows on one rank is skipped on all, and not counted. Call
      :meth:`synchronize` before ``scaler.step`` to average during backward; else gradients are unscaled first;
    * closures work, and see the mean loss of the ranks that average gradients, so that L-BFGS decides alike on them.

    Args:
        optimizer: any ``torch.optim.Optimizer``. It may still be used through this one only.
        averager: says when, and over which ranks, such as :class:`hvd_averaging.PeriodicModelAverager`.
        gradient_process_set: within which gradients are averaged after warm-up: ``"node"`` (the ranks of the averager
            on this host), a ``horovod.ProcessSet``, or ``None`` for none.
        optimizer_state: what becomes of momentum and moments when parameters are averaged. ``"local"``: they stay each
            rank's own. ``"average"``: they are averaged in the same round, and step counts become the maximum.
            ``"reset"``: they start afresh.
        model: the model, if the averager is to average its buffers as well.
        bucket_bytes: the size of the largest bucket of gradients; ``None`` sends all together after backward.

    Raises:
        TypeError: something else for ``optimizer``, ``averager`` or ``gradient_process_set``.
        ValueError: another word than these, or an averager with ``buffers`` but no ``model``.
        ProcessSetError: Horovod may not add the process set of this node; see :mod:`hvd_averaging.process_sets`.
        HorovodNotInitializedError: ``"node"`` before ``hvd.init()``.

    Example::

        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            PeriodicModelAverager(period=8, warmup_steps=1000),
        )
    """

    averager: ModelAverager
    optimizer_state: str
    model: torch.nn.Module | None
    bucket_bytes: int | None
    gradient_process_set: Any
    last_round: Round | None
    """What the latest averaging of parameters did."""
    last_gradient_round: Round | None
    """What the latest averaging of gradients did; ``None`` at a step without one."""

    _step_supports_amp_scaling = True  # GradScaler hands over `grad_scale` and `found_inf`, and skips nothing itself

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        averager: ModelAverager,
        gradient_process_set: Any = "node",
        *,
        optimizer_state: str = "local",
        model: torch.nn.Module | None = None,
        bucket_bytes: int | None = BUCKET_BYTES,
    ) -> None:
        _check(optimizer, averager, optimizer_state, model)
        self.__setstate__(
            {
                "inner": optimizer,
                "averager": averager,
                "optimizer_state": optimizer_state,
                "model": model,
                "bucket_bytes": bucket_bytes,
                "gradient_process_set": _gradient_process_set(gradient_process_set, averager),
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "averager", "optimizer_state", "model", "bucket_bytes", "gradient_process_set")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # makes the hooks of an optimizer, too
        # By the module that horovod.torch.broadcast_optimizer_state knows a wrapper, and spares it a real step.
        self.__dict__["__module__"] = "horovod.torch.optimizer"
        self.last_round = self.last_gradient_round = None
        self._rounds: GradientRounds | None = None
        self._hooks: dict[int, RemovableHandle] = {}  # by the id of the parameter
        self._accumulating = False
        self._synchronized = False
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._listen()

    # ---- the step -------------------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None) -> Any:
        """Average gradients if that is due, take a step of the wrapped optimizer, and average parameters if due.

        Every rank calls it equally often.

        Returns:
            What ``closure`` returned; averaged over the ranks that average gradients.

        Raises:
            AveragingError: as :meth:`hvd_averaging.ModelAverager.average_parameters`.
            TypeError: a gradient is sparse; on that rank, and a ``PeerError`` on the others.
        """
        if closure is None:
            self._unscale()
            if not self._synchronized:
                self._average_gradients()
        self._synchronized = False
        if self._overflowed():
            return None
        loss = self.inner.step(None if closure is None else self._synchronizing(closure))
        self._synchronized = False
        self._average_parameters()
        return loss

    def synchronize(self) -> None:
        """Average the gradients now, if they are due to be averaged at this step; :meth:`step` then does not again.

        For whatever needs the averaged gradients before the step, such as clipping. Every rank calls it equally often.

        Raises:
            AveragingError, TypeError: as :meth:`step`.
        """
        if self._rounds is not None:
            self._rounds.expect_no_changes()
        self._average_gradients()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """As in ``horovod.torch``, around a :meth:`step` after :meth:`synchronize`, which here needs no telling."""
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block ``backward()`` only accumulates: for all but the last one of a step."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def _synchronizing(self, closure: Closure) -> Closure:
        def synchronized() -> Any:
            with torch.enable_grad():
                loss = closure()
            return self._average_gradients(loss)

        return synchronized

    # ---- gradients ------------------------------------------------------------------------------------------------

    def _average_gradients(self, loss: Any = None) -> Any:
        rounds = self._current_rounds()
        self.last_gradient_round = None
        if rounds is not None:
            settings = f"gradients, {self.averager.describe()}"
            loss = rounds.average(self._named(), self.averager.step, settings, loss)
            self.last_gradient_round = rounds.last
        return loss

    def _current_rounds(self) -> GradientRounds | None:
        """Where gradients are averaged at this step; ``None`` for nowhere."""
        warm = self.averager.step < self.averager.warmup_steps
        if not warm and self.gradient_process_set is None:
            self._rounds = None  # its buffers are as large as the model
            return None
        process_set = self.averager.process_set if warm else self.gradient_process_set
        name = f"{self.averager.name}, gradients {'of warm-up' if warm else 'after warm-up'}"
        if self._rounds is None or self._rounds.name != name:
            self._rounds = GradientRounds(name, process_set, self.averager.timeout, self.bucket_bytes)
        return self._rounds

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters, named by their groups; after ``add_param_group``, also the new ones."""
        self._listen()
        return [
            (f"group{number}.{position}", parameter)
            for number, group in enumerate(self.param_groups)
            for position, parameter in enumerate(group["params"])
        ]

    def _listen(self) -> None:
        """Hear of every gradient that backward finishes; without being kept alive by the parameters."""
        this = weakref.ref(self)

        def arrived(parameter: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._arrived(parameter)

        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._hooks:
                    self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._synchronized = False
        rounds = None if self._accumulating else self._current_rounds()
        if rounds is not None:
            rounds.arrived(parameter)

    # ---- mixed precision ------------------------------------------------------------------------------------------

    def _unscale(self) -> None:
        """Before averaging, as the scales of ranks may differ once a step has overflowed on one of them only."""
        scale = getattr(self, "grad_scale", None)
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if scale is not None and gradients:
            inverse = (1 / scale.double()).float()
            torch._foreach_mul_(gradients, [inverse.to(gradient.device) for gradient in gradients])

    def _overflowed(self) -> bool:
        """Whether GradScaler found an infinity on any rank. Ranks talk only if there is a GradScaler."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        channel = self._channel()
        if not channel.members.included:
            return bool(found)
        return any(row[0] for row in channel.gather([int(bool(found))], "overflow").values())

    def _channel(self) -> Channel:
        averager = self.averager
        who = members(averager.process_set, self._adapter.hvd)
        return Channel(self._adapter, who, averager.name, averager.timeout, averager.step, call="scaler.step")

    @property
    def _adapter(self) -> Adapter:
        return process_sets.initialized()

    # ---- parameters -----------------------------------------------------------------------------------------------

    def _average_parameters(self) -> None:
        self._note(self.averager.average_parameters(self._parameters(self.averager.due(self.averager.step))))

    def join(self) -> Round | None:
        """As :meth:`hvd_averaging.ModelAverager.join`, for ranks with different numbers of batches.

        Raises:
            AveragingError: gradients are still averaged, in which a rank without batches could only be waited for.
        """
        rounds = self._current_rounds()
        if rounds is not None and not members(rounds.process_set, self._adapter.hvd).alone:
            raise AveragingError(
                f"{self.averager.name} (step {self.averager.step}): join() works after warm-up and with "
                "gradient_process_set=None only, since other ranks wait for this one's gradients. Give every rank "
                "equally many batches (drop the surplus)."
            )
        done = self.averager.join(self._parameters(due=True))
        self._note(done)
        return done

    def _parameters(self, due: bool) -> Together:
        along = companions(self.inner) if due and self.optimizer_state == "average" else []
        return Together(self.param_groups, along, self.model)

    def _note(self, done: Round | None) -> None:
        if done is not None:
            self.last_round = done
            if self.optimizer_state == "reset":
                reset(self.inner)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimizer, and the averager's as ``"averager"``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        found = {**self.inner.state_dict(), "averager": self.averager.state_dict()}
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`, on every rank. Without ``"averager"`` in it: a warning, and step 0.

        The ``"step"`` of a checkpoint of ``torch.distributed.optim.PostLocalSGDOptimizer`` counts as the averager's.
        """
        found = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            found = before(self, found) or found
        upstream = {"step": found.pop("step")} if "step" in found else {}
        averager = found.pop("averager", upstream)
        self.inner.load_state_dict(found)
        self.averager.load_state_dict(averager)
        self._rounds = None  # ranks may have come to other phases: they agree afresh
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.averager!r}, {self.inner!r})"


def _remove(hooks: Mapping[int, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()


def _check(optimizer: object, averager: object, optimizer_state: str, model: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: pass one such as torch.optim.SGD(...).")
    if isinstance(optimizer, PostLocalSGDOptimizer):
        raise TypeError("optimizer is a PostLocalSGDOptimizer already: gradients would be averaged twice.")
    if not isinstance(averager, ModelAverager):
        raise TypeError(f"averager is a {type(averager).__name__}: pass one such as PeriodicModelAverager(period=8).")
    if optimizer_state not in OPTIMIZER_STATE:
        words = ", ".join(map(repr, OPTIMIZER_STATE))
        raise ValueError(f"optimizer_state is one of {words}; not {optimizer_state!r}.")
    if optimizer_state == "average" and isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError('L-BFGS keeps a history that has no mean: use optimizer_state="local" or "reset".')
    if optimizer_state == "average" and (averager.delay or averager.fragments > 1):
        raise ValueError('optimizer_state="average" works with an averager without delay and fragments only.')
    if averager.buffers != "local" and model is None:
        raise ValueError(f"The averager has buffers={averager.buffers!r}: pass model=, to find its buffers in.")


def _gradient_process_set(wanted: Any, averager: ModelAverager) -> Any:
    if not isinstance(wanted, str):
        if wanted is not None:
            check_process_set(wanted)
        return wanted
    if wanted != "node":
        raise ValueError(f'gradient_process_set is "node", a horovod.ProcessSet or None; not {wanted!r}.')
    node = process_sets.by_node(averager.process_set)
    hvd = process_sets.initialized().hvd
    if members(node, hvd).ranks == members(averager.process_set, hvd).ranks and not members(node, hvd).alone:
        warnings.warn(
            "All ranks are on one host, so that gradients are averaged over all of them at every step, and averaging "
            "parameters changes nothing: pass gradient_process_set=None, or a process set of fewer ranks.",
            stacklevel=3,
        )
    return node
