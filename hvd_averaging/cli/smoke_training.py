"""What each of the two ranks of `smoke` does: `python -m hvd_averaging.cli.smoke_training FRAMEWORK BACKEND LIMIT`.

Each rank fits a line to points of its own, and parameters are averaged every few steps, until a second has passed.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from hvd_averaging import PeriodicModelAverager, broadcast_parameters, check_replicas

RANKS = 2
PERIOD = 8
SECONDS = 1.0
ANSWER = "hvd-averaging smoke result: "

# The parameters, and a step of training that returns the loss before it.
Training = tuple[list[Any], Callable[[], float]]


def main(framework: str, backend: str, limit: float) -> None:
    """Train, check what must hold, and let rank 0 tell."""
    signal.alarm(int(limit) + 1)  # whatever becomes of the launcher, no rank stays
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    _require(hvd.size() == RANKS, f"the launcher started {RANKS} ranks, and hvd.size() is {hvd.size()}")
    _require(getattr(hvd, f"{backend}_enabled")(), f"{backend} was asked for and is not in use")
    parameters, step = {"torch": _torch, "tensorflow": _tensorflow}[framework](hvd.rank())
    broadcast_parameters(parameters)
    averager = PeriodicModelAverager(period=PERIOD)
    losses: list[float] = []
    began = time.monotonic()
    while _mean(hvd, framework, time.monotonic() - began) < SECONDS:  # so that all ranks stop at the same step
        for _ in range(PERIOD):
            losses.append(step())
            averager.average_parameters(parameters)
    averager.average_now(parameters)
    _require(bool(check_replicas(parameters)), "the ranks have different parameters after a round")
    _require(losses[-1] < losses[0], f"the loss did not fall: {losses[0]} to {losses[-1]}")
    if hvd.rank() == 0:
        facts = {"ranks": hvd.size(), "steps": len(losses), "rounds": len(losses) // PERIOD + 1}
        print(ANSWER + json.dumps({**facts, "first": losses[0], "last": losses[-1]}), flush=True)
    hvd.shutdown()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"hvd-averaging smoke: {otherwise}")


def _mean(hvd: Any, framework: str, value: float) -> float:
    library = importlib.import_module(framework)
    tensor = library.tensor([value]) if framework == "torch" else library.constant([value])
    return float(hvd.allreduce(tensor, name="smoke.seconds")[0])


def _torch(rank: int) -> Training:
    import torch

    torch.manual_seed(rank)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    points = torch.randn(64, 8)
    values = points.sum(1, keepdim=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(points), values)
        torch.autograd.backward(loss)
        optimizer.step()
        return float(loss.detach())

    return list(model.parameters()), step


def _tensorflow(rank: int) -> Training:
    import tensorflow

    points = tensorflow.random.stateless_normal([64, 8], [rank, 0])
    values = tensorflow.reduce_sum(points, 1, keepdims=True)
    weight = tensorflow.Variable(tensorflow.zeros([8, 1]), name="weight")

    def step() -> float:
        with tensorflow.GradientTape() as tape:
            loss = tensorflow.reduce_mean((points @ weight - values) ** 2)
        weight.assign_sub(0.05 * tape.gradient(loss, weight))
        return float(loss)

    return [weight], step


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
