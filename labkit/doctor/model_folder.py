"""`labkit doctor --model-folder`: is all there, whole and of one piece, before a server spends a minute on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit import format as shown
from labkit.doctor.check import Check, Examination
from labkit.doctor.folder_files import is_lfs_pointer, unfinished_files
from labkit.doctor.tokenizer_files import tokenizer_checks
from labkit.doctor.weight_files import gguf_checks, weight_checks
from labkit.errors import LabkitError
from labkit.specs.config_fields import read_config_file
from labkit.specs.families import find_family
from labkit.specs.model_config import model_from_config
from labkit.specs.model_spec import ModelSpec
from labkit.text import plain

KNOWN_QUANTISATIONS = frozenset(
    {"awq", "gptq", "fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "bitsandbytes", "modelopt", "modelopt_fp4",
     "auto-round", "auto_round"}
)  # fmt: skip


def examine_folder(folder: str | os.PathLike[str]) -> Examination:
    """Every check of a model folder or GGUF file; nothing is written and no code of it is run.

    Args:
        folder: of config.json, that file itself, or a .gguf file.
    """
    path = Path(folder).expanduser()
    path = path.parent if path.name == "config.json" and path.is_file() else path
    title = f"model {plain(path.name or path, 200)}"
    if path.suffix.lower() == ".gguf" and path.is_file():
        return Examination(title, tuple(gguf_checks(path, has_tokenizer=False)))
    if not path.is_dir():
        return Examination(title, (Check(
            "folder", "problem", f"there is no folder {plain(path, 200)}", "the path is wrong or not mounted here",
            "give the folder that holds config.json",
        ),))  # fmt: skip
    try:
        return Examination(title, tuple(_folder_checks(path)))
    except OSError as error:
        return Examination(title, (Check(
            "folder", "problem", plain(error, 300), "this user may not read it, or the disk fails",
            f"ls -l {plain(path, 200)}",
        ),))  # fmt: skip


def _folder_checks(folder: Path) -> list[Check]:
    checks = unfinished_files(folder)
    config_check, config = check_config_file(folder)
    checks.append(config_check)
    if config is None:
        ggufs = sorted(folder.glob("*.gguf"))
        if ggufs:
            return [*checks, *gguf_checks(ggufs[0], has_tokenizer=(folder / "tokenizer.json").is_file())]
        return checks
    spec_check, spec = check_model(config, folder)
    checks += [spec_check, check_remote_code(config, folder), check_quantisation(config)]
    checks += weight_checks(folder, config, spec)
    checks += tokenizer_checks(folder, config)
    optional = (check_generation(folder), check_pooling(folder, spec))
    return [*checks, *(check for check in optional if check is not None)]


def check_config_file(folder: Path) -> tuple[Check, dict[str, Any] | None]:
    """config.json itself: there, JSON, no pointer; and what lies there instead."""
    path = folder / "config.json"
    if not path.is_file():
        return _no_config(folder), None
    if is_lfs_pointer(path):
        return Check(
            "config", "problem", "config.json is a Git LFS pointer", "the repository was cloned without git-lfs",
            f"cd {plain(folder, 200)} && git lfs install && git lfs pull",
        ), None  # fmt: skip
    try:
        return Check("config", "ok", "config.json is JSON"), read_config_file(path)
    except LabkitError as error:
        return Check(
            "config", "problem", plain(error, 300), "config.json is damaged or was edited by hand",
            "fetch it again: hf download <model> config.json --local-dir .",
        ), None  # fmt: skip


def _no_config(folder: Path) -> Check:
    if (folder / "adapter_config.json").is_file():
        return _adapter(folder)
    if sorted(folder.glob("*.gguf")):
        return Check(
            "config", "warning", "a .gguf file and no config.json", "GGUF carries its own configuration",
            "vllm serve <file>.gguf --tokenizer <hub id of the original model>",
        )  # fmt: skip
    if (folder / "params.json").is_file():
        return Check(
            "config", "warning", "params.json and no config.json", "this is Mistral's own format",
            "vllm serve … --config-format mistral --load-format mistral --tokenizer-mode mistral",
        )  # fmt: skip
    deeper = [found.parent for found in sorted(folder.glob("*/config.json"))[:4]]
    deeper += [found.parent for found in sorted(folder.glob("snapshots/*/config.json"))[:4]]
    if deeper:
        return Check(
            "config", "problem", f"no config.json here, but in {plain(deeper[0], 200)}", "the path is one folder short",
            f"give {plain(deeper[0], 200)}",
        )  # fmt: skip
    names = [plain(entry.name, 60) for entry in sorted(folder.iterdir())[:6]]
    return Check(
        "config", "problem", f"no config.json; the folder holds {', '.join(names) or 'nothing'}",
        "the download did not finish, or this is no model folder", "hf download <model> --local-dir .",
    )  # fmt: skip


def _adapter(folder: Path) -> Check:
    evidence = "adapter_config.json and no config.json"
    try:
        base = read_config_file(folder / "adapter_config.json").get("base_model_name_or_path")
    except LabkitError as error:
        return Check("adapter", "problem", plain(error, 300), "adapter_config.json is damaged", "fetch it again")
    if not isinstance(base, str) or not base:
        return Check(
            "adapter", "problem", f"{evidence}; it names no base model", "a LoRA adapter cannot be served alone",
            "find its base model, then: vllm serve <base> --enable-lora --lora-modules name=<this folder>",
        )  # fmt: skip
    return Check(
        "adapter", "problem", f"{evidence}; its base is {plain(base, 200)}", "a LoRA adapter cannot be served alone",
        f"vllm serve {plain(base, 200)} --enable-lora --lora-modules name={plain(folder, 200)}, or merge it first",
    )  # fmt: skip


def check_model(config: Mapping[str, Any], folder: Path) -> tuple[Check, ModelSpec | None]:
    """Whether the configuration describes a decoder that labkit can plan."""
    if not config.get("architectures") and not config.get("model_type"):
        return Check(
            "architecture", "problem", "config.json has neither architectures nor model_type",
            "vLLM chooses the network by them", "take the original model's config.json",
        ), None  # fmt: skip
    try:
        spec = model_from_config(dict(config), plain(folder.resolve().name, 200), source=str(folder))
    except LabkitError as error:
        return Check(
            "architecture", "problem", plain(error, 300), "config.json lacks or contradicts what the network needs",
            "take the original model's config.json",
        ), None  # fmt: skip
    evidence = f"{spec.architecture}, {spec.num_layers} layers, vocabulary {shown.count(spec.vocab_size)}"
    if not config.get("architectures"):
        return Check(
            "architecture", "warning", f"{evidence}; no architectures", "vLLM asks for the class of the network",
            'add "architectures": ["…ForCausalLM"] as in the original config.json',
        ), spec  # fmt: skip
    if not find_family(spec.model_type).known:
        return Check(
            "architecture", "warning", f"{evidence}; model type {plain(spec.model_type, 60)!r}",
            "labkit does not know this model type and takes it for a Llama; vLLM may not know it either",
            f"look for {plain(spec.architecture, 80)} where vLLM is: python -c 'import vllm; "
            "print(*vllm.ModelRegistry.get_supported_archs())'",
        ), spec  # fmt: skip
    return Check("architecture", "ok", evidence), spec


def check_remote_code(config: Mapping[str, Any], folder: Path) -> Check:
    """auto_map means Python files of the folder, run with your rights."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping) or not auto_map:
        return Check("remote-code", "ok", "needs no code of its own")
    words = [str(value).partition("--")[2] or str(value) for value in auto_map.values() if isinstance(value, str)]
    missing = sorted(
        {word.partition(".")[0] + ".py" for word in words if "--" not in word and "/" not in word}
        - {path.name for path in folder.glob("*.py")}
    )
    if missing:
        return Check(
            "remote-code", "problem", f"auto_map names {plain(', '.join(missing), 200)}, which is not there",
            "the model's Python files were not copied",
            "fetch them, or delete auto_map where vLLM knows the architecture",
        )  # fmt: skip
    return Check(
        "remote-code", "warning", f"auto_map: {plain(', '.join(words), 200)}",
        "--trust-remote-code would run these files with your rights",
        "read them first; leave the flag out where vLLM knows the architecture",
    )  # fmt: skip


def check_quantisation(config: Mapping[str, Any]) -> Check:
    """quantization_config: a method that vLLM knows."""
    section = config.get("quantization_config")
    if section is None:
        return Check("quantisation", "ok", "not quantised")
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if not isinstance(method, str) or not method:
        return Check(
            "quantisation", "problem", "quantization_config has no quant_method", "vLLM cannot choose a kernel",
            "take the original quantization_config, or give --quantization",
        )  # fmt: skip
    if method.casefold() not in KNOWN_QUANTISATIONS:
        return Check(
            "quantisation", "warning", f"quant_method {plain(method, 60)!r}", "labkit does not know this method",
            "vllm serve --help=quantization lists what your version takes",
        )  # fmt: skip
    return Check("quantisation", "ok", f"quantised: {plain(method, 60)}")


def check_generation(folder: Path) -> Check | None:
    """generation_config.json is optional; a broken one stops the server."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        read_config_file(path)
    except LabkitError as error:
        return Check(
            "generation-config", "problem", plain(error, 300), "generation_config.json is damaged",
            "fetch it again, or vllm serve … --generation-config vllm",
        )  # fmt: skip
    return Check("generation-config", "ok", "generation_config.json is JSON")


def check_pooling(folder: Path, spec: ModelSpec | None) -> Check | None:
    """An embedding model says by 1_Pooling/config.json how tokens become one vector."""
    if not (folder / "modules.json").is_file():
        return None
    path = folder / "1_Pooling" / "config.json"
    name = "pooling"
    if not path.is_file():
        return Check(
            name, "problem", "modules.json is there, 1_Pooling/config.json is not",
            "without it the last token is taken, and a mean-pooling model gives useless vectors",
            "hf download <model> 1_Pooling/config.json --local-dir .",
        )  # fmt: skip
    try:
        values = read_config_file(path)
    except LabkitError as error:
        return Check(name, "problem", plain(error, 300), "1_Pooling/config.json is damaged", "fetch it again")
    chosen = [key for key, value in values.items() if key.startswith("pooling_mode") and value]
    width = values.get("word_embedding_dimension")
    if spec is not None and isinstance(width, int) and width != spec.hidden_size:
        return Check(
            name, "problem", f"pooling of width {width}, the model's is {spec.hidden_size}",
            "1_Pooling belongs to another model", "fetch it again",
        )  # fmt: skip
    if not chosen:
        return Check(name, "problem", "1_Pooling/config.json chooses no pooling mode", "no vector can be made",
                     "take the original file")  # fmt: skip
    return Check(name, "ok", plain(", ".join(chosen), 200))
