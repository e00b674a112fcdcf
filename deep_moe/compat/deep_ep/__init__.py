"""DeepEP's all-to-alls, by their names, arguments and results, run by deep_moe.

>>> import torch
>>> import deep_moe.compat.deep_ep as deep_ep
>>> num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 128, 1, 4)
>>> buffer = deep_ep.Buffer(None, 0, num_bytes, low_latency_mode=True, device="cpu")
>>> x, topk_idx = torch.ones(3, 128).bfloat16(), torch.tensor([[0], [3], [0]])
>>> recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(
...     x, topk_idx, 8, 4, use_fp8=False)
>>> recv_count.tolist()
[2, 0, 0, 1]
>>> y, event, hook = buffer.low_latency_combine(2 * recv_x, topk_idx, torch.ones(3, 1), handle)
>>> y[:, 0].tolist()
[2.0, 2.0, 2.0]
>>> buffer.destroy()

Code that says `import deep_ep` finds it behind
`sys.modules["deep_ep"] = deep_moe.compat.deep_ep`. There is the low-latency part of version 1,
`Buffer`, and dispatch and combine of version 2 with expanded rows, `ElasticBuffer`, on one NVLink
domain; the rest is refused in words. docs/split.md says what differs.
"""

from __future__ import annotations

from typing import Any

import torch

from . import utils
from .buffer import Buffer, Config, LowLatencyHandle
from .elastic import ElasticBuffer, EPHandle
from .utils import EventHandle, EventOverlap

topk_idx_t = torch.int64  # the type of expert ids, for who asks

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "LowLatencyHandle",
    "utils",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}: it is DeepEP's all-to-alls, "
        f"{', '.join(__all__)}"
    )
