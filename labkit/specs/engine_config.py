"""`EngineConfig`: the knobs, with vLLM's names, meanings and units."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import FileFormatError, OutOfRangeError, UnknownNameError, UnsupportedError
from labkit.text import nearest, plain

# Every name that some vLLM version takes; which of them an engine has, the planner says by name.
KV_CACHE_DTYPES = (
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla",
    "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4", "nvfp4_4over6", "turboquant_k8v4",
    "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "octave_k3v4", "octave_k3v3",
    "octave_k3v3_compact", "ultraquant_4bit",
)  # fmt: skip
# Highest utilization that advice, cures and presets propose. The rest, 1.1 GiB of a 24 GB card, holds the CUDA context
# (half a GiB) and what the engine takes only after its profile: sampling, workspaces, the allocator's rounding.
HIGHEST_UTILIZATION = 0.95
DTYPES = ("auto", "float32", "float16", "bfloat16")
# Kinds of vLLM's other knobs that move memory, from 0.6 to 0.33, and why labkit has none of them.
_UNPLANNED = (
    (
        re.compile(r"spec(ulative|_decod|_method|_model|_tokens)|ngram_prompt|num_lookahead|typical_acceptance"),
        "labkit has no speculative decoding, so it has no knob {}",
    ),
    (re.compile(r"lora(s|_|$)"), "labkit does not plan vLLM's {}: adapters"),
    (re.compile(r"^kv_offloading"), "labkit does not plan vLLM's {}: KV in host memory"),
    (re.compile(r"offload"), "labkit does not plan vLLM's {}: weights in host memory"),
    (re.compile(r"context_parallel"), "labkit does not plan vLLM's {}: KV cut along the context"),
    (re.compile(r"limit_mm_per_prompt"), "labkit does not plan vLLM's {}: images of a prompt"),
    (re.compile(r"enable_dbo"), "labkit does not plan vLLM's {}: two batches at once"),
)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%")


@dataclass(frozen=True)
class Knob:
    """What the panel, the command line and the docs say about one field of `EngineConfig`.

    Attributes:
        name: the field, in vLLM's words.
        flag: vLLM's command-line flag, or None where vLLM has none.
        help: what it does to memory and speed, in one or two sentences.
        unit: "tokens", "GiB", "requests", … or "".
        choices: the allowed strings, for a knob of names.
        minimum, maximum: the allowed range, both ends included, for a knob of numbers.
        optional: None is allowed and means "as the model, the card or vLLM says".
    """

    name: str
    flag: str | None
    help: str
    kind: type
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    optional: bool = False

    def check(self, value: Any) -> Any:
        """`value` in the knob's own type.

        Raises:
            OutOfRangeError: the value has another type, is not one of the choices, or is outside the range.
        """
        if value is None and self.optional:
            return None
        value = self._convert(value)
        if self.choices and value not in self.choices:
            close = nearest(str(value), self.choices)
            raise self._error(value, f"one of {', '.join(self.choices)}", close)
        if self.minimum is not None and value < self.minimum:
            raise self._error(value, self._range(), str(self.minimum))
        if self.maximum is not None and value > self.maximum:
            raise self._error(value, self._range(), str(self.maximum))
        return value

    def _convert(self, value: Any) -> Any:
        if self.kind is bool:
            if isinstance(value, bool):
                return value
            raise self._error(value, "True or False", None)
        if self.kind is str:
            if isinstance(value, str):
                return value
            raise self._error(value, "text", None)
        try:
            number = float(value) if not isinstance(value, (bool, str, bytes)) else math.nan
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or (self.kind is int and number != int(number)):
            raise self._error(
                value, f"a {'whole ' if self.kind is int else ''}number, {self._range()}", self._example(value)
            )
        return self.kind(value)

    def _example(self, value: Any) -> str:
        """What "90%" or a word stands for, as this knob takes it."""
        percent = _PERCENT.fullmatch(str(value).strip()[:20])
        if percent and self.maximum == 1:
            return f"{float(percent.group(1)) / 100:g}"
        return "auto" if self.optional else f"{self.minimum:g}" if self.minimum is not None else "0"

    def _range(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        low, high = (
            f"{end:.0f}" if self.kind is int and end is not None else f"{end:g}" if end is not None else ""
            for end in (self.minimum, self.maximum)
        )
        return f"{low} to {high}{unit}" if low and high else f"{low}{unit} or more"

    def _error(self, value: Any, allowed: str, works: str | None) -> OutOfRangeError:
        return OutOfRangeError(
            f"{self.name} cannot be {plain(repr(value), 80)}: allowed is {allowed}", works=works, knob=self.name
        )


def _knob(default: Any, flag: str | None, help: str, kind: type, **rest: Any) -> Any:
    return field(default=default, metadata={"flag": flag, "help": help, "kind": kind, **rest})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of one engine, with vLLM's names, meanings and defaults (vLLM 0.33 unless said).

    None means "as the model, the card or the vLLM version says"; `labkit.plan` returns the resolved configuration.

    Raises:
        UnknownNameError: a keyword that is no knob; it names the nearest.
        UnsupportedError: one of vLLM's knobs of speculative decoding, or another that moves memory and is not planned.
        OutOfRangeError: a value outside the knob's range; it names the range.
    """

    max_model_len: int | None = _knob(
        None,
        "--max-model-len",
        "Longest request, prompt plus output. At least one such request must fit in the KV cache.",
        int,
        unit="tokens",
        minimum=1,
        maximum=2**31,
        optional=True,
    )
    block_size: int = _knob(
        16,
        "--block-size",
        "Tokens in one KV block. Larger blocks waste more of each request's last block; smaller "
        "ones need longer block tables.",
        int,
        unit="tokens",
        minimum=1,
        maximum=8192,
    )
    kv_cache_dtype: str = _knob(
        "auto",
        "--kv-cache-dtype",
        "Storage type of the KV cache; auto is the model's dtype. 8-bit types hold twice the tokens.",
        str,
        choices=KV_CACHE_DTYPES,
    )
    gpu_memory_utilization: float = _knob(
        0.92,
        "--gpu-memory-utilization",
        "Share of the card's total memory that this engine may take.",
        float,
        minimum=0.01,
        maximum=1.0,
    )
    max_num_seqs: int | None = _knob(
        None,
        "--max-num-seqs",
        "Most requests in one step. Each costs logits and sampler memory.",
        int,
        unit="requests",
        minimum=1,
        maximum=65536,
        optional=True,
    )
    max_num_batched_tokens: int | None = _knob(
        None,
        "--max-num-batched-tokens",
        "Most tokens in one step, over all requests. Sets the activation peak and the size of prefill chunks.",
        int,
        unit="tokens",
        minimum=1,
        maximum=2**24,
        optional=True,
    )
    enable_chunked_prefill: bool = _knob(
        True,
        "--enable-chunked-prefill",
        "Long prompts are computed in pieces beside running requests; without it a prompt must fit in one step.",
        bool,
    )
    enable_prefix_caching: bool = _knob(
        True,
        "--enable-prefix-caching",
        "Blocks of equal prompt beginnings are shared and kept for later requests.",
        bool,
    )
    enforce_eager: bool = _knob(
        False,
        "--enforce-eager",
        "No CUDA graphs: saves their memory and start-up time, costs decode speed.",
        bool,
    )
    swap_space: float = _knob(
        0.0,
        None,
        "Host memory for the KV of preempted requests. labkit's engine has it; vLLM dropped it in 0.18.",
        float,
        unit="GiB",
        minimum=0.0,
        maximum=4096.0,
    )
    preemption_mode: str = _knob(
        "recompute",
        None,
        "What happens to the KV of a preempted request: computed again, or swapped to host memory.",
        str,
        choices=("recompute", "swap"),
    )
    disable_hybrid_kv_cache_manager: bool = _knob(
        False,
        "--disable-hybrid-kv-cache-manager",
        "Sliding-window layers keep KV as if they saw everything.",
        bool,
    )
    num_gpu_blocks_override: int | None = _knob(
        None,
        "--num-gpu-blocks-override",
        "Number of KV blocks, instead of what memory allows.",
        int,
        unit="blocks",
        minimum=1,
        maximum=2**31,
        optional=True,
    )
    kv_cache_memory_bytes: int | None = _knob(
        None,
        "--kv-cache-memory-bytes",
        "Bytes of the KV cache, instead of what utilization leaves.",
        int,
        unit="bytes",
        minimum=1,
        optional=True,
    )
    dtype: str = _knob("auto", "--dtype", "Type of weights and activations; auto is the model's.", str, choices=DTYPES)
    quantization: str | None = _knob(
        None,
        "--quantization",
        "Weight format, where the model folder does not say it: fp8 is made of 16-bit weights at loading, half "
        "their memory. labkit's engine runs fp8 and awq.",
        str,
        optional=True,
    )
    load_format: str = _knob(
        "auto",
        "--load-format",
        "auto reads the weights, dummy makes random ones of the same shapes.",
        str,
        choices=("auto", "dummy"),
    )
    tensor_parallel_size: int = _knob(
        1,
        "--tensor-parallel-size",
        "Cards that share each layer; for a run on the CPU, processes that do.",
        int,
        unit="GPUs",
        minimum=1,
        maximum=1024,
    )
    pipeline_parallel_size: int = _knob(
        1,
        "--pipeline-parallel-size",
        "Groups of cards that hold consecutive layers.",
        int,
        unit="GPUs",
        minimum=1,
        maximum=1024,
    )
    data_parallel_size: int = _knob(
        1,
        "--data-parallel-size",
        "Copies of the engine.",
        int,
        unit="copies",
        minimum=1,
        maximum=4096,
    )
    enable_expert_parallel: bool = _knob(
        False,
        "--enable-expert-parallel",
        "Experts of a MoE layer are spread over the cards whole.",
        bool,
    )
    cpu_memory_gib: float = _knob(
        2.0,
        None,
        "On a machine without a GPU: the memory that stands in for the card's total.",
        float,
        unit="GiB",
        minimum=0.01,
        maximum=65536.0,
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> EngineConfig:
        """Refuses a name that is no knob before the dataclass does, with the nearest one."""
        names = [knob.name for knob in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in names:
                sentence = next((sentence for pattern, sentence in _UNPLANNED if pattern.search(name)), "")
                if sentence:
                    raise UnsupportedError(
                        sentence.format(plain(name, 80)),
                        works="leaving it out, or adding vLLM's flag to the exported command",
                        knob=plain(name, 80),
                    )
                close = nearest(name, names)
                hint = f"; did you mean {close}?" if close else ""
                raise UnknownNameError(f"EngineConfig has no knob {plain(name, 80)!r}{hint}", works=close)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for knob in self.knobs():
            object.__setattr__(self, knob.name, knob.check(getattr(self, knob.name)))

    @classmethod
    def knobs(cls) -> tuple[Knob, ...]:
        """The description of every field, in the order of the fields."""
        return tuple(Knob(name=entry.name, **entry.metadata) for entry in dataclasses.fields(cls))

    def replace(self, **changes: Any) -> EngineConfig:
        """A variant with `changes`; the same errors as the constructor."""
        return type(self)(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values by knob name, as the run store and the report keep them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """The configuration that `to_dict` gave, also one from an older labkit: knobs that are silent have defaults.

        Raises:
            UnknownNameError: keys that are no knobs, all named; a newer labkit may have written them.
            OutOfRangeError: a value outside its knob's range.
            FileFormatError: `values` is no mapping.
        """
        if not isinstance(values, Mapping):
            raise FileFormatError(f"a configuration is a mapping of knobs, not {plain(repr(values), 80)}")
        known = [entry.name for entry in dataclasses.fields(cls)]
        unknown = sorted(plain(key, 80) for key in values if key not in known)
        if unknown:
            raise UnknownNameError(
                f"the configuration has knobs that this labkit does not know: {', '.join(unknown[:10])}",
                available=", ".join(known),
                works="the labkit version that wrote it, or the configuration without them",
            )
        return cls(**values)

    def differences(self, other: EngineConfig) -> dict[str, tuple[Any, Any]]:
        """The knobs in which `other` differs: name → (own value, other's value)."""
        mine, theirs = self.to_dict(), other.to_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}
