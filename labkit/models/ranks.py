"""`Ranks`: the processes that share each layer of one model, and what they tell each other.

Every matrix is divided over them: Q, K, V, gate and up by output, so that each rank has whole heads; attention's
output and down by input, behind which an all-reduce sums the parts; embedding and head by vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

MEETING_S = 60.0


class Ranks(Protocol):
    """One process of `size`, number `rank`; all of them make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """0 is the one that schedules."""
        ...

    @property
    def size(self) -> int:
        """Processes that share each layer."""
        ...

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place or anew; the same bits on every rank."""
        ...

    def all_gather(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        """`[rows, width]` of each rank → the first columns of `[rows, size * width]`, contiguous, on every rank."""
        ...

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's `values` on every rank."""
        ...

    def smallest(self, number: int) -> int:
        """The smallest `number` of any rank."""
        ...


@dataclasses.dataclass(frozen=True)
class OneRank:
    """A model that nobody shares; see `Ranks`."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """`partial`."""
        return partial

    def all_gather(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        """`part`, which has no others."""
        return part

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """`values`."""
        return values

    def smallest(self, number: int) -> int:
        """`number`."""
        return number


ONE_RANK = OneRank()


class ProcessRanks:
    """Ranks through torch.distributed: NCCL between cards, gloo between CPU processes; see `Ranks`.

    The group is this object's own, not torch's default one. The processes find each other through a file and talk over
    the loopback interface: no port is chosen and nothing listens to the network.

    Args:
        rank, size: of this process.
        rendezvous: a file that does not exist yet, the same for all; whoever made its folder removes it.
        device: where the tensors are; "cuda:N" or "cpu".
        timeout_s: how long to wait for the other ranks in each call; here it is `MEETING_S`.

    Raises:
        RuntimeError: the others did not come, here; one went away or took too long, in calls on a CPU.
    """

    def __init__(
        self, rank: int, size: int, rendezvous: str, device: torch.device, *, timeout_s: float = 120.0
    ) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._timeout = timedelta(seconds=timeout_s)
        store = dist.FileStore(rendezvous, size)
        store.set_timeout(timedelta(seconds=MEETING_S))
        make = _nccl_group if device.type == "cuda" else _gloo_group
        self._group = make(store, rank, size)
        if device.type == "cuda":
            # NCCL connects at the first call, which no graph could capture.
            self.smallest(0)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """See `Ranks.all_reduce`; in place."""
        _wait(self._group.allreduce([partial], self._now(dist.AllreduceOptions())))
        return partial

    def all_gather(self, part: torch.Tensor, num_columns: int) -> torch.Tensor:
        """See `Ranks.all_gather`."""
        rows, width = part.shape
        out = part.new_empty(self.size * rows, width)
        _wait(self._group._allgather_base(out, part.contiguous(), self._now(AllgatherOptions())))
        parts = out.view(self.size, rows, width)
        if num_columns == self.size * width:
            return parts.transpose(0, 1).reshape(rows, num_columns)
        whole = part.new_empty(rows, num_columns)
        for start, columns in zip(range(0, num_columns, width), parts, strict=False):
            whole[:, start : start + width] = columns[:, : num_columns - start]
        return whole

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """See `Ranks.from_first`; in place."""
        options = self._now(dist.BroadcastOptions())
        options.rootRank = 0
        _wait(self._group.broadcast([values], options))
        return values

    def smallest(self, number: int) -> int:
        """See `Ranks.smallest`."""
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        options = self._now(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.MIN
        _wait(self._group.allreduce([value], options))
        return int(value)

    def _now(self, options: Any) -> Any:
        """On the caller's own stream, where a graph can capture it."""
        options.asyncOp, options.timeout = False, self._timeout
        return options

    def abort(self) -> None:
        """Give the group up: on cards kernels that wait for another rank end. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            group.abort()


def _gloo_group(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # A name or an interface of this host would be looked up, and might lead out of it.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout, options._threads = timedelta(seconds=MEETING_S), 1
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int) -> Any:
    # Where NCCL's processes meet; data goes from card to card.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = dist.ProcessGroupNCCL.Options()
    options.global_ranks_in_group = list(range(size))
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
