"""The decoder network of every family that `ModelSpec` can describe and labkit runs: Llama to Gemma 3, dense."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit.errors import UnsupportedError
from labkit.models.attention import AttentionBackend
from labkit.models.linear import Weight, project, project_few
from labkit.models.moe import MoeWeights, route_tokens
from labkit.models.ranks import ONE_RANK, Ranks
from labkit.models.rope import RotaryTable
from labkit.models.supported import check_supported
from labkit.specs.model_spec import ModelSpec, RopeSpec

# Longest rotary table made before `reserve_positions` asks for more.
_FIRST_POSITIONS = 8192


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; matrices as `F.linear` takes them, `[out, in]`, or of that shape and stored otherwise.

    Attributes:
        qkv: Q, K and V rows of this rank, in this order; `qkv_bias` beside it.
        gate_up: gate rows, then up rows (only up rows without a gate); None in a MoE layer.
        head_norm: norm weights of Q and K heads, `[num_heads + num_kv_heads, head_dim]`.
        attention_norm, mlp_norm: before attention and MLP.
        after_attention_norm, after_mlp_norm: after them, in models with sandwich norms.
    """

    qkv: Weight
    output: Weight
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: Weight | None = None
    down: Weight | None = None
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    head_norm: torch.Tensor | None = None
    after_attention_norm: torch.Tensor | None = None
    after_mlp_norm: torch.Tensor | None = None
    moe: MoeWeights | None = None

    def tensors(self) -> Iterator[Weight]:
        """Every tensor of the layer."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, MoeWeights):
                yield from value.tensors()
            elif value is not None:
                yield value


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of one rank. `head` is the same tensor as `embedding` where they are tied.

    Both are whole where one rank has the model, else the rank's share of `labkit.memory.tensors.vocabulary_rows` rows.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Weight

    def tensors(self) -> Iterator[Weight]:
        """Every tensor once."""
        yield self.embedding
        if self.head is not self.embedding:
            yield self.head
        yield self.final_norm
        for layer in self.layers:
            yield from layer.tensors()


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    """What `forward` needs to know of a layer, worked out once."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    table: RotaryTable | None


class Decoder:
    """A decoder in evaluation mode on flat tokens; attention is the caller's.

    Args:
        spec: the model. Its head counts are of the whole model, also under tensor parallelism.
        weights: of this rank.
        ranks: the processes that share each layer, of which this is one.

    Raises:
        UnsupportedError: the spec has something that this network lacks; the message says what.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        *,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        check_supported(spec)
        self.spec = spec
        self.weights = weights
        self.ranks = ranks
        self.tp_size = ranks.size
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._activation = activation(spec.hidden_act)
        scale = torch.tensor(spec.hidden_size**0.5 if spec.scale_embeddings else 1.0, dtype=self.dtype)
        self.embedding_scale = float(scale)
        self._plans: tuple[_LayerPlan, ...] = ()
        self._tables: tuple[RotaryTable, ...] = ()
        self.max_positions = 0
        self.reserve_positions(_first_positions(spec))

    def reserve_positions(self, max_positions: int) -> None:
        """Make the rotary tables long enough for positions 0 to `max_positions - 1`; longer ones stay as they are."""
        if max_positions <= self.max_positions:
            return
        tables: dict[tuple[RopeSpec, int], RotaryTable] = {}
        plans = []
        for layer in self.spec.layers:
            table = None
            if layer.uses_rope:
                key = (_layer_rope(self.spec, layer.kind == "sliding", layer.rope_theta), layer.head_dim)
                if key not in tables:
                    tables[key] = RotaryTable(
                        *key, max_positions, self.spec.max_position_embeddings, self.dtype, self.device
                    )
                table = tables[key]
            kv_heads = max(1, layer.num_kv_heads // self.tp_size)
            heads = layer.num_heads // self.tp_size
            plans.append(_LayerPlan(heads, kv_heads, layer.head_dim, layer.v_head_dim or layer.head_dim, table))
        self._plans, self._tables, self.max_positions = tuple(plans), tuple(tables.values()), max_positions

    def rotary_table(self, layer_index: int) -> RotaryTable | None:
        """The table that rotates Q and K of a layer; None where it has no rotary embedding."""
        return self._plans[layer_index].table

    def heads(self, layer_index: int) -> tuple[int, int, int]:
        """Query heads and KV heads of this rank in a layer, and their width."""
        plan = self._plans[layer_index]
        return plan.num_heads, plan.num_kv_heads, plan.head_dim

    def reduced(self, partial: torch.Tensor) -> torch.Tensor:
        """`partial` summed over the ranks that share a layer."""
        return self.ranks.all_reduce(partial)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embedding rows of int64 `[T]`, scaled as the model asks: `[T, hidden_size]`."""
        table = self.weights.embedding
        if self.tp_size == 1:
            rows = F.embedding(token_ids, table)
        else:
            # A token that another rank has gives zeros here, and the sum over the ranks its row.
            own = token_ids - self.ranks.rank * table.shape[0]
            is_here = (own >= 0) & (own < table.shape[0])
            rows = F.embedding(torch.where(is_here, own, 0), table)
            rows = self.reduced(rows.mul_(is_here.unsqueeze(-1)))
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def whole_logits(self, part: torch.Tensor) -> torch.Tensor:
        """`[rows, vocab_size]` from each rank's share of the vocabulary; without the rows that pad it."""
        return self.ranks.all_gather(part, self.spec.vocab_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, tied embeddings once, rotary tables not included."""
        return sum(tensor.nbytes for tensor in self.weights.tensors())

    @property
    def table_bytes(self) -> int:
        """Bytes of the rotary tables."""
        return sum(table.cos.nbytes + table.sin.nbytes for table in self._tables)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Hidden states after the final norm, `[T, hidden_size]`.

        Args:
            token_ids: int64 `[T]`, the tokens of all sequences of the step one after the other.
            positions: int64 `[T]`, below `max_positions`.
            attention: mixes the tokens within their sequences.
        """
        hidden = self.embed(token_ids)
        rows = {id(table): table.rows(positions) for table in self._tables}
        for index, (layer, plan) in enumerate(zip(self.weights.layers, self._plans, strict=True)):
            rotation = rows[id(plan.table)] if plan.table is not None else None
            hidden = self._layer(index, layer, plan, hidden, rotation, attention)
        return self._norm(hidden, self.weights.final_norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of `hidden` (`[rows, hidden_size]`, from `forward`): float32 `[rows, vocab_size]`."""
        logits = self.whole_logits(project_few(hidden, self.weights.head)).float()
        cap = self.spec.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _layer(
        self,
        index: int,
        layer: LayerWeights,
        plan: _LayerPlan,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        mixed = self._attend(index, layer, plan, self._norm(hidden, layer.attention_norm), rotation, attention)
        if layer.after_attention_norm is not None:
            mixed = self._norm(mixed, layer.after_attention_norm)
        hidden = mixed.add_(hidden)
        inner = self._norm(hidden, layer.mlp_norm)
        out = self._mlp(layer, inner) if layer.moe is None else route_tokens(inner, layer.moe, self._activation)
        out = self.reduced(out)
        if layer.after_mlp_norm is not None:
            out = self._norm(out, layer.after_mlp_norm)
        return out.add_(hidden)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        plan: _LayerPlan,
        inner: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        num_tokens, num_heads, num_qk = inner.shape[0], plan.num_heads, plan.num_heads + plan.num_kv_heads
        qkv = project(inner, layer.qkv, layer.qkv_bias)
        qk = qkv[:, : num_qk * plan.head_dim].view(num_tokens, num_qk, plan.head_dim)
        v = qkv[:, num_qk * plan.head_dim :].view(num_tokens, plan.num_kv_heads, plan.v_head_dim)
        if layer.head_norm is not None:
            qk = self._norm(qk, None, layer.head_norm)
        if plan.table is not None and rotation is not None:
            qk = plan.table.rotate(qk, rotation)
        mixed = attention.attend(index, qk[:, :num_heads], qk[:, num_heads:], v)
        out = project(mixed.view(num_tokens, num_heads * plan.v_head_dim), layer.output, layer.output_bias)
        return self.reduced(out)

    def _mlp(self, layer: LayerWeights, inner: torch.Tensor) -> torch.Tensor:
        wide = project(inner, layer.gate_up, layer.gate_up_bias)  # type: ignore[arg-type]
        if self.spec.gated_mlp:
            gate, up = wide.chunk(2, dim=-1)
            wide = self._activation(gate).mul_(up)
        else:
            wide = self._activation(wide)
        return project(wide, layer.down, layer.down_bias)  # type: ignore[arg-type]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None, scale: torch.Tensor | None = None) -> torch.Tensor:
        """RMS norm over the last axis; Gemma's weights are kept as float32 `1 + weight`, so it works in float32."""
        if not self.spec.norm_offset:
            x = F.rms_norm(x, x.shape[-1:], weight, self.spec.rms_norm_eps)
            return x if scale is None else x.mul_(scale)
        normed = F.rms_norm(x.float(), x.shape[-1:], weight, self.spec.rms_norm_eps)
        return (normed if scale is None else normed.mul_(scale)).to(x.dtype)


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that config.json calls `name`.

    Raises:
        UnsupportedError: a function that labkit does not have.
    """
    if name in ("silu", "swish"):
        return F.silu
    if name in ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"):
        return _gelu_tanh
    if name == "gelu":
        return F.gelu
    if name == "relu":
        return F.relu
    raise UnsupportedError(f"activation {name!r} is not in labkit's decoder", works="silu, gelu, gelu_pytorch_tanh")


def _first_positions(spec: ModelSpec) -> int:
    """LongRoPE's short factors hold until more positions than the model was first trained on are planned for."""
    limits = [spec.max_position_embeddings, _FIRST_POSITIONS]
    if spec.rope.kind in ("longrope", "su"):
        original = dict(spec.rope.parameters).get("original_max_position_embeddings")
        limits += [int(original)] if isinstance(original, (int, float)) and original >= 1 else []
    return min(limits)


def _layer_rope(spec: ModelSpec, is_sliding: bool, theta: float | None) -> RopeSpec:
    if is_sliding and spec.rope_local is not None:
        return spec.rope_local
    return spec.rope if theta is None else dataclasses.replace(spec.rope, theta=theta)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")
