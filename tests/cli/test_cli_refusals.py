"""What `labkit simulate` says of traffic and settings that its card cannot serve."""

from __future__ import annotations

from typer.testing import CliRunner

from labkit.cli import app


def test_what_does_not_fit_fails_with_its_reason():
    done = CliRunner().invoke(app, ["simulate", "--model", "qwen3-8b", "--gpu", "A10", "--limit", "5"])
    assert done.exit_code == 2
    assert "why: " in done.output
    assert "would work: max_model_len" in done.output


def test_requests_that_were_refused_are_counted_with_the_reason():
    options = ["--model", "qwen3-8b", "--gpu", "A10", "--limit", "50", "--max-model-len", "1024"]
    done = CliRunner().invoke(app, ["simulate", *options])
    # The trace's first 50 requests hold ten of more than 1,024 tokens.
    assert "40 of 50 requests" in done.output
    assert "10 not served" in done.output
    assert "available: 1024 tokens" in done.output
