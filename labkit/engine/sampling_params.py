"""`SamplingParams` and `EngineRequest`: what a caller asks of the engine, checked at the door."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

from labkit.errors import OutOfRangeError
from labkit.text import plain

MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 256


def _whole(name: str, value: Any, minimum: int, maximum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise _error(name, value, f"a whole number, {minimum} to {maximum}")


def _real(name: str, value: Any, minimum: float, maximum: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not minimum <= value <= maximum:
        raise _error(name, value, f"{minimum:g} to {maximum:g}")


def _check_stops(stop: Any) -> None:
    limits = f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters"
    if not isinstance(stop, (tuple, list)) or len(stop) > MAX_STOP_STRINGS:
        raise _error("stop", stop, limits)
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in stop):
        raise _error("stop", stop, limits)


def _error(name: str, value: Any, allowed: str) -> OutOfRangeError:
    return OutOfRangeError(f"{name} cannot be {plain(repr(value), 80)}: allowed is {allowed}", knob=name)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to end; names as in vLLM.

    Attributes:
        max_tokens: most output tokens.
        min_tokens: output tokens before which no end-of-sequence token, stop token or stop string ends the request.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens whose probabilities reach p.
        min_p: drop tokens less likely than this share of the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output.
        seed: of this request's random numbers; None takes one from the engine's seed and the request id.
        ignore_eos: go on after the model's end-of-sequence token.
        stop: strings that end the request; needs an engine with a detokenizer.
        stop_token_ids: token ids that end the request.

    Raises:
        OutOfRangeError: a value outside its range; names the range.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, 2**31)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _whole("top_k", self.top_k, 0, 2**31)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 1e-6, 1.0)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _check_stops(self.stop)
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True)
class EngineRequest:
    """One request.

    Attributes:
        request_id: unique among the engine's unfinished requests.
        prompt_token_ids: 1 or more token ids.
        arrival_s: on the engine's clock; kept for the records.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    arrival_s: float = 0.0


def check_prompt(request: EngineRequest, vocab_size: int) -> None:
    """Refuse a prompt that the model cannot read.

    Raises:
        OutOfRangeError: the prompt is empty, or a token id is not in 0 … vocab_size - 1.
    """
    if len(request.prompt_token_ids) == 0:
        raise OutOfRangeError(f"request {plain(request.request_id, 80)} has an empty prompt", needed="1 token or more")
    ids = request.prompt_token_ids
    if {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise OutOfRangeError(
                f"token id {plain(repr(token_id), 40)} of request {plain(request.request_id, 80)} is not in the "
                "vocabulary",
                works=f"0 to {vocab_size - 1}",
            )


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on the request's seed and the token's position.

    No state: preemption, batch composition and a rebuilt engine cannot change what a request draws.
    """
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def request_seed(request: EngineRequest, engine_seed: int) -> int:
    """The request's own seed, or one made of the engine's seed and the request id."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    digest = hashlib.blake2b(f"{engine_seed}/{request.request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
