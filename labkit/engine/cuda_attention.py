"""`CudaAttention`: the decoder's attention over block tables with labkit's kernels.

Rows of sequences with one new token come first in a step and go through the decode kernel, the others through the
prefill kernel: one long prompt must not slow down those that only decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from labkit_kernels.decode_plan import DecodeWorkspace
from labkit_kernels.heuristics import DecodeConfig, PrefillConfig, num_slots, prefill_config
from labkit_kernels.kv_write import KVTarget, write_kv
from labkit_kernels.ops import cache_kind, capability
from labkit_kernels.paged_decode import paged_decode
from labkit_kernels.paged_prefill import MAX_SPLITS, MIN_TILES_OF_SPLIT, paged_prefill
from labkit_kernels.rope_write import Rotary, rope_and_write
from labkit_kernels.scores import Scores

from labkit.engine.cuda_cache import CudaKVCache, LayerCache
from labkit.models.attention import attention_scale
from labkit.specs.model_spec import LayerSpec, ModelSpec


@dataclass(frozen=True)
class AttentionRows:
    """Who owns which rows of a step; every tensor is on the device. T rows, D + P places for sequences.

    Attributes:
        slot_mapping: int64 [T], block · block_size + offset of each token; negative writes nothing.
        decode_lens: int32 [D], tokens in the cache when the step is done, of sequences with one new token, which own
            the first D rows; 0 for padding.
        decode_tables: int32 [D, blocks].
        prompt_lens, prompt_tables: the same of P other sequences; None without.
        query_starts: int32 [P + 1], first row of each of them, then the row after the last. They may begin before row
            D: rows of unused places are theirs.
    """

    slot_mapping: torch.Tensor
    decode_lens: torch.Tensor
    decode_tables: torch.Tensor
    prompt_lens: torch.Tensor | None = None
    prompt_tables: torch.Tensor | None = None
    query_starts: torch.Tensor | None = None


class CudaAttention:
    """Attention of one engine on a card; see `labkit.models.attention.AttentionBackend`.

    Args:
        spec: the model.
        cache: where keys and values live.
        max_num_seqs, max_model_len: size the decode kernel's plan and scratch.
        tp_size: ranks that share the heads.
    """

    def __init__(
        self, spec: ModelSpec, cache: CudaKVCache, *, max_num_seqs: int, max_model_len: int, tp_size: int = 1
    ) -> None:
        self._cache = cache
        self._targets = tuple(_target(layer) for layer in cache.layers)
        self._scores = tuple(
            _scores(spec, layer, cached) for layer, cached in zip(spec.layers, cache.layers, strict=True)
        )
        self._workspaces: dict[tuple, DecodeWorkspace] = {}
        self._of_layer: list[DecodeWorkspace] = []
        for layer, cached in zip(spec.layers, cache.layers, strict=True):
            key = (layer.num_heads // tp_size, cached.k.shape[2], layer.head_dim, _window(layer))
            if key not in self._workspaces:
                self._workspaces[key] = DecodeWorkspace(
                    max_batch=max_num_seqs, max_seq_len=max_model_len, num_q_heads=key[0], num_kv_heads=key[1],
                    head_dim=key[2], kv_dtype=cached.k.dtype, device=cached.k.device, window=key[3],
                )  # fmt: skip
            self._of_layer.append(self._workspaces[key])
        self._rows: AttentionRows | None = None
        self._prompt_launches: dict[tuple, tuple[PrefillConfig, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of plan and scratch."""
        return sum(workspace.num_bytes for workspace in self._workspaces.values())

    def begin(self, rows: AttentionRows) -> None:
        """Announce a step and plan its split over the card; all on the device, so that it can be captured."""
        self._rows, self._prompt_launches = rows, {}
        if rows.decode_lens.shape[0]:
            for workspace in self._workspaces.values():
                workspace.plan(rows.decode_lens)

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        write_kv(k, v, self._current().slot_mapping, self._targets[layer_index])
        return self.read(layer_index, q)

    def attend_rotated(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        rotary: Rotary,
    ) -> torch.Tensor:
        """`attend` with the heads' norm and rotation and the cache write in one launch; q and k come unrotated."""
        slots = self._current().slot_mapping
        return self.read(layer_index, rope_and_write(q, k, v, positions, slots, rotary, self._targets[layer_index]))

    def _current(self) -> AttentionRows:
        if self._rows is None:
            raise RuntimeError("begin was not called for this step")
        return self._rows

    def read(self, layer_index: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of q `[T, heads, head_dim]` over the cache as it is; nothing is written."""
        rows, cached, scores = self._current(), self._cache.layers[layer_index], self._scores[layer_index]
        count = rows.decode_lens.shape[0]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if count:
            mine = (q, out) if count == q.shape[0] else (q[:count], out[:count])
            paged_decode(
                mine[0], cached.k, cached.v, rows.decode_tables, rows.decode_lens, scores,
                workspace=self._of_layer[layer_index], out=mine[1],
            )  # fmt: skip
        if rows.prompt_tables is not None:
            config, num_splits = self._prompt_launch(q, cached.k, rows.prompt_tables.shape[1])
            paged_prefill(
                q, cached.k, cached.v, rows.prompt_tables, rows.prompt_lens, rows.query_starts, scores,
                max_query_len=q.shape[0], out=out, config=config, num_splits=num_splits,
            )  # fmt: skip
        return out

    def _prompt_launch(self, q: torch.Tensor, k_cache: torch.Tensor, max_blocks: int) -> tuple[PrefillConfig, int]:
        """Settings and splits of a step's prompts, looked up once for all layers of one shape.

        Chosen by all rows, not by the longest prompt: a step of its size has run before anyone waited.
        """
        key = (q.shape, k_cache.shape[2])
        if key not in self._prompt_launches:
            rows_of_head = q.shape[0] * (q.shape[1] // k_cache.shape[2])
            config = prefill_config(capability(q.device), cache_kind(k_cache), q.shape[2], rows_of_head)
            self._prompt_launches[key] = (config, _num_splits(q, k_cache, max_blocks, config))
        return self._prompt_launches[key]


def _num_splits(q: torch.Tensor, k_cache: torch.Tensor, max_blocks: int, config: PrefillConfig) -> int:
    """Shares of the keys with which one prompt over all rows of q about fills the card, from shapes alone.

    A power of two, since each number of splits is a kernel of its own to compile; 1 where the card is half full.
    """
    programs = max(1, q.shape[0] * q.shape[1] // k_cache.shape[2] // config.rows) * k_cache.shape[2]
    wanted = num_slots(q.device, DecodeConfig(ctas_per_sm=1)) / programs
    tiles = max_blocks * k_cache.shape[1] // config.tile
    most = min(wanted * 2**0.5, tiles // MIN_TILES_OF_SPLIT, MAX_SPLITS)
    return 1 << (int(most).bit_length() - 1) if wanted >= 2 and most >= 1 else 1


def _window(layer: LayerSpec) -> int | None:
    return layer.window if layer.kind == "sliding" else None


def _target(cached: LayerCache) -> KVTarget:
    return KVTarget(cached.k, cached.v, k_token_scales=cached.k_scales, v_token_scales=cached.v_scales)


def _scores(spec: ModelSpec, layer: LayerSpec, cached: LayerCache) -> Scores:
    return Scores(
        scale=attention_scale(spec, layer),
        window=_window(layer),
        softcap=spec.attention_softcap or 0.0,
        k_token_scales=cached.k_scales,
        v_token_scales=cached.v_scales,
    )
