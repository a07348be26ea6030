"""`labkit explain-command` and `labkit diff` as a user types them."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from labkit.cli import app

SERVE = "vllm serve Qwen/Qwen3-8B --max-model-len 8k"


def run(*words: str) -> str:
    return CliRunner().invoke(app, list(words)).output


def test_a_command_is_planned_and_its_mistakes_are_named(tmp_path):
    said = run("explain-command", f"{SERVE} --blok-size 32", "--gpu", "A10")
    assert "refuses: --blok-size is not in vLLM 0.33.0; did you mean --block-size?" in said
    assert "requests of 8,000" in said
    script = tmp_path / "serve.sh"
    script.write_text(f"#!/bin/sh\nexec {SERVE} \\\n  --enforce-eager\n")
    found = json.loads(run("explain-command", str(script), "--gpu", "A10", "--json"))
    assert found["given"] == {"max_model_len": 8000, "enforce_eager": True}
    assert found["plan"]["verdict"] == "fits"


def test_two_commands_are_compared():
    said = run("diff", SERVE, f"{SERVE} --kv-cache-dtype fp8", "--gpu", "A10")
    assert "--kv-cache-dtype" in said
    assert "All together on A10: KV tokens" in said
    found = json.loads(run("diff", SERVE, f"{SERVE} --kv-cache-dtype fp8", "--gpu", "A10", "--json"))
    assert found["kv_cache_tokens"][1] == 2 * found["kv_cache_tokens"][0]
    assert run("diff", SERVE, SERVE, "--gpu", "A10").strip().startswith("Both commands mean the same")
