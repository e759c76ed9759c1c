"""Parameter shapes of well-known models, from their papers, so that a benchmark needs no model zoo."""

from __future__ import annotations

Shape = tuple[int, ...]


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
