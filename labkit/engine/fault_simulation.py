"""One simulated life of an engine: random configuration, random requests, faults, and the rules checked each step.

Replay one seed: ``python -m labkit.engine.fault_simulation --seed 17``; many: ``--seeds 200 --steps 500``.

Rules after every step: `Engine.check` (I1, I2, I3, I6, I7); blocks being written belong to one sequence and are not
cached (I4); tokens and sequences within their limits (I5); when all is done every block is free or cached (I8); a
request that waits alone is let in at once (L1); an admitted request advances in each step (L2); nobody is sent back
in a step where nobody advances, and no request more than `MAX_PREEMPTIONS` times (L3); tokens as in a plain loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import random
import sys
from dataclasses import dataclass

from labkit.engine.block_pool import HashFunction, block_hash
from labkit.engine.engine import Engine, RequestOutput, StepResult
from labkit.engine.sampling_params import EngineRequest, SamplingParams
from labkit.engine.sequence import Status
from labkit.engine.simulation import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    VirtualExecutor,
    bare_plan,
    reference_tokens,
    virtual_model,
)
from labkit.errors import DoesNotFitError, LabkitError
from labkit.memory.records import MemoryPlan
from labkit.results import at_least, at_most, write_results
from labkit.specs.engine_config import EngineConfig

MAX_PREEMPTIONS = 10


class SimulationError(LabkitError):
    """An invariant or a liveness rule is broken; the message names seed and step."""


class InjectedFault(LabkitError):
    """The fault that the simulation made the executor raise."""


@dataclass(frozen=True)
class SimulationReport:
    """What a seed gave.

    Attributes:
        digest: SHA-256 over the event log; equal for equal seed and steps.
    """

    seed: int
    num_steps: int
    num_requests: int
    num_finished: int
    num_tokens: int
    num_preemptions: int
    num_swapped_blocks: int
    num_cached_tokens: int
    num_faults: int
    num_reconfigurations: int
    most_preemptions: int
    digest: str


@dataclass
class _Tally:
    steps: int = 0
    requests: int = 0
    finished: int = 0
    tokens: int = 0
    preemptions: int = 0
    swapped: int = 0
    cached: int = 0
    faults: int = 0
    reconfigurations: int = 0
    most_preemptions: int = 0


def simulate(seed: int, num_steps: int = 500) -> SimulationReport:
    """Live through `num_steps` steps with arrivals and faults, then until all requests are done.

    Raises:
        SimulationError: a rule is broken; the message holds seed and step and how to replay them.
    """
    life = _Life(seed)
    try:
        for _ in range(num_steps):
            life.disturb()
            life.step()
        life.drain()
    except LabkitError as error:
        replay = f"python -m labkit.engine.fault_simulation --seed {seed} --steps {num_steps}"
        raise SimulationError(f"seed {seed}, step {life.tally.steps}: {error} — replay: {replay}") from error
    return life.report()


class _Life:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.tally = _Tally()
        self.log = hashlib.sha256()
        self.fault_rate = self.random.choice((0.0, 0.01, 0.05))
        self.collisions = self.random.choice(("none", "none", "none", "all", "parents"))
        self.faulted = False
        self.requests: dict[int, EngineRequest] = {}
        self.unadvanced: dict[int, int] = {}
        self.prefixes = [self._tokens(self.random.randint(1, 80)) for _ in range(3)]
        self.last_prompt = self._tokens(8)
        plan = self._plan()
        self.executor = VirtualExecutor(plan)
        self.executor.before_step = self.executor.half_way = self._maybe_raise
        self.executor.watch_write = self._watch_write
        self.engine = Engine(
            None,
            plan,
            seed=seed,
            executor=self.executor,
            clock=self.executor.clock,
            hash_function=self._hash_function(),
        )
        self._watch_allocation()

    def disturb(self) -> None:
        """Arrivals and faults between two steps."""
        chance = self.random.random
        while chance() < 0.3 and len(self.requests) < 40:
            self._arrive()
        if self.requests and chance() < self.fault_rate:
            self.engine.abort(self.random.choice(sorted(self.requests)))
            self.tally.faults += 1
        if chance() < self.fault_rate / 5:
            plan = self._plan()
            self.engine.reconfigure(plan)
            self._watch_allocation()
            self.tally.reconfigurations += 1

    def step(self) -> None:
        """One step and every rule."""
        self.faulted = False
        scheduler = self.engine.scheduler
        waits_alone = bool(scheduler.waiting) and not scheduler.running
        running = {entry.request.request_id for entry in scheduler.running}
        self.tally.steps += 1
        try:
            result = self.engine.step()
        except InjectedFault:
            self.engine.check()
            self._require(not self.engine.scheduler.running, "a failed step leaves sequences running")
            return
        self.engine.check()
        self._check_limits(result)
        self._require(self.faulted or not waits_alone or result.num_tokens > 0, "L1: a request waits alone for ever")
        self._require(self.faulted or not result.num_preemptions or result.num_tokens > 0, "L3: sent back for nothing")
        self._check_progress(running)
        newcomers = {entry.request.request_id for entry in self.engine.scheduler.running} - running
        self._require(not result.num_preemptions or not newcomers, "L3: a newcomer took what sending back gave")
        for output in result.finished:
            self._check_output(output)
        self._note(result)

    def drain(self) -> None:
        """No more arrivals or faults: everything ends, and every block comes back."""
        self.fault_rate = 0.0
        bound = 200 + sum(
            len(entry.prompt_token_ids) + (MAX_PREEMPTIONS + 2) * entry.sampling.max_tokens
            for entry in self.requests.values()
        )
        while self.engine.has_unfinished:
            self.step()
            bound -= 1
            self._require(bound > 0, "L2: requests are left and do not end")
        pool = self.engine.scheduler.pool
        self._require(pool.num_used == 0 and not self.requests, "I8: blocks or requests are left at the end")
        self._require(self.engine.scheduler.swap_pool.num_used == 0, "I8: host blocks are left at the end")

    def report(self) -> SimulationReport:
        """The figures of this life."""
        tally = self.tally
        return SimulationReport(
            seed=self.seed,
            num_steps=tally.steps,
            num_requests=tally.requests,
            num_finished=tally.finished,
            num_tokens=tally.tokens,
            num_preemptions=tally.preemptions,
            num_swapped_blocks=tally.swapped,
            num_cached_tokens=tally.cached,
            num_faults=tally.faults,
            num_reconfigurations=tally.reconfigurations,
            most_preemptions=tally.most_preemptions,
            digest=self.log.hexdigest(),
        )

    def _plan(self) -> MemoryPlan:
        rng = self.random
        block_size = rng.choice((1, 2, 3, 4, 8, 16, 32, 64))
        num_blocks = rng.choice((rng.randint(4, 16), rng.randint(4, 64), rng.randint(4, 512)))
        max_num_seqs = rng.randint(1, 32)
        budget = rng.choice((rng.randint(1, 8), rng.randint(1, 64), rng.randint(1, 256)))
        if rng.random() < 0.6:  # many requests at once in a pool that is too small for them
            num_blocks = max(4, min(512, rng.randint(100, 500) // block_size))
            max_num_seqs, budget = rng.randint(4, 32), rng.randint(16, 256)
        config = EngineConfig(
            block_size=block_size,
            max_model_len=rng.choice((rng.randint(16, 400), 400)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=rng.random() < (0.5 if budget > 32 else 0.9),
            enable_prefix_caching=rng.random() < 0.7,
            preemption_mode=rng.choice(("recompute", "swap")),
        )
        return bare_plan(virtual_model(), config, num_blocks, rng.choice((0, rng.randint(1, num_blocks), num_blocks)))

    def _hash_function(self) -> HashFunction:
        """In some lives all content has one hash, or content is hashed without what is before it: tokens must not
        change."""
        if self.collisions == "all":
            return lambda parent, token_ids: b"same"
        if self.collisions == "parents":
            return lambda parent, token_ids: block_hash(b"", token_ids)
        return block_hash

    def _tokens(self, count: int) -> tuple[int, ...]:
        """Few different ones in lives with collisions, so that equal blocks follow other beginnings."""
        kinds = VOCAB_SIZE if self.collisions == "none" else 4
        return tuple(self.random.randrange(1, kinds) for _ in range(count))

    def _arrive(self) -> None:
        rng = self.random
        prefix = rng.choice(self.prefixes)
        prompt = prefix[: rng.randint(0, len(prefix))] + self._tokens(rng.randint(1, rng.choice((4, 40, 120))))
        if rng.random() < 0.15:  # a prompt that was there before, whole
            prompt = self.last_prompt
        self.last_prompt = prompt
        sampling = SamplingParams(max_tokens=rng.randint(1, rng.choice((4, 30, 80))), ignore_eos=rng.random() < 0.5)
        request = EngineRequest(self.tally.requests, prompt, sampling, self.executor.now_s)
        self.tally.requests += 1
        try:
            self.engine.add_request(request)
        except DoesNotFitError as error:
            self._require(all((error.needed, error.available, error.works, error.knob)), "a refusal explains nothing")
        else:
            self.requests[request.request_id] = request

    def _maybe_raise(self) -> None:
        if self.random.random() < self.fault_rate / 2:
            self.tally.faults += 1
            raise InjectedFault("the executor failed, as told")

    def _watch_allocation(self) -> None:
        """Let the pool's allocation fail at random, as a pool short of memory would."""
        pool = self.engine.scheduler.pool
        allocate = pool.allocate

        def failing(count: int, *, after: int = -1, expected: int = 0) -> list[int] | None:
            if self.random.random() < self.fault_rate:
                self.tally.faults += 1
                self.faulted = True
                return None
            return allocate(count, after=after, expected=expected)

        pool.allocate = failing  # type: ignore[method-assign]

    def _watch_write(self, block_id: int) -> None:
        pool = self.engine.scheduler.pool
        self._require(pool.num_references(block_id) == 1, f"I4: block {block_id} is shared and written")
        self._require(pool.key_of(block_id) is None, f"I4: block {block_id} is cached and written")

    def _check_limits(self, result: StepResult) -> None:
        config = self.engine.plan.config
        self._require(result.num_tokens <= (config.max_num_batched_tokens or 0), "I5: more tokens than the budget")
        self._require(result.num_running <= (config.max_num_seqs or 0), "I5: more sequences than max_num_seqs")
        self._require(
            0 <= result.num_tokens_stored <= result.num_blocks_used * config.block_size, "stored tokens do not add up"
        )

    def _check_progress(self, running: set[int]) -> None:
        """L2: who ran before and after this step advanced in it, unless a fault was injected."""
        before = self.unadvanced
        self.unadvanced = {}
        for entry in self.engine.scheduler.running:
            request_id = entry.request.request_id
            self.unadvanced[request_id] = entry.num_computed_tokens
            stuck = before.get(request_id) == entry.num_computed_tokens and request_id in running
            self._require(self.faulted or not stuck, f"L2: request {request_id} runs but does not advance")
            self._require(entry.status is Status.RUNNING, "a finished sequence runs")

    def _check_output(self, output: RequestOutput) -> None:
        request = self.requests.pop(output.request_id)
        expected = reference_tokens(request, len(output.token_ids))
        self._require(list(output.token_ids) == expected, f"request {output.request_id} has other tokens")
        self._require(output.num_preemptions <= MAX_PREEMPTIONS, f"L3: {output.num_preemptions} preemptions")
        ended = EOS_TOKEN_ID in output.token_ids and not request.sampling.ignore_eos
        if output.finish_reason == "stop":
            self._require(ended and output.token_ids.index(EOS_TOKEN_ID) == len(output.token_ids) - 1, "wrong stop")
        elif output.finish_reason == "length":
            limit = min(request.sampling.max_tokens, (self.engine.plan.config.max_model_len or 0) - output.input_tokens)
            self._require(len(output.token_ids) >= limit and not ended, "it ended before its length")
        else:
            known = output.finish_reason.startswith(("cancelled", "refused: ", "length: "))
            self._require(known, f"unknown reason {output.finish_reason!r}")
        self.tally.finished += 1
        self.tally.cached += output.num_cached_tokens
        self.tally.most_preemptions = max(self.tally.most_preemptions, output.num_preemptions)

    def _note(self, result: StepResult) -> None:
        self.tally.tokens += result.num_tokens
        self.tally.preemptions += result.num_preemptions
        self.tally.swapped += result.num_swapped_blocks
        self.log.update(repr(result).encode())

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise SimulationError(message)


def add_up(total: dict[str, int], report: SimulationReport) -> None:
    """Add the counts of `report` to `total`; `most_preemptions` becomes the largest of all."""
    for name, value in dataclasses.asdict(report).items():
        if name.startswith("num_"):
            total[name] = total.get(name, 0) + value
    total["most_preemptions"] = max(total.get("most_preemptions", 0), report.most_preemptions)


def record_results(path: str, total: dict[str, int], command: str) -> None:
    """Write the counts of many lives, none of which broke a rule, as a results file."""
    write_results(
        path,
        command=command,
        card="virtual",
        rows=[total],
        summary={"steps": at_least(total["num_steps"], 1_000_000, 10_000_000), "broken rules": at_most(0, 0)},
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line: adds up the counts of all seeds, or prints the first broken rule with its seed."""
    parser = argparse.ArgumentParser(prog="python -m labkit.engine.fault_simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--steps", type=int, default=500, help="steps with arrivals and faults, for each seed")
    parser.add_argument("--record", help="file for the counts, such as results/simulation-engine.json")
    options = parser.parse_args(arguments)
    total: dict[str, int] = {}
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            report = simulate(seed, options.steps)
        except SimulationError as error:
            print(error, file=sys.stderr)
            return 1
        add_up(total, report)
    print("seeds", options.seed, "to", options.seed + options.seeds - 1, total, "last digest", report.digest)
    if options.record:
        command = f"{parser.prog} --seed {options.seed} --seeds {options.seeds} --steps {options.steps}"
        record_results(options.record, total, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
