"""A card that the catalogue lacks, from a JSON file of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.errors import FileFormatError, UnknownNameError
from labkit.specs.config_fields import ConfigFields, read_config_file
from labkit.specs.gpu_catalogue import spec_from_entry
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import nearest, plain

_MIB_KEYS = {"planned_total_mib": 2**26, "nvidia_smi_total_mib": 2**26, "sm_count": 2**16}
_NUMBER_KEYS = {
    "mem_bandwidth_gb_s": 1e6, "l2_mib": 1e6, "bf16_dense_tflops": 1e6, "fp16_dense_tflops": 1e6,
    "fp8_dense_tflops": 1e6,
}  # fmt: skip
# What catalogue entries say besides, which plans do not read.
_OTHER_KEYS = ("marketing_gb", "cuda_visible_total_mib", "bf16_supported", "fp8_tensor_cores", "sources", "note")


def gpu_from_file(path: Path) -> GpuSpec:
    """The card that `path` describes by the keys of one entry of `catalogue/gpus.json`.

    `planned_total_mib` is needed, the total that `torch.cuda.get_device_properties(0).total_memory` gives; simulations
    need the bandwidth and one of the 16-bit peaks too. The card is called by `name`, else by the file.

    Raises:
        FileFormatError: missing, no JSON object, without the total, or a value that is no number in its range.
        UnknownNameError: a key that entries do not have; names the nearest.
    """
    where = plain(path.name, 200)
    if not path.is_file():
        raise FileFormatError(f"there is no file {plain(path)} that describes a card", works="a name of `labkit gpus`")
    values = read_config_file(path)
    known = (*_MIB_KEYS, *_NUMBER_KEYS, *_OTHER_KEYS, "name", "compute_capability")
    for key in values:
        if key not in known:
            raise UnknownNameError(f"{where}: cards have no {plain(key, 80)!r}", works=nearest(key, known), knob="gpu")
    fields = ConfigFields(values, where)
    if not fields.has("planned_total_mib"):
        raise FileFormatError(
            f"{where} does not say planned_total_mib", works="the card's total memory as CUDA reports it, in MiB"
        )
    entry: dict[str, Any] = {
        key: fields.optional_integer(key, minimum=1, maximum=most) for key, most in _MIB_KEYS.items()
    }
    entry |= {key: fields.optional_number(key, minimum=1e-3, maximum=most) for key, most in _NUMBER_KEYS.items()}
    entry["compute_capability"] = fields.text("compute_capability", default="") or None
    if entry["compute_capability"] and not re.fullmatch(r"\d{1,2}\.\d", entry["compute_capability"]):
        raise FileFormatError(
            f"compute_capability in {where} is {plain(repr(entry['compute_capability']), 80)}", works='"9.0"'
        )
    spec = spec_from_entry(plain(fields.text("name", default=path.stem), 80), entry)
    return replace(spec, source=str(path.absolute()))
