"""A small language model whose layers are mixtures of experts learns the tales of train_text.py.

It learns them letter by letter, three times from the same start: with deep_moe's layer in BF16,
with an MXFP8 forward pass, and with a layer in plain PyTorch. On a CPU it takes about two minutes.

    python examples/train.py                 # loss every ten steps; draws build/train/loss.svg
    python -m examples.train --steps 20 --layers bf16
    python -m examples.train --device cuda --steps 2000 --width 512 --experts 64

Weights are kept in float32, as an optimizer wants them, and given to the layer in BF16.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder is searched for modules, not the checkout
    sys.path[0] = str(ROOT)

import deep_moe  # noqa: E402
from benchmarks.chart import Curve, Panel, Style, chart  # noqa: E402
from examples.train_text import tales  # noqa: E402

OUT = ROOT / "build" / "train"
CONTEXT = 64
STEPS_PER_POINT = 10
STYLES = {
    "plain": Style("#8250df", marker="ring"),
    "bf16": Style("#0969da"),
    "mxfp8": Style("#bc4c00"),
}
LABELS = {
    "plain": "plain PyTorch",
    "bf16": "deep_moe, BF16",
    "mxfp8": "deep_moe, MXFP8 forward",
}


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batches."""

    width: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_experts: int = 8
    num_topk: int = 2
    batch: int = 16


def text() -> torch.Tensor:
    """The tales' bytes."""
    return torch.tensor(list(tales()))


def plain_moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """What deep_moe.moe computes, expert by expert, for PyTorch to differentiate."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(w1)):
        token, slot = (topk_idx == expert).nonzero(as_tuple=True)
        rows = x[token]
        y = (F.silu(rows @ w1[expert]) * (rows @ w3[expert])) @ w2[expert]
        out = out.index_add(0, token, topk_weights[token, slot].unsqueeze(1) * y)
    return out.to(x.dtype)


class Experts(nn.Module):
    """A router and its experts. kind: "plain", or a precision of deep_moe.moe."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.num_topk = sizes.num_topk
        self.kind = kind
        width, num_experts = sizes.width, sizes.num_experts
        self.router = nn.Linear(width, num_experts, bias=False)

        def weights() -> nn.Parameter:  # the intermediate size is the width
            return nn.Parameter(torch.randn(num_experts, width, width) / math.sqrt(width))

        self.w1, self.w3, self.w2 = weights(), weights(), weights()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        topk_weights, topk_idx = self.router(tokens).softmax(-1).topk(self.num_topk)
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        rows = tokens.bfloat16()
        weights = [w.bfloat16() for w in (self.w1, self.w3, self.w2)]
        if self.kind == "plain":
            out = plain_moe(rows, topk_idx, topk_weights, *weights)
        else:
            out = deep_moe.moe(rows, topk_idx, topk_weights, *weights, precision=self.kind)
        return out.to(x.dtype).view(x.shape)


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.width) for _ in range(2))
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.proj = nn.Linear(sizes.width, sizes.width, bias=False)
        self.experts = Experts(sizes, kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3 * self.num_heads, -1)
        q, k, v = heads.transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.experts(self.norms[1](x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, sizes.width)
        self.position = nn.Parameter(torch.randn(CONTEXT, sizes.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(sizes, kind) for _ in range(sizes.num_layers)))
        self.head = nn.Sequential(nn.RMSNorm(sizes.width), nn.Linear(sizes.width, 256))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(letters) + self.position))


def train(
    kind: str, num_steps: int, sizes: Sizes, device: torch.device, *, is_quiet: bool = False
) -> list[float]:
    """The loss of every step, in nats per byte. The start and the batches are the same for every
    kind of layer."""
    torch.manual_seed(0)
    model = Model(sizes, kind).to(device)
    letters = text()
    batches = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    begin = time.perf_counter()
    losses: list[torch.Tensor] = []
    for step in range(num_steps):
        first = torch.randint(len(letters) - CONTEXT, (sizes.batch, 1), generator=batches)
        window = letters[first + torch.arange(CONTEXT + 1)].to(device)
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if not is_quiet and (step + 1) % STEPS_PER_POINT == 0:
            mean = torch.stack(losses[-STEPS_PER_POINT:]).mean().item()
            seconds = time.perf_counter() - begin
            print(f"{kind:6} step {step + 1:5}  loss {mean:.3f}  {seconds:6.1f} s", flush=True)
    return torch.stack(losses).tolist()


def picture(losses: dict[str, list[float]]) -> str:
    """The curves, each point the mean of ten steps."""
    curves = []
    for kind, values in losses.items():
        means = {
            end: sum(values[end - STEPS_PER_POINT : end]) / STEPS_PER_POINT
            for end in range(STEPS_PER_POINT, len(values) + 1, STEPS_PER_POINT)
        }
        curves.append(Curve(LABELS[kind], means, STYLES[kind]))
    title = "A small mixture-of-experts model learns to tell tales"
    return chart(title, [Panel("", curves)], x_label="step", y_label="loss, nats per byte")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", nargs="+", choices=list(STYLES), default=list(STYLES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--width", type=int, default=Sizes.width)
    parser.add_argument("--experts", type=int, default=Sizes.num_experts)
    parser.add_argument("--batch", type=int, default=Sizes.batch)
    parser.add_argument("--out", type=Path, default=OUT, help="a folder")
    options = parser.parse_args(arguments)
    if options.device.type == "cpu":
        torch.set_num_threads(1)  # more only wait for each other, so small are the products
    sizes = Sizes(width=options.width, num_experts=options.experts, batch=options.batch)
    losses = {kind: train(kind, options.steps, sizes, options.device) for kind in options.layers}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "loss.json").write_text(json.dumps(losses, indent=1) + "\n")
    if options.steps >= 2 * STEPS_PER_POINT:
        (options.out / "loss.svg").write_text(picture(losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
