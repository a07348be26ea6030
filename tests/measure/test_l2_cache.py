"""Stack distances against a list that is searched; the set-associative share against counting lines in random sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.measure.l2_cache import hit_share, last_use, stack_distances


def slow_distances(names, sizes):
    """Plain reference: a list of names, the most recent first."""
    stack, size_of, found = [], {}, []
    for name, size in zip(names, sizes, strict=True):
        if name in stack:
            at = stack.index(name)
            found.append(float(sum(size_of[other] for other in stack[:at])))
            stack.pop(at)
        else:
            found.append(np.inf)
        stack.insert(0, name)
        size_of[name] = size
    return np.array(found)


def slow_lru_hits(names, sizes, capacity):
    """Plain reference: a cache that evicts from the end until the newest fits."""
    cache, hits = [], []
    for name, size in zip(names, sizes, strict=True):
        hits.append(any(name == other for other, _ in cache))
        cache = [(name, size)] + [entry for entry in cache if entry[0] != name]
        while sum(size for _, size in cache) > capacity:
            cache.pop()
    return hits


@given(st.lists(st.integers(0, 12), max_size=80), st.lists(st.integers(1, 9), min_size=13, max_size=13))
def test_distances_equal_a_searched_list(names, sizes):
    names = np.array(names, dtype=np.int64)
    sizes = np.array(sizes)[names]
    assert np.array_equal(stack_distances(names, sizes), slow_distances(names.tolist(), sizes.tolist()))


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 12))
def test_hits_equal_a_plain_lru_cache(names, capacity):
    """Unit sizes: a name hits when fewer than `capacity` others came since, so its distance is below the capacity."""
    names = np.array(names, dtype=np.int64)
    ones = np.ones(len(names))
    hits = hit_share(stack_distances(names, ones), capacity) == 1
    assert hits.tolist() == slow_lru_hits(names.tolist(), ones.tolist(), capacity)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 1023, 1024, 1025])
def test_a_loop_over_n_names_is_n_minus_1_away(count):
    names = np.tile(np.arange(count), 2)
    distances = stack_distances(names, np.ones(2 * count))
    assert np.isinf(distances[:count]).all()
    assert (distances[count:] == count - 1).all()


def test_last_use():
    assert last_use(np.array([5, 6, 5, 5, 6])).tolist() == [-1, -1, 0, 2, 1]


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0, 1.1, 1.5])
def test_ways_are_lines_that_fall_on_random_sets(share):
    """2,048 sets of 16: a line stays while fewer than 16 of the lines that came after it fell on its set."""
    sets, ways = 2048, 16
    rng = np.random.default_rng(7)
    touched = int(share * sets * ways)
    stays = np.mean([(np.bincount(rng.integers(0, sets, touched), minlength=sets) < ways).mean() for _ in range(8)])
    assert hit_share(np.array([share]), 1.0, ways)[0] == pytest.approx(stays, abs=0.01)


def test_ends_of_the_share():
    assert hit_share(np.array([0.0, np.inf]), 100.0, 16).tolist() == [1.0, 0.0]
    assert hit_share(np.array([99.0, 100.0]), 100.0).tolist() == [1.0, 0.0]
