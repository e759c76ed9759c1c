"""Rounds in which less travels: the change since the last agreed weights, in fewer bits.

Those weights are the anchor. Every rank holds the same one, so that rounding does not add up in the weights, and what
rounding leaves out of a change goes along with the next one. The first round sends the parameters as they are, and so
does one in which the coding does not do: a rank is in ``hvd.join()``, or a change is infinite or not a number. How
numbers are coded and who sums them is the adapter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from .adapters import Adapter, WireReduction
from .agreement import Claim
from .channel import Channel
from .layout import Bucket, Layout, fingerprint
from .members import Members
from .round import Agreed, Rounds

WIRES = ("fp16", "bf16", "int8")
"""What a change may travel in; see :class:`hvd_averaging.ModelAverager`."""

BUCKET_BYTES, MOST_BUCKETS = 2 * 2**20, 200
"""Unless the user says: one bucket is coded while another one travels, and messages of half a megabyte go both ways at
full speed, over Gloo. But no more buckets than Horovod has names in its cache for."""


def check_wire(wire: str | None) -> None:
    """Raise ``ValueError`` unless ``wire`` is ``None`` or one of ``WIRES``."""
    if wire is not None and wire not in WIRES:
        raise ValueError(f"wire is None or one of {', '.join(map(repr, WIRES))}; not {wire!r}.")


class WireRounds(Rounds):
    """Rounds whose anchor, and what coding left out on this rank, can be saved and taken up again."""

    def __init__(
        self,
        name: str,
        process_set: Any,
        timeout: float | None,
        bucket_bytes: int | None = None,
        buffers: str = "local",
        wire: str = "fp16",
    ) -> None:
        super().__init__(name, process_set, timeout, bucket_bytes, buffers)
        self.wire = wire
        self._loaded: Mapping[str, Any] | None = None
        self._hash = 0

    def state(self) -> Mapping[str, Any] | None:
        """What an equal averager needs to go on just so; ``None`` if there has been no round yet."""
        agreed = self._agreed
        if self._loaded is not None or agreed is None or not agreed.reduction.history:
            return self._loaded
        state = cast(WireReduction, agreed.reduction).state(agreed.layout.entries)
        return {**state, "rank": agreed.members.rank, "ranks": list(agreed.members.ranks)}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Take up :meth:`state` in the next round, for which all ranks compare what they have."""
        self._loaded = {} if state is None else state

    def _bucket_bytes(self, layout: Layout) -> int:
        return self.bucket_bytes or max(BUCKET_BYTES, layout.bytes // MOST_BUCKETS)

    def _travel(self) -> str:
        return f"{super()._travel()}, wire={self.wire!r}"

    def _fits(self, claim: Claim, tensors: Sequence[Any], agreed: Agreed) -> bool:
        return self._loaded is None and super()._fits(claim, tensors, agreed)

    def _basis(self, adapter: Adapter, buckets: Sequence[Bucket], tensors: Sequence[Any]) -> int:
        return self._hash

    def _agree(self, claim: Claim, tensors: Sequence[Any], channel: Channel) -> Agreed:
        state = _usable(self.state(), claim.layout, channel.members)
        self._hash = 0 if state is None else _hash_of(state["anchor"], channel.adapter)
        agreed = super()._agree(claim, tensors, channel)
        if state is not None and agreed.same_basis:
            cast(WireReduction, agreed.reduction).restore(agreed.layout.entries, state)
        self._loaded = None
        return agreed

    def _make_reduction(
        self,
        layout: Layout,
        buckets: Sequence[Bucket],
        tensors: Sequence[Any],
        name: str,
        channel: Channel,
        same_basis: bool,
    ) -> WireReduction:
        return channel.adapter.wire_reduction(buckets, tensors, name, channel.members, self.wire)


def _usable(state: Mapping[str, Any] | None, layout: Layout, members: Members) -> Mapping[str, Any] | None:
    """The state, if it is of such parameters; without residuals if these are another rank's, or of other shards."""
    if not state:
        return None
    shapes = {entry.name: entry.wire_shape for entry in layout.entries if not entry.exact}
    if shapes != {name: tuple(tensor.shape) for name, tensor in state["anchor"].items()}:
        return None
    if state["rank"] != members.rank or tuple(state["ranks"]) != members.ranks:
        return {**state, "residual": {}, "shard_residuals": []}
    return state


def _hash_of(anchor: Mapping[str, Any], adapter: Adapter) -> int:
    digests = (str(fingerprint(adapter.bytes_of(tensor))) for tensor in anchor.values())
    return fingerprint(",".join(digests))
