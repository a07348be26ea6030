"""The paste box: vLLM's own words in, part by part and cures out; foreign and hostile text answered as text."""

from __future__ import annotations

import pytest

from labkit.widgets.log_box import LogBox

# Llama-3.1-8B: 32 layers × 2 × 8 heads × 128 × 2 B = 128 KiB a token, so 131,072 tokens need 16 GiB.
LOG = """INFO 11-30 10:00:00 [api_server.py:100] vLLM API server version 0.25.1
INFO 11-30 10:00:01 non-default args: {'model': 'meta-llama/Llama-3.1-8B-Instruct', 'max_model_len': 131072}
INFO 11-30 10:00:20 [gpu_model_runner.py:2000] Model loading took 14.9889 GiB and 4.2 seconds
ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which \
is larger than the available KV cache memory (4.21 GiB). Based on the available memory, the estimated maximum model \
length is 34480. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
"""


def explained(text: str, **names: str) -> LogBox:
    box = LogBox(**names)
    box.text.value = text
    box.button.click()
    return box


def test_a_length_error_is_answered_with_needed_available_and_a_cure():
    box = explained(LOG)
    assert "16.0 GiB" in box.answer.text
    assert "4.21 GiB" in box.answer.text
    assert "max_model_len" in box.answer.details
    assert ["weights", "15.0 GiB"] in [row[:2] for row in box.table.rows]


def test_a_named_card_puts_the_plan_beside_the_log():
    box = explained(LOG, gpu="RTX 4090")
    weights = next(row for row in box.table.rows if row[0] == "weights")
    assert weights[2].endswith("GiB")


@pytest.mark.parametrize("text", ["", "hello", "\x1b]52;c;x\x07<img src=x onerror=alert(1)>" * 50])
def test_text_that_is_no_log_is_said_to_be_none(text):
    box = explained(text)
    assert "vLLM" in box.answer.text
    assert "\x1b" not in box.answer.text + box.answer.details
    assert box.table.rows == []


def test_an_unknown_model_is_a_message_in_the_box():
    box = explained(LOG, model="no-such-model")
    assert box.answer.level == "bad"
    assert "no-such-model" in box.answer.text
