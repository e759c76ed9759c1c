"""The same training three ways: averaging gradients at every step, averaging parameters now and then, one rank alone.

    horovodrun -np 4 python examples/torch_local_sgd.py

Every rank trains on its own shard of scikit-learn's handwritten digits. The final models are compared by their test
accuracy and by what they cost in communication: in a table, and in a picture, ``output/torch_local_sgd.png``.

The loop to copy is in ``average_parameters_now_and_then``.
"""

# mypy: allow-untyped-calls
# (Tensor.backward has no type hints.)

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import digits
import horovod.torch as hvd
import options
import torch
from contest import Contest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hvd_averaging import PeriodicModelAverager, broadcast_parameters

BATCH_SIZE = 16  # of every rank


class Task:
    """What the three ways have in common: data, first weights, optimizer."""

    def __init__(self, epochs: int, seed: int) -> None:
        train, self.test = digits.load()
        self.shard = train.shard(hvd.rank(), hvd.size())
        self.epochs = epochs
        self.seed = seed
        if len(self.shard) < BATCH_SIZE:
            raise SystemExit(f"{len(train)} digits are too few for {hvd.size()} ranks: {BATCH_SIZE} each at least.")

    @property
    def steps(self) -> int:
        return self.epochs * (len(self.shard) // BATCH_SIZE)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same for all three ways; another order on every rank."""
        seed = self.seed * hvd.size() + hvd.rank()
        for images, labels in self.shard.batches(BATCH_SIZE, self.epochs, seed):
            yield torch.from_numpy(images), torch.from_numpy(labels)

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(digits.PIXELS, 256), nn.ReLU(), nn.Linear(256, digits.CLASSES))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def accuracy(self, model: nn.Module) -> Callable[[], float]:
        images, labels = torch.from_numpy(self.test.images), torch.from_numpy(self.test.labels)

        def accuracy() -> float:
            with torch.no_grad():
                return float((model(images).argmax(dim=1) == labels).float().mean())

        return accuracy


def average_gradients_at_every_step(task: Task, contest: Contest) -> None:
    """What Horovod does by itself."""
    model = task.model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(task.optimizer(model), named_parameters=model.named_parameters())
    gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    with contest.way("gradient averaging", hvd.size(), task.accuracy(model)) as way:
        for images, labels in task.batches():
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            way.step(gradient_bytes)


def average_parameters_now_and_then(task: Task, contest: Contest, period: int, warmup_steps: int) -> None:
    """Local SGD: every rank takes its own steps with its own gradients, and in every round takes over the mean."""
    model = task.model()
    optimizer = task.optimizer(model)
    broadcast_parameters(model)
    # Nothing else talks here, so before the first round, in warm-up, every rank trains alone. That gains nothing: the
    # default is no warm-up. It is for ranks that average gradients meanwhile (post-local SGD).
    averager = PeriodicModelAverager(period, warmup_steps)

    with contest.way("model averaging", hvd.size(), task.accuracy(model)) as way:
        for images, labels in task.batches():
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            done = averager.average_parameters(model)
            way.step(done.bytes if done else 0)
        done = averager.join(model)  # the steps since the last round count, too
        way.round(done.bytes if done else 0)


def train_alone(task: Task, contest: Contest) -> None:
    """What one rank makes of its own shard in as many steps, the others standing by: what talking has to beat."""
    model = task.model()
    optimizer = task.optimizer(model)

    if hvd.rank() == 0:
        with contest.way("one rank, one shard", 1, task.accuracy(model)) as way:
            for images, labels in task.batches():
                optimizer.zero_grad()
                cross_entropy(model(images), labels).backward()
                optimizer.step()
                way.step()
    hvd.barrier()


def main(arguments: argparse.Namespace) -> None:
    hvd.init()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    task = Task(arguments.epochs, arguments.seed)
    contest = Contest(task.steps, hvd.rank(), hvd.size())
    average_gradients_at_every_step(task, contest)
    average_parameters_now_and_then(task, contest, arguments.period, arguments.warmup_steps)
    train_alone(task, contest)
    contest.show_results(arguments.output)


if __name__ == "__main__":
    main(options.parse(__doc__.splitlines()[0]))
