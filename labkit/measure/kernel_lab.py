"""The kernel lab's experiment: L2 hit rate, DRAM bandwidth and time over block size, packing and shared prefix."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

from labkit.errors import OutOfRangeError
from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.l2_simulator import simulate_attention
from labkit.measure.roofline import Ceilings, Roofline, card_ceilings, roofline
from labkit.measure.run_record import Counters
from labkit.specs.gpu_loading import load_gpu
from labkit.specs.gpu_spec import GpuSpec

LINE_VARIANTS = ("full", "one program for each query head", "tile = block")
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
PREFIX_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Gives the counters of a launch; the simulation, or the card itself.
Count = Callable[[AttentionShape, GpuSpec, str], Counters | None]


@dataclass(frozen=True)
class LabSettings:
    """What the lab looks at: one decode step.

    Attributes:
        gpu: the card.
        num_seqs, context_len: sequences, and tokens of each.
        group: query heads of each of `num_kv_heads` KV heads.
        prefix_share: share of the context that all sequences share, 0 to 1, in the lines.
        block_sizes, prefix_shares: axes of the lines and the heat map.
    """

    gpu: GpuSpec
    num_seqs: int = 16
    context_len: int = 2048
    kv_cache_dtype: str = "bfloat16"
    group: int = 4
    num_kv_heads: int = 8
    head_dim: int = 128
    prefix_share: float = 0.0
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    prefix_shares: tuple[float, ...] = PREFIX_SHARES

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in (self.prefix_share, *self.prefix_shares)):
            raise OutOfRangeError("a shared prefix is 0 to 1 of the context", knob="prefix_share")
        if not self.block_sizes:
            raise OutOfRangeError("the lab needs one block size at least", knob="block_size")

    def shape(self, block_size: int, prefix_share: float | None = None) -> AttentionShape:
        """The launch with this block size and prefix."""
        share = self.prefix_share if prefix_share is None else prefix_share
        return AttentionShape(
            BatchShape.decode(self.num_seqs, self.context_len, round(share * self.context_len)),
            num_heads=self.group * self.num_kv_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            block_size=block_size, kv_cache_dtype=self.kv_cache_dtype,
        )  # fmt: skip


@dataclass(frozen=True)
class LabPoint:
    """One launch; `kv_bytes` is what DRAM must give at least, `roofline` what the card allows for what it did."""

    block_size: int
    variant: str
    prefix_share: float
    counters: Counters
    kv_bytes: int
    roofline: Roofline


@dataclass(frozen=True)
class LabResult:
    """`lines`: every variant at every block size; `heat`: the full kernel at every block size and shared prefix."""

    settings: LabSettings
    lines: tuple[LabPoint, ...]
    heat: tuple[LabPoint, ...]

    @property
    def method(self) -> str:
        """How the numbers came about; the first word is "measured" or "simulated"."""
        return self.lines[0].counters.method if self.lines else ""

    def line(self, variant: str) -> dict[int, LabPoint]:
        """Block size → point of one variant."""
        return {point.block_size: point for point in self.lines if point.variant == variant}


def lab_settings(card: str = "auto", otherwise: str = "H100", **values: object) -> LabSettings:
    """`LabSettings` for a card by name; "auto" on a machine without one is the card `otherwise`, simulated."""
    gpu = load_gpu(card)
    if gpu.is_cpu:
        gpu = load_gpu(otherwise)
    return replace(LabSettings(gpu), **values)  # type: ignore[arg-type]


def card_count(gpu: GpuSpec) -> Count | None:
    """What counts launches on `gpu` where that card is here and torch can use it, else None."""
    if gpu.origin != "nvml":
        return None
    import torch  # and triton with the kernels: only where there is a card

    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return None
    from labkit.measure.kernel_launches import CardCounter

    return CardCounter()


def run_lab(
    settings: LabSettings, count: Count | None = None, on_point: Callable[[int, int], object] | None = None,
    ceilings: Ceilings | None = None,
) -> LabResult:  # fmt: skip
    """Every point of the lines and the heat map.

    Args:
        count: gives a launch's counters, or None for a launch that this method cannot run, which is left out; None
            simulates.
        on_point: called with points done and points in all.
        ceilings: of the card, for the rooflines; None takes the data sheet's.

    Raises:
        LabkitError: shapes or cards that cannot be simulated.
    """
    count, ceilings = count or _simulate, ceilings or card_ceilings(settings.gpu)
    asked = [(variant, size, settings.prefix_share) for variant in LINE_VARIANTS for size in settings.block_sizes]
    num_lines = len(asked)
    asked += [("full", size, share) for share in settings.prefix_shares for size in settings.block_sizes]
    points: list[LabPoint | None] = []
    for variant, size, share in asked:
        shape = settings.shape(size, share)
        counters = count(shape, settings.gpu, variant)
        points.append(None if counters is None else _point(shape, variant, share, counters, ceilings))
        if on_point is not None:
            on_point(len(points), len(asked))
    lines, heat = points[:num_lines], points[num_lines:]
    return LabResult(
        settings, tuple(point for point in lines if point), tuple(point for point in heat if point)
    )  # fmt: skip


def _point(shape: AttentionShape, variant: str, share: float, counters: Counters, ceilings: Ceilings) -> LabPoint:
    """A point with its roofline; a simulated time is the roofline's own, so that only a measured one has a share."""
    time_s = counters.kernel_time_s if counters.method.startswith("measured") else None
    found = roofline(counters.dram_bytes, shape.flops, ceilings, time_s)
    return LabPoint(shape.block_size, variant, share, counters, shape.kv_bytes, found)


def _simulate(shape: AttentionShape, gpu: GpuSpec, variant: str) -> Counters:
    return simulate_attention(shape, gpu, variant).counters
