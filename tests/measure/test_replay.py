"""The command for ncu carries a launch whole."""

import subprocess
import sys

import pytest

from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.replay import main, read_job, replay_of


@pytest.mark.parametrize(
    ("shape", "variant"),
    [
        (AttentionShape(BatchShape((100, 7), (1, 1), 4), window=64, kv_cache_dtype="fp8"), "full"),
        (AttentionShape(BatchShape((64,), (32,)), 128, 1, 576, v_head_dim=512, is_latent=True), "prefill"),
    ],
)
def test_what_is_written_is_read(shape, variant):
    replay = replay_of(shape, variant)
    assert replay.command[:3] == (sys.executable, "-m", "labkit.measure.replay")
    assert read_job(replay.command[3]) == (shape, variant)


def test_usage_is_said(capsys):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_without_a_card_it_fails():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    command = replay_of(AttentionShape(BatchShape.decode(1, 16))).command
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
