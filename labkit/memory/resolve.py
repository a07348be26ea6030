"""A configuration with every "as the model, the card or the version says" filled in."""

from __future__ import annotations

import contextlib

from labkit.errors import OutOfRangeError, UnsupportedError
from labkit.memory.division import check_division
from labkit.memory.labkit_rules import check_shares
from labkit.memory.rules import VersionRules
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec

GIB = 2**30
# What labkit's engine stores on a CPU; vLLM's other KV formats are refused by name.
LABKIT_KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
LABKIT_CPU_SEQS, LABKIT_CPU_TOKENS = 32, 512
# From here on vLLM bounds a default by what other knobs allow: tokens by requests of max_model_len, requests by the
# stated tokens (`_set_default_max_num_seqs_and_batched_tokens_args` of its engine arguments).
BOUNDED_DEFAULTS_SINCE = (0, 11, 0)


def is_large_card(gpu: GpuSpec) -> bool:
    """The cards to which vLLM gives larger defaults: 70 GiB or more, and no A100."""
    return gpu.total_bytes >= 70 * GIB and "A100" not in gpu.name.upper()


def resolve_config(model: ModelSpec, gpu: GpuSpec, config: EngineConfig, rules: VersionRules | None) -> EngineConfig:
    """`config` without None in max_model_len, max_num_seqs and max_num_batched_tokens.

    Args:
        rules: vLLM's, or None for labkit's engine on a CPU.

    Raises:
        OutOfRangeError: fewer batched tokens than requests, or than a whole prompt without chunked prefill; cards or
            stages that cannot divide the model.
        UnsupportedError: labkit's engine does not store that KV format.
    """
    max_model_len = config.max_model_len or model.max_position_embeddings
    if rules is None:
        check_shares(model, config.tensor_parallel_size)
        seqs, tokens = _labkit_defaults(config)
        _check_kv_dtype(config)
    else:
        check_division(model, config)
        seqs = config.max_num_seqs or _default_seqs(gpu, rules, config.max_num_batched_tokens)
        tokens = config.max_num_batched_tokens or _default_tokens(gpu, rules, config, max_model_len, seqs)
    if not config.enable_chunked_prefill and config.max_num_batched_tokens is None:
        tokens = max(tokens, max_model_len)
    if rules is not None and rules.version >= BOUNDED_DEFAULTS_SINCE and config.max_num_batched_tokens is None:
        tokens = min(tokens, seqs * max_model_len)
        seqs = config.max_num_seqs or min(seqs, tokens)
    _check_tokens(config, max_model_len, seqs, tokens)
    return config.replace(max_model_len=max_model_len, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def open_config(model: ModelSpec, gpu: GpuSpec, resolved: EngineConfig, rules: VersionRules | None) -> EngineConfig:
    """The inverse: `resolved` with None in every knob that `resolve_config` would fill in with the same value."""
    opened = resolved
    for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
        candidate = opened.replace(**{name: None})
        # A default may contradict a value that was asked for: then the knob had to be stated.
        with contextlib.suppress(OutOfRangeError):
            if resolve_config(model, gpu, candidate, rules) == resolved:
                opened = candidate
    return opened


def _labkit_defaults(config: EngineConfig) -> tuple[int, int]:
    seqs = config.max_num_seqs or min(LABKIT_CPU_SEQS, config.max_num_batched_tokens or LABKIT_CPU_SEQS)
    return seqs, config.max_num_batched_tokens or max(LABKIT_CPU_TOKENS, seqs)


def _check_kv_dtype(config: EngineConfig) -> None:
    if config.kv_cache_dtype not in LABKIT_KV_DTYPES:
        raise UnsupportedError(
            f"labkit's engine does not store KV as {config.kv_cache_dtype}",
            works=", ".join(LABKIT_KV_DTYPES),
            knob="kv_cache_dtype",
        )


def _check_tokens(config: EngineConfig, max_model_len: int, seqs: int, tokens: int) -> None:
    if tokens < seqs:
        raise OutOfRangeError(
            "max_num_batched_tokens must not be below max_num_seqs: each running request takes a token a step",
            needed=f"{seqs} tokens",
            available=f"{tokens} tokens",
            works=str(seqs),
            knob="max_num_batched_tokens",
        )
    if not config.enable_chunked_prefill and tokens < max_model_len:
        raise OutOfRangeError(
            "without chunked prefill a whole prompt must fit in one step",
            needed=f"{max_model_len} tokens",
            available=f"{tokens} tokens",
            works=str(max_model_len),
            knob="max_num_batched_tokens",
        )


def _default_seqs(gpu: GpuSpec, rules: VersionRules, max_num_batched_tokens: int | None) -> int:
    """The card's default, at most as many as a stated number of tokens allows."""
    seqs = 1024 if rules.engine == "V1" and is_large_card(gpu) else 256
    is_bounded = rules.version >= BOUNDED_DEFAULTS_SINCE and max_num_batched_tokens is not None
    return min(seqs, max_num_batched_tokens or seqs) if is_bounded else seqs


def _default_tokens(gpu: GpuSpec, rules: VersionRules, config: EngineConfig, max_model_len: int, seqs: int) -> int:
    """Defaults of `vllm serve`; V0 chunked prompts by itself only beyond 32,768 tokens, 512 at a time until vLLM's
    pull request 10544 of November 2024."""
    if rules.engine == "V0":
        if max_model_len > 32768:
            return max(512 if rules.version < (0, 6, 5) else 2048, seqs)
        return max(max_model_len, 2048)
    if gpu.total_bytes >= 160 * GIB and rules.version >= (0, 20, 0):
        return max(16384, seqs)
    return max(8192 if is_large_card(gpu) else 2048, seqs)
