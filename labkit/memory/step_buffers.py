"""The buffers of one step of labkit's engine on a card, in the order in which the executor takes and gives them.

What is alive at one moment is the activation peak; where torch's allocator puts it is what captured graphs hold. The
order is that of `CudaExecutor._compute`, `FusedForward`, `Decoder.forward`, `CudaAttention` and the sampler; a test
compares it with what these allocate. T rows, D decoding and P other sequences, S rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.memory.awq_products import awq_scratch_bytes
from labkit.memory.caching_allocator import Memory
from labkit.memory.dtypes import ELEMENT_BYTES, compute_dtype
from labkit.memory.kernel_settings import attention_settings, sm_count
from labkit.memory.labkit_rules import model_of_rank
from labkit.memory.step_shapes import StepShape
from labkit.memory.tensors import vocabulary_rows
from labkit.memory.weights import weight_format
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec, MoeSpec

INDEX_BYTES, FLOAT_BYTES = 8, 4
# As `labkit_kernels.sampling`: float32 and int32 candidates of a row.
SAMPLER_CANDIDATES = 16384
# As `labkit_kernels.paged_prefill`.
MIN_TILES_OF_SPLIT, MAX_SPLITS = 4, 32
# Activations with a kernel of their own, as `labkit.engine.cuda_forward`.
FUSED_ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "gelu_new")
# Layers like the one before them need the same memory: so many are looked at.
ALIKE_LAYERS = 3
STEP_KNOBS = (
    "dtype", "quantization", "kv_cache_dtype", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "tensor_parallel_size", "enforce_eager",
)  # fmt: skip


def can_fuse(model: ModelSpec) -> bool:
    """Whether the engine's fused kernels cover the model: Llama, Mistral, Qwen2, Qwen3 and their like."""
    plain_layers = all(layer.uses_rope and not layer.num_experts for layer in model.layers)
    is_plain = model.gated_mlp and not (model.norm_offset or model.sandwich_norms)
    return plain_layers and is_plain and model.hidden_act in FUSED_ACTIVATIONS


@dataclass(frozen=True)
class StepModel:
    """What the buffers of a step depend on: the model, the card and the knobs, resolved; see `step_model`."""

    whole: ModelSpec
    gpu: GpuSpec
    config: EngineConfig

    @property
    def model(self) -> ModelSpec:
        """The heads and MLP columns of one rank."""
        return model_of_rank(self.whole, self.config.tensor_parallel_size)

    @property
    def element(self) -> int:
        """Bytes of a number of the model's type."""
        return ELEMENT_BYTES[compute_dtype(self.whole, self.config)]

    @property
    def table_blocks(self) -> int:
        """Entries of a block table's row, which begins at whole 16 bytes."""
        blocks = -(-int(self.config.max_model_len or 1) // self.config.block_size)
        return -(-blocks // 4) * 4


def step_model(model: ModelSpec, gpu: GpuSpec, config: EngineConfig) -> StepModel:
    """Without the knobs that no buffer depends on, so that equal ones are computed once."""
    return StepModel(model, gpu, EngineConfig(**{name: getattr(config, name) for name in STEP_KNOBS}))


class StepBuffers:
    """Runs one step of a `StepModel` after another through a `Memory`.

    What a step leaves to the next: its block tables, which attention lets go of when the next step has its own.
    """

    def __init__(self, facts: StepModel, memory: Memory) -> None:
        self._facts, self._memory = facts, memory
        self._model, self._element = facts.model, facts.element
        self._is_fused = can_fuse(facts.whole)
        self._layers = _telling_layers(self._model)
        self._tables: list[int] = []

    def run(self, shape: StepShape) -> None:
        """One step; its token ids stay, as a graph keeps them."""
        known = self._prepare(shape)
        hidden = self._fused(shape) if self._is_fused else self._plain(shape)
        self._give(*known)
        if shape.num_prompts:
            hidden = self._replaced(hidden, self._take(shape.num_samples * self._model.hidden_size))
        self._sample(shape.num_samples)
        self._give(hidden)

    def _prepare(self, shape: StepShape) -> list[int]:
        """Block tables of the step's sequences, and token ids with the newest ones put in."""
        take, blocks = self._memory.take, self._facts.table_blocks
        tables = [take(FLOAT_BYTES * places * blocks) for places in (shape.num_decodes, shape.num_prompts) if places]
        known: list[int] = []
        if shape.num_decodes:
            newest, is_new = take(INDEX_BYTES * shape.num_decodes), take(shape.num_decodes)
            known = [take(INDEX_BYTES * shape.num_decodes)]
            self._give(is_new, newest)
            if shape.num_decodes != shape.num_tokens:
                known.append(take(INDEX_BYTES * shape.num_tokens))
        self._give(*self._tables)
        self._tables = tables
        return known

    def _fused(self, shape: StepShape) -> int:
        """`FusedForward`: results of the layer before stay until the new ones are there."""
        rows, width = shape.num_tokens, self._model.hidden_size
        residual, first = self._embed(rows), self._take(rows * width)
        mixed = wide = out = None
        for layer in self._layers:
            heads = layer.num_heads * layer.head_dim
            qkv = self._product(rows, width, heads + 2 * layer.num_kv_heads * layer.head_dim)
            rotated, results = self._take(rows * heads), self._attend(layer, shape)
            self._give(rotated)
            new = self._product(rows, heads, width)
            # The first norm's result goes with its only name; later ones lie where the MLP's output did.
            self._give(qkv, results, mixed if mixed is not None else first)
            mixed = new
            new = self._product(rows, width, 2 * _mlp_width(self._model, layer))
            self._give(wide)
            wide, product = new, self._take(rows * _mlp_width(self._model, layer))
            new = self._product(rows, _mlp_width(self._model, layer), width)
            self._give(product, out)
            out = new
        self._give(wide, mixed, residual)
        return out if out is not None else self._take(rows * width)

    def _plain(self, shape: StepShape) -> int:
        """`Decoder.forward`: one operator after another."""
        rows, model = shape.num_tokens, self._model
        hidden = self._embed(rows)
        rotations = [self._take(rows * rotary_width(model, layer)) for layer in rotations_of(model) for _ in range(2)]
        for layer in self._layers:
            inner = self._norm(rows, model.hidden_size)
            mixed = self._attention_block(layer, shape)
            self._give(inner)
            if model.sandwich_norms:
                mixed = self._replaced(mixed, self._norm(rows, model.hidden_size))
            inner = self._norm(rows, model.hidden_size)
            out = self._experts(rows) if layer.num_experts else self._mlp(layer, rows)
            if model.sandwich_norms:
                out = self._replaced(out, self._norm(rows, model.hidden_size))
            self._give(inner, mixed, hidden)
            hidden = out
        normed = self._norm(rows, model.hidden_size)
        self._give(hidden, *rotations)
        return normed

    def _attention_block(self, layer: LayerSpec, shape: StepShape) -> int:
        """Q, K and V, the heads' norm, their rotation, attention and the output product."""
        rows, model = shape.num_tokens, self._model
        values = layer.v_head_dim or layer.head_dim
        heads = (layer.num_heads + layer.num_kv_heads) * layer.head_dim
        qkv = self._product(rows, model.hidden_size, heads + layer.num_kv_heads * values)
        rotated = None
        if model.qk_norm:
            rotated = self._norm(rows * heads // layer.head_dim, layer.head_dim, is_contiguous=False)
        if layer.uses_rope:
            turned = self._take(rows * heads)
            # A roll copies first what is a part of a wider tensor.
            copy = self._take(rows * heads) if rotated is None else None
            rolled = self._take(rows * heads)
            self._give(copy)
            new = self._take(rows * heads)
            self._give(turned, rolled, rotated)
            rotated = new
        results = self._attend(layer, shape)
        out = self._product(rows, layer.num_heads * values, model.hidden_size)
        self._give(qkv, rotated, results)
        return out

    def _attend(self, layer: LayerSpec, shape: StepShape) -> int:
        """Results of attention; prompts in a step that does not fill the card have their keys cut into parts."""
        rows, heads = shape.num_tokens, layer.num_heads
        results = self._take(rows * heads * layer.head_dim)
        splits = self._prefill_splits(layer, rows) if shape.num_prompts else 1
        if splits > 1:
            parts = splits * rows * heads * FLOAT_BYTES
            self._give(self._memory.take(parts * layer.head_dim), self._memory.take(parts))
        return results

    def _prefill_splits(self, layer: LayerSpec, rows: int) -> int:
        """As `labkit.engine.cuda_attention` chooses them, from shapes alone."""
        facts, group = self._facts, layer.num_heads // layer.num_kv_heads
        config = facts.config
        use = attention_settings(facts.gpu, "prefill", config.kv_cache_dtype, layer.head_dim, rows * group)
        programs = max(1, rows * group // use.get("rows", 128)) * layer.num_kv_heads
        wanted = sm_count(facts.gpu) / programs
        tiles = facts.table_blocks * config.block_size // use.get("tile", 64)
        most = min(wanted * 2**0.5, tiles // MIN_TILES_OF_SPLIT, MAX_SPLITS)
        return 1 << (int(most).bit_length() - 1) if wanted >= 2 and most >= 1 else 1

    def _mlp(self, layer: LayerSpec, rows: int) -> int:
        model, width = self._model, _mlp_width(self._model, layer)
        wide = self._product(rows, model.hidden_size, (2 if model.gated_mlp else 1) * width)
        active = self._take(rows * width)
        # Gate and up are views of the product, which lives as long as they do.
        if not model.gated_mlp:
            self._give(wide)
        out = self._product(rows, width, model.hidden_size)
        self._give(active, wide if model.gated_mlp else None)
        return out

    def _experts(self, rows: int) -> int:
        """`route_tokens` with all experts in one product: each token is copied to its k experts, and back."""
        model, moe, take = self._model, self._model.moe or MoeSpec(0, 0, 0), self._memory.take
        visits, width = rows * moe.num_experts_per_tok, moe.intermediate_size
        router = self._take(rows * moe.num_experts)
        chances = take(FLOAT_BYTES * rows * moe.num_experts)
        self._give(router)
        chosen = [take(INDEX_BYTES * visits), take(FLOAT_BYTES * visits)]
        self._give(chances)
        order = [take(INDEX_BYTES * visits) for _ in range(3)]
        inputs = self._take(visits * model.hidden_size)
        wide, active = self._take(visits * 2 * width), self._take(visits * width)
        results = self._take(visits * model.hidden_size)
        self._give(active)
        in_order = self._take(visits * model.hidden_size)
        out = self._take(rows * model.hidden_size)
        self._give(inputs, wide, results, in_order, *order, *chosen)
        return out

    def _embed(self, rows: int) -> int:
        embedded = self._take(rows * self._model.hidden_size)
        if not self._model.scale_embeddings:
            return embedded
        return self._replaced(embedded, self._take(rows * self._model.hidden_size))

    def _norm(self, rows: int, width: int, *, is_contiguous: bool = True) -> int:
        """RMS norm with its float32 factor of each row; models with an offset norm in float32, and what is no whole
        tensor is copied first."""
        take, elements = self._memory.take, rows * width
        if not self._model.norm_offset:
            copy = None if is_contiguous else self._take(elements)
            out = self._take(elements)
            self._give(take(FLOAT_BYTES * rows), copy)
            return out
        wide, normed = (take(FLOAT_BYTES * elements) for _ in range(2))
        self._give(take(FLOAT_BYTES * rows), wide)
        return self._replaced(normed, self._take(elements))

    def _product(self, rows: int, inputs: int, outputs: int) -> int:
        """Result of a product with a weight in the model's format."""
        facts = self._facts
        fmt = weight_format(facts.whole, facts.config.quantization)
        if fmt.kind == "fp8":
            rounded, scales = self._memory.take(rows * inputs), self._memory.take(FLOAT_BYTES * rows)
            out = self._take(rows * outputs)
            self._give(rounded, scales)
            return out
        out = self._take(rows * outputs)
        if fmt.kind == "awq":
            scratch = awq_scratch_bytes(facts.gpu, fmt.group_size, rows, inputs, outputs, self._element)
            self._give(self._memory.take(scratch) if scratch else None)
        return out

    def _sample(self, rows: int) -> None:
        """Logits, and the sampler's candidates; the chosen token ids stay."""
        facts, take, model = self._facts, self._memory.take, self._model
        size = facts.config.tensor_parallel_size
        logits = self._take(rows * (vocabulary_rows(model.vocab_size, size) if size > 1 else model.vocab_size))
        if size > 1:
            gathered = self._take(rows * size * vocabulary_rows(model.vocab_size, size))
            whole = self._take(rows * model.vocab_size)
            self._give(logits, gathered)
            logits = whole
        if model.final_softcap is not None:
            logits = self._replaced(logits, take(FLOAT_BYTES * rows * model.vocab_size))
        take(INDEX_BYTES * rows)
        thresholds = take(FLOAT_BYTES * rows)
        candidates = [take(size * rows * SAMPLER_CANDIDATES) for size in (4, 4)]
        self._give(*candidates, thresholds, logits)

    def _take(self, elements: int) -> int:
        """A tensor in the model's type."""
        return self._memory.take(elements * self._element)

    def _replaced(self, old: int, new: int) -> int:
        self._memory.give(old)
        return new

    def _give(self, *handles: int | None) -> None:
        for handle in handles:
            if handle is not None:
                self._memory.give(handle)


def rotary_width(model: ModelSpec, layer: LayerSpec) -> int:
    """Numbers of a head that are rotated."""
    return int(layer.head_dim * model.rope.partial_rotary_factor)


def rotations_of(model: ModelSpec) -> list[LayerSpec]:
    """A layer of each distinct rotation."""
    first: dict[tuple, LayerSpec] = {}
    for layer in model.layers:
        if layer.uses_rope:
            key = (layer.head_dim, layer.rope_theta, layer.kind == "sliding" and model.rope_local is not None)
            first.setdefault(key, layer)
    return list(first.values())


def _telling_layers(model: ModelSpec) -> tuple[LayerSpec, ...]:
    """The first layers, up to the first of the last new kind and some like it."""
    shapes = [
        (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.num_experts, layer.intermediate_size)
        for layer in model.layers
    ]
    last = max((shapes.index(shape) for shape in set(shapes)), default=0)
    return model.layers[: last + ALIKE_LAYERS]


def _mlp_width(model: ModelSpec, layer: LayerSpec) -> int:
    return model.intermediate_size if layer.intermediate_size is None else layer.intermediate_size
