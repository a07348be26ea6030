"""`BlockPool`: who owns which KV block, which blocks can be reused by prefix, and which are free.

A block is in exactly one of three states::

    free ──allocate──► referenced ──free (no key)────────────► free
                          ▲   └─────free (key registered)──┐
                          └──share── cached (in LRU order) ◄┘ ──evicted by allocate──► referenced
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any

from labkit.errors import LabkitError, OutOfRangeError

HashFunction = Callable[[Any, Sequence[int]], Hashable]


class BlockError(LabkitError):
    """The books of the pool would no longer balance: a double free, a foreign block, a broken invariant."""


def block_hash(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the parent's hash and the block's token ids as 64-bit integers."""
    return hashlib.sha256(parent_hash + array("q", token_ids).tobytes()).digest()


class BlockKey:
    """Content of one full block: its tokens and, through `parent`, every token before them."""

    __slots__ = ("hash", "parent", "token_ids")

    def __init__(self, parent: BlockKey | None, token_ids: tuple[int, ...], hash_function: HashFunction) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.hash: Hashable = hash_function(parent.hash if parent else b"", token_ids)

    def same_content(self, other: BlockKey | None) -> bool:
        """Whether both stand for the same tokens from the first one on; hashes are not trusted."""
        mine: BlockKey | None = self
        while mine is not other:
            if mine is None or other is None or mine.token_ids != other.token_ids:
                return False
            mine, other = mine.parent, other.parent
        return True

    def follows(self, parent: BlockKey | None, token_ids: tuple[int, ...]) -> bool:
        """Whether this is the block of `token_ids` after `parent`; one comparison where the chain is the same object,
        as it is but where two requests computed the same beginning side by side."""
        if self.token_ids != token_ids:
            return False
        if self.parent is None or parent is None:
            return self.parent is parent
        return self.parent.same_content(parent)


class BlockPool:
    """Reference counts, prefix cache and free blocks of one KV pool.

    Args:
        num_blocks: blocks in the pool, 0 or more.
        block_size: tokens in a block.
        enable_prefix_caching: freed blocks with a registered key stay until their room is needed, oldest first.
        hash_function: (parent hash or b"", token ids) → hash; equal hashes do no harm.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = block_hash,
    ) -> None:
        if num_blocks < 0 or block_size < 1:
            raise OutOfRangeError(f"a pool of {num_blocks} blocks of {block_size} tokens cannot be", knob="block_size")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_function = hash_function
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._free = bytearray(b"\1" * num_blocks)
        self._num_free = num_blocks
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._block_by_hash: dict[Hashable, int] = {}
        self._cursor = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and cached ones that nobody references."""
        return self._num_free + len(self._lru)

    @property
    def num_cached(self) -> int:
        """Blocks kept only for a later prefix hit."""
        return len(self._lru)

    @property
    def num_used(self) -> int:
        """Blocks that some table names."""
        return self.num_blocks - self.num_available

    def num_references(self, block_id: int) -> int:
        """How many tables name the block."""
        return self._ref_counts[block_id]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int, *, after: int = -1, expected: int = 0) -> list[int] | None:
        """`count` blocks with one reference each, or None when fewer are available.

        Ascending runs are preferred, because attention on a CPU reads those without copying.

        Args:
            after: the caller's last block; its successor is taken when it is free.
            expected: blocks the caller will want in the end; a gap of this length is looked for.

        Raises:
            OutOfRangeError: `count` is negative.
        """
        if count < 0:
            raise OutOfRangeError(f"cannot allocate {count} blocks", needed="a count of 0 or more")
        if count > self.num_available:
            return None
        blocks = self._take_free(min(count, self._num_free), after, expected) if self._num_free else []
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block_id in blocks:
            self._ref_counts[block_id] = 1
        return blocks

    def share(self, block_id: int) -> None:
        """One more reference to a block that is referenced or cached.

        Raises:
            BlockError: the block is free, so its content is nobody's.
        """
        if self._ref_counts[block_id] == 0:
            if block_id not in self._lru:
                raise BlockError(f"block {block_id} is free and cannot be shared")
            del self._lru[block_id]
        self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block; the last ones of the table become reusable first.

        Raises:
            BlockError: a block is named twice or has no reference; nothing is changed then.
        """
        if len(set(block_ids)) != len(block_ids):
            raise BlockError(f"a table names a block twice: {list(block_ids)}")
        if not self._are_held(block_ids):
            wrong = next(block_id for block_id in block_ids if not self._are_held([block_id]))
            raise BlockError(f"block {wrong} is freed but nobody holds it")
        counts, keys, lru, free = self._ref_counts, self._keys, self._lru, self._free
        for block_id in reversed(block_ids):
            counts[block_id] -= 1
            if counts[block_id]:
                continue
            if keys[block_id] is not None:
                lru[block_id] = None
            else:
                free[block_id] = 1
                self._num_free += 1

    def _are_held(self, block_ids: Sequence[int]) -> bool:
        if not block_ids:
            return True
        return (
            min(block_ids) >= 0
            and max(block_ids) < self.num_blocks
            and all(map(self._ref_counts.__getitem__, block_ids))
        )

    def find(self, key: BlockKey) -> int | None:
        """The block with exactly this content, or None."""
        block_id = self._block_by_hash.get(key.hash)
        if block_id is None or not key.same_content(self._keys[block_id]):
            return None
        return block_id

    def find_prefix(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks of the longest run of `keys`, from the first one, that are in the pool."""
        found: list[int] = []
        parent: BlockKey | None = None
        for key in keys:
            block_id = self._block_by_hash.get(key.hash)
            candidate = None if block_id is None else self._keys[block_id]
            if block_id is None or candidate is None or not candidate.follows(parent, key.token_ids):
                break
            found.append(block_id)
            parent = candidate
        return found

    def register(self, block_id: int, key: BlockKey) -> None:
        """Make a full, computed block findable by its content; of equal ones the first stays.

        Raises:
            BlockError: nobody holds the block.
        """
        self.register_all((block_id,), (key,))

    def register_all(self, block_ids: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """The same of blocks one after another."""
        counts, known, by_hash = self._ref_counts, self._keys, self._block_by_hash
        for block_id, key in zip(block_ids, keys, strict=True):
            if counts[block_id] < 1:
                raise BlockError(f"block {block_id} is registered but nobody holds it")
            if known[block_id] is None and self.enable_prefix_caching and key.hash not in by_hash:
                known[block_id] = key
                by_hash[key.hash] = block_id

    def key_of(self, block_id: int) -> BlockKey | None:
        """The registered content of a block."""
        return self._keys[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether the block is kept only for a later hit."""
        return block_id in self._lru

    def cached_blocks(self) -> tuple[int, ...]:
        """The blocks that only the prefix cache holds, least recently used first."""
        return tuple(self._lru)

    def _evict(self, count: int) -> list[int]:
        """The `count` cached blocks that were used least recently, ascending."""
        lru, keys, by_hash = self._lru, self._keys, self._block_by_hash
        blocks = sorted(islice(lru, count))
        for block_id in blocks:
            del lru[block_id]
            key = keys[block_id]
            if key is not None:
                del by_hash[key.hash]
                keys[block_id] = None
        return blocks

    def _take_free(self, count: int, after: int, expected: int) -> list[int]:
        blocks: list[int] = []
        if after >= 0:
            position = after + 1
            while len(blocks) < count and position < self.num_blocks and self._free[position]:
                blocks.append(position)
                position += 1
            self._mark_taken(blocks)
        rest = count - len(blocks)
        if rest:
            found = self._find_free(rest, max(rest, min(expected, self._num_free)))
            self._mark_taken(found)
            blocks += found
        return blocks

    def _mark_taken(self, blocks: list[int]) -> None:
        for block_id in blocks:
            self._free[block_id] = 0
        self._num_free -= len(blocks)

    def _find_free(self, count: int, room: int) -> list[int]:
        """`count` free blocks: from a gap of `room`, else from one of `count`, else the lowest ones."""
        taken = self._free
        for length in (room, count):
            start = taken.find(b"\1" * length, self._cursor)
            if start < 0:
                start = taken.find(b"\1" * length)
            if start >= 0:
                self._cursor = (start + length) % self.num_blocks
                return list(range(start, start + count))
        blocks: list[int] = []
        position = -1
        while len(blocks) < count:
            position = taken.find(1, position + 1)
            blocks.append(position)
        return blocks

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the books with the block tables of every request that holds blocks.

        Invariants: free + cached + referenced = total; a reference count is the number of tables that name the
        block; no table names a block twice; free, cached and referenced exclude each other; each cached hash leads
        to the block that carries it.

        Raises:
            BlockError: naming the first invariant that is broken.
        """
        counts = [0] * self.num_blocks
        for table in tables:
            for block_id in table:
                counts[block_id] += 1
            if len(set(table)) != len(table):
                raise BlockError(f"a table names a block twice: {list(table)}")
        if counts != self._ref_counts:
            wrong = next(i for i, count in enumerate(counts) if count != self._ref_counts[i])
            raise BlockError(f"block {wrong} counts {self._ref_counts[wrong]} references, tables name {counts[wrong]}")
        self._check_states(sum(1 for count in counts if count))

    def _check_states(self, num_referenced: int) -> None:
        if self._free.count(1) != self._num_free:
            raise BlockError(f"{self._free.count(1)} blocks are marked free, {self._num_free} are counted")
        if self._num_free + len(self._lru) + num_referenced != self.num_blocks:
            total = f"{self._num_free} free + {len(self._lru)} cached + {num_referenced} referenced"
            raise BlockError(f"{total} is not {self.num_blocks}")
        for block_id in self._lru:
            if self._ref_counts[block_id] or self._free[block_id] or self._keys[block_id] is None:
                raise BlockError(f"cached block {block_id} is also referenced or free, or has no key")
        for digest, block_id in self._block_by_hash.items():
            key = self._keys[block_id]
            if key is None or key.hash != digest or self._free[block_id]:
                raise BlockError(f"the hash of block {block_id} leads to other content")
        if len(self._block_by_hash) != sum(1 for key in self._keys if key is not None):
            raise BlockError("a block carries a key that no hash leads to")
