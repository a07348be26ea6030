"""`BlockPool` against a small model, and its answers to wrong use."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from labkit.engine.block_pool import BlockError, BlockKey, BlockPool, block_hash
from labkit.errors import OutOfRangeError


def _key(*blocks: tuple[int, ...], hash_function=block_hash) -> BlockKey:
    key = None
    for block in blocks:
        key = BlockKey(key, block, hash_function)
    return key


def test_empty_pool_gives_nothing():
    pool = BlockPool(0, 16)
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None
    pool.check([])


def test_allocates_all_and_not_one_more():
    pool = BlockPool(4, 16)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    pool.check([[0, 1, 2, 3]])


def test_negative_count_is_refused_and_changes_nothing():
    pool = BlockPool(4, 16)
    with pytest.raises(OutOfRangeError):
        pool.allocate(-1)
    assert pool.num_available == 4


@pytest.mark.parametrize(("num_blocks", "block_size"), [(-1, 16), (4, 0), (4, -1)])
def test_impossible_pool_is_refused(num_blocks, block_size):
    with pytest.raises(OutOfRangeError):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize("blocks", [[0, 0], [3], [-1], [4]])
def test_double_and_foreign_free_are_errors_and_change_nothing(blocks):
    pool = BlockPool(4, 16)
    pool.allocate(2)
    with pytest.raises(BlockError):
        pool.free(blocks)
    pool.check([[0, 1]])


def test_free_block_cannot_be_shared_or_registered():
    pool = BlockPool(4, 16)
    with pytest.raises(BlockError):
        pool.share(0)
    with pytest.raises(BlockError):
        pool.register(0, _key((1,)))


def test_growth_continues_the_run_of_its_own_sequence():
    pool = BlockPool(64, 16)
    first = pool.allocate(2, expected=10)
    second = pool.allocate(2, expected=10)
    for table in (first, second) * 8:
        table += pool.allocate(1, after=table[-1])
    assert first == list(range(first[0], first[0] + 10))
    assert second == list(range(second[0], second[0] + 10))


def test_freed_prefix_is_found_again_and_shared():
    pool = BlockPool(4, 2)
    table = pool.allocate(2)
    keys = [_key((1, 2)), _key((1, 2), (3, 4))]
    for block_id, key in zip(table, keys, strict=True):
        pool.register(block_id, key)
    pool.free(table)
    assert (pool.num_cached, pool.num_used, pool.num_available) == (2, 0, 4)
    assert pool.find_prefix(keys) == table
    for block_id in table:
        pool.share(block_id)
    pool.check([table])


def test_oldest_cached_block_is_evicted_first_and_tails_before_heads():
    pool = BlockPool(3, 1)
    tables = [pool.allocate(2), pool.allocate(1)]
    keys = [_key((1,)), _key((1,), (2,)), _key((9,))]
    for block_id, key in zip([*tables[0], *tables[1]], keys, strict=True):
        pool.register(block_id, key)
    pool.free(tables[0])
    pool.free(tables[1])
    pool.allocate(1)
    assert [pool.find(key) is not None for key in keys] == [True, False, True]
    pool.allocate(1)
    assert [pool.find(key) is not None for key in keys] == [False, False, True]


def test_same_block_after_another_beginning_is_not_a_hit():
    pool = BlockPool(4, 2)
    (block_id,) = pool.allocate(1)
    pool.register(block_id, _key((1, 2), (3, 4)))
    assert pool.find(_key((3, 4))) is None
    assert pool.find(_key((9, 9), (3, 4))) is None
    assert pool.find(_key((1, 2), (3, 4))) == block_id


def test_equal_hashes_of_other_content_are_no_hit():
    def same(parent, token_ids):
        return b"same"

    pool = BlockPool(4, 2, hash_function=same)
    (block_id,) = pool.allocate(1)
    pool.register(block_id, _key((1, 2), (3, 4), hash_function=same))
    assert pool.find(_key((1, 2), (3, 5), hash_function=same)) is None
    assert pool.find(_key((1, 3), (3, 4), hash_function=same)) is None
    assert pool.find(_key((3, 4), hash_function=same)) is None
    assert pool.find(_key((1, 2), (3, 4), hash_function=same)) == block_id


def test_without_prefix_caching_nothing_is_kept():
    pool = BlockPool(4, 2, enable_prefix_caching=False)
    table = pool.allocate(1)
    pool.register(table[0], _key((1, 2)))
    pool.free(table)
    assert (pool.num_cached, pool.find(_key((1, 2)))) == (0, None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._ref_counts.__setitem__(0, 2),
        lambda pool: pool._free.__setitem__(0, 1),
        lambda pool: pool._lru.__setitem__(0, None),
        lambda pool: pool._block_by_hash.clear(),
        lambda pool: pool._keys.__setitem__(1, None),
        lambda pool: setattr(pool, "_num_free", 7),
    ],
)
def test_check_sees_damage(damage):
    pool = BlockPool(4, 2)
    table = pool.allocate(2)
    pool.register(table[1], _key((1, 2)))
    pool.check([table])
    damage(pool)
    with pytest.raises(BlockError):
        pool.check([table])


def test_check_sees_a_lost_and_a_doubled_table_entry():
    pool = BlockPool(4, 2)
    table = pool.allocate(2)
    for wrong in ([[0]], [[0, 1], [1]], [[0, 1, 1]]):
        with pytest.raises(BlockError):
            pool.check(wrong)
    pool.check([table])


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool beside a model of plain sets: tables of content, and the cached contents by age."""

    @initialize(num_blocks=st.integers(1, 12), caching=st.booleans(), collide=st.booleans())
    def start(self, num_blocks, caching, collide):
        self.hash = (lambda parent, token_ids: b"x") if collide else block_hash
        self.pool = BlockPool(num_blocks, 1, enable_prefix_caching=caching, hash_function=self.hash)
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple] = {}
        self.cached: list[int] = []
        self.caching, self.collide = caching, collide

    def _held(self) -> set[int]:
        return {block_id for table in self.tables for block_id in table}

    def _free_count(self) -> int:
        return self.pool.num_blocks - len(self._held()) - len(self.cached)

    @rule(count=st.integers(0, 5), expected=st.integers(0, 8))
    def allocate(self, count, expected):
        held, free = self._held(), self._free_count()
        blocks = self.pool.allocate(count, expected=expected)
        if count > free + len(self.cached):
            assert blocks is None
            return
        assert len(set(blocks)) == count
        assert not held & set(blocks)
        evicted, self.cached = self.cached[: max(0, count - free)], self.cached[max(0, count - free) :]
        assert set(evicted) <= set(blocks)
        assert not set(self.cached) & set(blocks)
        for block_id in blocks:
            self.content.pop(block_id, None)
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def grow(self, data):
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        free = self._free_count()
        blocks = self.pool.allocate(1, after=table[-1])
        assert (blocks is None) == (free + len(self.cached) == 0)
        if blocks:
            if not free:
                assert blocks[0] == self.cached.pop(0)
            self.content.pop(blocks[0], None)
            table += blocks

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), path=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def register(self, data, path):
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        block_id, content = data.draw(st.sampled_from(table)), tuple(path)
        self.pool.register(block_id, _key(*[(token,) for token in path], hash_function=self.hash))
        taken = self.content.values() if not self.collide else ([content] if self.content else [])
        if self.caching and block_id not in self.content and content not in taken:
            self.content[block_id] = content

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def look_up_and_share(self, path):
        found = self.pool.find(_key(*[(token,) for token in path], hash_function=self.hash))
        expected = [block_id for block_id, content in self.content.items() if content == tuple(path)]
        assert found == (expected[0] if expected else None)
        if found is not None:
            self.pool.share(found)
            if found in self.cached:
                self.cached.remove(found)
            self.tables.append([found])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        held = self._held()
        self.cached += [block_id for block_id in reversed(table) if block_id not in held and block_id in self.content]

    @invariant()
    def books_balance(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.tables)
        assert self.pool.num_used == len(self._held())
        assert list(self.pool._lru) == self.cached
        assert self.pool.num_available == self.pool.num_blocks - len(self._held())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=300, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
