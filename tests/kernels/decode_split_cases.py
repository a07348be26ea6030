"""The device's own plan of a decode step, run by triton's interpreter, as JSON; usage: TRITON_INTERPRET=1 … CASES."""

import json
import sys

import torch
from labkit_kernels.decode_plan import DecodeWorkspace, _plan_kernel  # noqa: F401
from labkit_kernels.heuristics import DecodeConfig


def plan(case):
    workspace = DecodeWorkspace(
        max_batch=len(case["lens"]), max_seq_len=max(case["lens"]), num_q_heads=4, num_kv_heads=4, head_dim=64,
        kv_dtype=torch.bfloat16, device="cpu", config=DecodeConfig(tile=case["tile"]), window=case["window"],
        chunk_tokens=case["chunk_tokens"],
    )  # fmt: skip
    workspace.slots_per_head = case["slots"]
    workspace._allocate(torch.device("cpu"))
    workspace.plan(torch.tensor(case["lens"], dtype=torch.int32))
    count, chunk = workspace.meta.tolist()[:2]
    return {"chunk": chunk, "items": workspace.items[:3, :count].tolist()}


print(json.dumps([plan(case) for case in json.loads(sys.argv[1])]))
