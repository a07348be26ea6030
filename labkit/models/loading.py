"""`load_model_weights`: from a spec and a source of weights to a `Decoder`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from labkit.errors import FileFormatError, OutOfRangeError
from labkit.memory.labkit_rules import check_shares
from labkit.memory.tensors import vocabulary_rows
from labkit.models.awq_loading import AwqPart, AwqReader
from labkit.models.decoder import Decoder, DecoderWeights, LayerWeights
from labkit.models.hub import find_model_files
from labkit.models.linear import Weight, pack
from labkit.models.moe import MoeWeights, stacked
from labkit.models.quantization import engine_format
from labkit.models.quantized import AwqMatrix, quantize_fp8
from labkit.models.ranks import ONE_RANK, Ranks
from labkit.models.read_tally import OnRead, ReadTally, bytes_to_read, nothing
from labkit.models.supported import check_supported
from labkit.models.weight_sources import DummySource, GgufSource, SafetensorsSource, WeightSource
from labkit.specs.gguf import read_gguf
from labkit.specs.model_spec import LayerSpec, ModelSpec, WeightFormat
from labkit.text import nearest, plain

DTYPES = MappingProxyType({"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16})
# Prefixes under which the same decoder is stored: alone, as an embedding model, inside a multimodal model.
_PREFIXES = ("", "model.", "language_model.", "model.language_model.")
# Name, rows of the whole, rows of this rank.
_Part = tuple[str, int, slice]
# Tensors that files carry beside the decoder and that labkit's network does not need.
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|(model\.)?(vision_tower|visual|multi_modal_projector|vision_model)\..*")


def load_model_weights(
    spec: ModelSpec,
    source: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
    ranks: Ranks = ONE_RANK,
    pack_weights: bool = True,
    quantization: str | None = None,
    dequantize: bool | None = None,
    on_read: OnRead = nothing,
) -> Decoder:
    """A decoder with weights.

    Args:
        spec: the model.
        source: folder with safetensors, .gguf file or hub id; None for where the spec came from, which for one from
            the catalogue is the hub id.
        dtype: "float32", "float16", "bfloat16", or "auto" for the spec's.
        load_format: "auto" reads the weights, "dummy" makes random ones from `seed`.
        device: of the weights.
        ranks: the processes that share each layer; Q heads, MLP columns and vocabulary are divided, KV heads too, or
            repeated where there are fewer than ranks. Each process reads its own part.
        pack_weights: on the CPU, keep matrices in the order that makes products fast (`labkit.models.linear`).
        quantization: vLLM's word for the weight format; "fp8" quantises 16-bit weights while they are loaded.
        dequantize: keep the rounded values in `dtype` instead of the smaller format; None does so on a CPU, where
            no product of these formats is faster.
        on_read: called after each tensor with the bytes that are read by now, and all; what it raises ends the loading.

    Raises:
        FileFormatError: no such source, or a tensor is missing, unexpected or of another shape; it is named.
        UnsupportedError: the decoder or the reader lacks something that the model has.
        OutOfRangeError: heads or widths that the ranks do not divide, or a dtype or `quantization` that the model's
            files do not have.
    """
    check_supported(spec)
    _check_parallel(spec, ranks.rank, ranks.size)
    fmt = engine_format(spec, quantization, load_format)
    target = torch.device(device)
    storage = _Storage(fmt, pack_weights, target.type == "cpu" if dequantize is None else dequantize)
    opened = _open(spec.replace(weight_format=fmt), source, load_format, seed)
    compute = _torch_dtype(spec, dtype)
    tally = ReadTally(bytes_to_read(spec, fmt, str(compute).removeprefix("torch."), ranks.size), on_read)
    loader = _Loader(spec, opened, compute, target, storage, tally)
    weights = loader.weights(ranks.rank, ranks.size)
    loader.check_all_used()
    return Decoder(spec, weights, ranks=ranks)


def _open(spec: ModelSpec, source: str | os.PathLike[str] | None, load_format: str, seed: int) -> WeightSource:
    if load_format == "dummy":
        return DummySource(spec, seed)
    if load_format != "auto":
        raise OutOfRangeError(f"load_format is {plain(load_format, 60)!r}", works="auto or dummy", knob="load_format")
    if source is None:
        source = spec.name if spec.source in ("", "catalogue") else spec.source
    path = find_model_files(source)
    if path.is_dir():
        return SafetensorsSource(path)
    if path.suffix == ".safetensors":
        return SafetensorsSource(path.parent)
    if path.name == "config.json":
        return SafetensorsSource(path.parent)
    return GgufSource(read_gguf(path), spec)


def _torch_dtype(spec: ModelSpec, dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        if dtype in DTYPES.values():
            return dtype
        dtype = str(dtype)
    name = spec.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise OutOfRangeError(f"dtype is {plain(name, 60)!r}", works=", ".join(DTYPES), knob="dtype")
    return DTYPES[name]


def _check_parallel(spec: ModelSpec, rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise OutOfRangeError(f"rank {rank} of {size} ranks", knob="tensor_parallel_size")
    check_shares(spec, size)


@dataclass(frozen=True)
class _Storage:
    """How matrices are kept: in which format, in the CPU's order, or with the format undone."""

    fmt: WeightFormat
    packs: bool
    dequantizes: bool

    def finish(self, weight: torch.Tensor, part: str) -> Weight:
        """`weight` as it is kept; `part` as in `WeightFormat.unquantized`."""
        if self.fmt.kind == "fp8" and part not in self.fmt.unquantized:
            quantized = quantize_fp8(weight, per_channel=self.fmt.group_size == 0)
            if not self.dequantizes:
                return quantized
            weight = quantized.dequantize(weight.dtype)
        return pack(weight) if self.packs and part != "experts" else weight

    def finish_awq(self, matrix: AwqMatrix, part: str, dtype: torch.dtype) -> Weight:
        """The same for a matrix that was stored in 4 bits."""
        return self.finish(matrix.dequantize(dtype), part) if self.dequantizes else matrix


class _Loader:
    """Reads the tensors of one spec from one source and remembers which were used."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        storage: _Storage,
        tally: ReadTally,
    ) -> None:
        self.spec = spec
        self.storage = storage
        self.dtype = dtype
        self.awq = AwqReader(self._whole, storage.fmt.group_size, device)
        self._source, self._tally = source, tally
        self._device = device
        self._used: set[str] = set()
        self._is_dummy = isinstance(source, DummySource)
        self._prefix = self._find_prefix()

    def _find_prefix(self) -> str:
        """What stands before "model." in the stored names; "-" for names without "model."."""
        for prefix in _PREFIXES:
            if self._source.shape(f"{prefix}embed_tokens.weight") is not None:
                return prefix
            if self._source.shape(f"{prefix}model.embed_tokens.weight") is not None:
                return f"{prefix}model."
        return "model."

    def weights(self, rank: int, size: int) -> DecoderWeights:
        spec = self.spec
        embedding = self._vocabulary("embed_tokens.weight", rank, size)
        layers = tuple(
            _LayerLoader(self, layer, index, rank, size).weights() for index, layer in enumerate(spec.layers)
        )
        head: Weight = embedding
        if not spec.tie_word_embeddings and not spec.is_embedding:
            head = self.storage.finish(self._vocabulary(self._head_name(), rank, size), "lm_head")
        return DecoderWeights(embedding, layers, self.norm("norm.weight", (spec.hidden_size,)), head)

    def _vocabulary(self, name: str, rank: int, size: int) -> torch.Tensor:
        """A matrix with a row for each token; the rank's rows of several, the last ones padded with zeros."""
        shape = (self.spec.vocab_size, self.spec.hidden_size)
        if size == 1:
            return self.one(name, shape)
        rows = vocabulary_rows(shape[0], size)
        first, last = (min(start * rows, shape[0]) for start in (rank, rank + 1))
        part = self.stack([(name, shape)], [(slice(first, last),)])
        return F.pad(part, (0, 0, 0, rows - part.shape[0]))

    def _head_name(self) -> str:
        outer = self._prefix.removesuffix("model.")
        return "lm_head.weight" if self._source.shape(f"{outer}lm_head.weight") is None else f"{outer}lm_head.weight"

    def has(self, name: str) -> bool:
        """The source stores `name`; a generator has no names of its own."""
        return self._source.shape(self._full(name)) is not None

    def is_awq(self, name: str, part: str) -> bool:
        """The matrix `name` is stored in 4 bits; files may leave out modules one by one."""
        if self.storage.fmt.kind != "awq":
            return False
        return part not in self.storage.fmt.unquantized if self._is_dummy else self.has(f"{name}.qweight")

    def one(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.stack([(name, shape)])

    def norm(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Norm weights; as float32 `1 + weight` where the family adds the 1 (Gemma computes it in float32)."""
        weight = self.one(name, shape)
        return weight.float().add_(1) if self.spec.norm_offset else weight

    def stack(self, parts: Sequence[tuple[str, tuple[int, ...]]], axis_slices: Sequence[tuple] = ()) -> torch.Tensor:
        """The tensors `parts` (name, expected shape) one after the other along the first axis.

        `axis_slices` gives for each part the slices of this rank; without it the parts are whole.
        """
        for name, shape in parts:
            self._check(name, shape)
        if axis_slices:
            pieces = [self._part(name, shape, cut) for (name, shape), cut in zip(parts, axis_slices, strict=True)]
            return torch.cat(pieces).to(self._device)
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *parts[0][1][1:]), dtype=self.dtype, device=self._fill_device())
        start = 0
        for name, shape in parts:
            self._fill(name, out[start : start + shape[0]])
            start += shape[0]
        return out.to(self._device)

    def check_all_used(self) -> None:
        """Refuse tensors that the network has no place for: they would be silently left out."""
        unused = [name for name in self._source.names() - self._used if not _IGNORED.fullmatch(name)]
        if self.spec.tie_word_embeddings or self.spec.is_embedding:
            unused = [name for name in unused if not name.endswith("lm_head.weight")]
        if unused:
            shown = ", ".join(plain(repr(name), 80) for name in sorted(unused)[:4])
            raise FileFormatError(
                f"the weights hold {len(unused)} tensors that {plain(self.spec.name, 80)} has no place for: {shown}"
            )

    def _filled(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self._fill_device())
        self._fill(name, out)
        return out

    def _fill(self, name: str, out: torch.Tensor) -> None:
        self._source.fill(self._full(name), out)
        self._tally.add(out)

    def _part(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...]) -> torch.Tensor:
        """The slices `cut` of a tensor, of which only those are read where the source can."""
        sizes = [len(range(*one.indices(size))) for one, size in zip(cut, shape, strict=False)]
        out = torch.empty((*sizes, *shape[len(cut) :]), dtype=self.dtype, device=self._fill_device())
        if out.numel():
            self._source.fill_part(self._full(name), shape, cut, out)
            self._tally.add(out)
        return out

    def _whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._check(name, shape)
        return self._filled(name, shape, dtype)

    def _fill_device(self) -> torch.device:
        return self._device if self._is_dummy else torch.device("cpu")

    def _full(self, name: str) -> str:
        return name if name.endswith("lm_head.weight") else self._prefix + name

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        full = self._full(name)
        self._used.add(full)
        if self._is_dummy:
            return
        found = self._source.shape(full)
        if found is None:
            close = nearest(full, self._source.names() - self._used)
            raise FileFormatError(f"tensor {full!r} is missing from the weights", works=close and plain(close, 80))
        if found != shape:
            raise FileFormatError(f"tensor {full!r} has shape {found}, {plain(self.spec.name, 80)} needs {shape}")


class _LayerLoader:
    """Reads one layer for one rank of `size`."""

    def __init__(self, loader: _Loader, layer: LayerSpec, index: int, rank: int, size: int) -> None:
        self._loader = loader
        self._spec = loader.spec
        self._layer = layer
        self._prefix = f"layers.{index}."
        self._rank = rank
        self._size = size
        self._q_rows = layer.num_heads * layer.head_dim
        self._k_rows = layer.num_kv_heads * layer.head_dim
        self._v_rows = layer.num_kv_heads * (layer.v_head_dim or layer.head_dim)

    def weights(self) -> LayerWeights:
        spec, hidden = self._spec, self._spec.hidden_size
        sandwich = spec.sandwich_norms
        mlp = self._moe() if self._layer.num_experts else self._dense_mlp()
        output_rows = self._layer.num_heads * (self._layer.v_head_dim or self._layer.head_dim)
        return LayerWeights(
            qkv=self._fused("self_attn.", "qkv_proj", self._qkv_parts(), hidden, "attention"),
            qkv_bias=self._rows("self_attn.", "qkv_proj", self._qkv_parts(), "bias", ()) if spec.qkv_bias else None,
            output=self._columns("self_attn.o_proj", (hidden, output_rows), "attention"),
            output_bias=self._summed_bias("self_attn.o_proj.bias") if spec.attention_bias else None,
            head_norm=self._head_norm() if spec.qk_norm else None,
            attention_norm=self._norm("input_layernorm.weight"),
            mlp_norm=self._norm("pre_feedforward_layernorm.weight" if sandwich else "post_attention_layernorm.weight"),
            after_attention_norm=self._norm("post_attention_layernorm.weight") if sandwich else None,
            after_mlp_norm=self._norm("post_feedforward_layernorm.weight") if sandwich else None,
            **mlp,
        )

    def _norm(self, name: str) -> torch.Tensor:
        return self._loader.norm(self._prefix + name, (self._spec.hidden_size,))

    def _qkv_parts(self) -> list[_Part]:
        kv_ranks = min(self._size, self._layer.num_kv_heads)
        kv_rank = self._rank * kv_ranks // self._size
        return [
            ("q_proj", self._q_rows, _share(self._q_rows, self._rank, self._size)),
            ("k_proj", self._k_rows, _share(self._k_rows, kv_rank, kv_ranks)),
            ("v_proj", self._v_rows, _share(self._v_rows, kv_rank, kv_ranks)),
        ]

    def _fused(self, room: str, fused: str, parts: Sequence[_Part], inputs: int, part: str) -> Weight:
        """This rank's rows of several matrices as one, in the engine's weight format."""
        loader, prefix = self._loader, self._prefix + room
        if loader.is_awq(prefix + fused, part) and not loader.is_awq(prefix + parts[0][0], part):
            starts = list(accumulate([count for _, count, _ in parts], initial=0))
            cuts = [slice(start + cut.start, start + cut.stop) for start, (*_, cut) in zip(starts, parts, strict=False)]
            stored = [AwqPart(prefix + fused, starts[-1], inputs, cut) for cut in cuts]
        elif loader.is_awq(prefix + parts[0][0], part):
            stored = [AwqPart(prefix + name, count, inputs, cut) for name, count, cut in parts]
        else:
            return loader.storage.finish(self._rows(room, fused, parts, "weight", (inputs,)), part)
        return loader.storage.finish_awq(loader.awq.rows(stored), part, loader.dtype)

    def _rows(self, room: str, fused: str, parts: Sequence[_Part], kind: str, rest: tuple[int, ...]) -> torch.Tensor:
        """This rank's rows of several matrices, one after the other; stored each alone or all in one (Phi-3)."""
        loader, prefix = self._loader, self._prefix + room
        if not loader.has(f"{prefix}{fused}.{kind}"):
            named = [(f"{prefix}{name}.{kind}", (count, *rest)) for name, count, _ in parts]
            return loader.stack(named, [(cut,) for *_, cut in parts] if self._size > 1 else [])
        whole = (f"{prefix}{fused}.{kind}", (sum(count for _, count, _ in parts), *rest))
        if self._size == 1:
            return loader.stack([whole])
        starts = accumulate([count for _, count, _ in parts], initial=0)
        cuts = [(slice(start + cut.start, start + cut.stop),) for start, (*_, cut) in zip(starts, parts, strict=False)]
        return loader.stack([whole] * len(parts), cuts)

    def _columns(self, name: str, shape: tuple[int, int], part: str) -> Weight:
        """A matrix whose input is divided over the ranks, in the engine's weight format."""
        loader, cut = self._loader, _share(shape[1], self._rank, self._size)
        if loader.is_awq(self._prefix + name, part):
            matrix = loader.awq.columns(AwqPart(self._prefix + name, *shape, cut))
            return loader.storage.finish_awq(matrix, part, loader.dtype)
        stored = (f"{self._prefix}{name}.weight", shape)
        weight = loader.one(*stored) if self._size == 1 else loader.stack([stored], [(slice(None), cut)])
        return loader.storage.finish(weight, part)

    def _summed_bias(self, name: str) -> torch.Tensor:
        """A bias behind an all-reduce: the first rank adds it, the others add zero."""
        bias = self._loader.one(self._prefix + name, (self._spec.hidden_size,))
        return bias if self._rank == 0 else torch.zeros_like(bias)

    def _head_norm(self) -> torch.Tensor:
        head_dim, layer = self._layer.head_dim, self._layer
        weights = [self._loader.norm(f"{self._prefix}self_attn.{name}_norm.weight", (head_dim,)) for name in ("q", "k")]
        counts = (layer.num_heads // self._size, max(1, layer.num_kv_heads // self._size))
        return torch.cat([weight.expand(count, -1) for weight, count in zip(weights, counts, strict=True)])

    def _dense_mlp(self) -> dict[str, Any]:
        width = self._layer.intermediate_size or self._spec.intermediate_size
        hidden, has_bias = self._spec.hidden_size, self._spec.mlp_bias
        names = ("gate_proj", "up_proj") if self._spec.gated_mlp else ("up_proj",)
        parts = [(name, width, _share(width, self._rank, self._size)) for name in names]
        return {
            "gate_up": self._fused("mlp.", "gate_up_proj", parts, hidden, "mlp"),
            "gate_up_bias": self._rows("mlp.", "gate_up_proj", parts, "bias", ()) if has_bias else None,
            "down": self._columns("mlp.down_proj", (hidden, width), "mlp"),
            "down_bias": self._summed_bias("mlp.down_proj.bias") if has_bias else None,
        }

    def _moe(self) -> dict[str, Any]:
        moe, hidden = self._spec.moe, self._spec.hidden_size
        if moe is None:
            raise FileFormatError(f"{plain(self._spec.name, 80)} has experts in a layer and does not describe them")
        gate_up, down = [], []
        cut = _share(moe.intermediate_size, self._rank, self._size)
        parts = [(name, moe.intermediate_size, cut) for name in ("gate_proj", "up_proj")]
        for index in range(moe.num_experts):
            room = f"mlp.experts.{index}."
            gate_up.append(self._fused(room, "gate_up_proj", parts, hidden, "experts"))
            down.append(self._columns(f"{room}down_proj", (hidden, moe.intermediate_size), "experts"))
        router = self._loader.one(f"{self._prefix}mlp.gate.weight", (moe.num_experts, hidden))
        return {"moe": MoeWeights(router, stacked(gate_up), stacked(down), moe.num_experts_per_tok)}


def _share(length: int, rank: int, size: int) -> slice:
    return slice(rank * length // size, (rank + 1) * length // size)
