"""Two levels of averaging: the ranks of a node often, all ranks rarely; beside the ways of ``torch_local_sgd.py``.

    horovodrun -np 8 python examples/torch_hierarchical.py

The network within a node is fast and the one between nodes is not. Here all ranks are on one machine, and each half of
them plays a node. The final models are compared by their test accuracy and by what they send between nodes and within:
in a table, and in a picture, ``output/torch_hierarchical.png``.

The loop to copy is in ``average_within_nodes_often_and_between_nodes_rarely``.
"""

# mypy: allow-untyped-calls
# (Tensor.backward has no type hints.)

from __future__ import annotations

import argparse
import sys

import horovod.torch as hvd
import options
import torch
from contest import Contest
from torch.nn.functional import cross_entropy
from torch_local_sgd import Task, average_gradients_at_every_step, average_parameters_now_and_then

from hvd_averaging import HierarchicalModelAverager, average_parameters, broadcast_parameters

ROUNDS_WITHIN = 4  # of so many rounds, one is over all ranks


def ranks_per_node() -> int:
    """Of two nodes. ``horovodrun -H host1:4,host2:4`` would number the ranks host by host, too."""
    ranks: int = hvd.size()
    if ranks % 2:
        launch = f"Launch eight: horovodrun -np 8 python {sys.argv[0]}"
        raise SystemExit(f"Two equal nodes take an even number of ranks, which {ranks} is not. {launch}")
    return ranks // 2


def average_within_nodes_often_and_between_nodes_rarely(
    task: Task, contest: Contest, period: int, warmup_steps: int
) -> None:
    """Hierarchical local SGD: a round every ``period`` steps as in the other loop, but most stay within the node."""
    model = task.model()
    optimizer = task.optimizer(model)
    broadcast_parameters(model)
    levels = {period: ranks_per_node(), ROUNDS_WITHIN * period: hvd.size()}
    averager = HierarchicalModelAverager(levels, warmup_steps)

    with contest.way("hierarchical", hvd.size(), task.accuracy(model)) as way:
        for images, labels in task.batches():
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            done = averager.average_parameters(model)
            if done:
                way.step(done.bytes, done.ranks)
            else:
                way.step()
        done = average_parameters(model)  # the steps since the last round of all count, too
        way.round(done.bytes if done else 0)


def main(arguments: argparse.Namespace) -> None:
    hvd.init(process_sets="dynamic")  # the averager adds one for each node
    torch.set_num_threads(1)  # the ranks share this machine's cores
    task = Task(arguments.epochs, arguments.seed)
    contest = Contest(task.steps, hvd.rank(), hvd.size(), node=ranks_per_node())
    average_gradients_at_every_step(task, contest)
    average_parameters_now_and_then(task, contest, arguments.period, arguments.warmup_steps)
    average_within_nodes_often_and_between_nodes_rarely(task, contest, arguments.period, arguments.warmup_steps)
    contest.show_results(arguments.output)


if __name__ == "__main__":
    main(options.parse(__doc__.splitlines()[0]))
