"""Handwritten digits (scikit-learn's, 8 by 8 pixels), for training on several ranks. Knows no framework."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Batch = tuple[NDArray[np.float32], NDArray[np.int64]]

PIXELS, CLASSES = 64, 10


@dataclass(frozen=True)
class Digits:
    """``images``: float32, (n, 64), from 0 to 1. ``labels``: int64, (n,), from 0 to 9."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: NDArray[np.int64] | slice) -> Digits:
        return Digits(self.images[rows], self.labels[rows])

    def shard(self, rank: int, size: int) -> Digits:
        """The rows that ``rank`` trains on: no row is on two ranks, and every rank has equally many."""
        return self[: len(self) // size * size][rank::size]

    def batches(self, batch_size: int, epochs: int, seed: int) -> Iterator[Batch]:
        """Every epoch in a new order; the rows that do not fill a last batch sit that epoch out."""
        order = np.random.default_rng(seed)
        for _ in range(epochs):
            rows = order.permutation(len(self))
            for start in range(0, len(self) - batch_size + 1, batch_size):
                batch = self[rows[start : start + batch_size]]
                yield batch.images, batch.labels


def load() -> tuple[Digits, Digits]:
    """800 digits to train on and 997 to test with, always the same ones."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, train_size=800, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    return (
        Digits(train_images.astype(np.float32), train_labels.astype(np.int64)),
        Digits(test_images.astype(np.float32), test_labels.astype(np.int64)),
    )
