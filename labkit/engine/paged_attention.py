"""`PagedAttention`: the decoder's attention over block tables, in plain torch on a CPU.

Per sequence, keys and values are a view of the pool where its blocks are one ascending run, else gathered into
scratch. One new token: the query heads of a KV head are packed as rows of one call without mask. Several: the
context without mask and the chunk causally, merged by their log-sum-exp, which is faster than one explicit mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from labkit.engine.kv_cache import BlockRun, KVCache
from labkit.models.attention import attention_scale
from labkit.specs.model_spec import LayerSpec, ModelSpec

# Queries of one masked call: scores take num_heads · TILE_ROWS · keys · 4 bytes.
TILE_ROWS = 128
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Span(NamedTuple):
    """Rows start … stop-1 of the step belong to one sequence whose cache is `run`."""

    start: int
    stop: int
    run: BlockRun


class PagedAttention:
    """Attention of one engine on a CPU; see `labkit.models.attention.AttentionBackend`."""

    def __init__(self, spec: ModelSpec, cache: KVCache) -> None:
        self._spec = spec
        self._cache = cache
        self._scales = [attention_scale(spec, layer) for layer in spec.layers]
        self._spans: list[Span] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    def begin(self, spans: list[Span], slots: torch.Tensor) -> None:
        """Announce a step: who owns which rows, and where each row's key and value go ([T] int64)."""
        self._spans = spans
        self._slots = slots

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        self._cache.write(layer_index, self._slots, k, v)
        layer = self._spec.layers[layer_index]
        packed = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
        parts = [self._attend_one(layer_index, layer, packed, span) for span in self._spans]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(q.shape[0], q.shape[1], v.shape[2])

    def _attend_one(self, layer_index: int, layer: LayerSpec, packed: torch.Tensor, span: Span) -> torch.Tensor:
        """One sequence: [L, Hkv, group, Dv] from its rows of `packed` [T, Hkv, group, D]."""
        start, stop, run = span
        length, context = stop - start, run.num_tokens - (stop - start)
        first = _first_visible(layer, context)
        keys, values = self._cache.read(layer_index, run, first)
        q, scale = packed.narrow(0, start, length), self._scales[layer_index]
        softcap = self._spec.attention_softcap
        masked = length > 1 and layer.kind != "full" and _window_cuts(layer, context, length)
        if softcap is not None or masked or keys.shape[3] != values.shape[3]:
            return _tiled(layer, q, keys, values, context, first, scale, softcap)
        if length == 1:
            return _flash(q, keys, values, 0.0, False, scale=scale)[0].contiguous()
        return _chunk(q, keys, values, context - first, scale)


def _first_visible(layer: LayerSpec, context: int) -> int:
    """First key that the chunk's first query sees."""
    if layer.window is None or layer.kind not in ("sliding", "chunked"):
        return 0
    if layer.kind == "sliding":
        return max(0, context - layer.window + 1)
    return context // layer.window * layer.window


def _window_cuts(layer: LayerSpec, context: int, length: int) -> bool:
    """Whether some later query of the chunk does not see that first key any more."""
    return _first_visible(layer, context + length - 1) > _first_visible(layer, context)


def _mask(layer: LayerSpec, rows: range, columns: range) -> torch.Tensor:
    """[rows, columns] which keys each query sees, by position."""
    queries = torch.arange(rows.start, rows.stop).unsqueeze(1)
    keys = torch.arange(columns.start, columns.stop).unsqueeze(0)
    visible = keys <= queries
    if layer.window is not None and layer.kind == "sliding":
        visible &= keys > queries - layer.window
    elif layer.window is not None and layer.kind == "chunked":
        visible &= keys // layer.window == queries // layer.window
    return visible


def _tiled(
    layer: LayerSpec,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: int,
    first: int,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention under a mask, `TILE_ROWS` queries at a time, so that its memory does not grow with the chunk.

    `keys` and `values` begin at position `first`; q begins at position `context`.
    """
    out = q.new_empty(*q.shape[:3], values.shape[3])
    for start in range(0, q.shape[0], TILE_ROWS):
        rows = range(context + start, context + min(start + TILE_ROWS, q.shape[0]))
        columns = range(max(first, _first_visible(layer, rows.start)), rows.stop)
        seen = slice(columns.start - first, columns.stop - first)
        tile = slice(start, start + len(rows))
        mask = _mask(layer, rows, columns)
        out[tile] = _explicit(q[tile], keys[:, :, seen], values[:, :, seen], mask, scale, softcap)
    return out


def _explicit(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[L, Hkv, group, Dv] under a mask [L, S], with tanh-capped scores where the model has them."""
    length, num_kv_heads, group, head_dim = q.shape
    if softcap is None:
        k, v = (heads.expand(group, -1, -1, -1) for heads in (keys, values))
        result = F.scaled_dot_product_attention(q.permute(2, 1, 0, 3), k, v, attn_mask=mask, scale=scale)
        return result.permute(2, 1, 0, 3)
    # Rows of one KV head's queries together: keys stay as they are, where expanded ones would be copied.
    rows = q.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores = torch.bmm(rows, keys[0].transpose(1, 2)).float().mul_(scale / softcap).tanh_().mul_(softcap)
    scores.view(num_kv_heads, group, length, -1).masked_fill_(~mask, float("-inf"))
    result = torch.bmm(scores.softmax(dim=-1).to(values.dtype), values[0])
    return result.view(num_kv_heads, group, length, -1).permute(2, 0, 1, 3)


def _chunk(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int, scale: float) -> torch.Tensor:
    """Causal attention of the last L of S tokens, where every query sees the whole context.

    Query heads of one KV head lie in different batches, over which the keys are expanded without a copy.
    """
    grouped = q.permute(2, 1, 0, 3)
    k, v = (heads.expand(q.shape[2], -1, -1, -1) for heads in (keys, values))
    out, lse = _flash(grouped, k[:, :, context:], v[:, :, context:], 0.0, True, scale=scale)
    if context:
        earlier, earlier_lse = _flash(grouped, k[:, :, :context], v[:, :, :context], 0.0, False, scale=scale)
        out.lerp_(earlier, torch.sigmoid(earlier_lse - lse).unsqueeze(-1).to(out.dtype))
        del earlier
    return out.permute(2, 1, 0, 3).contiguous()
