"""Launches attention shapes and nothing else, for ncu; usage: python -m labkit.measure.replay JOB…"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.counters import Replay

KERNELS = "regex:_decode_kernel|_prefill_kernel"
# The first one warms up.
NUM_LAUNCHES = 13


def replay_of(shape: AttentionShape, variant: str = "full", card_uuid: str | None = None) -> Replay:
    """The command that launches `shape` on the card `card_uuid`, the first time to warm up."""
    return Replay(replay_command([(shape, variant)]), KERNELS, card_uuid=card_uuid)


def replay_command(launches: Sequence[tuple[AttentionShape, str]]) -> tuple[str, ...]:
    """The command that launches each shape and variant `NUM_LAUNCHES` times, one after another."""
    jobs = [json.dumps({"variant": variant, "shape": asdict(shape)}) for shape, variant in launches]
    return (sys.executable, "-m", "labkit.measure.replay", *jobs)


def read_job(text: str) -> tuple[AttentionShape, str]:
    """Shape and variant of a job that `replay_command` wrote."""
    job = json.loads(text)
    batch = job["shape"].pop("batch")
    lens = BatchShape(tuple(batch["context_lens"]), tuple(batch["query_lens"]), batch["shared_prefix_tokens"])
    return AttentionShape(lens, **job["shape"]), job["variant"]


def launch(shape: AttentionShape, variant: str) -> None:
    """Launch `NUM_LAUNCHES` times, each with a cold L2."""
    import torch
    from labkit_kernels.cold_timing import cold_l2

    from labkit.measure.kernel_launches import make_inputs, prepare_launch

    flush = cold_l2()
    call = prepare_launch(shape, variant, make_inputs(shape))
    for _ in range(NUM_LAUNCHES):
        flush()
        call()
    torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: jobs as JSON."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        print("usage: python -m labkit.measure.replay JOB…", file=sys.stderr)
        return 2
    for job in given:
        launch(*read_job(job))
    return 0


if __name__ == "__main__":
    sys.exit(main())
