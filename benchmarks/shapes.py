"""Parameter shapes to average: of well-known models, from their papers, so that a benchmark needs no model zoo; or so
many tensors of so many bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

Shape = tuple[int, ...]

FP32_BYTES = 4


def resnet50() -> list[Shape]:
    """ResNet-50 (He et al., 2016, table 1) for 1000 classes: 161 tensors, 25,557,032 parameters."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:  # the shortcut changes the number of channels
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


def gpt2_small() -> list[Shape]:
    """GPT-2's smallest (Radford et al., 2019, table 2), whose output shares the embedding: 148 tensors, 124,439,808."""
    width, layers, words, positions = 768, 12, 50257, 1024
    attention: list[Shape] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    perceptron: list[Shape] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    norm: list[Shape] = [(width,), (width,)]
    return [(words, width), (positions, width), *layers * [*norm, *attention, *norm, *perceptron], *norm]


def pieces(count: int, size_bytes: int) -> list[Shape]:
    """``count`` fp32 tensors of one dimension and about equal size, together of ``size_bytes``."""
    elements = size_bytes // FP32_BYTES
    return [(elements // count + (number < elements % count),) for number in range(count)]


MODELS = {"resnet50": resnet50, "gpt2_small": gpt2_small}


def named(name: str) -> list[Shape]:
    """A model's, or ``300x10MB``: 300 tensors of 10 MB in all (a megabyte is a million bytes; KB goes, too)."""
    if name in MODELS:
        return MODELS[name]()
    match = re.fullmatch(r"(\d+)x([\d.]+)(KB|MB)", name)
    if match is None:
        raise ValueError(f"{name!r} is neither one of {', '.join(MODELS)} nor like 300x10MB")
    count, size_bytes = int(match[1]), round(float(match[2]) * {"KB": 1e3, "MB": 1e6}[match[3]])
    if not 0 < count <= size_bytes // FP32_BYTES:
        raise ValueError(f"{name!r}: every tensor needs at least one number of {FP32_BYTES} bytes")
    return pieces(count, size_bytes)


def elements(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def describe(name: str) -> str:
    """For example ``resnet50 (161 tensors, 102 MB)``."""
    shapes = named(name)
    return f"{name} ({len(shapes)} tensors, {elements(shapes) * FP32_BYTES / 1e6:.3g} MB)"
