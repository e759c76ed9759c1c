"""Post-local SGD: gradients of all ranks at first, then those of the node, and parameters now and then.

    horovodrun -np 8 python examples/torch_post_local_sgd.py

Early in training, when everything still moves fast, averaging gradients pays; later, averaging parameters does with a
fraction of the traffic between nodes. Here all ranks are on one machine, and each half of them plays a node. The ways
are compared in a table, and in a picture, ``output/torch_post_local_sgd.png``.

The loop to copy is in ``average_gradients_first_and_parameters_later``.
"""

# mypy: allow-untyped-calls
# (Tensor.backward has no type hints.)

from __future__ import annotations

import argparse

import horovod.torch as hvd
import options
import torch
from contest import Contest
from torch.nn.functional import cross_entropy
from torch_hierarchical import ranks_per_node
from torch_local_sgd import Task, average_gradients_at_every_step, average_parameters_now_and_then

from hvd_averaging import PeriodicModelAverager, broadcast_parameters, process_sets
from hvd_averaging.torch import PostLocalSGDOptimizer


def average_gradients_first_and_parameters_later(task: Task, contest: Contest, period: int, warmup_steps: int) -> None:
    """One optimizer does both; on a real cluster, ``gradient_process_set="node"`` (the default) finds the node."""
    model = task.model()
    broadcast_parameters(model)
    averager = PeriodicModelAverager(period, warmup_steps)
    node = process_sets.by_size(ranks_per_node())
    optimizer = PostLocalSGDOptimizer(task.optimizer(model), averager, gradient_process_set=node)

    with contest.way("post-local SGD", hvd.size(), task.accuracy(model)) as way:
        for images, labels in task.batches():
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            rounds = [optimizer.last_gradient_round, optimizer.last_round]
            now = [done for done in rounds if done is not None and done.step == averager.step - 1]
            for done in now[:-1]:
                way.round(done.bytes, done.ranks)
            way.step(now[-1].bytes, now[-1].ranks)
        final = averager.average_now(model)  # the steps since the last round count, too
        way.round(final.bytes if final else 0)


def main(arguments: argparse.Namespace) -> None:
    hvd.init(process_sets="dynamic")  # the node's is added later
    torch.set_num_threads(1)  # the ranks share this machine's cores
    task = Task(arguments.epochs, arguments.seed)
    contest = Contest(task.steps, hvd.rank(), hvd.size(), node=ranks_per_node())
    average_gradients_at_every_step(task, contest)
    average_parameters_now_and_then(task, contest, arguments.period, warmup_steps=0)
    average_gradients_first_and_parameters_later(task, contest, arguments.period, arguments.warmup_steps)
    contest.show_results(arguments.output)


if __name__ == "__main__":
    main(options.parse(__doc__.splitlines()[0], warmup_steps=24))
