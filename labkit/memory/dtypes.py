"""Bytes of element types, and of the KV formats that vLLM knows by name."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import UnsupportedError
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import ModelSpec

ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8": 1,
    "int8": 1,
}


@dataclass(frozen=True)
class KvFormat:
    """Bytes that one head keeps of one token.

    Attributes:
        name: resolved name, never "auto".
        bits: bits of one stored element of K and V.
        scale_bytes: bytes beside each head's K row and V row together (per-token-head scales).
        block_scale: elements that share one extra scale byte (nvfp4), 0 for none.
        latent_bytes: bytes of one MLA token where the format fixes them (fp8_ds_mla), else 0.
    """

    name: str
    bits: int
    v_bits: int
    scale_bytes: int = 0
    block_scale: int = 0
    latent_bytes: int = 0

    def head_bytes(self, head_dim: int, v_head_dim: int) -> int:
        """Bytes of one token of one KV head, K and V together."""
        content = (head_dim * self.bits + v_head_dim * self.v_bits) // 8 + self.scale_bytes
        return content + ((head_dim + v_head_dim) // self.block_scale if self.block_scale else 0)

    def mla_bytes(self, width: int) -> int:
        """Bytes of one token of one MLA layer of `width` = kv_lora_rank + qk_rope_head_dim elements."""
        return self.latent_bytes or self.head_bytes(width, 0)


# Content of 8 heads of 128 as vLLM 0.33's `v1/core/kv_cache_planning.py` prints it.
KV_FORMATS = {
    "float32": KvFormat("float32", 32, 32),
    "float16": KvFormat("float16", 16, 16),
    "bfloat16": KvFormat("bfloat16", 16, 16),
    "fp8": KvFormat("fp8", 8, 8),
    "fp8_e4m3": KvFormat("fp8_e4m3", 8, 8),
    "fp8_e5m2": KvFormat("fp8_e5m2", 8, 8),
    "fp8_inc": KvFormat("fp8_inc", 8, 8),
    "fp8_ds_mla": KvFormat("fp8_ds_mla", 8, 8, latent_bytes=656),
    "nvfp4_ds_mla": KvFormat("nvfp4_ds_mla", 4, 4, latent_bytes=352),
    "int8_per_token_head": KvFormat("int8_per_token_head", 8, 8, scale_bytes=8),
    "fp8_per_token_head": KvFormat("fp8_per_token_head", 8, 8, scale_bytes=8),
    "int4_per_token_head": KvFormat("int4_per_token_head", 4, 4, scale_bytes=8),
    "nvfp4": KvFormat("nvfp4", 4, 4, block_scale=16),
    "nvfp4_4over6": KvFormat("nvfp4_4over6", 4, 4, block_scale=16),
    "turboquant_k8v4": KvFormat("turboquant_k8v4", 8, 4, scale_bytes=4),
    "turboquant_4bit_nc": KvFormat("turboquant_4bit_nc", 4, 4, scale_bytes=6),
    "turboquant_k3v4_nc": KvFormat("turboquant_k3v4_nc", 3, 4, scale_bytes=6),
    "turboquant_3bit_nc": KvFormat("turboquant_3bit_nc", 3, 3, scale_bytes=6),
}


def compute_dtype(model: ModelSpec, config: EngineConfig) -> str:
    """The type of activations: the configured one, else the model's (float32 models run in 16 bit, as in vLLM)."""
    if config.dtype != "auto":
        return config.dtype
    return "float16" if model.dtype == "float32" else model.dtype


def stored_kv_dtype(model: ModelSpec, config: EngineConfig) -> str:
    """The KV format that vLLM really takes: models with a sparse-attention indexer have one fp8 format of their own."""
    is_sparse = any(layer.index_head_dim for layer in model.layers)
    is_default = config.kv_cache_dtype == "auto" or config.kv_cache_dtype.startswith("fp8")
    return "fp8_ds_mla" if is_sparse and is_default else config.kv_cache_dtype


def kv_format(kv_cache_dtype: str, dtype: str) -> KvFormat:
    """The format behind a `--kv-cache-dtype` name; "auto" is the compute type `dtype`.

    Raises:
        UnsupportedError: vLLM has the name but how many bytes it takes is not known here.
    """
    name = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    if name not in KV_FORMATS:
        raise UnsupportedError(
            f"how many bytes the KV format {name} takes is not known",
            works="fp8 or another format with known bytes",
            knob="kv_cache_dtype",
        )
    return KV_FORMATS[name]
