"""Token ids that stand in for the text of a request: the same for the same request, seed and vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from labkit.errors import OutOfRangeError
from labkit.specs.workload import RequestSpec, Workload
from labkit.specs.workload_steps import check_count


def prompt_token_ids(workload: Workload, index: int, *, vocab_size: int, avoid: Iterable[int] = ()) -> list[int]:
    """The prompt of request `index`: `input_tokens` ids below `vocab_size`, none of them in `avoid`.

    Equal prefix blocks give equal tokens in every request; what lies behind a request's prefix blocks is its own.
    Ids are drawn by SHAKE-128 from the workload's seed, so they are the same on every machine.

    Args:
        workload: its seed and prefix blocks are used.
        index: of the request in `workload.requests`.
        vocab_size: ids are below this.
        avoid: ids not to use, such as those of special tokens and stops.

    Raises:
        OutOfRangeError: no such request, or nothing is left of the vocabulary.
    """
    check_count("index", index, minimum=0, maximum=max(0, len(workload.requests) - 1))
    avoided = _avoided(vocab_size, avoid)
    return _prompt(workload, index, workload.requests[index], vocab_size, avoided)


def prompts(workload: Workload, *, vocab_size: int, avoid: Iterable[int] = ()) -> Iterator[list[int]]:
    """The prompts of all requests, in order; the errors of `prompt_token_ids`."""
    avoided = _avoided(vocab_size, avoid)
    for index, request in enumerate(workload.requests):
        yield _prompt(workload, index, request, vocab_size, avoided)


def _avoided(vocab_size: int, avoid: Iterable[int]) -> list[int]:
    size = check_count("vocab_size", vocab_size, maximum=2**26)
    avoided = sorted({int(entry) for entry in avoid if 0 <= int(entry) < size})
    if len(avoided) >= size:
        raise OutOfRangeError(
            "every id of the vocabulary is to be avoided", needed="1 id", available="0 ids", knob="avoid"
        )
    return avoided


def _prompt(workload: Workload, index: int, request: RequestSpec, vocab_size: int, avoided: list[int]) -> list[int]:
    ids: list[int] = []
    size, left = workload.prefix_block_tokens, request.input_tokens
    for first, last in request.prefix_blocks if size else ():
        for block in range(first, last + 1):
            if left <= 0:
                break
            ids += _draw(f"{workload.seed} block {block}", min(size, left), vocab_size, avoided)
            left -= size
    if left > 0:
        ids += _draw(f"{workload.seed} request {index}", left, vocab_size, avoided)
    return ids


def _draw(key: str, count: int, vocab_size: int, avoided: list[int]) -> list[int]:
    import numpy as np

    words = np.frombuffer(hashlib.shake_128(key.encode()).digest(8 * count), dtype="<u8")
    ids = (words % np.uint64(vocab_size - len(avoided))).astype(np.int64)
    for entry in avoided:
        ids[ids >= entry] += 1
    return ids.tolist()
