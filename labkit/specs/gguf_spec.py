"""`ModelSpec` from the metadata and tensor table of a GGUF file."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from labkit.errors import FileFormatError, UnsupportedError
from labkit.specs.gguf import GgufFile, read_gguf
from labkit.specs.model_spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from labkit.text import plain

# general.architecture → class in config.json, model_type, activation.
_ARCHITECTURES: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "llama": ("LlamaForCausalLM", "llama", "silu"),
        "mistral": ("MistralForCausalLM", "mistral", "silu"),
        "qwen2": ("Qwen2ForCausalLM", "qwen2", "silu"),
        "qwen3": ("Qwen3ForCausalLM", "qwen3", "silu"),
        "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", "silu"),
        "gemma2": ("Gemma2ForCausalLM", "gemma2", "gelu_pytorch_tanh"),
        "gemma3": ("Gemma3ForCausalLM", "gemma3_text", "gelu_pytorch_tanh"),
    }
)
# The 27B models scale scores by hidden/heads; every other Gemma by head_dim. The file does not say (llama.cpp).
_GEMMA_27B_LAYERS: Mapping[str, int] = MappingProxyType({"gemma2": 46, "gemma3": 62})
_GEMMA3_LOCAL_THETA = 10000.0
# Window pattern where the file does not say: every n-th layer sees everything.
_FULL_EVERY: Mapping[str, int] = MappingProxyType({"gemma2": 2, "gemma3": 6})
_MAX_LENGTH = 2**31


def model_from_gguf(source: GgufFile | str | os.PathLike[str]) -> ModelSpec:
    """The spec of a GGUF file or of its checked header.

    Raises:
        FileFormatError: the file is broken, or its metadata are missing, out of range or at odds with its tensors.
        UnsupportedError: an architecture that labkit's decoder does not have.
    """
    file = source if isinstance(source, GgufFile) else read_gguf(source)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{plain(file.path, 200)}: architecture {plain(repr(architecture), 60)} is not one that labkit reads from "
            "GGUF",
            works=", ".join(_ARCHITECTURES),
        )
    return _Reader(file, str(architecture)).spec()


class _Reader:
    """Checked look-ups in the metadata of one file."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self.num_layers = self.whole("block_count", maximum=len(file.tensors))
        self.is_gemma = architecture.startswith("gemma")

    def spec(self) -> ModelSpec:
        file, architecture = self.file, self.architecture
        class_name, model_type, activation = _ARCHITECTURES[architecture]
        hidden_size = self.whole("embedding_length")
        layers = self.layers(hidden_size)
        first = layers[0]
        scale = None
        if self.is_gemma and self.num_layers == _GEMMA_27B_LAYERS[architecture]:
            scale = (hidden_size // first.num_heads) ** -0.5
        return ModelSpec(
            name=plain(file.metadata.get("general.name") or file.path.stem, 200),
            architecture=class_name,
            model_type=model_type,
            layers=layers,
            hidden_size=hidden_size,
            intermediate_size=self.whole("feed_forward_length"),
            vocab_size=self.vocab_size(hidden_size),
            max_position_embeddings=self.whole("context_length"),
            dtype="bfloat16",
            tie_word_embeddings="output.weight" not in file.tensors,
            rope=self.rope(first.head_dim),
            rope_local=RopeSpec(theta=_GEMMA3_LOCAL_THETA) if architecture == "gemma3" else None,
            rms_norm_eps=self.positive("attention.layer_norm_rms_epsilon", 1e-6),
            hidden_act=activation,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            attention_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_down.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            norms_per_layer=4 if self.is_gemma else 2,
            sandwich_norms=self.is_gemma,
            norm_offset=self.is_gemma,
            scale_embeddings=self.is_gemma,
            attention_softcap=self.softcap("attn_logit_softcapping", 50.0),
            final_softcap=self.softcap("final_logit_softcapping", 30.0),
            attention_scale=scale,
            moe=self.moe(),
            num_parameters=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
            bos_token_id=self.token("bos_token_id"),
            eos_token_ids=self.eos_token_ids(),
            source=str(file.path),
            notes=self.notes(),
        )

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def error(self, name: str, value: Any, allowed: str) -> FileFormatError:
        key = f"{self.architecture}.{name}"
        path = plain(self.file.path, 200)
        return FileFormatError(f"{path}: {key} is {plain(repr(value), 80)}, allowed is {allowed}")

    def whole(self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_LENGTH) -> int:
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.error(name, value, f"a whole number from {minimum} to {maximum}")
        return value

    def per_layer(self, name: str, default: int | None = None) -> list[int]:
        """A number of every layer, or an array with one for each."""
        value = self.get(name)
        if not isinstance(value, np.ndarray):
            return [self.whole(name, default)] * self.num_layers
        if value.shape != (self.num_layers,) or value.dtype.kind not in "iu" or not (1 <= value.min() <= value.max()):
            raise self.error(name, value.tolist()[:8], f"{self.num_layers} whole numbers of 1 or more")
        return [int(entry) for entry in value]

    def positive(self, name: str, default: float) -> float:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(name, value, "a number above 0")
        return float(value)

    def softcap(self, name: str, gemma2_default: float) -> float | None:
        if self.get(name) is None and self.architecture != "gemma2":
            return None
        return self.positive(name, gemma2_default)

    def layers(self, hidden_size: int) -> tuple[LayerSpec, ...]:
        heads = self.per_layer("attention.head_count")
        kv_heads = self.per_layer("attention.head_count_kv", heads[0])
        head_dim = self.whole("attention.key_length", hidden_size // heads[0])
        if head_dim % 2:
            raise self.error("attention.key_length", head_dim, "an even number")
        v_head_dim = self.whole("attention.value_length", head_dim)
        for index, (count, kv_count) in enumerate(zip(heads, kv_heads, strict=True)):
            if count % kv_count:
                raise self.error("attention.head_count_kv", kv_count, f"a divisor of layer {index}'s {count} heads")
        windows = self.windows()
        moe = self.moe()
        local_theta = _GEMMA3_LOCAL_THETA if self.architecture == "gemma3" else None
        return tuple(
            LayerSpec(
                kind="full" if window is None else "sliding",
                num_heads=count,
                num_kv_heads=kv_count,
                head_dim=head_dim,
                v_head_dim=None if v_head_dim == head_dim else v_head_dim,
                window=window,
                num_experts=moe.num_experts if moe else 0,
                rope_theta=None if window is None else local_theta,
            )
            for count, kv_count, window in zip(heads, kv_heads, windows, strict=True)
        )

    def windows(self) -> list[int | None]:
        """Window of each layer in tokens, None for full attention."""
        if self.get("attention.sliding_window") is None:
            return [None] * self.num_layers
        window = self.whole("attention.sliding_window", minimum=0)
        if not window:
            return [None] * self.num_layers
        every = _FULL_EVERY.get(self.architecture)
        pattern = self.get("attention.sliding_window_pattern")
        if isinstance(pattern, np.ndarray) and pattern.dtype == bool and len(pattern) == self.num_layers:
            return [window if sliding else None for sliding in pattern]
        if pattern is not None:
            every = self.whole("attention.sliding_window_pattern")
        return [None if every and (index + 1) % every == 0 else window for index in range(self.num_layers)]

    def rope(self, head_dim: int) -> RopeSpec:
        theta = self.positive("rope.freq_base", 10000.0)
        share = self.whole("rope.dimension_count", head_dim, maximum=head_dim) / head_dim
        if "rope_freqs.weight" in self.file.tensors:
            return RopeSpec(theta, "factors", (("factors", self.frequency_factors()),), share)
        kind = self.get("rope.scaling.type")
        if kind in (None, "none"):
            return RopeSpec(theta, partial_rotary_factor=share)
        if kind not in ("linear", "yarn"):
            raise self.error("rope.scaling.type", kind, "none, linear or yarn")
        parameters: list[tuple[str, Any]] = [("factor", self.positive("rope.scaling.factor", 1.0))]
        if kind == "yarn":
            original = self.whole("rope.scaling.original_context_length")
            parameters.append(("original_max_position_embeddings", original))
        return RopeSpec(theta, kind, tuple(parameters), share)

    def frequency_factors(self) -> tuple[float, ...]:
        """Divisors of the rotary frequencies: how GGUF stores Llama 3.1's RoPE."""
        tensor = self.file.tensors["rope_freqs.weight"]
        if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
            raise FileFormatError(
                f"{plain(self.file.path, 200)}: tensor rope_freqs.weight is {tensor.kind} {tensor.shape}, allowed is "
                "F32 with one axis"
            )
        factors = self.file.read("rope_freqs.weight").view("<f4")
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise FileFormatError(f"{plain(self.file.path, 200)}: rope_freqs.weight has values that are not above 0")
        return tuple(float(factor) for factor in factors)

    def moe(self) -> MoeSpec | None:
        if not self.get("expert_count"):
            return None
        num_experts = self.whole("expert_count", maximum=65536)
        return MoeSpec(
            num_experts=num_experts,
            num_experts_per_tok=self.whole("expert_used_count", maximum=num_experts),
            intermediate_size=self.whole("expert_feed_forward_length", self.whole("feed_forward_length")),
        )

    def vocab_size(self, hidden_size: int) -> int:
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
            found = "missing" if embedding is None else f"of shape {embedding.shape}"
            path = plain(self.file.path, 200)
            raise FileFormatError(
                f"{path}: tensor token_embd.weight is {found}, allowed is (vocabulary, {hidden_size})"
            )
        return embedding.shape[0]

    def token(self, name: str) -> int | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}")
        return value if type(value) is int else None

    def eos_token_ids(self) -> tuple[int, ...]:
        found = [self.token(name) for name in ("eos_token_id", "eot_token_id")]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def notes(self) -> tuple[str, ...]:
        kinds = Counter(tensor.kind for tensor in self.file.tensors.values())
        stored = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        return (f"Weights are stored as {stored}; labkit decodes them to its own dtype when it loads them.",)
