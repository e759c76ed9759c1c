"""The header's verdicts from sums alone, with the rounding that a float32 mean brings."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_averaging.header import LENGTH, Header, Presence, Tally


def mean_then_sum(headers, size):
    """What Horovod's Average on float32 and the multiplication by the size make of the headers of ``size`` ranks."""
    total = np.zeros(LENGTH, dtype=np.float32)
    for header in headers:
        total += np.array(header.encode(), dtype=np.float32)
    mean = total * np.float32(1 / size)
    return [float(value) * size for value in mean]


def tally(headers, size=None):
    return Tally.decode(mean_then_sum(headers, size or len(headers)))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 8999])
@pytest.mark.parametrize("step", [0, 1, 12345, 2**31, 2**32 - 1])
def test_equal_headers_are_sound(size, step):
    found = tally([Header(step, 2**63 - 12345)] * size)
    assert found.sound
    assert (found.present, found.contributors, found.joining, found.leaving, found.unable) == (size, size, 0, 0, 0)


@pytest.mark.parametrize("size", [2, 3, 7, 64, 1000, 8999])
def test_one_rank_that_differs_is_noticed(size):
    same = [Header(1000, 77)] * (size - 1)
    assert not tally([*same, Header(1001, 77)]).same_step
    assert not tally([*same, Header(1000 + 16**7, 77)]).same_step
    assert not tally([*same, Header(1000, 78)]).same_agreement
    assert tally([*same, Header(1000, 78)]).same_step
    assert not tally([*same, Header(1000, 77, able=False)]).sound
    assert not tally([*same, Header(1000, 77, Presence.LEAVING, contributes=False)]).sound


def test_differences_that_cancel_in_the_sum_are_noticed():
    assert not tally([Header(4, 9), Header(6, 9), Header(5, 9)]).same_step
    assert not tally([Header(0x10, 9), Header(0x01, 9)]).same_step


@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_a_rank_in_hvd_join_adds_zeros_and_is_not_counted(size):
    found = tally([Header(5, 9)] * (size - 1), size)
    assert found.sound
    assert (found.present, found.contributors) == (size - 1, size - 1)


def test_a_rank_without_batches_may_be_at_any_step():
    found = tally([Header(8, 9), Header(8, 9), Header(3, 9, Presence.JOINING, contributes=False)])
    assert found.sound
    assert (found.present, found.joining, found.contributors) == (3, 1, 2)
