"""Runs the GPU executor on CPU tensors in Triton's interpreter beside the CPU executor; prints one JSON object.

usage: TRITON_INTERPRET=1 interpreted_engine.py. Own process: kernels imported for the interpreter stay interpreted.
"""

from __future__ import annotations

import dataclasses
import json

import torch

from labkit.engine import Engine, EngineRequest, SamplingParams, cuda_cache
from labkit.engine.cuda_executor import CudaExecutor
from labkit.engine.cuda_graphs import next_larger
from labkit.engine.simulation import bare_plan
from labkit.memory.step_shapes import StepShape
from labkit.models.loading import load_model_weights
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec

PROMPTS = (tuple(range(3, 17)), (5,), tuple(range(40, 29, -1)))


def make_decoder(**changes):
    layer = LayerSpec(kind="full", num_heads=2, num_kv_heads=1, head_dim=64)
    fields = {
        "name": "tiny", "architecture": "", "model_type": "llama", "layers": (layer, layer), "hidden_size": 32,
        "intermediate_size": 48, "vocab_size": 101, "max_position_embeddings": 64, "dtype": "float32",
        "eos_token_ids": (0,),
    }  # fmt: skip
    spec = ModelSpec(**{**fields, **changes})
    decoder = load_model_weights(spec, dtype="float32", load_format="dummy", pack_weights=False)
    # Large embeddings keep greedy choices apart, so that rounding cannot swap them.
    torch.manual_seed(1)
    decoder.weights.embedding.normal_(0, 0.3)
    return decoder


def make_plan(decoder, blocks=32, swap=0, **config):
    defaults = {"max_model_len": 48, "max_num_seqs": 3, "max_num_batched_tokens": 12, "block_size": 4}
    return bare_plan(decoder.spec, EngineConfig(**{**defaults, **config}), blocks, swap)


class PaddedSteps:
    """Stands in for captured graphs: the padded step is computed, as a replay would, from the staging buffer."""

    def __init__(self, executor, shapes):
        self.shapes, self.replayed = shapes, []
        memory = executor._allocated
        send, compute = memory.staging.send, executor._compute
        memory.staging.send = lambda step: self.sent(send(step))
        self.run = lambda: compute(memory, self.tensors)

    def sent(self, tensors):
        self.tensors = tensors
        return tensors

    def shape_for(self, filled):
        return next_larger(
            [shape for shape in self.shapes if bool(shape.num_prompts) is bool(filled.num_prompts)], filled
        )

    def replay(self, shape):
        assert self.tensors.shape == shape
        self.replayed.append(shape)
        return self.run()


def serve(decoder, plan, on_card: bool, shapes=(), **sampling):
    engine = Engine(decoder, plan, executor=CudaExecutor(decoder, plan) if on_card else None)
    if shapes:
        engine.executor._allocated.graphs = PaddedSteps(engine.executor, shapes)
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(**{"max_tokens": 5 + index, "ignore_eos": True, **sampling})
        engine.add_request(EngineRequest(index, prompt, params))
    outputs, preemptions = {}, 0
    while engine.has_unfinished:
        for output in engine.step().finished:
            outputs[output.request_id] = list(output.token_ids)
            preemptions += output.num_preemptions
        engine.check()
    if shapes:
        assert set(engine.executor._allocated.graphs.replayed) == set(shapes)
    engine.close()
    return [outputs[index] for index in range(len(PROMPTS))], preemptions


def padded(decoder):
    """Every step runs padded: decode in four places, prompts beside it in steps of 10 and 14 rows."""
    plan = make_plan(decoder, max_num_seqs=4)
    ours, _ = serve(decoder, plan, True, (StepShape(4, 4, 0, 4), StepShape(10, 4, 2, 4), StepShape(14, 4, 3, 4)))
    return {"cuda": ours, "cpu": serve(decoder, plan, False)[0], "preemptions": 0}


def both(decoder, plan, **sampling):
    ours, preemptions = serve(decoder, plan, True, **sampling)
    return {"cuda": ours, "cpu": serve(decoder, plan, False, **sampling)[0], "preemptions": preemptions}


def reconfigured(decoder):
    """Blocks of 8 in the memory that blocks of 4 had, in the middle of the requests."""
    plan = make_plan(decoder)
    engine = Engine(decoder, plan, executor=CudaExecutor(decoder, plan))
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(EngineRequest(index, prompt, SamplingParams(max_tokens=5 + index, ignore_eos=True)))
    outputs, places = {}, []
    for _ in range(4):
        outputs |= {output.request_id: list(output.token_ids) for output in engine.step().finished}
    places.append(engine.executor._allocated.cache.memory.data_ptr())
    engine.reconfigure(make_plan(decoder, blocks=16, block_size=8))
    places.append(engine.executor._allocated.cache.memory.data_ptr())
    while engine.has_unfinished:
        outputs |= {output.request_id: list(output.token_ids) for output in engine.step().finished}
        engine.check()
    expected = serve(decoder, plan, False)[0]
    return {"cuda": [outputs[index] for index in range(len(PROMPTS))], "cpu": expected, "kept": places[0] == places[1]}


def main() -> None:
    torch.set_num_threads(1)
    llama = make_decoder()
    flat = make_decoder(layers=llama.spec.layers[:1])
    qwen = make_decoder(qk_norm=True, qkv_bias=True, model_type="qwen3", layers=flat.spec.layers)
    window = dataclasses.replace(llama.spec.layers[0], kind="sliding", window=6)
    gemma = make_decoder(
        norm_offset=True, sandwich_norms=True, norms_per_layer=4, hidden_act="gelu_pytorch_tanh", final_softcap=20.0,
        layers=(window, llama.spec.layers[0]), model_type="gemma2", attention_softcap=15.0,
    )  # fmt: skip
    results = {
        "llama": both(llama, make_plan(llama)),
        "qwen with a penalty": both(qwen, make_plan(qwen, block_size=8), repetition_penalty=1.7),
        "windows and caps": both(gemma, make_plan(gemma)),
        "recompute": both(flat, make_plan(flat, blocks=6), max_tokens=7),
    }
    swapping = make_plan(flat, blocks=6, swap=16, preemption_mode="swap")
    results["swap"] = both(flat, swapping, max_tokens=7)
    cuda_cache.STAGED_BYTES = 1
    results["swap block by block"] = both(flat, swapping, max_tokens=7)
    results["padded"] = padded(flat)
    results["other blocks"] = reconfigured(flat)
    drawn = [
        serve(flat, make_plan(flat, blocks=blocks), True, temperature=1.0, seed=4, max_tokens=4)[0]
        for blocks in (32, 6)
    ]
    results["drawn"] = {"cuda": drawn[0], "cpu": drawn[1], "preemptions": 0}
    print(json.dumps(results))


main()
