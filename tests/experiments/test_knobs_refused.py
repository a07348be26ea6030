"""Knobs that labkit's engine does not carry out are refused by name, before a worker starts."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest
import torch
from example_runs import example_workload

from labkit.engine.cuda_cache import cache_format
from labkit.engine.supported_knobs import CARD_KV_DTYPES, check_knobs
from labkit.errors import OutOfRangeError, UnknownNameError, UnsupportedError
from labkit.experiments import LabSession
from labkit.memory import plan as make_plan
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import KV_CACHE_DTYPES, EngineConfig

MODEL = "Qwen/Qwen3-0.6B"
FLAGS = sorted(json.loads(resources.files("labkit.advice").joinpath("vllm_flags.json").read_text())["flags"])
KNOBS = {knob.name for knob in EngineConfig.knobs()}
SPECULATIVE = re.compile(r"speculative|spec-(decod|method|model|tokens)|lookahead|ngram-prompt|typical-acceptance")

# What vLLM's documentation says they do moves memory that labkit does not plan.
MOVES_MEMORY = re.compile(r"lora|offload|context-parallel|enable-dbo|limit-mm-per-prompt")


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.strip("-").replace("-", "_") not in KNOBS])
def test_each_vllm_flag_that_is_no_knob_is_refused_by_name(flag):
    name = flag.strip("-").replace("-", "_")
    is_named = SPECULATIVE.search(flag) or MOVES_MEMORY.search(flag)
    wanted = UnsupportedError if is_named else UnknownNameError
    with pytest.raises(wanted, match=name):
        EngineConfig(**{name: 1})
    with pytest.raises(wanted, match=name):
        EngineConfig().replace(**{name: 1})


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"tensor_parallel_size": 3}, OutOfRangeError, "3 ranks do not divide 16 heads"),
        ({"pipeline_parallel_size": 2}, UnsupportedError, "pipeline_parallel_size = 2"),
        ({"data_parallel_size": 4}, UnsupportedError, "data_parallel_size = 4"),
        ({"enable_expert_parallel": True}, UnsupportedError, "enable_expert_parallel = True"),
        ({"quantization": "gptq"}, UnsupportedError, "gptq"),
        ({"quantization": "mxfp4"}, UnsupportedError, "mxfp4"),
        ({"quantization": "no such thing"}, UnsupportedError, "no such thing"),
        ({"quantization": "awq"}, OutOfRangeError, "AutoAWQ"),
    ],
)
def test_knobs_of_the_engine_are_refused_before_a_worker_starts(changes, error, named, tmp_path):
    knobs = {"cpu_memory_gib": 8.0, "max_model_len": 512, **changes}
    with LabSession(MODEL, "cpu", example_workload(), config=EngineConfig(**knobs), store=tmp_path / "runs") as session:
        with pytest.raises(error, match=re.escape(named)) as caught:
            session.run()
        assert caught.value.knob in changes
        assert caught.value.works
        assert session.worker_pid is None
        assert session.records() == ()


def test_all_lacking_knobs_are_in_one_message():
    plan = make_plan(load_model(MODEL), load_gpu("H200"), EngineConfig(pipeline_parallel_size=2, data_parallel_size=2))
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size = 2, data_parallel_size = 2"):
        check_knobs(plan)


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_kv_types_of_a_card_are_those_that_its_cache_takes(kv_cache_dtype):
    spec, plan = load_model(MODEL), make_plan(load_model(MODEL), load_gpu("H200"), EngineConfig(max_model_len=512))
    plan = type(plan)(**{**vars(plan), "config": plan.config.replace(kv_cache_dtype=kv_cache_dtype)})
    names = (kv_cache_dtype, getattr(torch, kv_cache_dtype, torch.bfloat16))
    if kv_cache_dtype in CARD_KV_DTYPES:
        check_knobs(plan)
        cache_format(spec, 16, *names)
        return
    for refuses in (lambda: check_knobs(plan), lambda: cache_format(spec, 16, *names)):
        with pytest.raises(UnsupportedError, match=kv_cache_dtype) as caught:
            refuses()
        assert caught.value.knob == "kv_cache_dtype"


def test_what_the_engine_has_is_not_refused():
    config = EngineConfig(
        max_model_len=512, enforce_eager=True, swap_space=1.0, preemption_mode="swap", quantization="fp8",
        kv_cache_dtype="fp8", enable_prefix_caching=False, enable_chunked_prefill=False, load_format="dummy",
        num_gpu_blocks_override=64, kv_cache_memory_bytes=2**30, disable_hybrid_kv_cache_manager=True, dtype="float16",
    )  # fmt: skip
    for gpu in ("H200", "cpu"):
        check_knobs(make_plan(load_model(MODEL), load_gpu(gpu), config))
