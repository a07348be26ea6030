"""Activation peak, CUDA graphs and non-torch memory of vLLM: formulas with few constants, each with its reason.

The constants are data (`vllm_constants.json`), fitted by `labkit.memory.fit` on start-up logs of two versions;
a version between uses the nearest fitted one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from labkit.memory.dtypes import ELEMENT_BYTES
from labkit.memory.rules import VersionRules
from labkit.memory.weights import StageLayers
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec

GIB = 2**30
MAX_CAPTURE_SIZE = 512
# FlashAttention's upper bound of splits when its launch is captured.
ATTENTION_SPLITS = 32
FORWARD_UNCERTAINTY = 0.1
NVLINK_CARDS = ("A100", "H100 SXM", "H200", "H20", "B200", "B300")


@dataclass(frozen=True)
class Constants:
    """The fitted constants of one version and model runner.

    Attributes:
        sampler_bytes: bytes per request and vocabulary entry while sampling (logits in fp32, their sort, its index).
        hidden_copies: hidden-state rows of the whole batch that are alive while sampling.
        forward_hidden: hidden-state rows per token that are alive in the widest layer of the forward pass.
        forward_mlp: MLP-width rows alive there (gate, up and their product).
        fixed_gib: what does not grow: the matrix library's workspace (32 MiB on Hopper) and the inputs.
        graph_launch_mib: launch parameters of one layer in one captured graph.
        graph_split: times the float32 partial results of decode attention, cut along the context into 32 splits, at
            the largest size that is captured whole.
        graph_rows: hidden-state rows of that size that every layer keeps between its graphs.
        graph_estimate_share: what vLLM estimates before capture over what capture takes; this is what the budget loses.
        non_torch_gib: growth outside torch at one card; `non_torch_tp_gib` with tensor parallelism (NCCL buffers,
            custom all-reduce over NVLink), `non_torch_pcie_gib` over PCIe, `non_torch_pp_gib` with
            pipeline stages only.
        late_growth_gib: what is allocated after the pool and was not profiled (library workspaces, communication).
        late_growth_mxfp4_bytes: with MXFP4 experts, bytes per request and vocabulary entry on top (sampler warm-up).
        activation_uncertainty, graph_uncertainty_gib: ± as a share, and in GiB.
        source: what they were fitted on.
    """

    sampler_bytes: float
    hidden_copies: float
    forward_hidden: float
    forward_mlp: float
    fixed_gib: float
    graph_launch_mib: float
    graph_split: float
    graph_rows: float
    graph_estimate_share: float
    non_torch_gib: float
    non_torch_tp_gib: float
    non_torch_pcie_gib: float
    non_torch_pp_gib: float
    late_growth_gib: float
    late_growth_mxfp4_bytes: float
    activation_uncertainty: float
    graph_uncertainty_gib: float
    source: str = ""


@lru_cache(maxsize=1)
def _table() -> list[dict[str, Any]]:
    text = resources.files("labkit.memory").joinpath("vllm_constants.json").read_text(encoding="utf-8")
    return json.loads(text)["constants"]


@lru_cache(maxsize=128)
def constants_for(version: tuple[int, int, int], runner: int) -> Constants:
    """The constants of the newest fitted version that is not newer than `version`, for that model runner."""
    values: dict[str, Any] = {}
    for entry in _table():
        if tuple(entry["since"]) <= version and entry["runner"] in (0, runner):
            values.update(entry["values"])
    return Constants(**values)


def mlp_width(model: ModelSpec, layer: LayerSpec) -> int:
    """Width of the dense MLP of a layer, or of the experts that every token visits."""
    width = model.intermediate_size if layer.intermediate_size is None else layer.intermediate_size
    if layer.num_experts and model.moe is not None:
        return model.moe.shared_intermediate_size + (width if model.moe.dense_beside else 0)
    return width


def has_vision(model: ModelSpec) -> bool:
    """Whether a vision tower is part of what is loaded."""
    return any(name.startswith("vision") for name, _ in model.extra_weights)


def expert_workspace_bytes(model: ModelSpec, tokens: int, tp: int, element: int) -> int:
    """The two buffers of the fused expert kernel, kept from the forward pass on.

    Each token is copied to its k experts: (tokens·k, max(I, H)) and (tokens·k, max(2I, H)) elements.
    """
    moe = model.moe
    if moe is None or model.weight_format.kind == "mxfp4":
        return 0
    width, hidden = max(1, moe.intermediate_size // tp), model.hidden_size
    return tokens * moe.num_experts_per_tok * (max(width, hidden) + max(2 * width, hidden)) * element


def activation_bytes(
    model: ModelSpec, config: EngineConfig, stage: StageLayers, rules: VersionRules, dtype: str
) -> int:
    """The peak of torch memory over weights that the profile run sees on one rank of `stage`."""
    constants = constants_for(rules.version, rules.model_runner(model))
    return activation_with(constants, model, config, stage, dtype)


def activation_with(
    constants: Constants, model: ModelSpec, config: EngineConfig, stage: StageLayers, dtype: str
) -> int:
    """The activation peak under given constants, in bytes.

    The larger of two moments: the widest layer of the forward pass over max_num_batched_tokens tokens, and sampling
    max_num_seqs rows of the whole vocabulary with the hidden states still alive; plus the experts' workspace and,
    between pipeline stages, the hidden states and the residual that are received or sent; plus, for a vision model,
    the embeddings of one full budget of image tokens, which the profile keeps.
    """
    tokens, element = config.max_num_batched_tokens or 0, ELEMENT_BYTES[dtype]
    rows = tokens * model.hidden_size * element
    between = 2 * rows if config.pipeline_parallel_size > 1 else 0
    images = rows if stage.first == 0 and has_vision(model) else 0
    peak = round(max(_moments(constants, model, config, stage, dtype)) + constants.fixed_gib * GIB)
    return peak + expert_workspace_bytes(model, tokens, config.tensor_parallel_size, element) + between + images


def _moments(
    constants: Constants, model: ModelSpec, config: EngineConfig, stage: StageLayers, dtype: str
) -> tuple[float, float]:
    """Bytes alive in the widest layer of the forward pass, and while sampling."""
    tokens, element = config.max_num_batched_tokens or 0, ELEMENT_BYTES[dtype]
    width = max((mlp_width(model, layer) for layer in model.layers[stage.first : stage.last]), default=0)
    gates = constants.forward_mlp if model.gated_mlp else constants.forward_mlp * 2 / 3
    hidden = constants.forward_hidden * model.hidden_size
    forward = tokens * element * (gates * width / config.tensor_parallel_size + hidden)
    if not stage.has_head or model.is_embedding:
        return forward, 0.0
    requests = min(config.max_num_seqs or 0, tokens)
    copies = constants.hidden_copies * tokens * model.hidden_size * element
    return forward, constants.sampler_bytes * requests * model.vocab_size + copies


def activation_uncertainty(
    model: ModelSpec, config: EngineConfig, stage: StageLayers, rules: VersionRules, dtype: str
) -> float:
    """± as a share of the peak: a tenth in the forward pass, what the version's sampler is known to while sampling."""
    constants = constants_for(rules.version, rules.model_runner(model))
    forward, sampling = _moments(constants, model, config, stage, dtype)
    return constants.activation_uncertainty if sampling > forward else FORWARD_UNCERTAINTY


def capture_sizes(config: EngineConfig, largest: int = MAX_CAPTURE_SIZE) -> list[int]:
    """Batch sizes for which graphs are captured: 1, 2, 4, every 8 below 256, every 16 above, up to `largest`."""
    if config.enforce_eager:
        return []
    limit = min((config.max_num_seqs or 0) * 2, largest)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [size for size in sizes if size <= limit]


def attention_width(layer: LayerSpec) -> int:
    """Width of attention's result in one layer: query heads times the width of V (of the latent, for MLA)."""
    if layer.kind == "mla":
        return layer.num_heads * layer.kv_lora_rank
    return layer.num_heads * (layer.v_head_dim or layer.head_dim)


def graph_features(
    model: ModelSpec, config: EngineConfig, stage: StageLayers, limit: int = MAX_CAPTURE_SIZE
) -> tuple[float, float, float]:
    """What the three graph constants multiply, in MiB, GiB and GiB: launches, split results, rows between graphs.

    Pieces between attention calls are captured for every size, whole decode steps for sizes up to max_num_seqs.
    """
    sizes = capture_sizes(config, limit)
    if not sizes:
        return 0.0, 0.0, 0.0
    layers = model.layers[stage.first : stage.last]
    whole = [size for size in sizes if size <= (config.max_num_seqs or 0)]
    largest = max(whole, default=0)
    width = max((attention_width(layer) for layer in layers), default=0) / config.tensor_parallel_size
    launches = len(layers) * (len(sizes) + len(whole))
    splits = largest * width * ATTENTION_SPLITS * 4 / GIB
    return launches, splits, len(layers) * largest * model.hidden_size * 2 / GIB


def graphs_bytes(model: ModelSpec, gpu: GpuSpec, config: EngineConfig, stage: StageLayers, rules: VersionRules) -> int:
    """Memory that capturing CUDA graphs takes on one rank."""
    is_blackwell = (gpu.compute_capability or "").startswith("10.")
    limit = rules.graph_limit_blackwell if is_blackwell else MAX_CAPTURE_SIZE
    return graphs_with(constants_for(rules.version, rules.model_runner(model)), model, config, stage, limit)


def graphs_with(
    constants: Constants, model: ModelSpec, config: EngineConfig, stage: StageLayers, limit: int = MAX_CAPTURE_SIZE
) -> int:
    """Graph memory under given constants, in bytes."""
    launches, splits, rows = graph_features(model, config, stage, limit)
    gib = constants.graph_launch_mib * launches / 1024 + constants.graph_split * splits + constants.graph_rows * rows
    return round(gib * GIB)


def graph_estimate_share(model: ModelSpec, rules: VersionRules) -> float:
    """What the budget loses over what capture takes."""
    return constants_for(rules.version, rules.model_runner(model)).graph_estimate_share


def has_fast_links(gpu: GpuSpec) -> bool:
    """Cards that are joined by NVLink: there the collective library and the custom all-reduce take GiB of buffers.

    Over PCIe they take little: 0.09 to 0.39 GiB on 16 and 24 GiB cards (cases N23, N60).
    """
    name = gpu.name.upper()
    return any(known in name for known in NVLINK_CARDS) or gpu.total_bytes >= 70 * GIB


def non_torch_bytes(config: EngineConfig, gpu: GpuSpec, rules: VersionRules, runner: int) -> int:
    """Growth outside torch while profiling: workspaces of libraries, NCCL buffers with more than one card."""
    return non_torch_with(constants_for(rules.version, runner), config, has_fast_links(gpu))


def non_torch_with(constants: Constants, config: EngineConfig, fast_links: bool) -> int:
    """Non-torch memory under given constants, in bytes."""
    if config.tensor_parallel_size > 1 and not fast_links:
        return round(constants.non_torch_pcie_gib * GIB)
    if config.tensor_parallel_size > 1:
        return round(constants.non_torch_tp_gib * GIB)
    if config.pipeline_parallel_size > 1:
        return round(constants.non_torch_pp_gib * GIB)
    return round(constants.non_torch_gib * GIB)


def late_growth_bytes(model: ModelSpec, config: EngineConfig, rules: VersionRules) -> int:
    """Memory that is taken after the pool, outside the budget."""
    constants = constants_for(rules.version, rules.model_runner(model))
    logits = (config.max_num_seqs or 0) * model.vocab_size if model.weight_format.kind == "mxfp4" else 0
    return round(constants.late_growth_gib * GIB + constants.late_growth_mxfp4_bytes * logits)
