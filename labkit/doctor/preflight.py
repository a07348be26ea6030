"""Preflight of a configuration: the guides' daily checklist as checks with values, and where the guide is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from labkit import format as shown
from labkit.advice.cures import cures
from labkit.doctor.accelerator import check_processes, check_temperature
from labkit.doctor.card_test import check_planned_pool
from labkit.doctor.check import Check, Examination
from labkit.doctor.cuda_rules import BF16_CAPABILITY, FP8_CAPABILITY, numbers
from labkit.doctor.machine import AnyMachine
from labkit.doctor.nvml_facts import CardFacts
from labkit.errors import LabkitError
from labkit.memory.explain import DOUBT
from labkit.memory.questions import Question, smallest_utilization
from labkit.memory.records import MemoryPlan
from labkit.memory.rules import vllm_rules
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.specs.workload import Workload

GIB = 2**30
# Left free beside the budget for graphs of old versions, libraries and the allocator's rounding.
RESERVE_BYTES = 1 * GIB
GUIDE_FILES = 65_535
GUIDE_TEMPERATURE_C = 75
GUIDE_RAM = 32 * GIB


def run_preflight(
    model: ModelSpec,
    gpu: GpuSpec,
    config: EngineConfig,
    machine: AnyMachine,
    *,
    workload: Workload | None = None,
    vllm: str = "0.33.0",
    server: str | None = None,
    test: bool = False,
) -> Examination:
    """Every point of the daily checklist for a configuration that is about to be served.

    Args:
        workload: the traffic; without it the points on batched tokens and concurrency say that they were not looked at.
        vllm: version whose rules plan the memory.
        server: address of a running server, such as "http://localhost:8000", for its health and metrics pages.
        test: take the planned weights and pool on this machine's card, and give them back.
    """
    question = Question(model, gpu, config, "vllm", vllm)
    title = f"preflight of {model.name} on {gpu.name}"
    try:
        found = question.plan()
    except LabkitError as error:
        refused = Check(
            "plan", "problem", str(error), "vLLM refuses this configuration", error.works or "change that knob"
        )
        return Examination(title, (refused, *_host_checks(machine)))
    checks = [
        check_fit(found, question),
        check_utilization(found, gpu, machine),
        check_length(config, model),
        check_block_size(found),
        check_batched_tokens(found, workload),
        check_concurrency(found, workload),
        check_fp8(config, gpu),
        check_dtype(config, model, gpu),
        check_parallel(config, machine, gpu),
        check_eager(config),
        check_log_level(machine),
        *_host_checks(machine),
        *([check_planned_pool(found)] if test and found.num_gpu_blocks > 0 and find_spec("torch") else []),
        *([] if server is None else [check_page(machine, server, "health"), check_page(machine, server, "metrics")]),
    ]
    return Examination(title, tuple(checks), {"verdict": found.verdict, "max_concurrency": found.max_concurrency})


def _host_checks(machine: AnyMachine) -> list[Check]:
    checks = [check_ram(machine), check_files(machine)]
    for card in machine.nvml().cards:
        checks += [check_guides_temperature(card), check_processes(card)]
    return checks


def check_guides_temperature(card: CardFacts) -> Check:
    """The guide wants below 75 °C; clocks fall at the card's own limit."""
    check = check_temperature(card)
    if check.status != "ok" or card.temperature_c is None or card.temperature_c < GUIDE_TEMPERATURE_C:
        return check
    limit = f"{card.slowdown_c} °C" if card.slowdown_c else "their own limit"
    cause = f"the guide is wrong here: {GUIDE_TEMPERATURE_C} °C is warm and costs nothing, clocks fall at {limit}"
    return replace(check, cause=cause)


def check_fit(found: MemoryPlan, question: Question) -> Check:
    """Whether the plan fits, and with how little utilization."""
    evidence = (
        f"{found.verdict}: {shown.count(found.kv_cache_tokens)} tokens of KV, {shown.number(found.max_concurrency)} "
        f"requests of {shown.count(found.config.max_model_len)}; binds: {found.binding_limit}"
    )
    if found.margin_bytes < 0 or found.num_gpu_blocks <= 0:
        share = smallest_utilization(question)
        works = f"--gpu-memory-utilization {share:g}" if share else "more cards, fp8 KV or smaller weights"
        longest = found.max_model_len_that_fits
        shorter = f"--max-model-len {longest}, or " if longest else ""
        return Check("fit", "problem", evidence, f"short of {shown.memory(-found.margin_bytes)}", shorter + works)
    if found.verdict == "does not fit":
        sizes = found.breakdown
        share = math.floor(100 * (sizes.total_bytes - sizes.outside_bytes) / sizes.total_bytes) / 100
        works = f"end what else holds the card's memory, or --gpu-memory-utilization {max(0.0, share):g}"
        return Check("fit", "problem", evidence, "the budget is not free on the card", works)
    if found.verdict == "may not fit":
        doubts = "; ".join(note.removeprefix(DOUBT) for note in found.notes if note.startswith(DOUBT))
        sure = " or ".join(cure.text.partition(":")[0] for cure in cures(found)[:3])
        return Check("fit", "warning", evidence, doubts, sure or "a start-up log of this host: labkit plan --log")
    return Check("fit", "ok", evidence)


def check_utilization(found: MemoryPlan, gpu: GpuSpec, machine: AnyMachine) -> Check:
    """gpu-memory-utilization against what is free, and against the card's own reserve."""
    asked, total = found.config.gpu_memory_utilization, gpu.total_bytes
    free = _free_bytes(gpu, machine)
    evidence = f"{asked:g} × {shown.memory(total)} = {shown.memory(asked * total)}"
    if free is not None and asked * total > free:
        return Check(
            "utilization", "problem", f"{evidence}; {shown.memory(free)} are free",
            "vLLM does not start when less is free than it asks for",
            f"--gpu-memory-utilization {int(free / total * 100) / 100:g}, or end the other process",
        )  # fmt: skip
    safe = int((total - RESERVE_BYTES) / total * 100) / 100
    if asked > safe:
        return Check(
            "utilization", "warning", evidence,
            f"less than {shown.memory(RESERVE_BYTES)} stay outside the budget: safe for this card is up to {safe:g}",
            f"--gpu-memory-utilization {safe:g}",
        )  # fmt: skip
    note = "the guide is wrong here (claim C15): what must stay outside the budget is bytes, not 10 % of every card"
    return Check("utilization", "ok", f"{evidence}; safe up to {safe:g}", note)


def _free_bytes(gpu: GpuSpec, machine: AnyMachine) -> int | None:
    cards = [card for card in machine.nvml().cards if card.uuid == gpu.uuid] if gpu.uuid else []
    return cards[0].free_bytes if cards else gpu.free_bytes


def check_length(config: EngineConfig, model: ModelSpec) -> Check:
    """max-model-len against the model's positions."""
    asked, longest = config.max_model_len, model.max_position_embeddings
    if asked is None:
        return Check("max-model-len", "ok", f"not set: the model's {shown.count(longest)}")
    evidence = f"{shown.count(asked)} of the model's {shown.count(longest)}"
    if asked > longest:
        return Check(
            "max-model-len", "problem", evidence, "longer than the model's positions", f"--max-model-len {longest}"
        )
    return Check("max-model-len", "ok", evidence)


def check_block_size(found: MemoryPlan) -> Check:
    """Whether a backend takes the size. The guide wants max-model-len divisible by it; nothing needs that."""
    size, length = found.config.block_size, found.config.max_model_len or 0
    why = (
        "" if found.gpu.is_cpu or found.engine != "vllm" else vllm_rules(found.engine_version).refused_block_size(size)
    )
    if why:
        return Check("block-size", "problem", f"{size} tokens", why, "leave --block-size out")
    if length % size == 0:
        return Check("block-size", "ok", f"{size} divides {shown.count(length)}")
    return Check(
        "block-size", "ok", f"{size} does not divide {shown.count(length)}: the last block of a full-length request "
        f"holds {length % size} of {size} tokens",
        "the guide is wrong here (claim C06): divisibility changes neither start nor speed, only that one block",
    )  # fmt: skip


def check_batched_tokens(found: MemoryPlan, workload: Workload | None) -> Check:
    """The guide wants average input × concurrency; with chunked prefill a step holds parts of prompts."""
    budget, seqs = found.config.max_num_batched_tokens or 0, found.config.max_num_seqs or 0
    if workload is None or not workload.requests:
        return Check("batched-tokens", "unknown", f"{shown.count(budget)} tokens a step", "no traffic was given")
    average = workload.input_tokens / len(workload.requests)
    wanted = average * min(seqs, found.max_concurrency)
    evidence = (
        f"{shown.count(budget)} tokens a step; average input {shown.count(average)} × concurrency "
        f"{shown.number(min(seqs, found.max_concurrency))} = {shown.count(wanted)}"
    )
    if not found.config.enable_chunked_prefill and budget < max(r.input_tokens for r in workload.requests):
        return Check(
            "batched-tokens", "problem", f"{evidence}; chunked prefill is off",
            "without chunked prefill a step must hold the longest prompt", "leave chunked prefill on",
        )  # fmt: skip
    if budget >= wanted:
        return Check("batched-tokens", "ok", evidence)
    return Check(
        "batched-tokens", "ok", evidence,
        "the guide is wrong here (claims C16, C17): concurrency does not depend on this budget, prompts are split over "
        "steps; more raises throughput of prompts and the activation peak",
    )  # fmt: skip


def check_concurrency(found: MemoryPlan, workload: Workload | None) -> Check:
    """Whether the longest request of the traffic fits."""
    if workload is None or not workload.requests:
        return Check("traffic", "unknown", "no traffic was given", "lengths were not compared", "--workload <trace>")
    longest = max(request.input_tokens + request.output_tokens for request in workload.requests)
    limit = found.config.max_model_len or 0
    too_long = sum(request.input_tokens + request.output_tokens > limit for request in workload.requests)
    evidence = f"longest request {shown.count(longest)} tokens, --max-model-len {shown.count(limit)}"
    if too_long:
        share = shown.share(too_long, len(workload.requests))
        return Check(
            "traffic", "warning", evidence, f"{shown.count(too_long)} requests ({share}) would be refused or cut",
            f"--max-model-len {longest}",
        )  # fmt: skip
    return Check("traffic", "ok", evidence)


def check_fp8(config: EngineConfig, gpu: GpuSpec) -> Check:
    """fp8 KV: where it is supported it halves KV bytes; the guide says always to use it."""
    capability = numbers(gpu.compute_capability)
    asked = config.kv_cache_dtype.startswith("fp8")
    if not capability:
        return Check("fp8-kv", "unknown", f"--kv-cache-dtype {config.kv_cache_dtype}; capability not known")
    evidence = f"--kv-cache-dtype {config.kv_cache_dtype} on capability {gpu.compute_capability}"
    if asked and capability < FP8_CAPABILITY:
        return Check(
            "fp8-kv", "warning", evidence,
            "below 8.9 fp8 KV works only with backends that convert it (FlashInfer or Triton on 8.0 and 8.6), and "
            "below 8.0 not at all",
            "--kv-cache-dtype auto, or --attention-backend FLASHINFER",
        )  # fmt: skip
    if not asked and capability >= FP8_CAPABILITY:
        return Check(
            "fp8-kv", "ok", evidence,
            "fp8 KV would halve KV bytes of attention layers; not of state layers, and check quality first (C07)",
        )  # fmt: skip
    return Check("fp8-kv", "ok", evidence)


def check_dtype(config: EngineConfig, model: ModelSpec, gpu: GpuSpec) -> Check:
    """bfloat16 below capability 8.0 does not start."""
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    capability = numbers(gpu.compute_capability)
    if dtype == "bfloat16" and capability and capability < BF16_CAPABILITY:
        return Check(
            "dtype", "problem", f"{dtype} on capability {gpu.compute_capability}",
            "bfloat16 needs 8.0; the guide that gives it to the V100 is wrong (claim C23)", "--dtype half",
        )  # fmt: skip
    return Check("dtype", "ok", f"{dtype}{f' on capability {gpu.compute_capability}' if capability else ''}")


def check_parallel(config: EngineConfig, machine: AnyMachine, gpu: GpuSpec) -> Check:
    """Ranks against the cards of this machine, where it is this machine's card that is planned."""
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    cards = len(machine.nvml().cards)
    if gpu.origin != "nvml" or not cards:
        return Check("parallel", "unknown" if ranks > 1 else "ok", f"{ranks} ranks; cards of the target not counted")
    if ranks > cards:
        return Check(
            "parallel", "problem", f"{ranks} ranks, {cards} cards", "every rank needs a card of its own (claim C27)",
            f"--tensor-parallel-size {cards}",
        )  # fmt: skip
    return Check("parallel", "ok", f"{ranks} ranks, {cards} cards")


def check_eager(config: EngineConfig) -> Check:
    """Eager mode only while rolling out: it costs decode speed."""
    if not config.enforce_eager:
        return Check("eager", "ok", "CUDA graphs are on")
    return Check(
        "eager", "warning", "--enforce-eager", "every kernel is launched from the CPU: decode is several times slower",
        "leave it out after the roll-out; if graphs do not fit, lower their capture sizes",
    )  # fmt: skip


def check_log_level(machine: AnyMachine) -> Check:
    """The log level of the environment that the server would inherit."""
    level = machine.environ().get("VLLM_LOGGING_LEVEL", "INFO").upper()
    if level == "DEBUG":
        return Check(
            "log-level", "warning", "VLLM_LOGGING_LEVEL=DEBUG", "each step and request is written out",
            "unset VLLM_LOGGING_LEVEL",
        )  # fmt: skip
    return Check("log-level", "ok", f"VLLM_LOGGING_LEVEL {level}; INFO writes a line every ten seconds")


def check_ram(machine: AnyMachine) -> Check:
    """Host memory: the guide's 32 GiB are neither needed nor enough by themselves."""
    free = machine.memory().free
    evidence = f"{shown.memory(free)} free; the guide wants {shown.memory(GUIDE_RAM)}"
    if free >= GUIDE_RAM:
        return Check("ram", "ok", evidence)
    return Check(
        "ram", "warning" if free < GUIDE_RAM // 4 else "ok", evidence,
        "weights pass through host memory shard by shard: the largest shard of each rank must fit, not a fixed number",
        "end other programs if loading is killed" if free < GUIDE_RAM // 4 else "",
    )  # fmt: skip


def check_files(machine: AnyMachine) -> Check:
    """ulimit -n against the guide's 65,535."""
    limit = machine.open_files_limit()
    if limit < 0 or limit >= GUIDE_FILES:
        return Check("files", "ok", f"ulimit -n {shown.count(limit) if limit >= 0 else 'unlimited'}")
    return Check(
        "files", "warning", f"ulimit -n {shown.count(limit)}", "every connection holds a file", "ulimit -n 65535"
    )


def check_page(machine: AnyMachine, server: str, page: str) -> Check:
    """`/health` and `/metrics` of a running server."""
    url = f"{server.rstrip('/')}/{page}"
    found = machine.fetch(url)
    if found is None:
        return Check(
            page, "problem", f"{url} does not answer", "the server is not up, or not at this address", f"curl {url}"
        )
    if found.code != 200:
        return Check(page, "problem", f"{url} answers {found.code}", "the server is up and not healthy", "read its log")
    if page == "metrics" and "vllm:" not in found.text:
        return Check(page, "warning", f"{url} holds no vllm: metric", "another program answers there", "check the port")
    return Check(page, "ok", f"{url} answers 200")


def preflight_of(
    model: str,
    gpu: str,
    knobs: Mapping[str, Any],
    machine: AnyMachine,
    *,
    trace: str | None = None,
    vllm: str = "0.33.0",
    server: str | None = None,
    test: bool = False,
) -> Examination:
    """`labkit doctor --preflight`: the checklist from names, as the command line has them.

    Raises:
        UnknownNameError, FileFormatError: no such model, card or trace.
    """
    from labkit.memory.rules import vllm_rules
    from labkit.specs import load_gpu, load_model, load_workload

    config = EngineConfig(**{"gpu_memory_utilization": vllm_rules(vllm).utilization, **knobs})
    workload = load_workload(trace, limit=5000) if trace else None
    return run_preflight(
        load_model(model), load_gpu(gpu), config, machine, workload=workload, vllm=vllm, server=server, test=test
    )
