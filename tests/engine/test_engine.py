"""What a caller sees of `Engine`: refusals, ends, cancellation, streaming, counts, and the order of work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labkit.engine import CACHED_BLOCK, FREE_BLOCK, Engine, EngineRequest, SamplingParams
from labkit.engine.simulation import VirtualExecutor, reference_tokens, virtual_model
from labkit.errors import DoesNotFitError, OutOfRangeError


@pytest.fixture
def virtual(make_plan):
    """An engine on a virtual clock; keywords are knobs, `blocks` and `swap` the pools."""

    def make(detokenize=None, **knobs) -> Engine:
        plan = make_plan(virtual_model(), **knobs)
        executor = VirtualExecutor(plan)
        return Engine(None, plan, executor=executor, clock=executor.clock, detokenize=detokenize)

    return make


def test_import_needs_no_torch():
    code = "import sys, labkit.engine, labkit.engine.fault_simulation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("knobs", "prompt", "max_tokens", "knob", "works"),
    [
        ({"blocks": 4, "block_size": 4}, 17, 1, "num_gpu_blocks", "17 tokens"),
        ({"blocks": 4, "block_size": 4}, 10, 8, "num_gpu_blocks", "17 tokens"),
        ({"max_model_len": 20}, 20, 1, "max_model_len", "20 tokens"),
        ({"max_model_len": 20}, 10, 11, "max_model_len", "20 tokens"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 16}, 17, 1, "max_num_batched_tokens", "16 tokens"),
    ],
)
def test_request_that_can_never_run_is_refused_with_reasons(
    virtual, greedy_request, knobs, prompt, max_tokens, knob, works
):
    engine = virtual(**knobs)
    with pytest.raises(DoesNotFitError) as caught:
        engine.add_request(greedy_request(1, (5,) * prompt, max_tokens))
    assert caught.value.needed
    assert caught.value.available
    assert works in caught.value.works
    assert caught.value.knob == knob
    assert not engine.has_unfinished


@pytest.mark.parametrize(("prompt", "max_tokens"), [(16, 1), (10, 7), (1, 16)])
def test_largest_request_that_is_said_to_fit_fits(virtual, greedy_request, drain, prompt, max_tokens):
    engine = virtual(blocks=4, block_size=4)
    engine.add_request(greedy_request(1, (5,) * prompt, max_tokens))
    output = drain(engine)[1]
    assert (output.finish_reason, len(output.token_ids)) == ("length", max_tokens)


def test_lone_request_that_outgrows_the_pool_ends_with_the_reason(virtual, drain):
    engine = virtual(blocks=4, block_size=4)
    request = EngineRequest(1, (5,) * 10, SamplingParams(max_tokens=200))
    engine.add_request(request)
    output = drain(engine)[1]
    if output.finish_reason != "stop":
        assert "16 tokens" in output.finish_reason
        assert output.finish_reason.startswith("length: ")
        assert len(output.token_ids) == 16 - 10 + 1
    assert list(output.token_ids) == reference_tokens(request, len(output.token_ids))


@pytest.mark.parametrize(
    "request_",
    [
        EngineRequest(1, ()),
        EngineRequest(1, (-1,)),
        EngineRequest(1, (50,)),
        EngineRequest(1, ("a",)),
        EngineRequest(1, (True,)),
        EngineRequest(1, (1.0,)),
        EngineRequest(1, (5,), SamplingParams(stop="x")),
        EngineRequest(0, (5,)),
    ],
)
def test_bad_request_is_refused_alone(virtual, drain, greedy_request, request_):
    engine = virtual()
    engine.add_request(greedy_request(0, (5, 6), 3))
    with pytest.raises(OutOfRangeError):
        engine.add_request(request_)
    assert list(drain(engine)) == [0]


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"min_tokens": 17},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"seed": 2**64},
        {"stop": ("",)},
        {"stop": ("x",) * 17},
        {"stop": (3,)},
    ],
)
def test_sampling_parameters_out_of_range_name_the_parameter(values):
    with pytest.raises(OutOfRangeError) as caught:
        SamplingParams(**values)
    assert caught.value.knob == next(iter(values))


def test_plan_without_blocks_or_with_open_knobs_is_refused(virtual, make_plan):
    with pytest.raises(DoesNotFitError):
        virtual(blocks=0)
    with pytest.raises(OutOfRangeError, match="max_num_seqs"):
        virtual(max_num_seqs=None)


def test_failed_reconfigure_leaves_the_engine_as_it_was(virtual, make_plan, greedy_request, drain):
    engine = virtual()
    engine.add_request(greedy_request(0, (5, 6, 7), 6))
    engine.step()
    with pytest.raises(DoesNotFitError):
        engine.reconfigure(make_plan(virtual_model(), blocks=0))
    assert len(drain(engine)[0].token_ids) == 6


def test_reconfigured_too_small_ends_what_no_longer_fits(virtual, make_plan, greedy_request, drain):
    engine = virtual()
    engine.add_request(greedy_request(0, (5,) * 40, 20))
    engine.add_request(greedy_request(1, (5,) * 3, 5))
    engine.step()
    engine.reconfigure(make_plan(virtual_model(), blocks=4))
    outputs = drain(engine)
    assert outputs[0].finish_reason.startswith("refused: ")
    assert outputs[1].finish_reason == "length"


def test_cancel_while_waiting_running_swapped_and_never_there(virtual, greedy_request, drain):
    engine = virtual(blocks=12, swap=12, preemption_mode="swap", max_num_seqs=3, block_size=4)
    for request_id in range(4):
        engine.add_request(greedy_request(request_id, (5 + request_id,) * 8, 30))
    while not any(entry.swap_table for entry in engine.scheduler.waiting):
        engine.step()
    swapped = next(entry.request.request_id for entry in engine.scheduler.waiting if entry.swap_table)
    running = engine.scheduler.running[0].request.request_id
    assert all(engine.abort(request_id) for request_id in (swapped, running, 3))
    assert not engine.abort(77)
    assert not engine.abort(3)
    engine.check()
    outputs = drain(engine)
    assert {i for i, output in outputs.items() if output.finish_reason == "cancelled"} == {swapped, running, 3}
    assert len(outputs) == 4
    assert engine.scheduler.swap_pool.num_used == 0


def test_tokens_stream_in_order_and_match_the_final_output(virtual, greedy_request):
    engine = virtual()
    for request_id in range(3):
        engine.add_request(greedy_request(request_id, (request_id + 5, 7), 6))
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while engine.has_unfinished:
        result = engine.step()
        for output in result.outputs:
            streamed[output.request_id].append(output.token_id)
        for output in result.finished:
            assert tuple(streamed[output.request_id]) == output.token_ids
            assert len(output.token_times_s) == 6
            assert output.first_token_s == output.token_times_s[0]
            assert output.finish_s == output.token_times_s[-1]
            assert list(output.token_times_s) == sorted(output.token_times_s)


def test_step_counts_add_up(virtual, greedy_request):
    engine = virtual(max_num_batched_tokens=10, block_size=4, enable_prefix_caching=False)
    engine.add_request(greedy_request(0, (5,) * 4, 9))
    first = engine.step()
    assert (first.num_tokens, first.num_prefill_tokens, first.num_decode_tokens) == (4, 4, 0)
    engine.add_request(greedy_request(1, (6,) * 15, 9))
    second = engine.step()
    assert (second.num_tokens, second.num_prefill_tokens, second.num_decode_tokens) == (10, 9, 1)
    assert (second.num_running, second.num_waiting) == (2, 0)
    assert second.num_blocks_used == 2 + 3
    assert second.num_tokens_stored == 5 + 9
    assert second.duration_s > 0


def test_decoding_goes_on_in_each_step_beside_a_long_prompt(virtual, greedy_request):
    engine = virtual(max_num_batched_tokens=8, blocks=200)
    engine.add_request(greedy_request(0, (5,), 50))
    engine.step()
    engine.add_request(greedy_request(1, (6,) * 100, 2))
    for _ in range(14):
        result = engine.step()
        assert 0 in {output.request_id for output in result.outputs}


def test_without_chunking_a_prompt_goes_in_whole(virtual, greedy_request):
    engine = virtual(max_num_batched_tokens=20, enable_chunked_prefill=False)
    engine.add_request(greedy_request(0, (5,) * 12, 4))
    engine.add_request(greedy_request(1, (6,) * 12, 4))
    assert engine.step().num_prefill_tokens == 12
    assert engine.step().num_prefill_tokens == 12


def test_first_come_first_served_no_overtaking(virtual, greedy_request):
    engine = virtual(blocks=10, block_size=4, enable_prefix_caching=False)
    engine.add_request(greedy_request(0, (5,) * 20, 10))
    engine.add_request(greedy_request(1, (6,) * 30, 2))
    engine.add_request(greedy_request(2, (7,), 2))
    order = []
    while engine.has_unfinished:
        order += [output.request_id for output in engine.step().finished]
    assert order[0] == 0


def test_equal_prompts_share_blocks_and_say_so(virtual, greedy_request, drain):
    engine = virtual(block_size=4)
    engine.add_request(greedy_request(0, tuple(range(1, 18)), 2))
    drain(engine)
    assert engine.block_map().count(CACHED_BLOCK) == 4
    engine.add_request(greedy_request(1, tuple(range(1, 18)), 2))
    engine.add_request(greedy_request(2, tuple(range(1, 17)), 2))
    result = engine.step()
    assert result.num_tokens == 1 + 4
    outputs = drain(engine)
    assert (outputs[1].num_cached_tokens, outputs[2].num_cached_tokens) == (16, 12)


def test_block_map_names_owners(virtual, greedy_request, drain):
    engine = virtual(blocks=8, block_size=4, enable_prefix_caching=False)
    engine.add_request(greedy_request(7, (5,) * 6, 3))
    engine.add_request(greedy_request(9, (6,) * 3, 1))
    assert engine.block_map() == (FREE_BLOCK,) * 8
    engine.step()
    owners = engine.block_map()
    assert owners.count(7) == 2
    assert owners.count(FREE_BLOCK) == 6
    drain(engine)
    assert engine.block_map() == (FREE_BLOCK,) * 8


def test_swapped_request_comes_back_with_its_kv_not_computed_again(virtual, greedy_request):
    def computed(mode: str) -> tuple[int, int]:
        engine = virtual(blocks=12, swap=20, block_size=4, preemption_mode=mode, enable_prefix_caching=False)
        for request_id in range(3):
            engine.add_request(greedy_request(request_id, (5 + request_id,) * 9, 12))
        tokens = preemptions = 0
        while engine.has_unfinished:
            result = engine.step()
            tokens, preemptions = tokens + result.num_tokens, preemptions + result.num_preemptions
        return tokens, preemptions

    needed = 3 * (9 + 12 - 1)
    assert computed("swap")[0] == needed
    assert computed("recompute")[0] > needed
    assert min(computed("swap")[1], computed("recompute")[1]) > 0


def test_ends_at_max_tokens_end_token_stop_token_and_not_before_min_tokens(virtual, drain):
    prompt = (3, 14, 15)
    output = reference_tokens(EngineRequest(0, prompt), 40)
    stop_id = output[5]
    first = output.index(stop_id)
    engine = virtual()
    cases = {
        0: SamplingParams(max_tokens=3, ignore_eos=True),
        1: SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop_id,)),
        2: SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop_id,), min_tokens=first + 2),
    }
    for request_id, sampling in cases.items():
        engine.add_request(EngineRequest(request_id, prompt, sampling))
    outputs = drain(engine)
    assert (outputs[0].finish_reason, len(outputs[0].token_ids)) == ("length", 3)
    assert (outputs[1].finish_reason, len(outputs[1].token_ids)) == ("stop", first + 1)
    assert len(outputs[2].token_ids) >= first + 2
    assert all(list(entry.token_ids) == output[: len(entry.token_ids)] for entry in outputs.values())


def test_stop_string_that_spans_tokens_ends_the_request(virtual, drain):
    def detokenize(token_ids):
        return "".join(f"<{token_id}>" for token_id in token_ids)

    prompt = (3, 14, 15)
    output = reference_tokens(EngineRequest(0, prompt), 20)
    engine = virtual(detokenize=detokenize)
    stop = f"{output[7]}><{output[8]}"
    engine.add_request(EngineRequest(0, prompt, SamplingParams(max_tokens=20, ignore_eos=True, stop=stop)))
    engine.add_request(EngineRequest(1, prompt, SamplingParams(max_tokens=20, ignore_eos=True, stop=("never",))))
    outputs = drain(engine)
    assert outputs[0].finish_reason == "stop"
    assert outputs[0].token_ids == tuple(output[:9])
    assert len(outputs[1].token_ids) == 20


def test_failing_detokenizer_ends_its_own_request_only(virtual, drain):
    def detokenize(token_ids):
        raise ValueError("no such \x1b[31mbyte")

    engine = virtual(detokenize=detokenize)
    engine.add_request(EngineRequest(0, (5,), SamplingParams(max_tokens=9, ignore_eos=True, stop=("x",))))
    engine.add_request(EngineRequest(1, (5,), SamplingParams(max_tokens=9, ignore_eos=True)))
    outputs = drain(engine)
    assert outputs[0].finish_reason == "error: the detokenizer failed: no such [31mbyte"
    assert (outputs[1].finish_reason, len(outputs[1].token_ids)) == ("length", 9)


def test_close_twice_and_step_of_an_idle_engine(virtual, greedy_request):
    engine = virtual()
    result = engine.step()
    assert (result.num_tokens, result.outputs, result.finished) == (0, (), ())
    engine.add_request(greedy_request(0, (5,), 3))
    engine.close()
    engine.close()


def test_thrashing_request_is_sent_back_few_times(virtual, greedy_request):
    """Ten requests of 80 tokens in a pool for three: without headroom each would be sent back again and again."""
    engine = virtual(blocks=60, block_size=4, max_num_seqs=10, enable_prefix_caching=False)
    for request_id in range(10):
        engine.add_request(greedy_request(request_id, (5 + request_id,) * 20, 60))
    preemptions = {}
    while engine.has_unfinished:
        for output in engine.step().finished:
            preemptions[output.request_id] = output.num_preemptions
    assert len(preemptions) == 10
    assert max(preemptions.values()) <= 3
