"""What vLLM's logs say about memory, as fixed patterns: every repetition is bounded, none can backtrack far.

Each pattern names a plain piece of text that must be in the line first, so that most lines cost one search.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_N = r"(-?\d{1,9}(?:\.\d{1,6})?)"
_COUNT = r"(\d{1,3}(?:,\d{3}){1,5}|\d{1,15})"
_UNIT = r" ?(GiB|GB|MiB|MB|KiB|KB|B)\b"


@dataclass(frozen=True)
class Pattern:
    """One line of some version.

    Attributes:
        needle: text that the line must contain.
        pattern: its groups are the numbers.
        fields: what each group is: a size field ends in `_bytes` and takes two groups when `units`, else GiB.
        units: each number is followed by a group with its unit.
        since, until: versions that print it, for the docs.
    """

    needle: str
    pattern: re.Pattern[str]
    fields: tuple[str, ...]
    units: bool = False
    since: str = "0.6"
    until: str = ""


def _p(needle: str, pattern: str, *fields: str, units: bool = False, since: str = "0.6", until: str = "") -> Pattern:
    text = pattern.replace("<n>", _N).replace("<c>", _COUNT).replace("<u>", _UNIT)
    return Pattern(needle, re.compile(text), fields, units, since, until)


PATTERNS: tuple[Pattern, ...] = (
    # Parts.
    _p("oading model weights took", r"weights took <n><u>", "weights_bytes", units=True, until="0.9"),
    _p("Model loading took", r"Model loading took <n><u>", "weights_bytes", units=True, since="0.8"),
    _p("model weights take", r"weights take <n>GiB", "weights_bytes", until="0.8"),
    _p("non_torch_memory takes", r"non_torch_memory takes <n>GiB", "non_torch_bytes", until="0.8"),
    _p("activation peak memory takes", r"peak memory takes <n>GiB", "activation_bytes", until="0.8"),
    _p("memory reserved for KV Cache is", r"reserved for KV Cache is <n>GiB", "available_kv_bytes", until="0.8"),
    _p("can use total_gpu_memory", r"total_gpu_memory \(<n>GiB\) x gpu_memory_utilization \(<n>\) = <n>GiB",
       "total_bytes", "gpu_memory_utilization", "requested_bytes", until="0.8"),
    _p("total_gpu_memory=", r"total_gpu_memory=<n>GiB", "total_bytes", until="0.6.4"),
    _p("initial_memory_usage=", r"initial_memory_usage=<n>GiB", "outside_bytes", until="0.6.4"),
    _p("peak_torch_memory=", r"peak_torch_memory=<n>GiB", "peak_torch_bytes", until="0.6.4"),
    _p("non_torch_memory=", r"non_torch_memory=<n>GiB", "non_torch_bytes", until="0.6.4"),
    _p("kv_cache_size=", r"kv_cache_size=<n>GiB", "available_kv_bytes", until="0.6.4"),
    _p("otal non KV cache memory", r"non KV cache memory: <n>GiB", "total_non_kv_bytes", since="0.10"),
    _p("torch peak memory increase", r"torch peak memory increase: <n>GiB", "activation_bytes", since="0.10"),
    _p("forward increase memory", r"non-torch forward increase memory: <n>GiB", "non_torch_bytes", since="0.10"),
    _p("total consumed", r"total consumed \(from mem_get_info\): <n>GiB", "consumed_bytes", since="0.22"),
    _p("weights memory:", r"weights memory: <n>GiB", "weights_bytes", since="0.10"),
    _p("GiB for weight", r"usage is <n> GiB for weight", "weights_bytes", since="0.11"),
    _p("GiB for consumed memory", r"<n> GiB for consumed memory", "consumed_bytes", since="0.22"),
    _p("GiB for peak activation", r"<n> GiB for peak activation", "activation_bytes", since="0.11"),
    _p("GiB for non-torch memory", r"<n> GiB for non-torch memory", "non_torch_bytes", since="0.11"),
    _p("GiB for CUDAGraph memory", r"<n> GiB for CUDAGraph memory", "cuda_graphs_bytes", since="0.11"),
    _p("kv cache memory in use is", r"kv cache memory in use is <n><u>", "pool_bytes", units=True, since="0.11"),
    _p("num_gpu_blocks is", r"num_gpu_blocks is: <c>", "num_gpu_blocks", since="0.9"),
    _p("CUDA graph memory profiling is enabled", r"current --gpu-memory-utilization=<n>", "gpu_memory_utilization",
       since="0.21"),
    _p("Free memory on device", r"Free memory on device[^(]{0,40}\(<n>/<n> GiB\) on startup", "free_bytes",
       "total_bytes", since="0.9"),
    _p("esired GPU memory utilization", r"esired GPU memory utilization (?:is )?\(<n>, <n> GiB\)",
       "gpu_memory_utilization", "requested_bytes", since="0.9"),
    _p("Initial free memory:", r"Initial free memory: <n><u>", "free_bytes", units=True, since="0.15"),
    _p("equested memory:", r"[Rr]equested memory: (?:[\d.]{1,8} \(util\), )?<n><u>", "requested_bytes", units=True,
       since="0.15"),
    _p("Available KV cache memory", r"Available KV cache memory: <n><u>", "available_kv_bytes", units=True,
       since="0.8"),
    _p("GPU KV cache size", r"GPU KV cache size: <c> tokens", "kv_cache_tokens", since="0.8"),
    _p("CPU blocks", r"# (?:GPU|cuda) blocks: <c>, # CPU blocks: <c>", "num_gpu_blocks", "num_swap_blocks",
       until="0.10"),
    _p("aximum concurrency for", r"aximum concurrency for <c> tokens per request: <n>x", "max_model_len",
       "max_concurrency"),
    _p("Graph capturing finished", r"Graph capturing finished in [\d.]{1,9} secs?, took <n><u>", "cuda_graphs_bytes",
       units=True),
    _p("stimated CUDA graph memory", r"stimated CUDA graph memory: <n><u>", "graphs_estimate_bytes", units=True,
       since="0.19"),
    _p("CUDA graph pool memory", r"CUDA graph pool memory: <n> GiB \(actual\), <n> GiB \(estimated\)",
       "cuda_graphs_bytes", "graphs_estimate_bytes", since="0.21"),
    _p("padding layers", r"Add <c> padding layers", "padding_layers", since="0.9"),
    _p("Setting attention block size", r"Setting attention block size to <c> tokens", "attention_block_size",
       since="0.10"),
    _p("Chunked prefill is enabled with", r"max_num_batched_tokens=<c>", "max_num_batched_tokens"),
    # Errors.
    _p("KV cache is needed", r"max seq len \(<c>\), \(?<n> GiB KV cache is needed, which is larger than the "
       r"available KV cache memory \(<n> GiB\)", "max_model_len", "needed_bytes", "available_kv_bytes", since="0.8"),
    _p("stimated maximum model length is", r"stimated maximum model length is <c>", "estimated_length", since="0.9"),
    _p("maximum number of tokens that can be stored", r"max seq len \(<c>\) is larger than the maximum number of "
       r"tokens that can be stored in KV cache \(<c>\)", "max_model_len", "kv_cache_tokens", until="0.10"),
    _p("when warming up sampler with", r"warming up sampler with <c> dummy requests", "max_num_seqs"),
    _p("Tried to allocate", r"Tried to allocate <n><u>", "failed_bytes", units=True),
    _p("has a total capacity of", r"total capacity of <n><u>(?: of which <n><u> is free)?", "total_bytes",
       "free_at_failure_bytes", units=True),
    _p("memory in use", r"this process has <n><u> memory in use", "process_bytes", units=True),
    _p("allocated by PyTorch", r"<n><u> is allocated by PyTorch", "torch_bytes", units=True),
    _p("available Mamba cache blocks", r"max_num_seqs \(<c>\) exceeds available Mamba cache blocks \(<c>\)",
       "max_num_seqs", "state_blocks_available"),
)  # fmt: skip

# Sentences without numbers, and the cause that each names.
ERROR_TEXTS: tuple[tuple[str, str], ...] = (
    ("No available memory for the cache blocks", "no_kv_memory"),
    ("KV cache is needed, which is larger", "length_does_not_fit"),
    ("larger than the maximum number of tokens that can be stored", "length_does_not_fit"),
    ("is less than desired GPU memory utilization", "card_not_free"),
    ("when warming up sampler with", "sampler_out_of_memory"),
    ("CUDA out of memory", "out_of_memory"),
    ("OutOfMemoryError", "out_of_memory"),
    ("exceeds available Mamba cache blocks", "too_few_state_blocks"),
    ("Error in memory profiling", "memory_moved"),
    ("unrecognized arguments", "unknown_flag"),
    ("is only supported on GPUs with compute capability", "dtype_unsupported"),
)

VERSIONS: tuple[re.Pattern[str], ...] = (
    re.compile(r"LLM engine \(v(\d{1,3}\.\d{1,3}(?:\.\d{1,4})?)"),
    re.compile(r"vLLM(?: API server)? version v?(\d{1,3}\.\d{1,3}(?:\.\d{1,4})?)"),
    re.compile(r"\bvllm[=:-]{1,2}v?(\d{1,3}\.\d{1,3}\.\d{1,4})"),
)
RANK = re.compile(r"\((?:Worker|VllmWorker|VllmWorkerProcess|EngineCore|RayWorkerWrapper)[A-Za-z_]{0,16}([^)]{0,48})\)")
RANK_PART = re.compile(r"(TP|PP|DP|rank=|rank )_?(\d{1,4})")
SIZES = {
    "B": 1, "KB": 2**10, "KiB": 2**10, "MB": 2**20, "MiB": 2**20, "GB": 2**30, "GiB": 2**30,
}  # fmt: skip
