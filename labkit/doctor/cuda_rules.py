"""Which driver, CUDA build and card go together: rules on versions, with the tables that they need as data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

# vLLM's floor and what labkit says of cards below it.
BF16_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)


@lru_cache(maxsize=1)
def builds() -> Mapping[str, Any]:
    """Architectures of the wheels and drivers of the CUDA releases, `vllm_builds.json`."""
    return MappingProxyType(json.loads(files(__package__).joinpath("vllm_builds.json").read_text()))


def numbers(version: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: "12.8" gives (12, 8), "2.9.0+cu128" gives (2, 9, 0); () for none."""
    found = re.match(r"v?(\d{1,6}(?:\.\d{1,6}){0,4})", version or "")
    return tuple(int(word) for word in found[1].split(".")) if found else ()


def dotted(version: Iterable[int]) -> str:
    """(12, 8) as "12.8"."""
    return ".".join(str(number) for number in version)


def needed_driver(cuda: str) -> str | None:
    """The driver that came with a CUDA release; for one that is not recorded, that of the next older recorded."""
    known = [(numbers(name), driver) for name, driver in builds()["driver_for_cuda"].items()]
    older = [driver for name, driver in sorted(known) if name <= numbers(cuda)[:2]]
    return older[-1] if older else None


def smallest_driver(cuda: str) -> str | None:
    """The oldest driver of the major release: CUDA runs on it by minor-version compatibility, PTX does not."""
    return builds()["driver_for_major"].get(str(numbers(cuda)[0])) if numbers(cuda) else None


def runs_on(architectures: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether binaries for `architectures` ("8.6", "9.0+PTX", "sm_90") run on a card.

    A binary runs on the same major version from its minor on; PTX is compiled for any newer card.
    """
    major, minor = capability
    for word in architectures:
        built, is_ptx = _architecture(word)
        if built is None:
            continue
        if (built[0] == major and built[1] <= minor) or (is_ptx and built <= capability):
            return True
    return False


def _architecture(word: str) -> tuple[tuple[int, int] | None, bool]:
    found = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)[af]?(\+PTX)?", word.strip())
    if not found:
        return None, False
    return (int(found[1]), int(found[2])), bool(found[3]) or word.startswith("compute_")


def torch_architectures(torch: str, cuda: str | None) -> tuple[str, ...]:
    """What torch's wheel of that version and CUDA was built for; () where it is not known or a CPU build."""
    if not cuda:
        return ()
    fitting = [
        row
        for row in builds()["torch_architectures"]
        if numbers(row["cuda_since"]) <= numbers(cuda)[:2] <= numbers(row["cuda_until"])
        and numbers(row["torch_since"]) <= numbers(torch)
    ]
    return tuple(max(fitting, key=lambda row: numbers(row["torch_since"]))["list"]) if fitting else ()


def vllm_architectures(version: str) -> tuple[str, ...]:
    """What vLLM's wheel of that version was built for; () where it is not known."""
    for row in builds()["vllm_architectures"]:
        if numbers(row["since"]) <= numbers(version)[:2] <= numbers(row["until"]):
            return tuple(row["list"])
    return ()


def clean_install(version: str) -> str:
    """The command that installs a release and its torch together."""
    return f"python -m venv .venv && .venv/bin/pip install vllm=={version}"
