"""`GpuSpec`: the facts of a card that planning and prediction need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuSpec:
    """One card, or the CPU standing in for one.

    Attributes:
        name: catalogue name such as "H100-80GB"; "cpu" for a machine without a GPU.
        total_bytes: what CUDA reports as the card's total; `--gpu-memory-utilization` multiplies this.
        nvidia_smi_total_bytes: what nvidia-smi prints, always a little more; None where unknown.
        free_bytes: free at the moment of looking, where NVML was asked; None from the catalogue.
        mem_bandwidth_bytes_per_s: data-sheet bandwidth.
        l2_bytes, sm_count, compute_capability: "9.0" and so on; None where unknown.
        bf16_flops, fp8_flops: dense tensor-core peak in FLOP/s; None where the card has none.
        origin: "nvml", "catalogue" or "cpu".
        uuid: NVML's identity of the card, None from the catalogue.
        source: path of the file that described it, "" for other cards.
    """

    name: str
    total_bytes: int
    nvidia_smi_total_bytes: int | None = None
    free_bytes: int | None = None
    mem_bandwidth_bytes_per_s: float | None = None
    l2_bytes: int | None = None
    sm_count: int | None = None
    compute_capability: str | None = None
    bf16_flops: float | None = None
    fp16_flops: float | None = None
    fp8_flops: float | None = None
    origin: str = "catalogue"
    uuid: str | None = None
    source: str = ""

    @property
    def lookup(self) -> str:
        """What `load_gpu` takes to find this card again: its file where it has one, else its name."""
        return self.source or self.name

    @property
    def is_cpu(self) -> bool:
        """True for a machine without a GPU."""
        return self.origin == "cpu"
