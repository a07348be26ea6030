"""A log beside the plan: the part that is off, the cause, the smallest cure, and the host's own constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.errors import UnknownNameError
from labkit.memory import plan
from labkit.memory.calibration import log_config
from labkit.memory.log_explanation import cures, explain_log, explain_log_file, explanation_json
from labkit.memory.logs import read_log, read_log_file
from labkit.memory.logs.record import LogRecord
from labkit.memory.questions import Question, smallest_utilization
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_catalogue import catalogue_model

GIB = 2**30
LOGS = Path(__file__).parent / "data" / "logs"


def explained(name, **names):
    return explain_log_file(LOGS / f"{name}.log", **names)


def test_rows_stand_beside_each_other_and_the_part_that_is_off_is_named():
    found = explained("v0-0.6.5-llama3-8b")
    rows = {row.part: row for row in found.rows}
    assert rows["weights"].log_bytes == round(14.96 * GIB)
    assert abs(rows["weights"].difference_bytes) < 0.05 * GIB
    assert not rows["weights"].is_off
    # 1.79 GiB of non-torch memory on one card is more than the formula's.
    assert (found.off, rows["non_torch"].is_off) == ("non_torch", True)
    assert "non-torch memory" in found.answer


def test_length_that_does_not_fit_gets_the_length_that_does():
    found = explained("v0-0.6.3-llama3-8b-3090")
    assert found.cause == "length_does_not_fit"
    assert dict(found.cures[0].changes) == {"max_model_len": 23648}
    # Case N07: chunked prefill with few batched tokens cures it without shortening.
    assert {"max_num_batched_tokens": 2048} in [dict(cure.changes) for cure in found.cures]


def test_every_single_cure_fits_under_the_calibrated_plan():
    found = explained("v0-0.6.3-llama3-8b-3090")
    for cure in found.cures[1:]:
        config = found.plan.config.replace(**cure.changes)
        again = plan(
            found.plan.model, found.plan.gpu, config, engine="vllm", engine_version="0.6.3",
            calibration=found.calibration,
        )  # fmt: skip
        assert again.margin_bytes >= 0, cure.text


def test_vllms_own_estimate_is_the_first_cure_also_without_a_known_card():
    found = explained("v1-0.11.0-gpt-oss-120b")
    assert dict(found.cures[0].changes) == {"max_model_len": 48608}
    assert any("the card" in note for note in found.notes)
    with_card = explained("v1-0.11.0-gpt-oss-120b", gpu="H100")
    assert with_card.plan is not None
    assert dict(with_card.cures[0].changes) == {"max_model_len": 48608}


def test_an_occupied_card():
    found = explained("v1-0.10.0-card-not-free")
    assert found.cause == "card_not_free"
    assert dict(found.cures[0].changes) == {"gpu_memory_utilization": 0.89}  # case D04


def test_the_samplers_out_of_memory_lowers_max_num_seqs_first():
    found = explained("v1-0.19.0-sampler-oom")
    assert found.cause == "sampler_out_of_memory"
    assert dict(found.cures[0].changes) == {"max_num_seqs": 256}  # case D05


def test_unknown_flags_and_missing_bfloat16():
    swap = explain_log(read_log("vLLM API server version 0.19.0\nerror: unrecognized arguments: --swap-space 4"))
    assert (swap.cause, "kv-offloading-size" in swap.cures[0].text) == ("unknown_flag", True)
    old = explain_log(read_log("Bfloat16 is only supported on GPUs with compute capability of at least 8.0"))
    assert dict(old.cures[0].changes) == {"dtype": "float16"}


@pytest.mark.parametrize(("total_gib", "smallest", "is_offered"), [(24.0, 0.947, True), (23.58, 0.963, False)])
def test_a_utilization_that_leaves_the_card_no_room_is_no_cure(total_gib, smallest, is_offered):
    """Above 0.95 the CUDA context and what the engine takes after its profile have no place."""
    card, config = GpuSpec("RTX 3090", round(total_gib * GIB)), EngineConfig(max_model_len=32768)
    model = catalogue_model("meta-llama/Llama-3.1-8B-Instruct")
    question = Question(model, card, config.replace(gpu_memory_utilization=0.9), "vllm", "0.6.3")
    assert smallest_utilization(question) == pytest.approx(smallest, abs=0.003)
    offered = [cure.changes for cure in cures("length_does_not_fit", question, LogRecord())]
    assert any("gpu_memory_utilization" in changes for changes in offered) == is_offered


@pytest.mark.parametrize(
    ("flags", "facts", "utilization"),
    [
        ({"gpu_memory_utilization": 0.8}, {"requested_bytes": 85, "total_bytes": 100}, 0.8),
        ({}, {"requested_bytes": 85, "total_bytes": 100}, 0.85),
        ({}, {"requested_bytes": 120, "total_bytes": 100}, 1.0),
        ({}, {"total_bytes": 100}, 0.9),
        ({}, {}, 0.9),
    ],
)
def test_the_utilization_of_a_log_is_the_flag_else_what_it_asked_of_the_card_else_the_versions(
    flags, facts, utilization
):
    assert log_config(LogRecord(flags=flags, facts=facts), 0.9).gpu_memory_utilization == utilization


def test_foreign_and_empty_text_get_a_clear_answer():
    for text in ("", "nothing of the kind"):
        found = explain_log(read_log(text))
        assert (found.cause, found.plan, found.rows) == ("not_vllm", None, ())
        assert "vLLM" in found.answer


def test_a_log_calibrates_the_next_question():
    record = read_log_file(LOGS / "v0-0.6.5-llama3-8b.log")
    model, card = catalogue_model("meta-llama/Llama-3.1-8B-Instruct"), GpuSpec("A100-80GB", round(79.22 * GIB))
    config = log_config(record, 0.9)
    options = {"engine": "vllm", "engine_version": "0.6.5"}
    plain = plan(model, card, config, **options)
    own = plan(model, card, config, calibration=record, **options)
    pools = [found.details["ranks"][0]["available_kv_bytes"] / GIB for found in (plain, own)]
    # The log's pool is 53.29 GiB: the formulas alone miss it by more than a GiB, its own constants do not.
    assert abs(pools[0] - 53.29) > 1
    assert pools[1] == pytest.approx(53.29, abs=0.03)
    # Weights halve and the constants stay: the next question is answered with this host's overheads.
    halved = plan(model, card, config.replace(quantization="fp8"), calibration=record, **options)
    gained = (halved.details["ranks"][0]["available_kv_bytes"] - own.details["ranks"][0]["available_kv_bytes"]) / GIB
    assert gained == pytest.approx(6.5, abs=0.1)
    assert any("calibrated by a log" in note for note in own.notes)


def test_a_quantised_copys_name_means_its_original_in_that_format():
    found = explained("v0-0.8.0-pp2-two-ranks")
    assert found.plan.model.weight_format.kind == "awq"
    assert found.plan.config.pipeline_parallel_size == 2


def test_json_is_plain_and_complete():
    found = explanation_json(explained("v1-0.19.0-gemma3-27b-h100"))
    assert json.loads(json.dumps(found)) == found
    assert found["parts"]["activation"]["log_gib"] == pytest.approx(3.99, abs=0.001)
    assert found["facts"]["kv_cache_tokens"] == 36560
    two = explanation_json(explained("v0-0.8.0-pp2-two-ranks"))
    assert two["ranks"]["PP1 TP0"]["available_kv_gib"] == pytest.approx(14.26, abs=0.001)


def test_wrong_names_are_refused():
    with pytest.raises(UnknownNameError):
        explained("v1-0.29-consumed", gpu="H1OO")
