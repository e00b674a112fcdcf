"""A policy whose experts serve in FP8 learns by policy gradients, and every ratio is exactly 1.

Off-policy corrections multiply by exp(log-probability in training - log-probability when the action
was drawn). Where an engine serves quantized experts and a trainer multiplies in BF16, that ratio is
not 1 even for actions of the very policy that is trained. With `forward="serving"` the trainer runs
the engine's call, and the ratio is 1 to the last bit.

    python examples/policy_gradient.py            # a few steps in the emulator, half a minute
    python -m examples.policy_gradient --device cuda --steps 200

The policy sees a letter and names the next one; it is rewarded for the letter that follows in the
alphabet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

if not __package__:  # run as a file, whose folder is searched for modules, not the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import deep_moe

LETTERS = 26
HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 128, 128, 4, 2
BATCH, LENGTH = 32, 4  # stories that are told side by side, and letters of each
WEIGHTS = "fp8"


class Policy(nn.Module):
    """What is around the experts, and the experts."""

    def __init__(self, buffer: deep_moe.SymmBuffer, arch: str | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = deep_moe.MoELayer(
            HIDDEN,
            INTERMEDIATE,
            EXPERTS,
            forward="serving",
            sym_buffer=buffer,
            arch=arch,
            device=buffer.device,
        )
        self.head = nn.Linear(HIDDEN, LETTERS)

    def route(self, letters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, topk_idx and topk_weights of letters [batch]."""
        x = self.embedding(letters)
        topk_weights, topk_idx = self.router(x).softmax(-1).topk(TOPK)
        return x.bfloat16(), topk_idx, topk_weights

    def log_probabilities(self, letters: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Of each next letter [batch, letters], from the experts' output x."""
        return self.head(self.embedding(letters) + x.float()).log_softmax(-1)


@dataclass
class Engine:
    """The experts as an engine serves them: quantized, laid out, called."""

    buffer: deep_moe.SymmBuffer
    arch: str | None
    weights: deep_moe.MegaMoEWeights | None = None

    def load(self, experts: deep_moe.MoELayer) -> None:
        """The weights that the trainer has now."""
        layers = experts.serving_weights(WEIGHTS)
        self.weights = deep_moe.transform_weights_for_mega_moe(*layers, self.arch, weights=WEIGHTS)

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        assert self.weights is not None
        deep_moe.prepare_inputs(x, topk_idx, topk_weights, self.buffer, arch=self.arch)
        y = torch.empty_like(x)
        deep_moe.mega_moe(y, self.weights, self.buffer, arch=self.arch)
        return y


@torch.no_grad()
def roll_out(
    policy: Policy, engine: Engine, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Letters [length + 1, batch] and the log-probabilities [length, batch] that they were drawn
    with. A call of the engine for each letter of all stories."""
    device = engine.buffer.device
    letters = [torch.randint(LETTERS, (BATCH,), generator=generator).to(device)]
    drawn = []
    for _ in range(LENGTH):
        y = engine(*policy.route(letters[-1]))
        log_p = policy.log_probabilities(letters[-1], y)
        next_letters = torch.multinomial(log_p.exp().cpu(), 1, generator=generator).to(device)
        drawn.append(log_p.gather(1, next_letters)[:, 0])
        letters.append(next_letters[:, 0])
    return torch.stack(letters), torch.stack(drawn)


def trained_log_probabilities(
    policy: Policy, letters: torch.Tensor, experts: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Of the letters of stories [length, batch]: experts are called once for all of them.

    Router and head are PyTorch's, whose bits may depend on the number of rows: so they get as many
    as they got when the letters were drawn. The experts' do not.
    """
    routed = [policy.route(position) for position in letters[:-1]]
    x, topk_idx, topk_weights = (torch.cat(parts) for parts in zip(*routed, strict=True))
    y = experts(x, topk_idx, topk_weights).view(LENGTH, BATCH, HIDDEN)
    log_p = [policy.log_probabilities(*pair) for pair in zip(letters[:-1], y, strict=True)]
    return torch.stack(log_p).gather(2, letters[1:].unsqueeze(2))[..., 0]


@dataclass(frozen=True)
class Step:
    """reward: the mean. ratio: least and greatest of all letters. error: the greatest distance of
    the ratio from 1 if the trainer's forward pass were BF16's."""

    reward: float
    ratio: tuple[float, float]
    error: float


def step(
    policy: Policy, engine: Engine, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> Step:
    """Draw stories, and make what was rewarded more likely."""
    engine.load(policy.experts)
    letters, drawn = roll_out(policy, engine, generator)
    reward = (letters[1:] == (letters[:-1] + 1) % LETTERS).float()
    experts = policy.experts
    log_p = trained_log_probabilities(policy, letters, experts)
    ratio = (log_p - drawn).exp()
    loss = -(ratio * (reward - reward.mean())).mean()
    with torch.no_grad():
        in_bf16 = trained_log_probabilities(
            policy,
            letters,
            lambda *routed: deep_moe.moe(*routed, experts.w1, experts.w3, experts.w2),
        )
        error = ((in_bf16 - drawn).exp() - 1).abs().max().item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return Step(reward.mean().item(), (ratio.min().item(), ratio.max().item()), error)


def learn(num_steps: int, device: torch.device) -> list[Step]:
    """A new policy, which learns for so many steps."""
    arch = "sm_90a" if device.type == "cpu" else None
    torch.manual_seed(0)
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, EXPERTS, BATCH * LENGTH, TOPK, HIDDEN, INTERMEDIATE, weights=WEIGHTS, device=device
    )
    policy = Policy(buffer, arch).to(device)
    engine = Engine(buffer, arch)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    steps = []
    for number in range(1, num_steps + 1):
        steps.append(step(policy, engine, optimizer, generator))
        print(
            f"step {number:4}  reward {steps[-1].reward:.3f}  ratio {steps[-1].ratio[0]} to "
            f"{steps[-1].ratio[1]}, with a BF16 forward pass 1 ± {steps[-1].error:.1e}",
            flush=True,
        )
    return steps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args(arguments)
    return int(any(step.ratio != (1.0, 1.0) for step in learn(options.steps, options.device)))


if __name__ == "__main__":
    sys.exit(main())
