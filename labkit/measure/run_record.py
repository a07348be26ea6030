"""`RunRecord`: everything that one run was and gave, as immutable rows that load as pandas frames."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from labkit.measure.nvml_sampler import NvmlSummary
from labkit.memory.records import MemoryBreakdown, MemoryPlan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.text import brief

if TYPE_CHECKING:
    import pandas as pd

RunStatus = Literal["running", "finished", "cancelled", "failed", "unfinished"]


@dataclass(frozen=True)
class RequestRow:
    """One request of a run; times in seconds from the start of the run.

    Attributes:
        arrival_s: when the workload offered it.
        first_token_s, finish_s: when its first and last token were there; None when it never got that far.
        input_tokens, output_tokens: prompt length and tokens generated so far.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_preemptions: how often it was sent back.
        finish_reason: "length", "stop", "cancelled", "refused: …" or "" while it runs.
        token_times_s: when each output token was there, for inter-token latency.
    """

    request_id: int
    arrival_s: float
    first_token_s: float | None
    finish_s: float | None
    input_tokens: int
    output_tokens: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str = ""
    token_times_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepRow:
    """One engine step; `start_s` from the start of the run, start to start is the cycle time."""

    start_s: float
    duration_s: float
    num_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks_cached: int
    num_tokens_stored: int
    num_preemptions: int = 0
    num_swapped_blocks: int = 0


def step_rows(*columns: Iterable[Any]) -> list[StepRow]:
    """Many rows at once, of columns in the order of the fields.

    A frozen record sets its fields by one call each, which for a row takes eight times as long as this.

    Raises:
        ValueError: not a column for each field, or not of one length.
    """
    rows = []
    for start_s, duration_s, tokens, prefill, decode, running, waiting, used, cached, stored, sent, swapped in zip(
        *columns, strict=True
    ):
        row = object.__new__(StepRow)
        row.__dict__.update(
            start_s=start_s, duration_s=duration_s, num_tokens=tokens, num_prefill_tokens=prefill,
            num_decode_tokens=decode, num_running=running, num_waiting=waiting, num_blocks_used=used,
            num_blocks_cached=cached, num_tokens_stored=stored, num_preemptions=sent, num_swapped_blocks=swapped,
        )  # fmt: skip
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Counters:
    """Cache and DRAM counters, never without their method and bandwidth.

    Attributes:
        method: "measured (…)" or "simulated (…)"; shown beside every value.
        card: the card that was measured or simulated.
        l2_hit_rate: share of L2 sector reads of the SMs that hit, 0 to 1.
        dram_bytes, dram_bytes_per_s: read from DRAM, and that per second of kernel time.
        kernel_time_s: time of the kernels that were looked at.
        scope: what was looked at, "" for a single launch.
        l2_read_bytes: what the SMs read from the L2, hits and misses.
        dram_write_bytes: written to DRAM.
        warps_active_share: mean warps on an SM over the most it holds, while it had any.
        tensor_active_share: share of the SMs' active cycles in which their tensor pipe worked.
    """

    method: str
    card: str
    l2_hit_rate: float
    dram_bytes: float
    dram_bytes_per_s: float
    kernel_time_s: float
    scope: str = ""
    l2_read_bytes: float | None = None
    dram_write_bytes: float | None = None
    warps_active_share: float | None = None
    tensor_active_share: float | None = None


@dataclass(frozen=True)
class MemorySample:
    """Memory at one moment of a run, in bytes; None is "nobody says".

    Attributes:
        time_s: from the start of the run.
        kv_used_bytes: blocks that requests hold, by the pool's own account.
        allocated_bytes, active_bytes, reserved_bytes: torch's allocator on the card: in tensors, these and what waits
            for another stream, taken from the driver.
        unused_split_bytes: free pieces inside torch's segments that cannot go back to the driver.
        device_used_bytes: of the whole card, from NVML.
        process_bytes: of this process: on a card from NVML, else its resident memory on this machine.
        other_processes_bytes: of all others on the card, from NVML.
    """

    time_s: float
    kv_used_bytes: int
    allocated_bytes: int | None = None
    active_bytes: int | None = None
    reserved_bytes: int | None = None
    unused_split_bytes: int | None = None
    device_used_bytes: int | None = None
    process_bytes: int | None = None
    other_processes_bytes: int | None = None


@dataclass(frozen=True)
class RunRecord:
    """One run of one configuration on one workload.

    Attributes:
        run_id: unique in a store; made by the caller, so that equal inputs can give equal bytes.
        name: what a person calls it, from what changed ("fp8 KV, block 32"); text from outside.
        created: ISO 8601 time, given by the caller.
        config: the settings as asked for; `plan.config` has every None resolved.
        origin: "measured" for a real engine, "simulated" for a virtual one.
        workload: name, source, licence, steps, seed and count of requests of the `Workload`.
        versions: package → version; machine facts under "machine".
        duration_s: from the first arrival to the last finish.
        measured: the measured memory parts, None when the run ended before they were read.
        counters: of the attention of one decode step at the run's fullest, measured after the timed steps or simulated.
        step_counters: of one such step as a whole, where it was measured.
        counter_notes: why a better method did not count, one line each, with the cure.
        memory_timeline: memory while the run went on.
        nvml: power, clocks, temperature and what held the clocks down, None where there is no card.
        block_map: final or fullest-moment owner of each block, -1 free, -2 cached, else request_id; for the
            occupancy map.
        energy_j: from NVML, None where there is none.
    """

    run_id: str
    name: str
    created: str
    status: RunStatus
    config: EngineConfig
    model: ModelSpec
    gpu: GpuSpec
    workload: Mapping[str, Any]
    plan: MemoryPlan
    requests: tuple[RequestRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    measured: MemoryBreakdown | None = None
    counters: Counters | None = None
    step_counters: Counters | None = None
    counter_notes: tuple[str, ...] = ()
    memory_timeline: tuple[MemorySample, ...] = ()
    nvml: NvmlSummary | None = None
    block_map: tuple[int, ...] = ()
    energy_j: float | None = None
    duration_s: float = 0.0
    seed: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    origin: Literal["measured", "simulated"] = "measured"
    error: str = ""
    note: str = ""

    def __repr__(self) -> str:
        shown = ("run_id", "name", "status", "origin", "model", "gpu", "num_requests", "num_steps", "duration_s")
        return brief(self, *shown, *(["error"] if self.error else []))

    @property
    def num_requests(self) -> int:
        """Rows of `requests`, finished or not."""
        return len(self.requests)

    @property
    def num_steps(self) -> int:
        """Rows of `steps`."""
        return len(self.steps)

    def requests_frame(self) -> pd.DataFrame:
        """One row a request, columns as in `RequestRow`."""
        return _frame(self.requests, RequestRow)

    def steps_frame(self) -> pd.DataFrame:
        """One row a step, columns as in `StepRow`."""
        return _frame(self.steps, StepRow)


def _frame(rows: tuple, row_type: type) -> pd.DataFrame:
    import pandas as pd  # pandas costs 0.4 s to import and planning does not need it

    columns = [entry.name for entry in dataclasses.fields(row_type)]
    return pd.DataFrame([[getattr(row, name) for name in columns] for row in rows], columns=columns)
