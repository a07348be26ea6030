"""`labkit bench engine`: output tokens per second against transformers, same weights, one thread, in one run.

Measured in CPU time of the process, because other work on the machine then matters little; rounds of all contenders
alternate, and the best round of each counts. Every contender generates exactly the tokens that were asked for
(no end token), greedily; only those count, not what a padded batch computes beside them.
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from labkit.engine.engine import Engine
from labkit.engine.sampling_params import EngineRequest, SamplingParams
from labkit.errors import LabkitError
from labkit.files import write_atomic
from labkit.memory import plan as make_plan
from labkit.models.decoder import Decoder
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec

# One request: prompt tokens and the number of output tokens.
Job = tuple[list[int], int]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Ratio that must hold, and the one aimed at.
AT_LEAST = {"batch_32_vs_generate": (1.5, 2.0), "batch_1_vs_generate": (1.0, 1.2)}


class ContenderError(LabkitError):
    """Another engine does not run on this machine; the benchmark goes on without it."""


def mixed_jobs(count: int, vocab_size: int, *, seed: int = 0, longest: tuple[int, int] = (128, 64)) -> list[Job]:
    """Requests with prompts of 8 to `longest[0]` and outputs of 8 to `longest[1]` tokens, lengths log-uniform."""
    rng = random.Random(seed)

    def length(maximum: int) -> int:
        return round(8 * (maximum / 8) ** rng.random())

    return [
        ([rng.randrange(10, vocab_size) for _ in range(length(longest[0]))], length(longest[1])) for _ in range(count)
    ]


def transformers_twin(decoder: Decoder) -> Any:
    """transformers' LlamaForCausalLM over the same weights, sharing their memory where the layout allows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec, layer = decoder.spec, decoder.spec.layers[0]
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=layer.num_heads,
        num_key_value_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(_named_weights(decoder), assign=True, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _named_weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    weights = decoder.weights
    named = {
        "model.embed_tokens.weight": weights.embedding,
        "lm_head.weight": _dense(weights.head),
        "model.norm.weight": weights.final_norm,
    }
    for index, (spec, layer) in enumerate(zip(decoder.spec.layers, weights.layers, strict=True)):
        prefix = f"model.layers.{index}."
        rows = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        for name, part in zip("qkv", _dense(layer.qkv).split(rows), strict=True):
            named[f"{prefix}self_attn.{name}_proj.weight"] = part
        for name, part in zip(("gate", "up"), _dense(layer.gate_up).chunk(2), strict=True):
            named[f"{prefix}mlp.{name}_proj.weight"] = part
        named[f"{prefix}mlp.down_proj.weight"] = _dense(layer.down)
        named[f"{prefix}self_attn.o_proj.weight"] = _dense(layer.output)
        named[f"{prefix}input_layernorm.weight"] = layer.attention_norm
        named[f"{prefix}post_attention_layernorm.weight"] = layer.mlp_norm
    return named


def _dense(weight: Any) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.to_dense()


def run_engine(decoder: Decoder, jobs: list[Job]) -> list[list[int]]:
    """Outputs of labkit's engine with its default knobs, all requests at once."""
    config = EngineConfig(
        max_model_len=256, max_num_seqs=len(jobs), max_num_batched_tokens=512, dtype="float32", cpu_memory_gib=4.0,
        num_gpu_blocks_override=16 * len(jobs), enable_prefix_caching=False,
    )  # fmt: skip
    cpu = GpuSpec(name="cpu", total_bytes=4 * 2**30, origin="cpu")
    engine = Engine(decoder, make_plan(decoder.spec, cpu, config, engine="labkit"))
    for request_id, (prompt, count) in enumerate(jobs):
        engine.add_request(EngineRequest(request_id, tuple(prompt), SamplingParams(max_tokens=count, ignore_eos=True)))
    outputs: dict[int, list[int]] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: list(output.token_ids) for output in engine.step().finished}
    engine.close()
    return [outputs[request_id] for request_id in range(len(jobs))]


@torch.inference_mode()
def run_generate(model: Any, jobs: list[Job]) -> list[list[int]]:
    """Outputs of transformers' `generate` on one batch, padded left, as long as the longest output."""
    width = max(len(prompt) for prompt, _ in jobs)
    count = max(count for _, count in jobs)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in jobs])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in jobs])
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0)
    return [row[width : width + wanted].tolist() for row, (_, wanted) in zip(out, jobs, strict=True)]


def run_generate_batch(model: Any, jobs: list[Job]) -> list[list[int]]:
    """Outputs of transformers' own continuous batching, each request with its own length, all at once.

    Raises:
        ContenderError: it does not run on this machine.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    settings = ContinuousBatchingConfig(num_blocks=8 * len(jobs), page_size=32, max_batch_tokens=512)
    longest = max(count for _, count in jobs)
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs: dict[str, list[int]] = {}
    try:
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings, warmup=False, timeout=60
        ) as manager:
            names = [manager.add_request(prompt, max_new_tokens=count) for prompt, count in jobs]
            while len(outputs) < len(jobs) and manager.is_running():
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    outputs[result.request_id] = list(result.generated_tokens)
    except Exception as error:
        raise ContenderError(f"transformers' continuous batching does not run here: {error}") from error
    if [len(outputs.get(name, ())) for name in names] != [count for _, count in jobs]:
        raise ContenderError("transformers' continuous batching returned fewer requests or tokens than asked for")
    return [outputs[name] for name in names]


def run_bench(
    decoder: Decoder,
    *,
    rounds: int = 3,
    made: str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure all contenders on 32 mixed requests and on one, and compare their tokens.

    Args:
        decoder: a Llama model in float32.
        rounds: of each contender; the fastest counts.
        made: ISO time for the record, now by default.

    Returns:
        The content of `results/engine-cpu.json`.
    """
    torch.set_num_threads(1)
    model = transformers_twin(decoder)
    contenders: dict[str, Callable[[list[Job]], list[list[int]]]] = {
        "labkit": lambda jobs: run_engine(decoder, jobs),
        "generate": lambda jobs: run_generate(model, jobs),
        "generate_batch": lambda jobs: run_generate_batch(model, jobs),
    }
    rows: list[dict[str, Any]] = []
    for size in (1, 32):
        jobs = mixed_jobs(size, decoder.spec.vocab_size) if size > 1 else [(list(range(10, 74)), 64)]
        rows += _race(contenders, jobs, rounds, on_progress)
    return {
        "made": made or datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"labkit bench engine --rounds {rounds}",
        "card": "cpu",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": 1,
            "load_average_at_end": [round(load, 1) for load in os.getloadavg()],
        },
        "versions": {name: _version(name) for name in ("torch", "transformers", "numpy", "labkit")},
        "model": decoder.spec.name,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "measure": "output tokens per second of CPU time of the process; best round; rounds alternate",
        "rows": rows,
        "summary": _summary(rows),
    }


def _race(
    contenders: dict[str, Callable[[list[Job]], list[list[int]]]],
    jobs: list[Job],
    rounds: int,
    on_progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    outputs: dict[str, list[list[int]]] = {}
    errors: dict[str, str] = {}
    for number in range(rounds):
        for name, run in contenders.items():
            if name in errors:
                continue
            on_progress(f"{len(jobs)} requests, round {number + 1} of {rounds}: {name}")
            start = time.process_time()
            try:
                outputs[name] = run(jobs)
            except ContenderError as error:
                errors[name] = str(error)
                continue
            times[name].append(time.process_time() - start)
    num_tokens = sum(count for _, count in jobs)
    return [
        {
            "contender": name,
            "num_requests": len(jobs),
            "input_tokens": sum(len(prompt) for prompt, _ in jobs),
            "output_tokens": num_tokens,
            "cpu_s": [round(value, 3) for value in times[name]],
            "output_tokens_per_cpu_s": round(num_tokens / min(times[name]), 2) if times[name] else None,
            "same_tokens_as_labkit": outputs.get(name) == outputs.get("labkit") if name in outputs else None,
            "error": errors.get(name, ""),
        }
        for name in contenders
    ]


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rates = {(row["num_requests"], row["contender"]): row["output_tokens_per_cpu_s"] for row in rows}
    summary = {}
    for size in (32, 1):
        ours = rates[size, "labkit"]
        for other in ("generate", "generate_batch"):
            name = f"batch_{size}_vs_{other}"
            ratio = round(ours / rates[size, other], 3) if rates[size, other] else None
            at_least, aim = AT_LEAST.get(name, (1.0, 1.0))
            if ratio is not None:
                summary[name] = {"value": ratio, "at_least": at_least, "aim": aim, "ok": ratio >= at_least}
    return summary


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def bench_engine(
    path: str | os.PathLike[str] = "results/engine-cpu.json",
    *,
    rounds: int = 3,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The command: SmolLM2-135M-Instruct in float32, results written to `path` and returned.

    Raises:
        FileFormatError: the weights are not there, or `path` cannot be written.
    """
    from labkit.models import load_model_weights
    from labkit.specs import load_model

    decoder = load_model_weights(load_model(MODEL), MODEL, dtype="float32")
    results = run_bench(decoder, rounds=rounds, on_progress=on_progress)
    write_atomic(Path(path), json.dumps(results, indent=1) + "\n")
    return results
