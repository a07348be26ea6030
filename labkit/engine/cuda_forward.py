"""The decoder's layers with fused kernels: norms with their residual sum, heads' norm with rotation and cache write,
gated activation. Models that need more than that run through `Decoder.forward` on the same attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from labkit_kernels.activations import gelu_and_mul, silu_and_mul
from labkit_kernels.norms import add_rms_norm, rms_norm
from labkit_kernels.rope_write import Rotary

from labkit.engine.cuda_attention import CudaAttention
from labkit.errors import UnsupportedError
from labkit.memory.step_buffers import can_fuse
from labkit.models.decoder import Decoder
from labkit.models.linear import project
from labkit.models.moe import reads_on_host

_GATED = {
    "silu": silu_and_mul, "swish": silu_and_mul, "gelu_pytorch_tanh": gelu_and_mul, "gelu_new": gelu_and_mul,
}  # fmt: skip

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_forward(decoder: Decoder, attention: CudaAttention) -> Forward:
    """token ids and positions, int64 `[T]` → hidden states after the final norm, `[T, hidden_size]`."""
    if can_fuse(decoder.spec):
        return FusedForward(decoder, attention)
    return lambda token_ids, positions: decoder.forward(token_ids, positions, attention)


def why_eager(decoder: Decoder) -> str:
    """Why no graph can hold this model's decode step; "" where one can."""
    reasons = (reads_on_host(layer.moe) for layer in decoder.weights.layers if layer.moe is not None)
    return next((reason for reason in reasons if reason), "")


class FusedForward:
    """`Decoder.forward` in nine launches a layer; the residual is kept in place, in the model's dtype."""

    def __init__(self, decoder: Decoder, attention: CudaAttention) -> None:
        self._decoder = decoder
        self._attention = attention
        self._act = _GATED[decoder.spec.hidden_act]
        self._rotaries = _rotaries(decoder)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rotary tables as the kernels read them."""
        return sum(table.nbytes for table in {id(one.cos_sin): one.cos_sin for one in self._rotaries}.values())

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, hidden_size] behind the last norm, of `token_ids` and `positions` [tokens]."""
        decoder, weights, eps = self._decoder, self._decoder.weights, self._decoder.spec.rms_norm_eps
        residual = decoder.embed(token_ids)
        hidden = rms_norm(residual, weights.layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, layer in enumerate(weights.layers):
            mixed = self._attend(index, hidden, positions)
            hidden = add_rms_norm(mixed, residual, layer.mlp_norm, eps, out=mixed)
            wide = project(hidden, layer.gate_up, layer.gate_up_bias)  # type: ignore[arg-type]
            out = decoder.reduced(project(self._act(wide), layer.down, layer.down_bias))  # type: ignore[arg-type]
            hidden = add_rms_norm(out, residual, next_norms[index], eps, out=out)
        return hidden

    def _attend(self, index: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        decoder, layer = self._decoder, self._decoder.weights.layers[index]
        num_heads, num_kv_heads, head_dim = decoder.heads(index)
        qkv = project(hidden, layer.qkv, layer.qkv_bias).view(-1, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        mixed = self._attention.attend_rotated(index, q, k, v, positions, self._rotaries[index])
        return decoder.reduced(project(mixed.view(-1, num_heads * head_dim), layer.output, layer.output_bias))


def _rotaries(decoder: Decoder) -> tuple[Rotary, ...]:
    """Of each layer: the decoder's own table as cosines, then sines, float32; layers share it where it is the same."""
    tables: dict[int, torch.Tensor] = {}
    rotaries = []
    for index, layer in enumerate(decoder.weights.layers):
        table = decoder.rotary_table(index)
        if table is None:
            raise UnsupportedError("a layer without rotary embedding has no fused kernel", works="Decoder.forward")
        if id(table) not in tables:
            half = table.rotary_dim // 2
            tables[id(table)] = torch.cat((table.cos[:, :half], table.sin[:, half:]), dim=-1).float().contiguous()
        norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if layer.head_norm is not None:
            norms = (layer.head_norm[0], layer.head_norm[decoder.heads(index)[0]])
        rotaries.append(Rotary(tables[id(table)], False, *norms, decoder.spec.rms_norm_eps))
    return tuple(rotaries)
