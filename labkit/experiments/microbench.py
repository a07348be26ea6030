"""A microbenchmark of the card that is here, in a minute: products, attention, small kernels, sampling, copies, host.

It measures the kernels of labkit's own engine and needs no model: shapes are those of common layers, and a network of
a few thin layers shows what the host spends on a step. `labkit.experiments.card_constants` makes constants of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from types import MappingProxyType
from typing import Any

from labkit.errors import LabkitError, UnsupportedError
from labkit.specs import cpu_gpu, load_gpu
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import plain

VOCAB_SIZE = 151_936


@dataclass(frozen=True)
class Shapes:
    """What is launched.

    Attributes:
        matrices: (outputs, inputs) around those of layers, narrow and wide. rows: tokens of a step.
        heads: (query heads, KV heads). decodes: (requests, context of each).
        prefills: (requests, new tokens of each, context that they end at).
        places: for prompts, in a step that computes one of `prompt_tokens`.
        elementwise: rows of norms and activations, of width `hidden` and `wide`. sampled: rows of `vocab_size` logits.
        swapped: (blocks, caches). thin_layers: of networks that show the host's time. host_batches: requests in them.
        rotated_bytes: of weights and keys, so that the L2 keeps none from one launch to the next, as in a model.
    """

    matrices: tuple[tuple[int, int], ...] = tuple(product((1024, 4096, 28672), (1024, 4096, 14336)))
    rows: tuple[int, ...] = (1, 16, 64, 128, 256, 512, 1024, 2048, 8192)
    heads: tuple[tuple[int, int], ...] = ((16, 8), (32, 8))
    decodes: tuple[tuple[int, int], ...] = (
        (1, 512), (1, 8192), (32, 512), (32, 4096), (128, 512), (256, 512), (256, 2048),
    )  # fmt: skip
    prefills: tuple[tuple[int, int, int], ...] = (
        (1, 64, 64), (1, 512, 512), (1, 2048, 2048), (1, 8192, 8192), (4, 512, 512), (1, 512, 4096),
    )  # fmt: skip
    places: tuple[int, ...] = (1, 64)
    prompt_tokens: int = 512
    elementwise: tuple[int, ...] = (1, 64, 256, 2048, 8192)
    hidden: int = 4096
    wide: int = 24576
    sampled: tuple[int, ...] = (1, 32, 128, 256)
    vocab_size: int = VOCAB_SIZE
    swapped: tuple[int, int] = (128, 16)
    thin_layers: tuple[int, ...] = (2, 10)
    host_batches: tuple[int, ...] = (1, 64, 256)
    host_steps: int = 60
    rotated_bytes: int = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        kind: "read", "matmul", "gemm", "decode", "prefill", "places", "norm", "activation", "sample", "swap", "host",
            "prompt", "admission", or without graphs "launch decode" or "launch" (of a prompt).
        sizes: what was measured: rows, elements, tokens, heads, KV type, layers and so on.
        seconds: median of one launch, or of one engine step.
    """

    kind: str
    sizes: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Microbenchmark:
    """What `run_microbenchmark` found.

    Attributes:
        card: its name in the catalogue. made: ISO 8601. seconds: how long it took.
        timings: the measurements. missing: kind → why it was not measured.
    """

    card: str
    made: str
    seconds: float
    timings: tuple[Timing, ...]
    missing: Mapping[str, str] = field(default_factory=dict)


OnProgress = Callable[[str], None]


class Bench:
    """Where launches are made and how they are timed.

    Args:
        device: "cuda", or "cpu" for a trial of the code in Triton's interpreter, whose times mean nothing.
        shapes: what to launch.
    """

    def __init__(self, device: str = "cuda", shapes: Shapes | None = None) -> None:
        import torch

        self.torch, self.device, self.shapes = torch, device, shapes or Shapes()
        self._flush = torch.empty(64 * 2**20 if device == "cuda" else 1, dtype=torch.int32, device=device)

    def randn(self, *size: int) -> Any:
        """Random bfloat16 numbers."""
        return self.torch.randn(*size, device=self.device, dtype=self.torch.bfloat16)

    def time_s(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median seconds of one of `calls`, launched one after the other as a CUDA graph after a cold L2."""
        from labkit.measure.kernel_launches import graph_time_s

        def chain() -> None:
            for call in calls:
                call()

        if self.device == "cuda":
            return graph_time_s(chain, self._flush.zero_) / len(calls)
        start = time.perf_counter()
        chain()
        return (time.perf_counter() - start) / len(calls)

    def synchronize(self) -> None:
        """Wait for the card."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    @property
    def gpu(self) -> GpuSpec:
        """The card as the catalogue has it, so that plans are the same on every machine that has one."""
        return load_gpu(self.torch.cuda.get_device_name()) if self.device == "cuda" else cpu_gpu(2.0)


def run_microbenchmark(
    budget_s: float = 60.0,
    *,
    bench: Bench | None = None,
    on_progress: OnProgress = lambda text: None,
    made: str = "",
) -> Microbenchmark:
    """Measure the card that is here; a part that fails or finds no time left is named in `missing`.

    Raises:
        UnsupportedError: there is no card, or no Triton for it.
    """
    if bench is None:
        check_card()
        bench = Bench()
    start = time.monotonic()
    timings: list[Timing] = []
    missing: dict[str, str] = {}
    for kind, section in SECTIONS.items():
        before = time.monotonic()
        try:
            for timing in section(bench):
                timings.append(timing)
                if time.monotonic() - start > budget_s:
                    missing[kind] = f"not all of it: {budget_s:g} s were over"
                    break
        except (LabkitError, RuntimeError, ValueError, TypeError) as error:
            missing[kind] = plain(f"{type(error).__name__}: {error}", 300)
        on_progress(f"{kind}: {time.monotonic() - before:.1f} s{', ' + missing[kind] if kind in missing else ''}")
        if time.monotonic() - start > budget_s:
            left = list(SECTIONS)[list(SECTIONS).index(kind) + 1 :]
            missing.update(dict.fromkeys(left, f"{budget_s:g} s were over"))
            break
    return Microbenchmark(bench.gpu.name, made, round(time.monotonic() - start, 1), tuple(timings), missing)


def check_card() -> None:
    """Refuse a machine that has nothing to measure.

    Raises:
        UnsupportedError: no torch, no Triton or no card; says what works without.
    """
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"the microbenchmark needs torch and Triton: {error}", works="labkit doctor") from error
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "the microbenchmark needs an NVIDIA card, and torch finds none here",
            works="the same command on the machine with the card; `labkit calibrate --run ID` with runs made there; or "
            "simulations with the constants that come with labkit",
        )


def _ceilings(bench: Bench) -> Iterator[Timing]:
    from labkit.measure.card_ceilings import MATMUL_SIZE, READ_BYTES, measure_ceilings

    found = measure_ceilings()
    yield Timing("read", {"bytes": READ_BYTES}, READ_BYTES / found.read_bytes_per_s)
    flops = 2 * MATMUL_SIZE**3
    yield Timing("matmul", {"flops": flops}, flops / float(found.flops_per_s or 1.0))


def _gemm(bench: Bench) -> Iterator[Timing]:
    from labkit.models.linear import project

    first = bench.randn(256, 256)
    # The first product of a process also loads its library.
    bench.time_s([lambda: project(first, first)])
    for outputs, inputs in bench.shapes.matrices:
        count = max(2, min(32, bench.shapes.rotated_bytes // (2 * outputs * inputs)))
        weights = [bench.randn(outputs, inputs).mul_(inputs**-0.5) for _ in range(count)]
        for rows in bench.shapes.rows:
            x = bench.randn(rows, inputs)
            used = weights[: count if rows <= 512 else 4]
            calls = [lambda x=x, weight=weight: project(x, weight) for weight in used]
            yield Timing("gemm", {"outputs": outputs, "inputs": inputs, "rows": rows}, bench.time_s(calls))


def _decode(bench: Bench) -> Iterator[Timing]:
    from labkit.measure.attention_shape import BatchShape

    for dtype in ("bfloat16", "fp8"):
        for heads in bench.shapes.heads:
            for requests, context in bench.shapes.decodes:
                seconds = _attention_s(bench, BatchShape.decode(requests, context), heads, dtype, "full")
                sizes = {"requests": requests, "context": context, "heads": heads[0], "kv_heads": heads[1]}
                yield Timing("decode", {**sizes, "head_dim": 128, "kv": dtype}, seconds)


def _prefill(bench: Bench) -> Iterator[Timing]:
    from labkit.measure.attention_shape import BatchShape

    heads = bench.shapes.heads
    for dtype, pair, count in (("bfloat16", heads[0], 6), ("fp8", heads[0], 3), ("bfloat16", heads[-1], 4)):
        for requests, queries, context in bench.shapes.prefills[:count]:
            lengths = BatchShape((context,) * requests, (queries,) * requests)
            sizes = {"requests": requests, "queries": queries, "context": context, "heads": pair[0]}
            seconds = _attention_s(bench, lengths, pair, dtype, "prefill")
            yield Timing("prefill", {**sizes, "kv_heads": pair[1], "head_dim": 128, "kv": dtype}, seconds)


def _places(bench: Bench) -> Iterator[Timing]:
    """One prompt alone, and the same prompt in a step that has places for many."""
    from labkit_kernels.paged_prefill import paged_prefill

    from labkit.measure.attention_shape import AttentionShape, BatchShape
    from labkit.measure.kernel_launches import make_inputs

    torch, heads = bench.torch, bench.shapes.heads[0]
    queries = bench.shapes.prompt_tokens
    shape = AttentionShape(BatchShape((queries,), (queries,)), *heads, 128, 16)
    given = make_inputs(shape, bench.device, 0)
    out = torch.empty_like(given.q)
    for places in bench.shapes.places:
        tables, lens = given.tables.repeat(places, 1), torch.zeros(places, dtype=torch.int32, device=bench.device)
        starts = torch.full((places + 1,), queries, dtype=torch.int32, device=bench.device)
        lens[0], starts[0] = queries, 0

        def call(tables: Any = tables, lens: Any = lens, starts: Any = starts) -> None:
            paged_prefill(
                given.q, given.k_cache, given.v_cache, tables, lens, starts, given.scores, max_query_len=queries,
                out=out, num_splits=1,
            )  # fmt: skip

        yield Timing("places", {"places": places, "queries": queries}, bench.time_s([call] * 4))


def _attention_s(bench: Bench, batch: Any, heads: tuple[int, int], dtype: str, variant: str) -> float:
    """Seconds of one launch, among launches on other caches so that none finds its own in the L2."""
    from labkit.measure.attention_shape import AttentionShape
    from labkit.measure.kernel_launches import make_inputs, prepare_launch

    shape = AttentionShape(batch, *heads, 128, 16, kv_cache_dtype=dtype)
    num_bytes = sum(batch.context_lens) * heads[1] * shape.head_bytes
    count = max(1, min(6, bench.shapes.rotated_bytes // num_bytes))
    return bench.time_s(
        [prepare_launch(shape, variant, make_inputs(shape, bench.device, seed)) for seed in range(count)]
    )


def _small_kernels(bench: Bench) -> Iterator[Timing]:
    from labkit_kernels.activations import silu_and_mul
    from labkit_kernels.norms import add_rms_norm

    hidden, wide = bench.shapes.hidden, bench.shapes.wide
    weight = bench.torch.ones(hidden, device=bench.device, dtype=bench.torch.bfloat16)
    for rows in bench.shapes.elementwise:
        x, residual, gated = bench.randn(rows, hidden), bench.randn(rows, hidden), bench.randn(rows, wide)
        norm = [lambda x=x, residual=residual: add_rms_norm(x, residual, weight, 1e-6, out=x)] * 8
        yield Timing("norm", {"rows": rows, "bytes": 8 * rows * hidden}, bench.time_s(norm))
        gate = [lambda gated=gated: silu_and_mul(gated)] * 8
        yield Timing("activation", {"rows": rows, "bytes": 3 * rows * wide}, bench.time_s(gate))


def _sampling(bench: Bench) -> Iterator[Timing]:
    from labkit_kernels.sampling import SamplingTensors, sample

    torch, device, vocab_size = bench.torch, bench.device, bench.shapes.vocab_size
    for rows in bench.shapes.sampled:
        logits = bench.randn(rows, vocab_size)
        zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        for temperature in (0.0, 0.6):
            parameters = SamplingTensors(
                torch.full((rows,), temperature, device=device), zeros, torch.ones(rows, device=device),
                torch.zeros(rows, device=device), torch.arange(rows, dtype=torch.int64, device=device), zeros,
            )  # fmt: skip
            calls = [lambda logits=logits, parameters=parameters: sample(logits, parameters)] * 4
            sizes = {"rows": rows, "vocab_size": vocab_size, "temperature": temperature}
            yield Timing("sample", sizes, bench.time_s(calls))


def _swap(bench: Bench) -> Iterator[Timing]:
    from labkit_kernels.block_copy import BlockSwapper

    num_blocks, num_caches = bench.shapes.swapped
    size = (num_blocks, 16, 8, 128)
    ours = [bench.randn(*size) for _ in range(num_caches)]
    pinned = bench.device == "cuda"
    theirs = [bench.torch.zeros(size, dtype=bench.torch.bfloat16, pin_memory=pinned) for _ in range(num_caches)]
    swapper = BlockSwapper(ours, theirs)
    pairs = [(block, block) for block in range(num_blocks)]
    for direction, swap in (("out", swapper.swap_out), ("in", swapper.swap_in)):
        seconds = []
        for _ in range(5):
            bench.synchronize()
            start = time.perf_counter()
            swapper.wait(swap(pairs))
            bench.synchronize()
            seconds.append(time.perf_counter() - start)
        sizes = {"bytes": sum(cache.nbytes for cache in ours), "direction": direction}
        yield Timing("swap", sizes, statistics.median(seconds[1:]))


def thin_model(num_layers: int) -> Any:
    """A model whose layers cost a card next to nothing, so that steps take as long as the host needs."""
    from labkit.specs.model_spec import LayerSpec, ModelSpec

    layer = LayerSpec(kind="full", num_heads=16, num_kv_heads=8, head_dim=128)
    return ModelSpec(
        name=f"thin, {num_layers} layers", architecture="Qwen3ForCausalLM", model_type="qwen3", qk_norm=True,
        layers=(layer,) * num_layers, hidden_size=256, intermediate_size=512, vocab_size=1024,
        max_position_embeddings=4096, dtype="bfloat16", eos_token_ids=(0,),
    )  # fmt: skip


class HostSteps:
    """Start-to-start seconds of an engine's steps, on a network that the card computes in no time.

    Args:
        engine: over `thin_model(num_layers)`.
        num_steps: to take the median of.
    """

    def __init__(self, engine: Any, num_layers: int, num_steps: int) -> None:
        self._engine, self._num_layers, self._num_steps = engine, num_layers, num_steps
        self._next_id = 0
        self._add(4, 60, 4)
        self._drain()

    def decode(self, requests: int, kind: str = "host") -> Timing:
        """Steps in which so many requests decode."""
        self._add(requests, 4, self._num_steps + 8)
        rows = [row for row in self._drain() if row.num_decode_tokens == requests and not row.num_prefill_tokens]
        return Timing(kind, {"requests": requests, "layers": self._num_layers}, _cycle_s(rows[4:]))

    def prompts(self, kind: str, tokens: int = 64) -> Timing:
        """Steps that compute one prompt each: the next one comes when the last was taken."""
        found = []
        for _ in range(self._num_steps):
            self._add(1, tokens, 1)
            found.append(self._engine.step())
        rows = [row for row in [*found, *self._drain()] if row.num_prefill_tokens == tokens]
        return Timing(kind, {"layers": self._num_layers, "tokens": tokens}, _cycle_s(rows[8:]))

    def admission(self, requests: int = 32, tokens: int = 256) -> Timing:
        """Taking in requests before anything of them is computed."""
        start = time.perf_counter()
        self._add(requests, tokens, 1)
        seconds = (time.perf_counter() - start) / requests
        self._drain()
        return Timing("admission", {"requests": requests, "tokens": tokens}, seconds)

    def _add(self, count: int, num_prompt: int, num_output: int) -> None:
        from labkit.engine.sampling_params import EngineRequest, SamplingParams

        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
        for _ in range(count):
            self._next_id += 1
            prompt = tuple((self._next_id + 7 * place) % 997 + 1 for place in range(num_prompt))
            self._engine.add_request(EngineRequest(self._next_id, prompt, sampling))

    def _drain(self) -> list[Any]:
        found = []
        while self._engine.has_unfinished:
            found.append(self._engine.step())
        return found


def _cycle_s(rows: Sequence[Any]) -> float:
    gaps = [after.start_s - before.start_s for before, after in pairwise(rows)]
    if not gaps:
        raise UnsupportedError("the engine gave too few steps to time")
    return statistics.median(gaps)


def _host(bench: Bench) -> Iterator[Timing]:
    from labkit.engine.engine import Engine
    from labkit.memory import plan
    from labkit.models import load_model_weights

    shapes = bench.shapes
    for num_layers in shapes.thin_layers:
        spec = thin_model(num_layers)
        decoder = load_model_weights(spec, dtype="bfloat16", load_format="dummy", device=bench.device)
        config = EngineConfig(
            max_model_len=2048, max_num_seqs=max(shapes.host_batches), max_num_batched_tokens=2048,
            enable_prefix_caching=False, num_gpu_blocks_override=2048,
        )  # fmt: skip
        engine = Engine(decoder, plan(spec, bench.gpu, config))
        try:
            steps = HostSteps(engine, num_layers, shapes.host_steps)
            for requests in shapes.host_batches:
                yield steps.decode(requests)
            yield steps.prompts("prompt")
            yield steps.admission()
            engine.reconfigure(plan(spec, bench.gpu, config.replace(enforce_eager=True)))
            eager = HostSteps(engine, num_layers, shapes.host_steps)
            yield eager.decode(shapes.host_batches[0], "launch decode")
            yield eager.prompts("launch")
        finally:
            engine.close()


# In this order, what matters most first.
SECTIONS: Mapping[str, Callable[[Bench], Iterator[Timing]]] = MappingProxyType({
    "ceilings": _ceilings, "gemm": _gemm, "decode": _decode, "prefill": _prefill, "host": _host, "places": _places,
    "small kernels": _small_kernels, "sampling": _sampling, "swap": _swap,
})  # fmt: skip
