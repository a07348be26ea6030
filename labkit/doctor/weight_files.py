"""Weights against index and configuration, by headers only: no tensor is read, nothing is loaded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import format as shown
from labkit.doctor.check import Check
from labkit.doctor.folder_files import is_lfs_pointer
from labkit.errors import LabkitError
from labkit.models.json_files import read_json_object
from labkit.specs.gguf import read_gguf
from labkit.specs.model_spec import ModelSpec
from labkit.text import plain

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 100 * 2**20
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_PACKED = (".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_scales", ".absmax",
           ".input_scale")  # fmt: skip
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_AGAIN = "hf download <model> --local-dir . --force-download"


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class BrokenShard(Exception):
    """A shard that is not whole: `args` are the evidence and the cause."""


def weight_checks(folder: Path, config: Mapping[str, Any], spec: ModelSpec | None) -> list[Check]:
    """Every check of the folder's weights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and not (folder / INDEX).is_file():
        return [_no_safetensors(folder)]
    index_check, mapping, total = check_index(folder)
    checks = [index_check] if index_check else []
    tensors: dict[str, Tensor] = {}
    broken = False
    own = [path for path in files if not path.name.startswith("consolidated")] or files
    for path in own:
        try:
            tensors |= read_header(path)
        except BrokenShard as error:
            broken = True
            checks.append(Check("shard", "problem", f"{plain(path.name, 120)}: {error.args[0]}", error.args[1], _AGAIN))
    if broken or (index_check and index_check.status == "problem"):
        return checks
    checks.append(Check("weights", "ok", f"{len(tensors)} tensors in {len(own)} whole files"))
    if mapping is not None:
        checks.append(check_index_content(mapping, tensors, total))
    if len(own) < len(files):
        checks.append(Check(
            "duplicate-weights", "warning", "consolidated*.safetensors beside the model's own shards",
            "the same weights twice: only disk and download", "delete consolidated*.safetensors",
        ))  # fmt: skip
    return checks + content_checks(tensors, config, spec)


def content_checks(tensors: Mapping[str, Tensor], config: Mapping[str, Any], spec: ModelSpec | None) -> list[Check]:
    """Names, shapes and types against the configuration."""
    checks = [check_packing(tensors, config), check_dtype(tensors, config)]
    if spec is not None:
        checks += [check_layers(tensors, spec), check_shapes(tensors, spec), check_head(tensors, spec)]
    return checks


def _no_safetensors(folder: Path) -> Check:
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickled:
        return Check(
            "weights", "warning", f"only pickled weights: {plain(pickled[0].name, 100)}",
            "a pickle can run code when it is loaded, and it loads slowly",
            "take the safetensors revision, or convert it in a machine without secrets",
        )  # fmt: skip
    return Check(
        "weights", "problem", "no .safetensors file", "only the configuration was copied or downloaded",
        "hf download <model> --local-dir .",
    )  # fmt: skip


def check_index(folder: Path) -> tuple[Check | None, dict[str, str] | None, int | None]:
    """model.safetensors.index.json: JSON, plain names, files that are there."""
    path = folder / INDEX
    if not path.is_file():
        numbered = sorted(folder.glob("model-*-of-*.safetensors"))
        if not numbered:
            return None, None, None
        return Check(
            "index", "problem", f"{len(numbered)} numbered shards and no {INDEX}", "vLLM and transformers load by it",
            f"hf download <model> {INDEX} --local-dir .",
        ), None, None  # fmt: skip
    if is_lfs_pointer(path):
        return Check("index", "problem", f"{INDEX} is a Git LFS pointer", "cloned without git-lfs", "git lfs pull"), \
            None, None  # fmt: skip
    try:
        values = read_json_object(path, max_bytes=MAX_INDEX_BYTES)
    except LabkitError as error:
        return Check("index", "problem", plain(error, 300), f"{INDEX} is damaged", _AGAIN), None, None
    mapping, metadata = values.get("weight_map"), values.get("metadata")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        return Check("index", "problem", f"{INDEX} has no weight_map", "it is damaged", _AGAIN), None, None
    names = sorted(set(mapping.values()))
    outside = [name for name in names if Path(name).name != name or "\\" in name]
    if outside:
        return Check(
            "index", "problem", f"{INDEX} names {plain(outside[0], 120)}", "it points out of the folder",
            "take the model from its original place",
        ), None, None  # fmt: skip
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        return Check(
            "index", "problem", f"{len(missing)} of {len(names)} shards missing: {plain(missing[0], 120)}",
            "the download did not finish", "hf download <model> --local-dir . fetches only what is missing",
        ), None, None  # fmt: skip
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return None, mapping, size if isinstance(size, int) and not isinstance(size, bool) else None


def check_index_content(mapping: Mapping[str, str], tensors: Mapping[str, Tensor], total: int | None) -> Check:
    """Every tensor of the index is in the shard that it names, and the sizes add up."""
    wrong = [name for name, file in mapping.items() if name not in tensors or tensors[name].file != file]
    if wrong:
        name = wrong[0]
        return Check(
            "index-content", "problem",
            f"{len(wrong)} tensors are not where the index says, such as {plain(name, 100)} in "
            f"{plain(mapping[name], 80)}",
            "index and shards are of different revisions", _AGAIN,
        )  # fmt: skip
    extra = [name for name in tensors if name not in mapping]
    if extra:
        return Check(
            "index-content", "warning", f"{len(extra)} tensors are in no index, such as {plain(extra[0], 100)}",
            "left over from another revision, or a broken conversion: they are not loaded", "delete stale shards",
        )  # fmt: skip
    size = sum(_num_bytes(tensor) for tensor in tensors.values())
    if total is not None and total != size:
        return Check(
            "index-content", "warning", f"the index says {shown.memory(total)}, the shards hold {shown.memory(size)}",
            "index and shards are of different revisions, or the writer counted tied weights", _AGAIN,
        )  # fmt: skip
    return Check("index-content", "ok", f"{len(mapping)} tensors where the index says, {shown.memory(size)}")


def read_header(path: Path) -> dict[str, Tensor]:
    """Name → tensor of one safetensors file.

    Raises:
        BrokenShard: a pointer, a truncated or damaged file.
    """
    if is_lfs_pointer(path):
        raise BrokenShard("is a Git LFS pointer of some hundred bytes", "cloned without git-lfs: git lfs pull")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise BrokenShard(
                    f"the header should have {length} bytes, the file has {size}", "cut or no safetensors"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise BrokenShard(plain(error, 200), "not readable") from error
    except (ValueError, RecursionError) as error:
        raise BrokenShard("the header is no JSON", "damaged, or no safetensors file") from error
    return _tensors(header, path.name, size - 8 - length)


def _tensors(header: Any, file: str, room: int) -> dict[str, Tensor]:
    if not isinstance(header, dict):
        raise BrokenShard("the header is no JSON object", "damaged")
    found, end = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            first, last = entry["data_offsets"]
            tensor = Tensor(file, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
            if not 0 <= first <= last or any(size < 0 for size in tensor.shape):
                raise ValueError
        except (KeyError, TypeError, ValueError) as error:
            raise BrokenShard(f"the entry of {plain(name, 80)} is damaged", "damaged") from error
        if tensor.dtype in _BYTES and last - first != _num_bytes(tensor):
            raise BrokenShard(f"{plain(name, 80)}: shape and bytes disagree", "damaged or badly converted")
        found[name], end = tensor, max(end, last)
    if end != room:
        state = "cut: the download or copy stopped" if end > room else "bytes that no tensor covers: damaged"
        raise BrokenShard(f"tensors take {shown.memory(end)}, the file holds {shown.memory(room)}", state)
    return found


def _num_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * _BYTES.get(tensor.dtype, 1)


def check_packing(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Check:
    """Quantised tensors and quantization_config go together."""
    packed = next((name for name in tensors if name.endswith(_PACKED)), None)
    section = config.get("quantization_config") or config.get("compression_config")
    if packed and not section:
        return Check(
            "packing", "problem", f"tensors such as {plain(packed, 100)} and no quantization_config",
            "the weights are quantised and config.json does not say so", "take config.json of the quantised model",
        )  # fmt: skip
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if method in ("awq", "gptq") and packed is None:
        return Check(
            "packing", "problem", f"quant_method {method} and no .qweight tensor",
            "the weights are not quantised, config.json is of another revision",
            "take the unquantised config.json, or the quantised weights",
        )  # fmt: skip
    return Check("packing", "ok", f"quantised tensors as {method} says" if packed else "no quantised tensors")


def check_dtype(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Check:
    """The type that the configuration states against the one that is stored."""
    section = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    stated = config.get("dtype") or config.get("torch_dtype") or (section or {}).get("torch_dtype")
    kinds: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in _DTYPES:
            kinds[tensor.dtype] = kinds.get(tensor.dtype, 0) + _num_bytes(tensor)
    if not kinds:
        return Check("dtype", "ok", "no 16- or 32-bit tensors to compare")
    stored = _DTYPES[max(kinds, key=lambda kind: kinds[kind])]
    if not isinstance(stated, str):
        return Check(
            "dtype", "warning", f"config.json states no dtype, stored is {stored}",
            "vLLM then takes float32 weights as float16", f"vllm serve … --dtype {stored}",
        )  # fmt: skip
    if stated.removeprefix("torch.") == stored or config.get("quantization_config"):
        return Check("dtype", "ok", f"{stored} is stored, config.json says {plain(stated, 40)}")
    return Check(
        "dtype", "warning", f"{stored} is stored, config.json says {plain(stated, 40)}",
        "weights are converted at load: memory follows config.json, disk and load time the files",
        f"vllm serve … --dtype {plain(stated, 40)} says it plainly",
    )  # fmt: skip


def check_layers(tensors: Mapping[str, Tensor], spec: ModelSpec) -> Check:
    """Every layer of the configuration has weights."""
    seen = {int(found[1]) for name in tensors if (found := re.search(r"(?:layers|h|blocks)\.(\d{1,4})\.", name))}
    missing = [index for index in range(spec.num_layers) if index not in seen]
    if not seen or not missing:
        return Check("layers", "ok", f"{len(seen)} layers have weights")
    return Check(
        "layers", "problem", f"{spec.num_layers} layers stated, none of layer {_ranges(missing)} is stored",
        "a shard is missing from folder and index, or config.json is of a larger model", _AGAIN,
    )  # fmt: skip


def _ranges(numbers: Iterable[int]) -> str:
    found = list(numbers)
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]} ({len(found)} layers)"


def check_shapes(tensors: Mapping[str, Tensor], spec: ModelSpec) -> Check:
    """Embedding, projections and norms against vocabulary, hidden size and heads."""
    layer = next((entry for entry in spec.layers if entry.num_heads), None)
    wanted: dict[str, tuple[int | None, ...]] = {
        "embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "lm_head.weight": (spec.vocab_size, spec.hidden_size),
        "input_layernorm.weight": (spec.hidden_size,),
        "mlp.down_proj.weight": (spec.hidden_size, None),
    }
    uniform = layer and len({(e.num_heads, e.num_kv_heads, e.head_dim) for e in spec.layers}) == 1
    if layer is not None and uniform and not layer.kv_lora_rank:
        wanted["self_attn.k_proj.weight"] = (layer.num_kv_heads * layer.head_dim, spec.hidden_size)
    for name, tensor in tensors.items():
        if "visual" in name or "vision" in name or tensor.dtype not in _DTYPES:
            continue
        for ending, shape in wanted.items():
            if name.endswith(ending) and not _fits(tensor.shape, shape):
                return Check(
                    "shapes", "problem",
                    f"{plain(name, 100)} is {list(tensor.shape)}, config.json means {[s or 'any' for s in shape]}",
                    "config.json and weights are of different models or revisions",
                    "take both from one revision; after adding tokens, set vocab_size to the embedding's rows",
                )  # fmt: skip
    return Check("shapes", "ok", "embedding, norms and projections fit config.json")


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def check_head(tensors: Mapping[str, Tensor], spec: ModelSpec) -> Check:
    """An output matrix where the embedding is not shared."""
    has_head = any(name.endswith(("lm_head.weight", "output.weight", "embed_out.weight")) for name in tensors)
    has_head = has_head or any("lm_head." in name for name in tensors)
    if has_head or spec.tie_word_embeddings or spec.is_embedding or not spec.architecture.endswith("CausalLM"):
        return Check("head", "ok", "output matrix is stored" if has_head else "shares the embedding or needs none")
    return Check(
        "head", "problem", "no lm_head.weight, and tie_word_embeddings is false", "the output matrix is missing",
        'add "tie_word_embeddings": true if the original ties them, else fetch the missing shard',
    )  # fmt: skip


def gguf_checks(path: Path, has_tokenizer: bool) -> list[Check]:
    """A GGUF file: whole, with a vocabulary; vLLM wants a tokenizer beside it."""
    if is_lfs_pointer(path):
        return [Check("gguf", "problem", f"{plain(path.name, 120)} is a Git LFS pointer", "cloned without git-lfs",
                      "git lfs pull")]  # fmt: skip
    try:
        file = read_gguf(path)
    except LabkitError as error:
        return [Check("gguf", "problem", plain(error, 300), "the file is cut or damaged", _AGAIN)]
    checks = [Check("gguf", "ok", f"{len(file.tensors)} tensors, whole")]
    if "tokenizer.ggml.tokens" not in file.metadata and not has_tokenizer:
        checks.append(Check(
            "gguf-tokenizer", "problem", "the file has no vocabulary and no tokenizer.json lies beside it",
            "no text can be encoded", "vllm serve … --tokenizer <hub id of the original model>",
        ))  # fmt: skip
    elif not has_tokenizer:
        checks.append(Check(
            "gguf-tokenizer", "warning", "no tokenizer.json beside the file",
            "vLLM converts the vocabulary of GGUF slowly and not always rightly (Can't load tokenizer)",
            "vllm serve … --tokenizer <hub id of the original model>",
        ))  # fmt: skip
    return checks
