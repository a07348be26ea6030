"""`load_model`: a `ModelSpec` from a catalogue name, a folder, a config.json, a GGUF file or a hub id."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from pathlib import Path
from typing import Any

from labkit.errors import FileFormatError, UnknownNameError
from labkit.format import memory
from labkit.specs.config_fields import parse_config, read_config_file
from labkit.specs.hub_probe import hub_answers
from labkit.specs.model_catalogue import catalogue_model, find_name, model_names
from labkit.specs.model_config import model_from_config
from labkit.specs.model_spec import ModelSpec, WeightFormat
from labkit.specs.quantized_names import named_model
from labkit.text import nearest, plain

MAX_SAFETENSORS_HEADER_BYTES = 100 * 2**20
MAX_SHARDS = 10_000
_FILES = "a model folder, config.json or .gguf file"
_SOURCES = f"a name of `labkit models`, a hub id, {_FILES}"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def load_model(source: str | os.PathLike[str] | ModelSpec) -> ModelSpec:
    """The model that `source` means.

    Args:
        source: a path that exists (model folder, config.json or .gguf file); else a catalogue name, in any case and
            with or without its organisation; else a hub id, whose config.json is taken from the hub's cache or, where
            the hub can be reached, from there; else a catalogue name with its weight format, such as Qwen3-32B-AWQ.

    Raises:
        UnknownNameError: nothing of that name; names the nearest.
        FileFormatError: a file is missing, broken or over a limit.
        UnsupportedError: an encoder-decoder model.
    """
    if isinstance(source, ModelSpec):
        return source
    if not isinstance(source, (str, os.PathLike)) or not str(source).strip() or "\0" in str(source):
        raise UnknownNameError(f"a model's name is text, not {plain(repr(source), 80)}", works=_SOURCES, knob="model")
    name = str(source).strip()
    path = Path(name).expanduser()
    if _exists(path):
        return _load_path(path)
    if isinstance(source, os.PathLike) or name.endswith((".json", ".gguf")) or name.startswith(("/", "./", "../", "~")):
        raise FileFormatError(f"there is no model at {plain(name)}", works=_FILES, knob="model")
    found = find_name(name)
    if found is not None:
        return catalogue_model(found)
    if not _HUB_ID.fullmatch(name):
        reason = ""
    else:
        spec, reason = _load_hub(name)
        if spec is not None:
            return spec
    copy = named_model(name)
    if copy is None:
        raise _unknown(name, reason)
    return copy


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _load_path(path: Path) -> ModelSpec:
    if path.is_dir():
        return _load_folder(path)
    if path.suffix.casefold() == ".gguf":
        return _load_gguf(path)
    if path.suffix.casefold() == ".json":
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return model_from_config(read_config_file(path), plain(name, 200), source=str(path))
    raise FileFormatError(f"{plain(path)} is no model", works=_FILES, knob="model")


def _load_gguf(path: Path) -> ModelSpec:
    """The file's model; its weights are as many bytes as its tensors, as engines that compute on them hold them."""
    from labkit.specs.gguf import read_gguf
    from labkit.specs.gguf_spec import model_from_gguf

    file = read_gguf(path)
    num_bytes = sum(tensor.num_bytes for tensor in file.tensors.values())
    elements = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    fmt = WeightFormat("gguf", bits=max(1, round(8 * num_bytes / max(1, elements))), unquantized=("norm",))
    return model_from_gguf(file).replace(weights_bytes=num_bytes, weight_format=fmt)


def _load_folder(folder: Path) -> ModelSpec:
    config = folder / "config.json"
    if not config.is_file():
        ggufs = sorted(folder.glob("*.gguf"))[:2]
        if len(ggufs) == 1:
            return _load_gguf(ggufs[0])
        raise FileFormatError(
            f"{plain(folder)} holds no config.json and not exactly one .gguf file", works=_FILES, knob="model"
        )
    values = read_config_file(config)
    extra = folder / "hf_quant_config.json"
    if "quantization_config" not in values and extra.is_file():
        values = {**values, "quantization_config": {"quant_method": "modelopt", **read_config_file(extra)}}
    spec = model_from_config(values, plain(folder.resolve().name, 200), source=str(folder))
    spec = _with_pooling(spec, folder)
    return spec.replace(weights_bytes=safetensors_bytes(folder))


def _with_pooling(spec: ModelSpec, folder: Path) -> ModelSpec:
    """sentence-transformers writes modules.json beside an embedding model."""
    if not (folder / "modules.json").is_file():
        return spec
    pooling = folder / "1_Pooling" / "config.json"
    values = read_config_file(pooling) if pooling.is_file() else {}
    last = values.get("pooling_mode_lasttoken") or values.get("pooling_mode") in ("lasttoken", "last")
    return spec.replace(is_embedding=True, pooling="last" if last or not values else "mean")


def safetensors_bytes(folder: Path) -> int | None:
    """Bytes of all tensors in the folder's .safetensors files by their headers; None where there is none.

    Raises:
        FileFormatError: a header is longer than its file or than 100 MiB, or tensors end beyond the file.
    """
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        return None
    if len(shards) > MAX_SHARDS:
        raise FileFormatError(f"{plain(folder)} holds {len(shards)} shards", needed=f"at most {MAX_SHARDS}")
    consolidated = [shard for shard in shards if shard.name.startswith("consolidated")]
    counted = [shard for shard in shards if shard not in consolidated] or consolidated
    return sum(_shard_bytes(shard) for shard in counted)


def _shard_bytes(shard: Path) -> int:
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise FileFormatError(f"cannot read {plain(shard)}: {error.strerror or error}") from error
    header = struct.unpack("<Q", start)[0] if len(start) == 8 else size
    if header > min(size - 8, MAX_SAFETENSORS_HEADER_BYTES):
        raise FileFormatError(
            f"the header of {plain(shard.name)} is longer than its file or than {memory(MAX_SAFETENSORS_HEADER_BYTES)}",
            needed=f"{header} bytes",
            available=f"{size} bytes",
        )
    return size - 8 - header


def _load_hub(name: str) -> tuple[ModelSpec | None, str]:
    """The model of a hub id, or None and why there is none."""
    path, reason = _hub_file(name, "config.json")
    if path is None:
        return None, reason
    try:
        spec = model_from_config(
            parse_config(Path(path).read_bytes(), f"config.json of {name}"), name, source=f"hub:{name}"
        )
    except OSError as error:
        raise FileFormatError(f"cannot read {plain(path)}: {error.strerror or error}") from error
    return spec.replace(weights_bytes=_hub_weights_bytes(name)), ""


def _hub_weights_bytes(name: str) -> int | None:
    """`metadata.total_size` of the safetensors index; None for a single file or where it does not say."""
    path, _ = _hub_file(name, "model.safetensors.index.json")
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            index: Any = json.loads(file.read(64 * 2**20))
        total = index["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return total if isinstance(total, int) and not isinstance(total, bool) and 0 < total < 2**50 else None


# By the name of the hub library's error.
_HUB_REFUSALS = {
    "GatedRepoError": "its owner asks for consent on the hub: accept it there, then set HF_TOKEN or run hf auth login",
    "RepositoryNotFoundError": "the hub has no such public model, and a private one needs HF_TOKEN or hf auth login",
    "RemoteEntryNotFoundError": "the model has no config.json on the hub",
}


def _hub_file(name: str, file: str) -> tuple[str | None, str]:
    """Path of a file of hub repository `name` in the local cache, fetched where the hub answers; and why not."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        return None, "huggingface_hub is not installed"
    try:
        cached = try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return cached, ""
        if not hub_answers():
            return None, "the hub is switched off or cannot be reached"
        return hf_hub_download(name, file, etag_timeout=5), ""
    except Exception as error:
        # The hub library raises a dozen kinds of its own and its network layer's errors; all mean "not there".
        kind = type(error).__name__
        return None, _HUB_REFUSALS.get(kind, f"the hub gave {kind}")


def _unknown(name: str, reason: str) -> UnknownNameError:
    close = nearest(name, model_names()) or nearest(name, [known.rpartition("/")[2] for known in model_names()])
    why = f"; {reason}" if reason else ""
    return UnknownNameError(
        f"there is no model called {plain(name, 120)!r} in the catalogue or on disk{why}",
        needed=_SOURCES, works=close, knob="model",
    )  # fmt: skip
