"""The engine on a card: tokens against a plain forward pass, graphs, knobs, padding, memory given back."""

from __future__ import annotations

import random

import pytest

from labkit.engine import Engine, EngineRequest, SamplingParams
from labkit.errors import DoesNotFitError
from labkit.memory import Overrides
from labkit.memory import plan as make_memory_plan
from labkit.specs import load_gpu
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec, MoeSpec

NUM_REQUESTS = 11
KNOBS = {
    "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 400,
    "gpu_memory_utilization": 0.1,
}  # fmt: skip
# Largest gap between the best logit and that of the token that was taken, by dtype of the model.
NEAR_TIE = {"float32": 2e-3, "bfloat16": 0.25}


def make_spec(**changes) -> ModelSpec:
    layer = LayerSpec(kind="full", num_heads=9, num_kv_heads=3, head_dim=64)
    fields = {
        "name": "smol", "architecture": "", "model_type": "llama", "layers": (layer,) * 4, "hidden_size": 576,
        "intermediate_size": 1536, "vocab_size": 4099, "max_position_embeddings": 1024, "dtype": "bfloat16",
        "eos_token_ids": (0,), "tie_word_embeddings": False,
    }  # fmt: skip
    return ModelSpec(**{**fields, **changes})


def make_decoder(spec: ModelSpec, dtype: str):
    import torch

    from labkit.models import load_model_weights

    decoder = load_model_weights(spec, dtype=dtype, load_format="dummy", device="cuda")
    torch.manual_seed(3)
    decoder.weights.embedding.normal_(0, 0.3)
    return decoder


@pytest.fixture(scope="module")
def decoders():
    return {dtype: make_decoder(make_spec(), dtype) for dtype in ("float32", "bfloat16")}


def requests(max_tokens: int = 40, **sampling) -> list[EngineRequest]:
    rng = random.Random(7)
    return [
        EngineRequest(
            index,
            tuple(rng.randrange(1, 4099) for _ in range(rng.randrange(1, 200))),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),
        )
        for index in range(NUM_REQUESTS)
    ]


def make_engine(decoder, **knobs) -> Engine:
    config = EngineConfig(**{**KNOBS, **knobs}, dtype=str(decoder.dtype).removeprefix("torch."))
    return Engine(decoder, make_memory_plan(decoder.spec, load_gpu("H200"), config))


def drain(engine: Engine, asked: list[EngineRequest]):
    for request in asked:
        engine.add_request(request)
    outputs, preemptions = {}, 0
    while engine.has_unfinished:
        for output in engine.step().finished:
            outputs[output.request_id] = list(output.token_ids)
            preemptions += output.num_preemptions
        engine.check()
    return [outputs[request.request_id] for request in asked], preemptions


def serve(decoder, asked=None, **knobs):
    engine = make_engine(decoder, **knobs)
    try:
        return drain(engine, asked or requests())
    finally:
        engine.close()


def gaps(decoder, asked: list[EngineRequest], outputs: list[list[int]]):
    """How far each token's logit is below the best one, by a plain forward pass over the whole sequence."""
    import torch

    from labkit.models.attention import DenseAttention

    found = []
    for request, output in zip(asked, outputs, strict=True):
        tokens = torch.tensor([*request.prompt_token_ids, *output], device="cuda")
        hidden = decoder.forward(
            tokens, torch.arange(len(tokens), device="cuda"), DenseAttention(decoder.spec, [len(tokens)])
        )
        logits = decoder.logits(hidden[len(request.prompt_token_ids) - 1 : -1])
        chosen = logits.gather(1, torch.tensor(output, device="cuda").unsqueeze(1)).squeeze(1)
        found.append(logits.max(dim=-1).values - chosen)
    return torch.cat(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_tokens_are_the_models_own_choice(decoders, dtype):
    asked = requests()
    outputs, _ = serve(decoders[dtype], asked)
    below = gaps(decoders[dtype], asked, outputs)
    assert float(below.max()) <= NEAR_TIE[dtype]
    assert float((below == 0).float().mean()) > 0.97


def test_places_that_nobody_takes_leave_the_others_alone():
    """Captured steps for 64 requests, few of which decode while the rest are prompts: the split of long KV over the
    card must leave room for the empty places."""
    heads = LayerSpec(kind="full", num_heads=8, num_kv_heads=8, head_dim=64)
    decoder, rng = make_decoder(make_spec(layers=(heads,) * 2), "float32"), random.Random(3)
    asked = [
        EngineRequest(
            index,
            tuple(rng.randrange(1, 4099) for _ in range(rng.randrange(200, 900))),
            SamplingParams(max_tokens=60, ignore_eos=True),
        )
        for index in range(40)
    ]
    knobs = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 3000}
    outputs, _ = serve(decoder, asked, **knobs)
    below = gaps(decoder, asked, outputs)
    assert float(below.max()) <= NEAR_TIE["float32"]
    assert float((below == 0).float().mean()) > 0.97


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True, "model_type": "qwen3"},
        {"qkv_bias": True, "model_type": "qwen2"},
        {
            "norm_offset": True, "sandwich_norms": True, "norms_per_layer": 4, "hidden_act": "gelu_pytorch_tanh",
            "final_softcap": 20.0, "attention_softcap": 15.0, "model_type": "gemma2",
            "layers": (
                LayerSpec(kind="sliding", num_heads=9, num_kv_heads=3, head_dim=64, window=50),
                LayerSpec(kind="full", num_heads=9, num_kv_heads=3, head_dim=64),
            ),
        },
    ],
    ids=lambda changes: changes["model_type"],
)  # fmt: skip
def test_other_families(changes):
    decoder, asked = make_decoder(make_spec(**changes), "float32"), requests()
    outputs, _ = serve(decoder, asked)
    assert float(gaps(decoder, asked, outputs).max()) <= NEAR_TIE["float32"]


def test_tokens_are_transformers_tokens(decoders):
    import torch

    from labkit.engine.bench import run_generate, transformers_twin

    decoder, asked = decoders["float32"], requests()[:4]
    model = transformers_twin(decoder).cuda()
    outputs, _ = serve(decoder, asked)
    for request, output in zip(asked, outputs, strict=True):
        with torch.device("cuda"):
            assert run_generate(model, [(list(request.prompt_token_ids), 40)]) == [output]


def test_bfloat16_tokens_are_transformers_tokens_but_for_near_ties(decoders):
    import torch

    from labkit.engine.bench import transformers_twin

    decoder, asked = decoders["bfloat16"], requests()
    model = transformers_twin(decoder).cuda()
    outputs, _ = serve(decoder, asked)
    for request, output in zip(asked, outputs, strict=True):
        tokens = torch.tensor([[*request.prompt_token_ids, *output]], device="cuda")
        with torch.inference_mode():
            logits = model(tokens).logits[0, len(request.prompt_token_ids) - 1 : -1].float()
        best, chosen = logits.max(dim=-1), torch.tensor(output, device="cuda")
        below = best.values - logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
        assert float(below.max()) <= NEAR_TIE["bfloat16"]
        assert int((best.indices == chosen).sum()) >= len(output) - 2


@pytest.mark.parametrize(
    "knobs",
    [
        {"enforce_eager": True},
        {"block_size": 32},
        {"block_size": 1, "num_gpu_blocks_override": 6400},
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 512, "enable_chunked_prefill": False},
        {"max_num_seqs": 3},
        {"enable_prefix_caching": False},
        {"num_gpu_blocks_override": 40},
        {"num_gpu_blocks_override": 40, "preemption_mode": "swap", "swap_space": 0.01},
    ],
    ids=str,
)
def test_knobs_do_not_change_tokens(decoders, knobs):
    outputs, preemptions = serve(decoders["float32"], **knobs)
    assert outputs == serve(decoders["float32"])[0]
    if knobs.get("num_gpu_blocks_override") == 40:
        assert preemptions > 0


@pytest.mark.parametrize("staged_blocks", [3, 1000])
def test_swapped_blocks_pass_in_turns(decoders, monkeypatch, staged_blocks):
    """Many requests leave and come back, a few blocks at a time or all at once, while others are computed."""
    from labkit.engine import cuda_cache

    knobs = {"num_gpu_blocks_override": 40, "preemption_mode": "swap", "swap_space": 0.02, "max_num_batched_tokens": 32}
    monkeypatch.setattr(cuda_cache, "STAGED_BYTES", staged_blocks * 4 * 2 * 16 * 3 * 64 * 4)
    asked = requests(max_tokens=120)
    outputs, preemptions = serve(decoders["float32"], asked, **knobs)
    assert preemptions > 5
    assert outputs == serve(decoders["float32"], asked)[0]


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_eight_bit_kv_stays_near_the_models_choice(decoders, kind):
    asked = requests()
    outputs, _ = serve(decoders["bfloat16"], asked, kv_cache_dtype=kind)
    assert float(gaps(decoders["bfloat16"], asked, outputs).median()) <= 0.05


def test_drawn_tokens_do_not_depend_on_batch_or_graphs(decoders):
    asked = requests(temperature=0.9, top_p=0.95, top_k=200, seed=11)
    baseline, _ = serve(decoders["float32"], asked)
    assert serve(decoders["float32"], asked, enforce_eager=True, max_num_seqs=2)[0] == baseline
    assert baseline != serve(decoders["float32"])[0]


def test_steps_with_prompts_replay_graphs_too(decoders):
    engine, replayed = make_engine(decoders["float32"]), []
    graphs = engine.executor._allocated.graphs
    replay = graphs.replay
    graphs.replay = lambda shape: replayed.append(shape) or replay(shape)
    steps = 0
    for request in requests():
        engine.add_request(request)
    while engine.has_unfinished:
        steps += engine.step().num_tokens > 0
    engine.close()
    assert len(replayed) == steps
    assert {shape.num_tokens for shape in replayed if shape.num_prompts} >= {128}
    assert any(shape.num_tokens < 128 for shape in replayed if shape.num_prompts)


def test_many_short_prompts_at_once_replay_a_larger_graph(decoders):
    """48 prompts of 2 or 3 tokens: a step of 120, whose own graph of 128 has 16 places, runs in that of 384."""
    decoder, rng = decoders["float32"], random.Random(5)
    asked = [
        EngineRequest(
            index, tuple(rng.randrange(1, 4099) for _ in range(2 + index % 2)),
            SamplingParams(max_tokens=20, ignore_eos=True),
        )
        for index in range(48)
    ]  # fmt: skip
    engine, replayed = make_engine(decoder, max_num_seqs=64, max_num_batched_tokens=512), []
    graphs = engine.executor._allocated.graphs
    replay = graphs.replay
    graphs.replay = lambda shape: replayed.append(shape) or replay(shape)
    outputs, _ = drain(engine, asked)
    engine.close()
    assert [shape.num_tokens for shape in replayed if shape.num_prompts] == [384]
    below = gaps(decoder, asked, outputs)
    assert float(below.max()) <= NEAR_TIE["float32"]
    assert float((below == 0).float().mean()) > 0.97


def test_a_prompt_seen_before_takes_its_blocks(decoders):
    """The second round computes only the last block of each prompt and gives the same tokens."""
    engine = make_engine(decoders["float32"])
    first, _ = drain(engine, requests())
    for request in requests():
        engine.add_request(request)
    again, cached = {}, 0
    while engine.has_unfinished:
        for output in engine.step().finished:
            again[output.request_id], cached = list(output.token_ids), cached + output.num_cached_tokens
    engine.close()
    assert [again[request.request_id] for request in requests()] == first
    assert cached == sum((len(request.prompt_token_ids) - 1) // 16 * 16 for request in requests())


def test_experts_are_visited_in_graphs():
    layer = LayerSpec(kind="full", num_heads=9, num_kv_heads=3, head_dim=64, num_experts=8)
    moe = MoeSpec(num_experts=8, num_experts_per_tok=2, intermediate_size=512)
    decoder, asked = (
        make_decoder(make_spec(layers=(layer,) * 2, moe=moe, model_type="qwen3_moe"), "bfloat16"),
        requests(),
    )
    for enforce_eager in (False, True):
        engine = make_engine(decoder, enforce_eager=enforce_eager)
        assert (engine.executor._allocated.graphs is None) is enforce_eager
        outputs, _ = drain(engine, asked)
        engine.close()
        # A token whose router nearly ties may visit another expert in the plain forward pass.
        assert float((gaps(decoder, asked, outputs) <= NEAR_TIE["bfloat16"]).float().mean()) > 0.99


def test_padding_reads_and_writes_nothing(decoders):
    """Three sequences run in the graph of four, in a pool full of NaN."""
    import torch

    asked = requests()[:3]
    baseline, _ = serve(decoders["float32"], asked, enforce_eager=True)
    engine = make_engine(decoders["float32"])
    with torch.inference_mode():
        for layer in engine.executor._allocated.cache.layers:
            layer.k.fill_(float("nan"))
            layer.v.fill_(float("nan"))
    assert drain(engine, asked)[0] == baseline
    engine.close()


@pytest.mark.parametrize("knobs", [{}, {"kv_cache_dtype": "int8_per_token_head", "enforce_eager": True}], ids=str)
def test_the_planner_predicts_the_pool_of_the_budget(decoders, knobs):
    """Exactly from the parts that were measured, and within 1 % without them."""
    import torch

    knobs = {**knobs, "num_gpu_blocks_override": None, "gpu_memory_utilization": 0.9}
    engine = make_engine(decoders["bfloat16"], **knobs)
    parts, plan = engine.executor.budget_parts, engine.plan
    measured = Overrides(
        total_bytes=torch.cuda.mem_get_info()[1], weights_bytes=parts["weights"],
        activation_bytes=parts["activation"], cuda_graphs_bytes=parts["cuda_graphs"],
        non_torch_bytes=parts["workspace"], tables_bytes=parts["block_tables"],
    )  # fmt: skip
    exact = make_memory_plan(plan.model, load_gpu("H200"), plan.config, overrides=measured)
    guessed = make_memory_plan(plan.model, load_gpu("H200"), plan.config)
    engine.close()
    assert exact.num_gpu_blocks == plan.num_gpu_blocks
    assert guessed.num_gpu_blocks == pytest.approx(plan.num_gpu_blocks, rel=0.01)


def test_pool_takes_what_the_budget_leaves(decoders):
    import torch

    engine = make_engine(decoders["bfloat16"], num_gpu_blocks_override=None, gpu_memory_utilization=0.2)
    total = torch.cuda.mem_get_info()[1]
    parts = engine.memory_parts()
    inside = sum(size for part, size in parts.items() if part != "outside")
    assert abs(inside - 0.2 * total) < 0.01 * 0.2 * total
    assert parts["kv_cache"] == engine.plan.num_gpu_blocks * engine.plan.block_bytes
    drain(engine, requests())
    engine.close()


def test_fifty_reconfigurations_lose_no_byte(decoders):
    import torch

    rng = random.Random(1)
    engine = make_engine(decoders["bfloat16"])
    start = engine.plan
    gpu, seen = load_gpu("H200"), []
    for number in range(51):
        knobs = {
            "block_size": rng.choice([16, 32]), "enforce_eager": rng.random() < 0.7,
            "kv_cache_dtype": rng.choice(["auto", "fp8"]), "max_num_seqs": rng.choice([2, 4, 8]),
            "num_gpu_blocks_override": rng.randrange(100, 500), "max_model_len": rng.choice([256, 512]),
        }  # fmt: skip
        config = EngineConfig(**{**KNOBS, **knobs}, dtype="bfloat16")
        engine.reconfigure(make_memory_plan(engine.plan.model, gpu, config))
        if number % 10 == 0:
            drain(engine, requests(max_tokens=3))
            engine.reconfigure(start)
            torch.cuda.synchronize()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    engine.close()
    assert len(set(seen[1:])) == 1


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_nothing_is_compiled_while_requests_wait(decoders, monkeypatch, enforce_eager):
    """Prompts of any length beside any number of rows that decode find their kernels."""
    from triton.runtime.jit import JITFunction

    engine = make_engine(decoders["bfloat16"], enforce_eager=enforce_eager, max_num_batched_tokens=2048, max_num_seqs=7)
    compiled, compile_now = [], JITFunction._do_compile

    def compile_and_note(kernel, *rest, **named):
        compiled.append(kernel.fn.__name__)
        return compile_now(kernel, *rest, **named)

    monkeypatch.setattr(JITFunction, "_do_compile", compile_and_note)
    drain(engine, requests(temperature=0.7))
    engine.close()
    assert compiled == []


def test_engines_one_after_another_lose_no_byte(decoders):
    import torch

    left = []
    for _ in range(4):
        engine = make_engine(decoders["bfloat16"])
        drain(engine, requests(max_tokens=3))
        engine.close()
        left.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(left[1:])) == 1


def test_a_card_without_the_budget_free_says_what_fits(decoders, monkeypatch):
    import torch

    free, total = torch.cuda.mem_get_info()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free // 20, total))
    with pytest.raises(DoesNotFitError, match="another process") as caught:
        make_engine(decoders["bfloat16"], num_gpu_blocks_override=None, gpu_memory_utilization=0.9)
    assert caught.value.knob == "gpu_memory_utilization"


def test_a_second_engine_beside_another_says_what_fits(decoders):
    """Weights are shared; the first engine's pool is not within the second one's reach."""
    knobs = {"num_gpu_blocks_override": None, "enforce_eager": True}
    first = make_engine(decoders["bfloat16"], gpu_memory_utilization=0.6, **knobs)
    with pytest.raises(DoesNotFitError, match=r"this one holds .* GiB for something else") as caught:
        make_engine(decoders["bfloat16"], gpu_memory_utilization=0.6, **knobs)
    share = float(caught.value.works.removeprefix("gpu_memory_utilization = "))
    assert 0.2 < share < 0.4
    second = make_engine(decoders["bfloat16"], gpu_memory_utilization=share, **knobs)
    assert drain(second, requests(4)) == drain(first, requests(4))
    second.close()
    first.close()


def test_out_of_memory_in_a_step_leaves_the_engine_usable(decoders, monkeypatch):
    import torch

    asked = requests()
    baseline, _ = serve(decoders["float32"], asked)
    engine = make_engine(decoders["float32"])
    submit, calls = engine.executor.submit, []

    def fail_once(batch):
        calls.append(batch)
        if len(calls) == 5:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (injected)")
        return submit(batch)

    monkeypatch.setattr(engine.executor, "submit", fail_once)
    for request in asked:
        engine.add_request(request)
    outputs, failures = {}, 0
    while engine.has_unfinished:
        try:
            finished = engine.step().finished
        except torch.cuda.OutOfMemoryError:
            failures += 1
            continue
        outputs |= {output.request_id: list(output.token_ids) for output in finished}
        engine.check()
    assert failures == 1
    assert [outputs[request.request_id] for request in asked] == baseline
    engine.close()


def test_out_of_memory_while_reconfiguring_leaves_a_way_back(decoders, monkeypatch):
    import torch

    from labkit.engine import cuda_executor

    asked = requests()
    baseline, _ = serve(decoders["float32"], asked)
    engine = make_engine(decoders["float32"])
    start = engine.plan

    def fail(*arguments):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory (injected)")

    other = make_memory_plan(start.model, load_gpu("H200"), start.config.replace(block_size=32))
    with monkeypatch.context() as patched:
        patched.setattr(cuda_executor, "CudaKVCache", fail)
        with pytest.raises(DoesNotFitError, match="steps of this plan do not fit") as caught:
            engine.reconfigure(other)
    assert caught.value.knob == "max_num_batched_tokens"
    engine.reconfigure(start)
    assert drain(engine, asked)[0] == baseline
    engine.close()
