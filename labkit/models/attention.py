"""The attention interface of the decoder, and a dense causal backend for tests and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from labkit.errors import OutOfRangeError
from labkit.specs.model_spec import LayerSpec, ModelSpec


class AttentionBackend(Protocol):
    """Mixes the tokens of one step; built for a spec, so scale, window and softcap are its own matter."""

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention output `[T, num_heads, v_head_dim]`, contiguous.

        Args:
            layer_index: index into `spec.layers`.
            q: `[T, num_heads, head_dim]`, rotated, not scaled; rows may be strided.
            k: `[T, num_kv_heads, head_dim]`, rotated; rows may be strided.
            v: `[T, num_kv_heads, v_head_dim]`; rows may be strided.
        """
        ...


def attention_scale(spec: ModelSpec, layer: LayerSpec) -> float:
    """Multiplier of Q·K in `layer`."""
    return layer.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale


class DenseAttention:
    """Causal attention over whole sequences that keeps all keys and values; exact, simple, not paged.

    Args:
        spec: the model.
        lengths: new tokens of each sequence in the first step; the flat tokens are in this order.
    """

    def __init__(self, spec: ModelSpec, lengths: Sequence[int]) -> None:
        self._spec = spec
        self._caches: list[list[tuple[torch.Tensor, torch.Tensor] | None]] = [
            [None] * len(lengths) for _ in spec.layers
        ]
        self._lengths: tuple[int, ...] = ()
        self.begin(lengths)

    def begin(self, lengths: Sequence[int]) -> None:
        """Announce the new tokens of each sequence in the next step (0 for none).

        Raises:
            OutOfRangeError: another number of sequences than at the start, or a negative length.
        """
        if (self._caches and len(lengths) != len(self._caches[0])) or any(length < 0 for length in lengths):
            raise OutOfRangeError(
                f"lengths {list(lengths)[:8]} do not fit the sequences of this backend",
                needed="0 or more new tokens for each sequence that it began with",
            )
        self._lengths = tuple(lengths)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        outputs = []
        parts = (tensor.split(self._lengths) for tensor in (q, k, v))
        for sequence, (queries, keys, values) in enumerate(zip(*parts, strict=True)):
            cached = self._caches[layer_index][sequence]
            if cached is not None:
                keys, values = torch.cat((cached[0], keys)), torch.cat((cached[1], values))
            self._caches[layer_index][sequence] = (keys, values)
            outputs.append(self._one(layer_index, queries, keys, values))
        return torch.cat(outputs)

    def _one(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One sequence: its last `len(q)` queries over all of `k` and `v`."""
        layer = self._spec.layers[layer_index]
        rows = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device).unsqueeze(1)
        columns = torch.arange(k.shape[0], device=q.device).unsqueeze(0)
        visible = columns <= rows if layer.kind != "encoder" else torch.ones_like(columns <= rows)
        if layer.kind == "sliding" and layer.window is not None:
            visible &= columns > rows - layer.window
        if layer.kind == "chunked" and layer.window is not None:
            visible &= columns // layer.window == rows // layer.window
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        scale, softcap = attention_scale(self._spec, layer), self._spec.attention_softcap
        if softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
            return out[0].transpose(0, 1).contiguous()
        group = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
        scores = softcap * torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / softcap))
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1).to(v.dtype)
        return (weights @ v)[0].transpose(0, 1).contiguous()
