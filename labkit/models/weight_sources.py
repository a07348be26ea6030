"""Where weights come from: safetensors folders, GGUF files and a seeded generator, under Hugging Face's names.

A source says the shape of a tensor from a checked header, and fills memory that the caller allocated after comparing
that shape with the spec: nothing is allocated because a file says so.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Set
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from labkit.errors import FileFormatError
from labkit.models.gguf_weights import check_decodable, dequantize, read_gguf_tensor
from labkit.models.json_files import read_json_object
from labkit.specs.gguf import GgufFile
from labkit.specs.model_spec import ModelSpec
from labkit.text import plain

_MAX_INDEX_BYTES = 64 * 2**20
_MAX_SAFETENSORS_HEADER = 16 * 2**20
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Words of eight 4-bit numbers.
_PACKED = (".qweight", ".qzeros")
_ZEROS_OF_8 = 0x88888888 - 2**32
# Root mean square of -8 to 7.
_SPREAD_OF_NIBBLES = math.sqrt(21.5)


class WeightSource(Protocol):
    """Named tensors, read one at a time."""

    def names(self) -> Set[str]:
        """Names of all tensors, as Hugging Face's classes have them."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of tensor `name`, None when there is none."""
        ...

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Write tensor `name` into `out` (its shape, contiguous, CPU unless the source says otherwise)."""
        ...

    def fill_part(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...], out: torch.Tensor) -> None:
        """Write the slices `cut` of tensor `name`, which is of `shape`, into `out`."""
        ...


def _fill_from_whole(
    source: WeightSource, name: str, shape: tuple[int, ...], cut: tuple[slice, ...], out: torch.Tensor
) -> None:
    whole = torch.empty(shape, dtype=out.dtype, device=out.device)
    source.fill(name, whole)
    out.copy_(whole[cut])


class SafetensorsSource:
    """A folder with `model.safetensors`, or `model.safetensors.index.json` and the files that it names.

    Raises:
        FileFormatError: no such folder or file, a broken header, or an index that names anything but files in the
            folder itself (symbolic links there are followed: the hub's cache is made of them).
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._files: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file_name in self._file_names():
            self._read_header(file_name)

    def names(self) -> Set[str]:
        """See `WeightSource.names`."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `WeightSource.shape`."""
        return self._shapes.get(name)

    def fill(self, name: str, out: torch.Tensor) -> None:
        """See `WeightSource.fill`."""
        self._read(name, (), out)

    def fill_part(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...], out: torch.Tensor) -> None:
        """See `WeightSource.fill_part`; the rest of the tensor is not read."""
        self._read(name, cut, out)

    def _read(self, name: str, cut: tuple[slice, ...], out: torch.Tensor) -> None:
        path = self._folder / self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_slice(name)[cut] if cut else file.get_tensor(name)
            if tensor.shape != out.shape:
                raise FileFormatError(f"{plain(path, 200)} changed while it was read")
            out.copy_(tensor)
        except (SafetensorError, OSError) as error:
            raise FileFormatError(
                f"cannot read tensor {plain(name, 80)!r} of {plain(path, 200)}: {plain(error)}"
            ) from error

    def _file_names(self) -> list[str]:
        single, index = self._folder / "model.safetensors", self._folder / "model.safetensors.index.json"
        if index.is_file():
            return self._indexed_names(index)
        if single.is_file():
            return [single.name]
        raise FileFormatError(
            f"{plain(self._folder, 200)} has neither model.safetensors nor model.safetensors.index.json",
            works="a folder with safetensors weights, or a .gguf file; pickled .bin weights are never loaded",
        )

    def _indexed_names(self, index: Path) -> list[str]:
        weight_map = read_json_object(index, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise FileFormatError(f"{plain(index, 200)} has no weight_map")
        names = dict.fromkeys(weight_map.values())
        for name in names:
            if not _is_plain_file_name(name):
                raise FileFormatError(
                    f"{plain(index, 200)} names {plain(repr(name), 120)}, allowed are .safetensors files in that folder"
                )
            if not (self._folder / name).is_file():
                raise FileFormatError(f"{plain(index, 200)} names {plain(name, 120)!r}, which is not there")
        return sorted(names)

    def _read_header(self, file_name: str) -> None:
        path = self._folder / file_name
        try:
            with open(path, "rb") as raw:
                length = int.from_bytes(raw.read(8), "little")
            if length > _MAX_SAFETENSORS_HEADER:
                raise FileFormatError(
                    f"{plain(path, 200)}: the header is {length} bytes, allowed are {_MAX_SAFETENSORS_HEADER}"
                )
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    self._add(name, part.get_dtype(), tuple(part.get_shape()), file_name)
        except (SafetensorError, OSError) as error:
            raise FileFormatError(f"cannot read {plain(path, 200)}: {plain(error)}") from error

    def _add(self, name: str, kind: str, shape: tuple[int, ...], file_name: str) -> None:
        shown = f"tensor {plain(name, 80)!r} of {plain(self._folder / file_name, 200)}"
        if name in self._shapes:
            raise FileFormatError(f"{shown} is in {plain(self._files[name], 120)} too")
        allowed = {"I32"} if name.endswith(_PACKED) else _FLOATS
        if kind not in allowed:
            raise FileFormatError(f"{shown} has type {kind}, allowed are {', '.join(sorted(allowed))}")
        self._shapes[name], self._files[name] = shape, file_name


def _is_plain_file_name(name: object) -> bool:
    if not isinstance(name, str) or not name.endswith(".safetensors") or "\0" in name or len(name) > 255:
        return False
    return PurePosixPath(name).name == name and PureWindowsPath(name).name == name


_GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
        "input_layernorm": "attn_norm",
    }
)
_GGUF_MLP_NORM: Mapping[bool, Mapping[str, str]] = MappingProxyType(
    {
        False: MappingProxyType({"post_attention_layernorm": "ffn_norm"}),
        True: MappingProxyType(
            {
                "post_attention_layernorm": "post_attention_norm",
                "pre_feedforward_layernorm": "ffn_norm",
                "post_feedforward_layernorm": "post_ffw_norm",
            }
        ),
    }
)
_GGUF_TOP: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)


class GgufSource:
    """A GGUF file under Hugging Face's names; undoes what llama.cpp's converter did to the values.

    Rows of Q and K of `llama` files are put back in order, and 1 is taken off Gemma's norm weights again.
    """

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self._file = file
        self._spec = spec
        self._is_permuted = file.metadata.get("general.architecture") == "llama"
        layer_names = {**_GGUF_NAMES, **_GGUF_MLP_NORM[spec.sandwich_norms]}
        back = {stored: name for name, stored in layer_names.items()}
        self._stored: dict[str, str] = {}
        for stored in file.tensors:
            if stored == "rope_freqs.weight":
                continue
            self._stored[_hugging_face_name(stored, back)] = stored

    def names(self) -> Set[str]:
        """See `WeightSource.names`."""
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `WeightSource.shape`."""
        stored = self._stored.get(name)
        return None if stored is None else self._file.tensors[stored].shape

    def fill(self, name: str, out: torch.Tensor) -> None:
        """See `WeightSource.fill`."""
        stored = self._stored[name]
        is_query, is_key = ".attn_q." in stored, ".attn_k." in stored
        if self._is_permuted and (is_query or is_key):
            layer = self._spec.layers[int(stored.split(".")[1])]
            self._fill_permuted(stored, layer.num_heads if is_query else layer.num_kv_heads, out)
            return
        if self._spec.norm_offset and stored.endswith("norm.weight"):
            weights = torch.empty(out.shape)
            read_gguf_tensor(self._file, stored, weights)
            out.copy_(weights.sub_(1))
            return
        read_gguf_tensor(self._file, stored, out)

    def fill_part(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...], out: torch.Tensor) -> None:
        """See `WeightSource.fill_part`."""
        _fill_from_whole(self, name, shape, cut, out)

    def _fill_permuted(self, stored: str, num_heads: int, out: torch.Tensor) -> None:
        """Rows (2 i, 2 i + 1) of a head are its i-th rotated pair in the file, and i and i + head_dim / 2 here."""
        tensor = self._file.tensors[stored]
        check_decodable(tensor)
        num_rows = tensor.shape[0]
        data = torch.from_numpy(self._file.read(stored)).view(num_heads, num_rows // num_heads // 2, 2, -1)
        dequantize(data.transpose(1, 2).contiguous().view(-1), tensor.kind, out.view(-1))


def _hugging_face_name(stored: str, back: Mapping[str, str]) -> str:
    """The name in Hugging Face's classes; the stored name itself where there is none, so that it is reported."""
    match = re.fullmatch(r"blk\.(\d{1,6})\.([a-z0-9_]+)\.(weight|bias)", stored)
    if match and match[2] in back:
        return f"model.layers.{int(match[1])}.{back[match[2]]}.{match[3]}"
    base, _, suffix = stored.rpartition(".")
    return f"{_GGUF_TOP[base]}.{suffix}" if base in _GGUF_TOP else stored


class DummySource:
    """Random weights of whatever shape is asked for: N(0, 1 / in) for matrices, 0.02 for embeddings, neutral norms.

    The values depend on seed, name and device type only.
    """

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        self._neutral = 0.0 if spec.norm_offset else 1.0
        self._seed = seed
        self._hidden_size, self._group_size = spec.hidden_size, spec.weight_format.group_size

    def names(self) -> Set[str]:
        """No names of its own: it has any tensor."""
        return frozenset()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None: the caller's shape is right."""
        return None

    def fill(self, name: str, out: torch.Tensor) -> None:
        """See `WeightSource.fill`; `out` may be on any device."""
        if name.endswith("norm.weight"):
            out.fill_(self._neutral)
            return
        if name.endswith(".bias"):
            out.zero_()
            return
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest[:7], "little"))
        if name.endswith((*_PACKED, ".scales")):
            self._fill_awq(name, out, generator)
            return
        scale = 0.02 if name.endswith("embed_tokens.weight") else 1 / math.sqrt(out.shape[-1])
        out.normal_(0.0, scale, generator=generator)

    def fill_part(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...], out: torch.Tensor) -> None:
        """See `WeightSource.fill_part`; the values are those of the whole tensor."""
        _fill_from_whole(self, name, shape, cut, out)

    def _fill_awq(self, name: str, out: torch.Tensor, generator: torch.Generator) -> None:
        """Evenly spread 4-bit numbers around the zero point 8, as wide as the 16-bit weights would be."""
        if name.endswith(".qweight"):
            out.random_(-(2**31), 2**31, generator=generator)
        elif name.endswith(".qzeros"):
            out.fill_(_ZEROS_OF_8)
        else:
            inputs = out.shape[0] * self._group_size if self._group_size else self._hidden_size
            out.fill_(1 / (_SPREAD_OF_NIBBLES * math.sqrt(inputs)))
