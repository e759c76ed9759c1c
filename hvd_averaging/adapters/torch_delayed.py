"""Sums of a copy of the parameters, formed while training goes on in the parameters themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import header as headers
from ..layout import Bucket
from ..members import Members
from .torch_reduction import TorchReduction


class DelayedReduction(TorchReduction):
    """Packs a copy, which stays, and has Horovod put the sums elsewhere: two buffers, and no pass to copy the copy."""

    def __init__(
        self, hvd: Any, buckets: Sequence[Bucket], tensors: Sequence[torch.Tensor], name: str, members: Members
    ) -> None:
        super().__init__(hvd, buckets, tensors, name, members)
        self._sums = [torch.empty_like(flat) for flat in self._flat]

    def _sum(self, bucket: int) -> int:
        # Horovod's public function would allocate the output anew each time, which costs more than to fill it.
        handle: int = self._hvd.mpi_ops._grouped_allreduce_async(
            [self._flat[bucket]],
            [self._sums[bucket]],
            name=self._names[bucket],
            op=self._hvd.Sum,
            prescale_factor=1.0,
            postscale_factor=1.0,
            process_set=self._members.process_set,
        )
        return handle

    def result(self) -> list[float]:
        super().result()
        sums: list[float] = self._sums[-1][-headers.LENGTH :].tolist()
        return sums

    @torch.no_grad()
    def add_change(self, tensors: Sequence[torch.Tensor], contributors: int) -> None:
        """Add the mean minus the copy to ``tensors``; exactly nothing where 2 or 4 ranks were equal."""
        for copied, summed in zip(self._flat, self._sums, strict=True):
            torch.sub(copied, summed, alpha=1 / contributors, out=copied)
        if self._views:
            torch._foreach_sub_(self._pieces(tensors), self._views)

    @torch.no_grad()
    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copy, as tensors like ``tensors``."""
        like = [torch.empty_like(tensor) for tensor in tensors]
        if self._views:
            torch._foreach_copy_(self._pieces(like), self._views)
        return like
