"""What the command line says to a first user: refusals of vLLM, nothing as a value, a card that is not here."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from labkit import cli
from labkit.advice.claims import judge
from labkit.doctor.preflight import check_block_size, check_fit
from labkit.errors import LabkitError, OutOfRangeError, UnknownNameError
from labkit.memory import plan
from labkit.memory.machine import question_for
from labkit.memory.rules import vllm_rules
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig


@pytest.fixture
def call():
    """What a command prints; its own errors are raised."""

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli.app, list(arguments))
        if isinstance(done.exception, LabkitError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output

    return run


@pytest.mark.parametrize(
    ("version", "size", "why"),
    [
        # Of vLLM's CUDA backends FlashAttention, Triton and Flex take 16 n; until 0.17 the most was 32.
        ("0.33.0", 17, "such as 16 or 32"),
        ("0.33.0", 1, "such as 16"),
        ("0.33.0", 48, ""),
        ("0.33.0", 256, ""),
        ("0.17.0", 64, "at most 32"),
        ("0.17.0", 31, "such as 16 or 32"),
    ],
)
def test_block_sizes_that_no_backend_takes_name_the_nearest(version, size, why):
    found = vllm_rules(version).refused_block_size(size)
    assert why in found
    assert bool(found) == bool(why)
    notes = plan(load_model("Qwen/Qwen2-7B"), load_gpu("A10"), EngineConfig(block_size=size), engine="vllm",
                 engine_version=version).notes  # fmt: skip
    assert any(note.startswith(f"vLLM refuses block_size {size}") for note in notes) == bool(why)


def test_labkits_own_engine_refuses_no_block_size_of_vllm():
    found = plan(load_model("Qwen/Qwen2-7B"), load_gpu("A10"), EngineConfig(block_size=17), engine="labkit")
    assert not any("refuses" in note for note in found.notes)


def test_an_option_without_a_value_is_no_default(call):
    for flag in ("--max-model-len", "--block-size", "--kv-cache-dtype"):
        with pytest.raises(OutOfRangeError, match=f"{flag} has no value"):
            call("plan", flag, "")


def test_plan_says_that_vllm_refuses_before_the_table(call):
    said = call("plan", "--gpu", "A10", "--block-size", "17")
    assert said.index("vLLM refuses block_size 17") < said.index("Memory of the card")
    assert said.count("vLLM refuses") == 1
    assert "vLLM refuses block_size 17" in call("simulate", "--gpu", "A10", "--block-size", "17", "--limit", "1")


def test_a_plan_without_a_card_says_so(call, monkeypatch):
    monkeypatch.setattr("labkit.specs.gpu_loading.read_gpus", lambda *args: ())
    assert "no card is here" in call("plan", "--gpu", "auto")
    assert "no card is here" not in call("plan", "--gpu", "cpu")
    assert "no card is here" not in call("plan", "--gpu", "A10")


def test_engines_whose_steps_are_not_known_are_refused(call):
    with pytest.raises(UnknownNameError, match="vllm or labkit"):
        call("simulate", "--engine", "sglang", "--limit", "1")


def test_an_unknown_model_points_to_the_list():
    with pytest.raises(UnknownNameError, match="labkit models"):
        load_model("nosuch")


def test_sizes_of_the_machine_name_their_option():
    with pytest.raises(OutOfRangeError) as refused:
        question_for("Qwen/Qwen2-7B", "A10", free_gib=-1)
    assert refused.value.knob == "--free-gib"


@pytest.mark.parametrize("name", ["c4", "4", "C04", " c04 "])
def test_claims_go_by_short_names(name):
    assert judge(name).claim == "C04"


@pytest.mark.parametrize("name", ["C31", "C0", "", "C004", "x"])
def test_claims_that_are_none_name_all(name):
    with pytest.raises(UnknownNameError, match="C01 to C30"):
        judge(name)


def test_a_trace_of_a_header_alone_says_what_works(tmp_path, call):
    path = tmp_path / "head.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(LabkitError, match=r"a header alone.*labkit traces"):
        call("simulate", "--workload", str(path))


@pytest.mark.parametrize(
    ("flag", "value", "works"),
    [
        ("--gpu-memory-utilization", "90%", "0.9"), ("--gpu-memory-utilization", "half", "0.01"),
        ("--max-model-len", "long", "auto"), ("--block-size", "1.5", "1"),
    ],
)  # fmt: skip
def test_what_is_no_number_gets_one_that_works(call, flag, value, works):
    with pytest.raises(OutOfRangeError) as refused:
        call("plan", "--gpu", "A10", flag, value)
    assert refused.value.works == works


def test_more_than_the_card_has_cannot_be_free(call):
    with pytest.raises(OutOfRangeError, match="--free-gib"):
        call("plan", "--gpu", "A10", "--free-gib", "100")
    assert "fits" in call("plan", "--gpu", "A10", "--free-gib", "20")
    assert "fits" in call("plan", "--gpu", "A10", "--total-gib", "120", "--free-gib", "100")


def test_a_panel_for_a_model_that_is_none_is_not_written(call, tmp_path):
    for wrong in (("--model", "nosuch"), ("--gpu", "nosuch")):
        with pytest.raises(UnknownNameError):
            call("panel", "--no-start", "--out", str(tmp_path / "p.ipynb"), *wrong)
    assert not list(tmp_path.iterdir())


def test_preflight_gives_no_clean_bill_to_a_block_size_that_vllm_refuses():
    check = check_block_size(plan_of(block_size=17))
    assert (check.status, "multiple of 16" in check.cause) == ("problem", True)
    assert check_block_size(plan_of(block_size=48)).status == "ok"


def test_preflight_names_what_makes_a_doubtful_plan_sure():
    question = question_for("Qwen/Qwen2.5-32B-Instruct", "H100 SXM")
    check = check_fit(question.plan(), question)
    assert (check.status, check.fix.startswith("--quantization fp8 or ")) == ("warning", True)


def plan_of(**knobs):
    return plan(load_model("Qwen/Qwen2-7B"), load_gpu("A10"), EngineConfig(**knobs), engine="vllm")
