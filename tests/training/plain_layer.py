"""Small layers, and the plain formula that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import deep_moe
from deep_moe.activations import activation_of
from deep_moe.activations.activation import GatedActivation

BIASES = ("b1", "b3", "b2")


@dataclass
class Layer:
    """Inputs of a call by name; the tensors are leaves that require gradients."""

    topk_idx: torch.Tensor
    tensors: dict[str, torch.Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def random(
        cls,
        *,
        num_tokens: int = 7,
        num_topk: int = 3,
        num_experts: int = 5,
        hidden: int = 16,
        intermediate: int = 24,
        biases: bool = False,
        fused: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        **options: Any,
    ) -> Layer:
        """One slot in six names no expert, the last expert gets none, and one token names an expert
        twice."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int, dtype: torch.dtype = dtype, scale: float = 0.4) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            return values.to(dtype).requires_grad_()

        idx = torch.randint(-1, num_experts - 1, (num_tokens, num_topk), generator=generator)
        if num_tokens and num_topk > 1:
            idx[0, :2] = 0
        width = 2 * intermediate if fused else intermediate
        tensors: dict[str, torch.Tensor | None] = {
            "x": normal(num_tokens, hidden, scale=1.0),
            "topk_weights": normal(num_tokens, num_topk, dtype=wide, scale=1.0),
            "w1": normal(num_experts, hidden, width),
            "w3": None if fused else normal(num_experts, hidden, intermediate),
            "w2": normal(num_experts, intermediate, hidden),
        }
        if biases:
            for name in BIASES:
                size = hidden if name == "b2" else intermediate
                tensors[name] = normal(num_experts, size, dtype=wide)
        return cls(idx, tensors, options)

    def __call__(self, **options: Any) -> torch.Tensor:
        tensors: dict[str, Any] = dict(self.tensors)
        first = [tensors.pop(name) for name in ("x", "topk_weights", "w1", "w3", "w2")]
        x, topk_weights, w1, w3, w2 = first
        more = {**tensors, **self.options, **options}
        return deep_moe.moe(x, self.topk_idx, topk_weights, w1, w3, w2, **more)

    def run(self, d_out: torch.Tensor | None = None, **options: Any) -> dict[str, torch.Tensor]:
        """The output and all gradients, by name."""
        out = self(**options)
        return {"out": out.detach(), **self.gradients(out, d_out)}

    def gradients(
        self, out: torch.Tensor, d_out: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        leaves = {name: tensor for name, tensor in self.tensors.items() if tensor is not None}
        if d_out is None:
            d_out = random_like(out)
        found = torch.autograd.grad(out, list(leaves.values()), d_out.to(out))
        return dict(zip(leaves, found, strict=True))

    def double(self) -> Layer:
        """The same values in float64."""
        tensors = {
            name: None if t is None else t.detach().double().requires_grad_()
            for name, t in self.tensors.items()
        }
        return Layer(self.topk_idx, tensors, self.options)

    def plain(self) -> torch.Tensor:
        """The formula, token by token and slot by slot, for PyTorch's own autograd."""
        t: dict[str, Any] = self.tensors
        x, topk_weights, w1, w3, w2 = (t[n] for n in ("x", "topk_weights", "w1", "w3", "w2"))
        assert x is not None
        assert topk_weights is not None
        assert w1 is not None
        assert w2 is not None
        activation = activation_of(
            self.options.get("activation", "swiglu"), self.options.get("activation_clamp")
        )
        assert isinstance(activation, GatedActivation)
        out = [x.new_zeros(x.shape[1]) + 0 * x[i] for i in range(len(x))]
        for token, experts in enumerate(self.topk_idx.tolist()):
            for slot, expert in enumerate(experts):
                if not 0 <= expert < len(w2):
                    continue
                if w3 is None:
                    gate, up = (x[token] @ w1[expert]).chunk(2)
                else:
                    gate, up = x[token] @ w1[expert], x[token] @ w3[expert]
                if t.get("b1") is not None:
                    gate, up = gate + t["b1"][expert], up + t["b3"][expert]
                y = activation(gate, up) @ w2[expert]
                if t.get("b2") is not None:
                    y = y + t["b2"][expert]
                out[token] = out[token] + topk_weights[token, slot] * y
        used = sum(tensor.sum() * 0 for tensor in t.values() if tensor is not None)
        return torch.stack(out) + used


def random_like(tensor: torch.Tensor, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)


def assert_equal_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], bound: float) -> None:
    """The error of each tensor is at most `bound` times its size, both as norms."""
    assert a.keys() == b.keys()
    for name in a:
        expected = b[name].double()
        error = (a[name].double() - expected).norm()
        assert error <= bound * expected.norm(), f"{name}: {error / expected.norm():.2e}"
