"""The same training with either library's periodic averager; test_parity.py compares what comes out.

    torchrun --nproc-per-node 2 parity_training.py upstream DIRECTORY
    horovodrun -np 2 python parity_training.py ours DIRECTORY

Every rank writes its parameters after every step, schedule by schedule, to DIRECTORY/LIBRARY-RANK.npz.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

PERIODIC = [(2, 0), (3, 4), (5, 1)]  # (period, warmup_steps)
HIERARCHICAL = [({2: 2, 4: 4}, 0), ({1: 2, 3: 4}, 0), ({2: 2, 4: 4}, 3)]  # for four ranks
STEPS = 16


def train(rank, averager):
    """The parameters after every step, one row a step."""
    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    rows = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = torch.randn(5, 6, generator=data), torch.randint(3, (5,), generator=data)
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        rows.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy())
    assert averager.step == STEPS
    return np.stack(rows)


def start(library):
    """This rank, the number of ranks, and the periodic and hierarchical averager of the library."""
    if library == "ours":
        import horovod.torch as hvd

        from hvd_averaging import HierarchicalModelAverager, PeriodicModelAverager

        hvd.init(process_sets="dynamic")
        return hvd.rank(), hvd.size(), PeriodicModelAverager, HierarchicalModelAverager
    from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager

    dist = torch.distributed
    dist.init_process_group("gloo")
    hierarchical = hierarchical_model_averager.HierarchicalModelAverager
    return dist.get_rank(), dist.get_world_size(), averagers.PeriodicModelAverager, hierarchical


if __name__ == "__main__":
    library, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    rank, size, periodic, hierarchical = start(library)
    runs = {f"{period} {warmup}": train(rank, periodic(period, warmup)) for period, warmup in PERIODIC}
    if size == 4:
        runs |= {f"{levels} {warmup}": train(rank, hierarchical(levels, warmup)) for levels, warmup in HIERARCHICAL}
    np.savez(directory / f"{library}-{rank}.npz", **runs)
    if library == "upstream":
        # The threads of its process groups have aborted a rank at its end ("terminate called without an active
        # exception"), even after destroy_process_group: all is on file, so the ranks leave without ending anything.
        torch.distributed.barrier()
        os._exit(0)
    import horovod.torch as hvd

    hvd.barrier()  # a rank that ends would end Horovod for others, which may still be in a round of their pair
