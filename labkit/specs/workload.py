"""`Workload`: requests with arrival, lengths and shared prefixes; the record that traces and generators make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from labkit.text import brief


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request of a trace.

    Attributes:
        arrival_s: seconds from the start of the run.
        input_tokens, output_tokens: lengths as the source counts them.
        prefix_blocks: inclusive ranges of block ids of the prompt's `prefix_block_tokens`-token blocks, in order;
            equal ids mean equal content, so the KV can be shared. Kept as ranges: a trace may name 10**13 blocks.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix_blocks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Workload:
    """A traffic: requests in order of arrival, and how they came about.

    Attributes:
        name: file or generator; text from outside, escape before showing.
        requests: sorted by `arrival_s`.
        prefix_block_tokens: tokens of one prefix block, 0 where no request has prefix blocks.
        source, licence: where the numbers come from; "synthetic" for a generator.
        steps: what was done to the source, one sentence each (slice, rate scaling, clipping), in order.
        seed: of the generator, and of the token ids that stand in for the text.
    """

    name: str
    requests: tuple[RequestSpec, ...]
    prefix_block_tokens: int = 0
    source: str = "synthetic"
    licence: str = ""
    steps: tuple[str, ...] = ()
    seed: int = 0

    def __repr__(self) -> str:
        return brief(self, "name", "num_requests", "input_tokens", "output_tokens", "duration_s", "steps")

    @property
    def num_requests(self) -> int:
        """How many requests there are."""
        return len(self.requests)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last; 0 for no requests."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.input_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(request.output_tokens for request in self.requests)

    def with_requests(self, requests: Iterable[RequestSpec], step: str) -> Workload:
        """The same traffic with other `requests`, and `step` added to what was done to it."""
        return replace(self, requests=tuple(requests), steps=(*self.steps, step))
