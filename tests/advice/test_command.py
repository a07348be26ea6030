"""Exported commands: only flags of the version, plain numbers, safe quoting, and a word for what cannot be carried."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from samples import sample_gpu, sample_plan

from labkit.advice import check_command, export_command, export_plan, known_versions, vllm_command
from labkit.advice.command import FORMS
from labkit.advice.vllm_check import check_with_vllm
from labkit.errors import LabkitError, OutOfRangeError
from labkit.memory import plan
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import DTYPES, KV_CACHE_DTYPES, EngineConfig

CONFIGS = st.builds(
    EngineConfig,
    max_model_len=st.none() | st.integers(1, 2**20),
    block_size=st.integers(1, 512),
    kv_cache_dtype=st.sampled_from(KV_CACHE_DTYPES),
    gpu_memory_utilization=st.floats(0.01, 1.0),
    max_num_seqs=st.none() | st.integers(1, 2048),
    max_num_batched_tokens=st.none() | st.integers(1, 65536),
    enable_chunked_prefill=st.booleans(),
    enable_prefix_caching=st.booleans(),
    enforce_eager=st.booleans(),
    swap_space=st.floats(0, 64),
    preemption_mode=st.sampled_from(("recompute", "swap")),
    num_gpu_blocks_override=st.none() | st.integers(1, 10**6),
    kv_cache_memory_bytes=st.none() | st.integers(1, 2**40),
    dtype=st.sampled_from(DTYPES),
    load_format=st.sampled_from(("auto", "dummy")),
    tensor_parallel_size=st.sampled_from((1, 2, 8)),
    data_parallel_size=st.sampled_from((1, 2)),
    enable_expert_parallel=st.booleans(),
    cpu_memory_gib=st.floats(0.1, 64),
)


def flags_in(words) -> dict[str, str]:
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


@settings(deadline=None)
@given(config=CONFIGS, version=st.sampled_from(known_versions()))
def test_every_command_parses_on_its_version_and_never_swaps(config, version):
    exported = export_command("org/model", config, version)
    assert check_command(exported.serve, version) == ()
    assert shlex.split(exported.serve.replace("\\\n", " ")) == list(exported.words)
    assert "--swap-space" not in exported.words
    assert "--trust-remote-code" not in exported.words
    assert not any(word.lower().endswith("k") and word[:-1].isdigit() for word in exported.words)
    left_out = {item.knob for item in exported.not_exported}
    assert {"swap_space"} <= left_out or config.swap_space == 0


@settings(deadline=None)
@given(name=st.text(max_size=60))
def test_any_model_name_stays_one_word_of_shell_docker_and_compose(name):
    exported = export_command(name, EngineConfig())
    assume(not os.path.isdir(exported.words[2]))
    assert len(shlex.split(exported.serve)) == 3
    docker = shlex.split(exported.docker.replace("\\\n", " "))
    assert docker[-2:] == ["serve", exported.words[2]]
    assert not exported.words[2].startswith("-")
    argument = exported.compose.splitlines()[6].removeprefix("      - ")
    assert json.loads(argument).replace("$$", "$") == exported.words[2]


def test_a_shell_runs_a_hostile_name_as_text(tmp_path):
    name = "$(touch pwned); `touch pwned` 'q' \"d\" && touch pwned"
    command = vllm_command(name, EngineConfig(max_num_seqs=8)).replace("vllm serve", "printf '%s|'", 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == f"{name}|--max-num-seqs|8|"
    assert list(tmp_path.iterdir()) == []


def test_compose_does_not_expand_a_dollar():
    """Compose replaces $NAME; a doubled one stays a dollar."""
    compose = export_command("org/$HOME", EngineConfig()).compose
    assert '      - "org/$$HOME"' in compose.splitlines()


def test_only_what_differs_from_the_versions_own_default_is_given():
    assert vllm_command("m", EngineConfig(), "0.33.0") == "vllm serve m"
    assert vllm_command("m", EngineConfig(gpu_memory_utilization=0.9), "0.17.1") == "vllm serve m"
    assert flags_in(export_command("m", EngineConfig(), "0.17.1").words) == {"--gpu-memory-utilization": "0.92"}
    old = flags_in(export_command("m", EngineConfig(gpu_memory_utilization=0.9), "0.6.6").words)
    assert old == {"--enable-prefix-caching": "", "--enable-chunked-prefill": ""}
    off = EngineConfig(enable_prefix_caching=False, enable_chunked_prefill=False, enforce_eager=True)
    assert set(flags_in(export_command("m", off, "0.33.0").words)) == {
        "--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--enforce-eager",
    }  # fmt: skip


def test_numbers_are_plain():
    config = EngineConfig(max_model_len=131072, kv_cache_memory_bytes=12_345_678_901, gpu_memory_utilization=0.85)
    words = flags_in(export_command("m", config).words)
    assert words["--max-model-len"] == "131072"
    assert words["--kv-cache-memory-bytes"] == "12345678901"
    assert words["--gpu-memory-utilization"] == "0.85"


@pytest.mark.parametrize(
    ("config", "version", "knob", "text"),
    [
        ({"swap_space": 4.0}, "0.33.0", "swap_space", "--kv-offloading-size"),
        ({"swap_space": 4.0}, "0.7.3", "swap_space", "vLLM 0.7.3 still has --swap-space"),
        ({"preemption_mode": "swap"}, "0.33.0", "preemption_mode", "computing again"),
        ({"block_size": 8}, "0.33.0", "block_size", "multiple of 16"),
        ({"block_size": 64}, "0.17.1", "block_size", "at most 32 on CUDA"),
        ({"block_size": 64}, "0.6.0", "block_size", "takes 8, 16, 32"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "0.10.2", "kv_cache_dtype", "takes auto, fp8"),
        ({"kv_cache_memory_bytes": 10**9}, "0.9.2", "kv_cache_memory_bytes", "known from vLLM 0.10"),
        ({"data_parallel_size": 2}, "0.7.3", "data_parallel_size", "known from vLLM 0.8"),
        ({"load_format": "dummy"}, "0.33.0", "load_format", "measuring"),
        ({"cpu_memory_gib": 4.0}, "0.33.0", "cpu_memory_gib", "card's own total"),
    ],
)
def test_what_cannot_be_carried_is_said_with_the_nearest_thing(config, version, knob, text):
    exported = export_command("m", EngineConfig(**config), version)
    item = next(item for item in exported.not_exported if item.knob == knob)
    assert text in item.reason
    assert f"--{knob.replace('_', '-')}" not in exported.words
    assert f"# not exported: {knob}" in exported.text()


def test_block_size_64_is_carried_since_0_18():
    assert "--block-size 64" in vllm_command("m", EngineConfig(block_size=64), "0.18.0")


def test_comments_say_what_changed_and_why():
    exported = export_command("m", EngineConfig(max_num_seqs=64), reasons={"max_num_seqs": "frees\n1.2 GiB"})
    assert exported.comments == ("for vLLM 0.33.0", "max_num_seqs: vLLM's own choice → 64: frees 1.2 GiB")
    assert exported.text().endswith("\nvllm serve m \\\n    --max-num-seqs 64\n")
    assert "are not recorded" in export_command("m", EngineConfig(), "0.99.0").comments[1]


def test_what_the_cpu_engine_resolved_for_itself_is_left_to_the_card():
    gpu = sample_gpu(name="cpu")
    exported = export_plan(sample_plan(EngineConfig(dtype="float32", cpu_memory_gib=1.0), gpu=gpu))
    assert "--dtype" not in exported.words
    assert [item.knob for item in exported.not_exported] == ["dtype", "cpu_memory_gib"]
    assert "--dtype" in export_plan(sample_plan(EngineConfig(dtype="float32"))).words


def test_only_what_was_asked_for_is_in_the_command_of_a_plan():
    model = load_model("qwen3-8b")
    asked = {"max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 1024}
    for gpu, engine in (("cpu", "labkit"), ("H100 SXM", "vllm")):
        card = load_gpu(gpu)
        bare = export_plan(plan(model, card, EngineConfig(), engine=engine))
        assert bare.words == ("vllm", "serve", "Qwen/Qwen3-8B")
        for name, value in asked.items():
            words = export_plan(plan(model, card, EngineConfig(**{name: value}), engine=engine)).words
            assert words[3:] == (f"--{name.replace('_', '-')}", str(value))
        whole = export_plan(plan(model, card, EngineConfig(**asked), engine=engine)).words
        assert set(whole[4::2]) == {"4096", "8", "1024"}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_carries_the_comments_and_what_is_left_out(form):
    exported = export_command("m", EngineConfig(max_num_seqs=64, swap_space=4.0))
    text = exported.text(form)
    assert text.startswith("# for vLLM 0.33.0\n# max_num_seqs: vLLM's own choice → 64: Most requests in one step\n")
    assert "\n# not exported: swap_space 4: removed in 0.18" in text
    assert text.endswith(getattr(exported, form).rstrip("\n") + "\n")


def test_an_unknown_form_is_refused():
    with pytest.raises(OutOfRangeError, match="there is no form 'helm'"):
        export_command("m", EngineConfig()).text("helm")


def test_docker_and_compose_mount_a_folder_and_share_memory(tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    exported = export_command(str(folder), EngineConfig(tensor_parallel_size=2), port=9000)
    words = shlex.split(exported.docker.replace("\\\n", " "))
    assert {"--ipc=host", "9000:8000", f"type=bind,source={folder},target=/models/my model,readonly"} <= set(words)
    assert words[words.index("--gpus") + 1] == "2"
    assert words[words.index("serve") + 1] == "/models/my model"
    for line in ("    ipc: host", "              count: 2", '      - "9000:8000"', '      - "--tensor-parallel-size"'):
        assert line in exported.compose.splitlines()
    # Compose's long form of a volume; JSON is YAML.
    volumes = [json.loads(line.removeprefix("      - ")) for line in exported.compose.splitlines() if '"bind"' in line]
    assert volumes == [{"type": "bind", "source": str(folder), "target": "/models/my model", "read_only": True}]


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(OutOfRangeError, match="port cannot be"):
        export_command("m", EngineConfig(), port=port)


def test_the_check_with_vllm_is_none_where_it_is_not_installed(tmp_path):
    assert check_with_vllm(["m"]) is None
    with pytest.raises(LabkitError, match="cannot ask vLLM"):
        check_with_vllm(["m"], python=str(tmp_path / "python"))


def test_the_check_with_vllm_gives_the_parsers_own_error(tmp_path, monkeypatch):
    """A package with vLLM's layout and a plain parser stands in for the real one."""
    for name, text in {
        "vllm/__init__.py": "__version__ = '0.33.0'",
        "vllm/utils/__init__.py": "",
        "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser",
        "vllm/engine/__init__.py": "",
        "vllm/engine/arg_utils.py": "class AsyncEngineArgs:\n    @staticmethod\n    def add_cli_args(parser):\n"
        "        parser.add_argument('--max-num-seqs', type=int)\n        return parser\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert check_with_vllm(["m", "--max-num-seqs", "8"], sys.executable).error == ""
    assert "unrecognized arguments: --swap-space" in check_with_vllm(["m", "--swap-space", "4"]).error
