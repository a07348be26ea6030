"""Do the checks bite? Each known kind of bug is planted into the code, and the simulation must find it.

Failures seen in other engines (blocks twice in a free list, hash collisions, admission that stops, lost swaps, …).
"""

from __future__ import annotations

import inspect
import textwrap

import pytest

from labkit.engine.batch import BatchBuilder, _add_rows
from labkit.engine.block_pool import BlockKey, BlockPool
from labkit.engine.engine import Engine
from labkit.engine.fault_simulation import simulate
from labkit.engine.scheduler import Scheduler
from labkit.engine.sequence import Sequence

BUGS = {
    "free drops all references": (BlockPool.free, "counts[block_id] -= 1", "counts[block_id] = 0"),
    "free keeps the block": (BlockPool.free, "lru[block_id] = None", "pass"),
    "shared block stays in the LRU": (BlockPool.share, "del self._lru[block_id]", "pass"),
    "share counts nothing": (BlockPool.share, "self._ref_counts[block_id] += 1", "pass"),
    "evicted block keeps its hash": (BlockPool._evict, "del by_hash[key.hash]", "pass"),
    "evicted block keeps its key": (BlockPool._evict, "keys[block_id] = None", "pass"),
    "taken block stays free": (BlockPool._mark_taken, "self._free[block_id] = 0", "pass"),
    "free count drifts": (BlockPool._mark_taken, "-= len(blocks)", "-= 1"),
    "one block too few": (BlockPool.blocks_for, "-(-num_tokens // self.block_size)", "num_tokens // self.block_size"),
    "hash trusted, tokens not compared": (BlockKey.follows, "self.token_ids != token_ids", "False"),
    "parents not compared": (BlockKey.follows, "return self.parent.same_content(parent)", "return True"),
    "first block after any parent": (BlockKey.follows, "return self.parent is parent", "return True"),
    "parents compared by their last block": (
        BlockKey.same_content,
        "mine, other = mine.parent, other.parent",
        "return True",
    ),
    "whole prompt taken from the cache": (Scheduler._cached_prefix, "(sequence.num_tokens - 1)", "sequence.num_tokens"),
    "registered before it is computed": (
        Scheduler.register_full_blocks,
        "count = sequence.num_computed_tokens",
        "count = len(sequence.block_table) * block_size",
    ),
    "swapped in from nowhere": (Scheduler._enter, "step.swap_in.extend", "list().extend"),
    "swapped out to nowhere": (Scheduler._preempt, "step.swap_out.extend", "list().extend"),
    "host blocks leak": (Scheduler._enter, "self.swap_pool.free(sequence.swap_table)", "pass"),
    "oldest is sent back": (Scheduler._grow, "self.running[-1]", "self.running[0]"),
    "long prompt starves the others": (Scheduler._continue_running, "step.budget - others", "step.budget"),
    "budget is not spent": (BatchBuilder.choose, "self.budget -= num_new_tokens", "pass"),
    "last block is never given": (Scheduler._admit, "> self.pool.num_available", ">= self.pool.num_available"),
    "sent back without forgetting": (Sequence.forget_kv, "self.num_computed_tokens = 0", "pass"),
    "cancelled request keeps its blocks": (Scheduler._leave, "self.pool.free(sequence.block_table)", "pass"),
    "failed step is taken as done": (Engine._step_now, "_scheduler.forget_all_kv()", "_scheduler.advance(batch)"),
    "computed tokens off by one": (Scheduler.advance, "= batch.seq_lens[row]", "= batch.seq_lens[row] - 1"),
    "token out of an unfinished prompt": (_add_rows, "start + count == sequence.num_tokens", "True"),
    "old keys after a new block size": (Engine._requeue, "sequence.keys = []", "pass"),
    "sent back to the end of the queue": (
        Scheduler._preempt,
        "insort(self.waiting, sequence, key=_index)",
        "self.waiting.append(sequence)",
    ),
    "table row leaks": (Scheduler._preempt, "self._free_slots.append(sequence.slot)", "pass"),
}  # fmt: skip
MOST_SEEDS, STEPS = 80, 150


def _plant(monkeypatch, function, old: str, new: str) -> None:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, "the planted text must be in the code once"
    code = compile(source.replace(old, new), "planted", "exec", flags=annotations.compiler_flag)
    namespace = dict(function.__globals__)
    exec(code, namespace)
    changed = namespace[function.__name__]
    path = function.__qualname__.split(".")
    module = inspect.getmodule(function)
    monkeypatch.setattr(getattr(module, path[0]) if len(path) > 1 else module, function.__name__, changed)


@pytest.mark.parametrize("name", list(BUGS))
def test_simulation_finds_the_planted_bug(name, monkeypatch):
    _plant(monkeypatch, *BUGS[name])
    found = False
    for seed in range(MOST_SEEDS):
        try:
            simulate(seed, STEPS)
        except Exception:
            found = True
            break
    assert found, f"{MOST_SEEDS} lives did not notice: {name}"
