"""`RunWatch`: memory and power while a run goes on, from torch's allocator, NVML and the pool's own account."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from labkit.measure.allocator import AllocatorTimeline
from labkit.measure.nvml_sampler import NvmlSampler, NvmlSummary
from labkit.measure.run_record import MemorySample

NVML_INTERVAL_S = 0.25
MAX_SAMPLES = 600


class RunWatch:
    """In its `with` block NVML is looked at by a thread, and memory at each call of `look`.

    Args:
        uuid: NVML's identity of the card; None for a run on the CPU.
        block_bytes: of one KV block.
        others: samplers of the other cards that share the model, for their energy.
        sampler, allocator: for tests.

    Attributes:
        nvml: after the block: power, clocks and energy of the first card; None on a CPU.
        energy_j: of all cards together; None on a CPU, and where one of them does not say.
    """

    def __init__(
        self, uuid: str | None, block_bytes: int, *, others: Sequence[NvmlSampler] = (),
        sampler: NvmlSampler | None = None, allocator: AllocatorTimeline | None = None,
    ) -> None:  # fmt: skip
        self.nvml: NvmlSummary | None = None
        self.energy_j: float | None = None
        self._others = tuple(others)
        self._is_on_card = uuid is not None
        self._block_bytes = block_bytes
        self._sampler = sampler or NvmlSampler(uuid, NVML_INTERVAL_S)
        self._allocator = allocator or AllocatorTimeline()
        self._process = psutil.Process()
        self._samples: list[MemorySample] = []
        self._every, self._looks = 1, 0

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        """What was kept: at most `MAX_SAMPLES`, evenly over the looks."""
        return tuple(self._samples)

    def __enter__(self) -> RunWatch:
        for sampler in (self._sampler, *self._others):
            sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        summary, *others = [sampler.stop() for sampler in (self._sampler, *self._others)]
        self.nvml = summary if self._is_on_card else None
        shares = [found.energy_j for found in (summary, *others) if found.energy_j is not None]
        self.energy_j = sum(shares) if self._is_on_card and len(shares) == 1 + len(others) else None

    def look(self, time_s: float, num_blocks_used: int) -> MemorySample:
        """Memory now, `time_s` into the run."""
        kv_used = num_blocks_used * self._block_bytes
        if self._is_on_card:
            sample = self._look_at_card(time_s, kv_used)
        else:
            sample = MemorySample(time_s, kv_used, process_bytes=self._process.memory_info().rss)
        if self._looks % self._every == 0:
            self._samples.append(sample)
        self._looks += 1
        if len(self._samples) > MAX_SAMPLES:
            self._samples, self._every = self._samples[::2], 2 * self._every
        return sample

    def _look_at_card(self, time_s: float, kv_used: int) -> MemorySample:
        torch, nvml = self._allocator.look(), self._sampler.last
        return MemorySample(
            time_s,
            kv_used,
            allocated_bytes=getattr(torch, "allocated_bytes", None),
            active_bytes=getattr(torch, "active_bytes", None),
            reserved_bytes=getattr(torch, "reserved_bytes", None),
            unused_split_bytes=getattr(torch, "unused_split_bytes", None),
            device_used_bytes=getattr(nvml, "memory_used_bytes", None),
            process_bytes=getattr(nvml, "process_bytes", None),
            other_processes_bytes=getattr(nvml, "other_processes_bytes", None),
        )
