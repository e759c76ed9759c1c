"""How numbers become fewer bytes, and bytes numbers again: half precision, and 8-bit integers with a step per block.

Knows nothing of ranks or parameters. Callers cut what they have into stretches, which stay in the processor's cache
from one operation to the next: over the whole of a large bucket, every operation would read and write main memory.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

STRETCH, STRETCH_OF_THREADS = 2**16, 2**15
"""Elements of a stretch on a CPU: what several of them take in float32 fits the second-level cache. Where PyTorch has
several threads, so few that it does not spread them: its threads would wait for each other after every operation."""

BLOCK = 512
"""Elements that share a step of four bytes, so that steps cost 0.8 % of the bytes."""

_LARGEST_CODE = 127
_SMALLEST_STEP = 2.0**-100  # what smaller ones leave out would be denormal, which processors are slow with

Coded = tuple[torch.Tensor, ...]
"""A stretch written down: views of a row of bytes."""


class Coding(Protocol):
    """A way to write floating-point numbers down in fewer bytes."""

    multiple: int
    """How many elements are coded together: rows are whole multiples of it."""

    def row_bytes(self, elements: int) -> int:
        """The length of a row with that many elements."""

    def stretches(self, row: torch.Tensor, length: int) -> list[Coded]:
        """The row (1-D, uint8) in stretches of ``length`` elements, a multiple of ``multiple``; the last is shorter."""

    def encode(self, numbers: torch.Tensor, coded: Coded) -> None:
        """Write ``numbers`` (1-D, floating) down in ``coded``, and leave in them what that does not say."""

    def add(self, coded: Coded, sums: torch.Tensor) -> None:
        """Add to ``sums`` (1-D, floating) what ``coded`` says."""

    def is_finite(self, coded: Coded) -> bool:
        """Whether all that ``coded`` says are finite numbers."""


class Half:
    """The numbers, rounded to a 16-bit floating-point type."""

    multiple = 2  # rows of bytes stay aligned

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def row_bytes(self, elements: int) -> int:
        return 2 * elements

    def stretches(self, row: torch.Tensor, length: int) -> list[Coded]:
        return [(stretch,) for stretch in row.view(self._dtype).split(length)]

    def encode(self, numbers: torch.Tensor, coded: Coded) -> None:
        coded[0].copy_(numbers)
        numbers.sub_(coded[0])

    def add(self, coded: Coded, sums: torch.Tensor) -> None:
        sums.add_(coded[0])

    def is_finite(self, coded: Coded) -> bool:
        # A tenth of what isfinite() takes; both are NaN where any number is.
        return all(math.isfinite(extreme) for extreme in torch.aminmax(coded[0]))


class Int8:
    """The numbers as multiples, from -127 to 127, of a step that is a 127th of the largest of their block.

    A row is all multiples and then all steps, in float32. A block of zeros has the step 0, and so has one whose numbers
    are too small to be told from it; one with an infinity or a NaN in it has a step that is not finite either.
    """

    multiple = BLOCK

    def row_bytes(self, elements: int) -> int:
        return elements + 4 * (elements // BLOCK)

    def stretches(self, row: torch.Tensor, length: int) -> list[Coded]:
        elements = row.numel() * BLOCK // (BLOCK + 4)
        multiples = row[:elements].view(torch.int8).view(-1, BLOCK)
        steps = row[elements:].view(torch.float32).view(-1, 1)
        blocks = length // BLOCK
        return list(zip(multiples.split(blocks), steps.split(blocks), strict=True))

    def encode(self, numbers: torch.Tensor, coded: Coded) -> None:
        codes, steps = coded
        numbers = numbers.view(-1, BLOCK)
        torch.div(numbers.abs().amax(1, keepdim=True), _LARGEST_CODE, out=steps)
        torch.threshold_(steps, _SMALLEST_STEP, 0)  # leaves a NaN
        multiples = (numbers * steps.clamp(min=_SMALLEST_STEP).reciprocal_()).round_()
        codes.copy_(multiples)
        numbers.addcmul_(multiples, steps.to(numbers.dtype), value=-1)

    def add(self, coded: Coded, sums: torch.Tensor) -> None:
        codes, steps = coded
        sums.view(-1, BLOCK).addcmul_(codes.to(sums.dtype), steps.to(sums.dtype))

    def is_finite(self, coded: Coded) -> bool:
        return bool(coded[1].isfinite().all())


CODINGS: dict[str, Coding] = {"fp16": Half(torch.float16), "bf16": Half(torch.bfloat16), "int8": Int8()}


def stretch_of(tensor: torch.Tensor) -> int:
    """How many elements of ``tensor`` make a stretch, a multiple of every coding's ``multiple``.

    All of them on a GPU, which takes longer to start an operation than to do it.
    """
    if tensor.device.type != "cpu":
        return max(BLOCK, tensor.numel())
    return STRETCH if torch.get_num_threads() == 1 else STRETCH_OF_THREADS
