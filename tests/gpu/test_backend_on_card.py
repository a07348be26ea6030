"""The worker's backend with its weights on a card: run, other knobs, run again, and the measured parts."""

from __future__ import annotations

import gc

import pytest

from labkit.experiments.engine_backend import EngineBackend
from labkit.experiments.run import RunOptions
from labkit.experiments.serialise import to_plain
from labkit.memory import plan as make_plan
from labkit.specs import load_gpu, load_model, synthetic_workload
from labkit.specs.engine_config import EngineConfig


@pytest.fixture
def backend():
    backend = EngineBackend()
    yield backend
    backend.close()


def plan_of(**knobs):
    base = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 1024, "gpu_memory_utilization": 0.1}
    return make_plan(load_model("Qwen/Qwen3-0.6B"), load_gpu("H200"), EngineConfig(**{**base, **knobs}))


def test_runs_under_changed_knobs_keep_the_weights(backend):
    import torch

    events, workload = [], to_plain(synthetic_workload(6, input_lengths=200, output_lengths=20, seed=1))
    model = to_plain(load_model("Qwen/Qwen3-0.6B"))
    load = {"model": model, "source": "", "dtype": "auto", "load_format": "dummy", "device": "cuda"}
    backend.load(load, events.append, lambda: False)
    place = backend._decoder.weights.embedding.data_ptr()
    for knobs in ({}, {"block_size": 32}, {"enforce_eager": True, "kv_cache_dtype": "fp8"}):
        plan = plan_of(**knobs)
        backend.configure({"plan": to_plain(plan)}, events.append, lambda: False)
        run = {"workload": workload, "options": to_plain(RunOptions())}
        answer = backend.run(run, events.append, lambda: False)
        assert answer["status"] == "finished"
        parts = answer["memory_parts"]
        assert abs(parts["kv_cache"] - plan.breakdown.kv_cache_bytes) < 0.05 * plan.breakdown.kv_cache_bytes
        assert (parts["cuda_graphs"] == 0) is ("enforce_eager" in knobs)
    assert backend._decoder.weights.embedding.data_ptr() == place
    backend.close()
    gc.collect()
    torch.cuda.empty_cache()
    # What stays are cuBLAS's workspaces of 32 MiB, one for the steps' stream and one for that of captures.
    assert torch.cuda.memory_allocated() < 2**27
