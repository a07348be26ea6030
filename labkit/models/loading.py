"""`load_model_weights`: from a spec and a source of weights to a `Decoder`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch

from labkit.errors import FileFormatError, OutOfRangeError
from labkit.models.decoder import Decoder, DecoderWeights, LayerWeights
from labkit.models.hub import find_model_files
from labkit.models.linear import PackedMatrix, pack
from labkit.models.moe import MoeWeights
from labkit.models.supported import check_supported
from labkit.models.weight_sources import DummySource, GgufSource, SafetensorsSource, WeightSource
from labkit.specs.gguf import read_gguf
from labkit.specs.model_spec import LayerSpec, ModelSpec
from labkit.text import nearest, plain

DTYPES = MappingProxyType({"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16})
# Prefixes under which the same decoder is stored: alone, as an embedding model, inside a multimodal model.
_PREFIXES = ("", "model.", "language_model.", "model.language_model.")
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
    tp_rank: int = 0,
    tp_size: int = 1,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    pack_weights: bool = True,
) -> Decoder:
    """A decoder with weights.

    Args:
        spec: the model.
        source: folder with safetensors, .gguf file or hub id; None for where the spec came from, which for one from
            the catalogue is the hub id.
        dtype: "float32", "float16", "bfloat16", or "auto" for the spec's.
        load_format: "auto" reads the weights, "dummy" makes random ones from `seed`.
        device: of the weights.
        tp_rank, tp_size: this rank of so many that share each layer; Q heads and MLP columns are divided, KV heads
            too, or repeated where there are fewer than ranks.
        all_reduce: sum over the ranks, for `tp_size` above 1.
        pack_weights: on the CPU, keep matrices in the order that makes products fast (`labkit.models.linear`).

    Raises:
        FileFormatError: no such source, or a tensor is missing, unexpected or of another shape; it is named.
        UnsupportedError: the decoder or the reader lacks something that the model has.
        OutOfRangeError: heads or widths that `tp_size` does not divide, or a dtype that does not exist.
    """
    check_supported(spec)
    _check_parallel(spec, tp_rank, tp_size)
    opened = _open(spec, source, load_format, seed)
    loader = _Loader(spec, opened, _torch_dtype(spec, dtype), torch.device(device), pack if pack_weights else _as_is)
    weights = loader.weights(tp_rank, tp_size)
    loader.check_all_used()
    return Decoder(spec, weights, tp_size=tp_size, all_reduce=all_reduce)


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
    for layer in spec.layers:
        kv_fits = layer.num_kv_heads % size == 0 or size % layer.num_kv_heads == 0
        width = layer.intermediate_size or spec.intermediate_size
        if layer.num_experts and spec.moe is not None:
            width = spec.moe.intermediate_size
        if layer.num_heads % size or not kv_fits or width % size:
            raise OutOfRangeError(
                f"{size} ranks do not divide {layer.num_heads} heads, {layer.num_kv_heads} KV heads and an MLP of "
                f"{width}",
                knob="tensor_parallel_size",
            )


class _Loader:
    """Reads the tensors of one spec from one source and remembers which were used."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        finish: Callable[[torch.Tensor], torch.Tensor | PackedMatrix],
    ) -> None:
        self.spec = spec
        self.finish = finish
        self._source = source
        self._dtype = dtype
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
        embedding = self.one("embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
        layers = tuple(
            _LayerLoader(self, layer, index, rank, size).weights() for index, layer in enumerate(spec.layers)
        )
        head: torch.Tensor | PackedMatrix = embedding
        if not spec.tie_word_embeddings and not spec.is_embedding:
            head = self.finish(self.one(self._head_name(), (spec.vocab_size, spec.hidden_size)))
        return DecoderWeights(embedding, layers, self.norm("norm.weight", (spec.hidden_size,)), head)

    def _head_name(self) -> str:
        outer = self._prefix.removesuffix("model.")
        return "lm_head.weight" if self._source.shape(f"{outer}lm_head.weight") is None else f"{outer}lm_head.weight"

    def has(self, name: str) -> bool:
        """The source stores `name`; a generator has no names of its own."""
        return self._source.shape(self._full(name)) is not None

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
            pieces = [self._filled(name, shape)[cut] for (name, shape), cut in zip(parts, axis_slices, strict=True)]
            return torch.cat(pieces).contiguous().to(self._device)
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *parts[0][1][1:]), dtype=self._dtype, device=self._fill_device())
        start = 0
        for name, shape in parts:
            self._source.fill(self._full(name), out[start : start + shape[0]])
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

    def _filled(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        out = torch.empty(shape, dtype=self._dtype, device=self._fill_device())
        self._source.fill(self._full(name), out)
        return out

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
            qkv=self._loader.finish(self._qkv("weight", (hidden,))),
            qkv_bias=self._qkv("bias", ()) if spec.qkv_bias else None,
            output=self._loader.finish(self._columns("self_attn.o_proj.weight", (hidden, output_rows))),
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

    def _qkv(self, kind: str, rest: tuple[int, ...]) -> torch.Tensor:
        kv_ranks = min(self._size, self._layer.num_kv_heads)
        kv_rank = self._rank * kv_ranks // self._size
        parts = [
            ("q_proj", self._q_rows, _share(self._q_rows, self._rank, self._size)),
            ("k_proj", self._k_rows, _share(self._k_rows, kv_rank, kv_ranks)),
            ("v_proj", self._v_rows, _share(self._v_rows, kv_rank, kv_ranks)),
        ]
        return self._rows("self_attn.", "qkv_proj", parts, kind, rest)

    def _rows(
        self, room: str, fused: str, parts: Sequence[tuple[str, int, slice]], kind: str, rest: tuple[int, ...]
    ) -> torch.Tensor:
        """This rank's rows of several matrices, one after the other; stored each alone or all in one (Phi-3).

        `parts` are (name, rows of the whole, rows of this rank).
        """
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

    def _columns(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A matrix whose input is divided over the ranks."""
        if self._size == 1:
            return self._loader.one(self._prefix + name, shape)
        cut = (slice(None), _share(shape[1], self._rank, self._size))
        return self._loader.stack([(self._prefix + name, shape)], [cut])

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
        return {
            "gate_up": self._loader.finish(self._gate_up("weight", width, (hidden,))),
            "gate_up_bias": self._gate_up("bias", width, ()) if has_bias else None,
            "down": self._loader.finish(self._columns("mlp.down_proj.weight", (hidden, width))),
            "down_bias": self._summed_bias("mlp.down_proj.bias") if has_bias else None,
        }

    def _gate_up(self, kind: str, width: int, rest: tuple[int, ...]) -> torch.Tensor:
        names = ("gate_proj", "up_proj") if self._spec.gated_mlp else ("up_proj",)
        cut = _share(width, self._rank, self._size)
        return self._rows("mlp.", "gate_up_proj", [(name, width, cut) for name in names], kind, rest)

    def _moe(self) -> dict[str, Any]:
        moe, hidden = self._spec.moe, self._spec.hidden_size
        if moe is None:
            raise FileFormatError(f"{plain(self._spec.name, 80)} has experts in a layer and does not describe them")
        gate_up, down = [], []
        cut = _share(moe.intermediate_size, self._rank, self._size)
        for index in range(moe.num_experts):
            room = f"mlp.experts.{index}."
            parts = [(name, moe.intermediate_size, cut) for name in ("gate_proj", "up_proj")]
            gate_up.append(self._rows(room, "gate_up_proj", parts, "weight", (hidden,)))
            down.append(self._columns(f"{room}down_proj.weight", (hidden, moe.intermediate_size)))
        router = self._loader.one(f"{self._prefix}mlp.gate.weight", (moe.num_experts, hidden))
        return {"moe": MoeWeights(router, torch.stack(gate_up), torch.stack(down), moe.num_experts_per_tok)}


def _as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _share(length: int, rank: int, size: int) -> slice:
    return slice(rank * length // size, (rank + 1) * length // size)
