"""What is known of the user's cards, as files in the user's data folder, and which constants follow from it.

    <data folder>/cards/<card>.json    {"format", "microbenchmark", "calibrations": [...]}

`constants_for` takes the best that there is: runs of the same model on the same card, a microbenchmark of the card,
or what comes with labkit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.engine.step_constants import StepConstants, load_constants
from labkit.errors import FileFormatError
from labkit.experiments.card_constants import constants_of
from labkit.experiments.measured_memory import MeasuredMemory
from labkit.experiments.microbench import Microbenchmark
from labkit.experiments.serialise import from_plain, loads, to_plain
from labkit.experiments.store_tables import data_folder
from labkit.files import write_atomic
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import plain

_FORMAT = "labkit-card-2"
_MAX_BYTES = 4 * 2**20
_MAX_CALIBRATIONS = 50


@dataclass(frozen=True)
class RunCalibration:
    """Constants that runs of one model on one card gave.

    Attributes:
        model: the model's name. engine: "labkit" or "vllm". engine_version: of vLLM, "" for labkit's.
        made: ISO 8601. run_ids: of the runs.
        memory: what their measured parts say about the planner's, None where none were measured.
    """

    model: str
    engine: str
    engine_version: str
    made: str
    run_ids: tuple[str, ...]
    constants: StepConstants
    memory: MeasuredMemory | None = None


@dataclass(frozen=True)
class CardFile:
    """What is kept of one card; `calibrations` newest first."""

    card: str
    microbenchmark: Microbenchmark | None = None
    calibrations: tuple[RunCalibration, ...] = ()


def card_path(gpu: GpuSpec, folder: Path | None = None) -> Path:
    """The file of `gpu`, whether or not it is there yet."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.casefold()).strip("-")[:60] or "card"
    return (folder or data_folder()) / "cards" / f"{name}.json"


def read_card(gpu: GpuSpec, folder: Path | None = None) -> CardFile:
    """What is kept of `gpu`; an empty record where nothing is.

    Raises:
        FileFormatError: the file is damaged or of another version of labkit.
    """
    path = card_path(gpu, folder)
    try:
        if not path.is_file():
            return CardFile(gpu.name)
        if path.stat().st_size > _MAX_BYTES:
            raise FileFormatError(f"{plain(path, 200)} is too large for constants of a card", works="deleting it")
        content = loads(path.read_bytes(), plain(path, 200))
    except OSError as error:
        raise FileFormatError(f"cannot read {plain(path, 200)}: {error.strerror or error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise FileFormatError(
            f"{plain(path, 200)} keeps no constants of this version", works="deleting it, then `labkit calibrate`"
        )
    return from_plain(CardFile, content, plain(path, 200))


def write_card(gpu: GpuSpec, content: CardFile, folder: Path | None = None) -> Path:
    """Keep `content` and return the path.

    Raises:
        FileFormatError: the folder cannot be written.
    """
    values: dict[str, Any] = {"format": _FORMAT, **to_plain(content)}
    return write_atomic(card_path(gpu, folder), json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def keep_microbenchmark(gpu: GpuSpec, found: Microbenchmark, folder: Path | None = None) -> Path:
    """Keep a new microbenchmark in place of the last one; calibrations by runs stay."""
    return write_card(gpu, replace(read_card(gpu, folder), microbenchmark=found), folder)


def keep_calibration(gpu: GpuSpec, found: RunCalibration, folder: Path | None = None) -> Path:
    """Keep constants that runs gave, in place of those of the same model and engine."""
    kept = read_card(gpu, folder)
    others: Sequence[RunCalibration] = [entry for entry in kept.calibrations if _key(entry) != _key(found)]
    return write_card(gpu, replace(kept, calibrations=(found, *others)[:_MAX_CALIBRATIONS]), folder)


def constants_for(
    gpu: GpuSpec,
    model: str,
    *,
    engine: str = "vllm",
    engine_version: str = "0.33.0",
    is_moe: bool = False,
    folder: Path | None = None,
) -> StepConstants:
    """The best constants that are known for an engine with a model on a card; `level` says which.

    A microbenchmark measures the kernels of labkit's engine, so it serves simulations of that engine alone.

    Raises:
        FileFormatError: the card's file is damaged.
    """
    known = calibration_for(gpu, model, engine=engine, engine_version=engine_version, folder=folder)
    if known is not None:
        return known.constants
    return base_constants(gpu, engine=engine, engine_version=engine_version, is_moe=is_moe, folder=folder)


def calibration_for(
    gpu: GpuSpec, model: str, *, engine: str, engine_version: str, folder: Path | None = None
) -> RunCalibration | None:
    """What runs of this model, card and engine gave; None where there were none.

    Raises:
        FileFormatError: the card's file is damaged.
    """
    wanted = (model, engine, engine_version if engine == "vllm" else "")
    return next((entry for entry in read_card(gpu, folder).calibrations if _key(entry) == wanted), None)


def base_constants(
    gpu: GpuSpec, *, engine: str, engine_version: str, is_moe: bool = False, folder: Path | None = None
) -> StepConstants:
    """The best constants that no run of a model was needed for: a microbenchmark's, or those that come with labkit.

    Raises:
        FileFormatError: the card's file is damaged.
    """
    shipped = load_constants(engine_version, is_moe=is_moe, engine=engine)
    found = read_card(gpu, folder).microbenchmark if engine == "labkit" else None
    return shipped if found is None else constants_of(found, gpu, shipped)


def _key(entry: RunCalibration) -> tuple[str, str, str]:
    return (entry.model, entry.engine, entry.engine_version)
