"""What a user brings along: commands, settings, logs and error lines into the panel's knobs and into an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

import labkit
from labkit.doctor.pasted import read_pasted
from labkit.errors import FileFormatError, LabkitError
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig
from labkit.widgets import Panel, PasteBox

LOGS = Path(__file__).resolve().parents[1] / "memory" / "data" / "logs"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.06 GiB"
SERVE = "vllm serve Qwen/Qwen3-8B --max-model-len 8k --kv-cache-dtype fp8"

# Llama-3.1-8B: 32 layers × 2 × 8 heads × 128 × 2 B = 128 KiB a token, so 131,072 tokens need 16 GiB.
LENGTH_LOG = """INFO 11-30 10:00:00 [api_server.py:100] vLLM API server version 0.25.1
INFO 11-30 10:00:01 non-default args: {'model': 'meta-llama/Llama-3.1-8B-Instruct', 'max_model_len': 131072}
INFO 11-30 10:00:20 [gpu_model_runner.py:2000] Model loading took 14.9889 GiB and 4.2 seconds
ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which \
is larger than the available KV cache memory (4.21 GiB). Based on the available memory, the estimated maximum model \
length is 34480. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
"""


@pytest.fixture
def panel():
    with labkit.Session("Qwen/Qwen3-8B", "A10", store="sqlite://") as session:
        made = Panel(session, EngineConfig(cpu_memory_gib=3.0, block_size=32))
        made.run_bar.paste.value = True
        yield made
        made.settle()


def paste(panel, text: str):
    panel.paste_box.text.value = text
    panel.paste_box.button.click()
    return panel.paste_box.answer


def test_a_command_sets_the_knobs_in_one_step_and_leaves_the_lab_alone(panel):
    answer = paste(panel, SERVE)
    assert (panel.config.max_model_len, panel.config.kv_cache_dtype, panel.config.block_size) == (8000, "fp8", 16)
    assert panel.config.cpu_memory_gib == 3.0
    assert answer.text == (
        "Taken over. Settings: max_model_len 8,000, kv_cache_dtype fp8; everything else as vLLM has it."
    )  # fmt: skip
    assert answer.level == "ok"
    panel.knob_set.undo()
    assert panel.config.block_size == 32


def test_what_vllm_would_refuse_stands_below_and_the_rest_is_taken(panel):
    answer = paste(panel, f"{SERVE} --blok-size 8 --cpu-offload-gb 4")
    assert answer.level == "warn"
    assert "did you mean --block-size?" in answer.details
    assert "--cpu-offload-gb is not in the plan" in answer.details
    assert panel.config.max_model_len == 8000


def test_a_command_for_another_model_gives_the_command_for_its_panel(panel):
    answer = paste(panel, "vllm serve openai/gpt-oss-20b --max-model-len 4096")
    assert "serves openai/gpt-oss-20b; here the model is Qwen/Qwen3-8B" in answer.text
    assert answer.copy == "labkit panel max_model_len=4096 --model=openai/gpt-oss-20b --gpu=A10"
    assert paste(panel, "vllm serve qwen3-8b").copy == ""


@pytest.mark.parametrize("text", ["block_size=64", "labkit panel 'block_size=64' --model=x --gpu=A10"])
def test_settings_as_text_are_taken(panel, text):
    paste(panel, text)
    assert panel.config.block_size == 64
    assert "no knob" in paste(panel, "blok_size=64").text
    assert panel.config.block_size == 64


def test_an_error_line_is_explained_and_moves_nothing(panel):
    before = panel.config
    answer = paste(panel, OOM)
    assert answer.level == "bad"
    assert "--gpu-memory-utilization down" in answer.text
    assert "labkit does not know this one" in paste(panel, "hello world").text
    assert panel.config == before


def test_a_log_shows_its_parts_and_each_cure_can_be_applied(panel):
    answer = paste(panel, (LOGS / "v1-0.19.0-gemma3-27b-h100.log").read_text())
    assert [row[0] for row in panel.paste_box.table.rows][:2] == ["card's total", "weights"]
    assert answer.buttons == ["Take its settings"]
    found = read_pasted(
        (LOGS / "v1-0.10.0-card-not-free.log").read_text(), load_model("Qwen/Qwen3-8B"), load_gpu("A10")
    )
    paste(panel, (LOGS / "v1-0.10.0-card-not-free.log").read_text())
    shown = [line.text for line in panel.paste_box.cures if line.text]
    assert shown == [cure.text for cure in found.cures][:4]
    index = next(at for at, cure in enumerate(found.cures) if cure.changes)
    panel.paste_box.cures[index].pressed = {"what": "Apply", "count": 1}
    assert all(getattr(panel.config, name) == value for name, value in found.cures[index].changes.items())


def test_nothing_pasted_says_what_to_paste(panel):
    assert "a vllm serve command, a log, or an error line" in paste(panel, "  ").text
    with pytest.raises(FileFormatError):
        read_pasted("")
    with pytest.raises(LabkitError):
        read_pasted("block_size=none")


def test_hostile_text_stays_text(panel):
    answer = paste(panel, "vllm serve '<img src=x onerror=alert(1)>\x1b]52;c;x\x07' --max-num-seqs 7")
    assert panel.config.max_num_seqs == 7
    assert "\x1b" not in answer.text + answer.details + answer.copy


def explained(text: str, **names: str) -> PasteBox:
    """A box of its own, without a panel."""
    box = PasteBox(**names)
    box.text.value = text
    box.button.click()
    return box


def test_alone_a_length_error_is_answered_with_needed_available_and_a_cure():
    box = explained(LENGTH_LOG)
    assert "16.0 GiB" in box.answer.text
    assert "4.21 GiB" in box.answer.text
    assert any("max_model_len" in line.text for line in box.cures)
    assert ["weights", "15.0 GiB"] in [row[:2] for row in box.table.rows]


def test_alone_there_is_nothing_to_set_and_no_button_for_it():
    for text in (LENGTH_LOG, SERVE, "block_size=64"):
        box = explained(text)
        assert [line.buttons for line in (box.answer, *box.cures)] == [[]] * 5
        assert "Taken over" not in box.answer.text
        box.answer.pressed = {"what": "Take its settings", "count": 1}
    assert box.answer.text == "Settings: block_size 64; everything else as vLLM has it."


def test_a_named_card_puts_the_plan_beside_the_log():
    box = explained(LENGTH_LOG, gpu="RTX 4090")
    weights = next(row for row in box.table.rows if row[0] == "weights")
    assert weights[2].endswith("GiB")


@pytest.mark.parametrize("text", ["", "hello", "\x1b]52;c;x\x07<img src=x onerror=alert(1)>" * 50])
def test_alone_text_of_no_kind_is_said_to_be_none(text):
    box = explained(text)
    assert box.answer.level in ("warn", "bad")
    assert "\x1b" not in box.answer.text + box.answer.details
    assert box.table.rows == []


def test_an_unknown_model_is_a_message_in_the_box():
    box = explained(LENGTH_LOG, model="no-such-model")
    assert box.answer.level == "bad"
    assert "no-such-model" in box.answer.text
