"""Energy of a run from NVML; where a card or driver does not say, there is None and the reason, never 0."""

from __future__ import annotations

import importlib
from typing import Any

from labkit.text import plain


class EnergyMeter:
    """Reads the card's energy counter at the start and at the end of a run.

    Args:
        uuid: NVML's identity of the card; None for no card.
        pynvml: the module, for tests.

    Attributes:
        reason: why there is no energy, "" where there is.
    """

    def __init__(self, uuid: str | None, pynvml: Any = None) -> None:
        self.reason = ""
        self._handle: Any = None
        self._start_mj: int | None = None
        if uuid is None:
            self.reason = "not available: no NVIDIA card in this run"
            return
        try:
            # Imported only where a card is asked for.
            self._nvml = pynvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._start_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except Exception as error:
            self._give_up(error)

    def stop(self) -> float | None:
        """Joules since the start; None where NVML does not say."""
        if self._start_mj is None:
            return None
        try:
            end_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except Exception as error:
            self._give_up(error)
            return None
        if end_mj < self._start_mj:
            self.reason = "not available: the counter was reset during the run"
            return None
        return (end_mj - self._start_mj) / 1000.0

    def _give_up(self, error: Exception) -> None:
        self._start_mj = None
        self.reason = f"not available: {plain(error, 200) or type(error).__name__}"
