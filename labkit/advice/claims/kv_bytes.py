"""Claims about the bytes of KV cache and weights."""

from __future__ import annotations

from labkit.advice.claims.verdict import Verdict, burst, judged, planned, summed
from labkit.memory.questions import kv_bytes_for
from labkit.specs import load_model

_SMALL, _CARD, _GIB = "Qwen/Qwen2-0.5B", "A10", 2**30


def c07() -> Verdict:
    """fp8 KV."""
    ratios = {}
    for name, card in (("Qwen/Qwen2-7B", "L40S"), ("meta-llama/Llama-3.1-8B-Instruct", "H100 SXM")):
        wide, narrow = (
            planned(name, card, max_model_len=4096),
            planned(name, card, max_model_len=4096, kv_cache_dtype="fp8"),
        )
        ratios[f"bytes of a token, {name}, fp8 over 16 bit"] = narrow.block_bytes / wide.block_bytes
    traffic = burst(128, 600, 200)
    rates = [
        summed("Qwen/Qwen2-7B", "L40S", traffic, max_model_len=4096, kv_cache_dtype=kind).output_tokens_per_s or 0.0
        for kind in ("auto", "fp8")
    ]
    return judged(
        "C07",
        "An fp8 KV cache halves KV memory.",
        "holds" if all(abs(ratio - 0.5) < 0.01 for ratio in ratios.values()) else "depends",
        {**ratios, "throughput, fp8 over 16 bit, Qwen2-7B on L40S": rates[1] / rates[0]},
        "Formats with scales for each token and head take a little more; latent attention has a format of its own. The "
        "pool keeps its size and holds twice the tokens.",
    )


def c08() -> Verdict:
    """AWQ and KV."""
    plain, awq = (planned(_SMALL, _CARD, max_model_len=4096, **knobs) for knobs in ({}, {"quantization": "awq"}))
    return judged(
        "C08",
        "AWQ weights also compress the KV cache: weights 1.04 to 0.32 GB, total 19.2 to 11.5 GB.",
        "wrong" if plain.block_bytes == awq.block_bytes else "holds",
        {
            "bytes of a KV block, 16 bit": plain.block_bytes,
            "bytes of a KV block, AWQ": awq.block_bytes,
            "weights, 16 bit, GiB": plain.breakdown.weights_bytes / _GIB,
            "weights, AWQ, GiB": awq.breakdown.weights_bytes / _GIB,
            "all memory in use, 16 bit, GiB": plain.breakdown.used_bytes / _GIB,
            "all memory in use, AWQ, GiB": awq.breakdown.used_bytes / _GIB,
        },
        "KV keeps the type of --kv-cache-dtype. What the weights free goes to the pool, so that the total stays; the "
        "embedding of a small model stays at 16 bit.",
    )


def c09() -> Verdict:
    """DeepSeek-V2-Lite on two cards."""
    name, card = "deepseek-ai/DeepSeek-V2-Lite", "A100-80GB"
    plain = planned(name, card, tensor_parallel_size=2, max_model_len=8192)
    awq = planned(name, card, tensor_parallel_size=2, max_model_len=8192, quantization="awq")
    weights = [2 * found.breakdown.weights_bytes / 1e9 for found in (plain, awq)]
    used = [2 * found.breakdown.used_bytes / 1e9 for found in (plain, awq)]
    return judged(
        "C09",
        "fp8 KV and AWQ bring a 16B model on 2 A100 from 32 GB to 19 GB.",
        "wrong" if abs(used[1] / used[0] - 1) < 0.02 else "depends",
        {
            "weights on both cards, 16 bit, GB": weights[0],
            "weights on both cards, AWQ, GB": weights[1],
            "memory in use on both cards, 16 bit, GB": used[0],
            "memory in use on both cards, AWQ, GB": used[1],
        },
        "The weights do shrink; the engine then takes the same share of the cards (its utilization) and gives the "
        "rest to the pool. A total of 19 GB needs a smaller utilization or --kv-cache-memory-bytes.",
    )


def c10() -> Verdict:
    """The formula with the hidden size."""
    model = load_model(_SMALL)
    real = kv_bytes_for(planned(_SMALL, _CARD, max_model_len=4096), 64, 4096)
    formula = 64 * 4096 * model.num_layers * model.hidden_size * 2 * 2
    return judged(
        "C10",
        "KV bytes = batch x length x layers x hidden x 2 x 2.",
        "wrong" if formula > 1.05 * real else "holds",
        {
            "formula, 64 requests of 4,096 tokens, GiB": formula / _GIB,
            "real, GiB": real / _GIB,
            "formula over real": formula / real,
        },
        "It holds for models whose every query head has a KV head of its own (heads x head size = hidden). With "
        "grouped queries it is KV heads x head size instead of hidden.",
    )


def c11() -> Verdict:
    """One long request of an embedding model."""
    found = planned("Qwen/Qwen3-Embedding-0.6B", _CARD, max_model_len=32768)
    real = kv_bytes_for(found, 1, 32768)
    return judged(
        "C11",
        "One 32,768-token request of Qwen3-Embedding-0.6B needs 48 GB of KV.",
        "wrong" if real < 24e9 else "holds",
        {"real, GB": real / 1e9, "claimed over real": 48e9 / real},
        "28 layers x 8 KV heads x 128 x 2 x 2 bytes a token. It turns for as many such requests at once as the ratio "
        "says.",
    )


def c12() -> Verdict:
    """max-model-len and memory."""
    long, short = (planned(_SMALL, _CARD, max_model_len=length) for length in (32768, 4096))
    change = 1 - short.breakdown.used_bytes / long.breakdown.used_bytes
    return judged(
        "C12",
        "max-model-len 32768 to 4096 cuts GPU memory by 87 %.",
        "wrong" if abs(change) < 0.05 else "holds",
        {
            "memory in use at 32768, GiB": long.breakdown.used_bytes / _GIB,
            "memory in use at 4096, GiB": short.breakdown.used_bytes / _GIB,
            "KV of one longest request at 32768, GiB": kv_bytes_for(long, 1, 32768) / _GIB,
            "KV of one longest request at 4096, GiB": kv_bytes_for(short, 1, 4096) / _GIB,
        },
        "What shrinks by 87 % is the largest request, not what the engine takes: that is the utilization's share. It "
        "turns where the pool is set to one request, with --kv-cache-memory-bytes or a utilization chosen for it.",
    )


def c20() -> Verdict:
    """A large KV share as a sign."""
    free = planned(_SMALL, _CARD)
    tight = planned(_SMALL, _CARD, max_num_seqs=8, max_model_len=2048)
    shares = [100 * found.breakdown.kv_cache_bytes / found.breakdown.total_bytes for found in (free, tight)]
    return judged(
        "C20",
        "If the KV cache is over 80 % of memory, max-num-seqs or max-model-len is too high.",
        "wrong" if shares[1] >= shares[0] > 80 else "depends",
        {
            "KV share by default, %": shares[0],
            "KV share at 8 requests of 2,048 tokens, %": shares[1],
        },
        "The pool is what weights and peaks leave of the utilization's share, so a small model has a large one. A sign "
        "of too much is a pool that the traffic never fills, whatever its share.",
    )
