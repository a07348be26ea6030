"""The command line: knobs as options, JSON alone on standard output, errors as one message without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from labkit import cli
from labkit.errors import LabkitError
from labkit.specs.engine_config import EngineConfig

LLAMA = ["--model", "llama-3.1-8b-instruct", "--gpu", "H100 SXM"]


def run(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments))


def run_main(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `labkit …`, in this process."""
    monkeypatch.setattr(sys, "argv", ["labkit", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def plan_json(*arguments: str) -> dict:
    done = run("plan", *LLAMA, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_plan_prints_one_json_object_with_the_agreed_names():
    found = plan_json()
    for name in (
        "total_gib", "budget_gib", "weights_gib", "activation_gib", "non_torch_gib", "cuda_graphs_gib", "kv_cache_gib",
        "block_bytes", "num_gpu_blocks", "kv_cache_tokens", "max_concurrency", "max_model_len_that_fits", "verdict",
        "binding_limit", "uncertainty",
    ):  # fmt: skip
        assert name in found


def test_plan_takes_vllms_flags():
    # 32 layers × 2 × 8 heads × 128 × 1 B × 32 tokens = 2 MiB
    found = plan_json("--block-size", "32", "--kv-cache-dtype", "fp8", "--max-model-len", "8192", "--enforce-eager")
    assert found["block_bytes"] == 2 * 2**20
    assert found["cuda_graphs_gib"] == 0
    assert found["config"]["max_model_len"] == 8192


def test_available_kv_overrides_what_the_budget_would_leave():
    # The golden table: 40 GiB of KV at 8,192 tokens is 20,480 blocks, 327,680 tokens, 40 requests.
    found = plan_json("--available-kv-gib", "40", "--max-model-len", "8192")
    assert (found["num_gpu_blocks"], found["kv_cache_tokens"], found["max_concurrency"]) == (20480, 327680, 40.0)


def test_every_knob_is_an_option_with_its_own_help():
    import typer.main

    command = typer.main.get_command(cli.app).commands["plan"]
    by_name = {parameter.name: parameter for parameter in command.params}
    for knob in EngineConfig.knobs():
        assert knob.help in by_name[knob.name].help
        assert (knob.flag or f"--{knob.name.replace('_', '-')}") in by_name[knob.name].opts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--gpu", "H10"], "no GPU called"),
        (["plan", "--model", "./nothing.gguf"], "nothing.gguf"),
        (["plan", "--model", "llama-9"], "llama-9"),
        (["plan", "--block-size", "0"], "block_size"),
        (["plan", "--kv-cache-dtype", "fp9"], "fp8"),
        (["run", "--workload", "no-such-trace"], "no-such-trace"),
        (["runs", "--store", "/proc/nowhere/runs.sqlite3"], "/proc/nowhere"),
        (["runs", "--export-json", "no-such-run"], "there is no store"),
    ],
)
def test_bad_input_ends_in_one_message(monkeypatch, capsys, arguments, words):
    code, out, err = run_main(monkeypatch, capsys, *arguments)
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_unknown_option_names_the_nearest():
    done = run("plan", "--blok-size", "3")
    assert done.exit_code == 2
    assert "--block-size" in done.output


def test_interrupt_says_what_is_kept(monkeypatch, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130
    assert "kept" in capsys.readouterr().err


def test_interrupt_inside_a_command_says_what_is_kept(monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "show_table", interrupted)
    code, _, err = run_main(monkeypatch, capsys, "gpus")
    assert code == 130
    assert "kept" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_terminals_that_are_not_utf_8_get_a_plan(encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    words = [sys.executable, "-m", "labkit", "plan", *LLAMA]
    done = subprocess.run(words, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"KV cache" in done.stdout
    assert done.stderr == b""


def test_control_characters_of_a_message_do_not_reach_the_terminal(monkeypatch, capsys):
    def failing() -> None:
        raise LabkitError("a\x1b]52;c;x\x07b [red]c[/red]")

    monkeypatch.setattr(cli, "app", failing)
    with pytest.raises(SystemExit):
        cli.main()
    err = capsys.readouterr().err
    assert "\x1b]" not in err
    assert "[red]c[/red]" in err


@pytest.mark.parametrize("command", ["models", "gpus", "traces"])
def test_lists_print(command):
    done = run(command)
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) > 3


def test_numbers_mean_what_vllms_own_command_line_means():
    # vLLM's human_readable_int: 8k is 8,000 and 8K is 8,192.
    assert plan_json("--max-model-len", "8k")["config"]["max_model_len"] == 8000
    assert plan_json("--max-model-len", "8K")["config"]["max_model_len"] == 8192
    assert plan_json("--max-num-seqs", "auto")["config"]["max_num_seqs"] == 1024


def test_a_plan_that_does_not_fit_says_what_would():
    said = run("plan", "--model", "qwen3-8b", "--gpu", "A10").output
    assert "would work: --kv-cache-dtype fp8: fits then" in said
    # 70.6e9 parameters × 2 B are 131 GiB: eight A10s of 22 GiB hold them, four do not.
    said = run("plan", "--model", "llama-3.1-70b-instruct", "--gpu", "A10").output
    assert "would work: --tensor-parallel-size 8 --max-model-len" in said
    assert "missing" in said
    assert "would work" not in run("plan", *LLAMA).output


def test_help_gives_every_unit_in_words():
    for command in ("tune", "calibrate", "plan"):
        said = run(command, "--help").output
        assert " ." not in said
        assert ("econds for" in said) == (command != "plan")


def test_version():
    import labkit

    assert run("--version").output.strip() == f"labkit {labkit.__version__}"


def test_an_exported_command_names_the_model_as_the_hub_does(tmp_path, monkeypatch):
    assert "serve openai/gpt-oss-20b" in run("export", "--model", "gpt-oss-20b").output
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt-oss-20b").mkdir()
    assert "serve gpt-oss-20b" in run("export", "--model", "gpt-oss-20b").output


def test_a_bare_out_of_memory_line_is_explained_as_well(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 22.06 GiB\n")
    said = run("explain-log", str(log)).output
    assert "out-of-memory" in said
    assert "--gpu-memory-utilization down" in said
    assert "no such file" in run_error("explain-log", str(tmp_path / "none.log"))


def run_error(*arguments: str) -> str:
    return str(run(*arguments).exception)
