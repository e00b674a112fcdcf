"""Damage drawn at random, from seeds, to modules of experts that transformers made. The kernel runs
them as it ran them before, bit for bit, or leaves them to transformers for a reason that names what
was damaged; and gives back what it took."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import deep_moe.integrations.transformers as adapter
from deep_moe.errors import DeepMoEError

from ..checkpoint.test_drawn_damage import DTYPES, SHAPES

# In front of what has the same condition: a second import of a skipped module finds half of it.
transformers = pytest.importorskip("transformers", minversion="5.16.1")

from deep_moe.integrations.transformers.experts import (  # noqa: E402
    experts_forward,
    own_tensors,
    path_of,
)

from .test_transformers import gpu_experts, random_call, small_qwen  # noqa: E402

NUM_DRAWS = 4  # of each kind of damage
LAYERS, SCALES = ("gate_up_proj", "down_proj"), "_scale_inv"
# Of `gpu_experts`; None for what transformers has for floats.
FORMS: dict[str, dict[str, Any] | None] = {
    "MXFP4": {"expert_dtype": "fp4", "scale_fmt": "ue8m0"},
    "MXFP4, float scales": {"expert_dtype": "fp4", "scale_fmt": "float"},
    "FP8, blocks": {"block_size": (128, 128)},
    "FP8, matrices": {"block_size": None},
    "MXFP8": {"block_size": (1, 32), "scale_fmt": "ue8m0"},
    "MXFP8, float scales": {"block_size": (1, 32), "scale_fmt": "float"},
    "BF16": None,
    "gpt-oss": None,
}
# Either the values are as they were, or the reason has one of these words; without words, the
# former.
Words = list[str]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    adapter.register(arch="sm_90a")
    yield
    adapter.close_buffers()


def value_of(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if name.endswith(SCALES):
        exponents = torch.randint(120, 125, tensor.shape, generator=generator, dtype=torch.uint8)
        if tensor.element_size() == 1:
            return exponents.view(tensor.dtype)
        return torch.exp2(exponents.float() - 127).to(tensor.dtype)
    if tensor.dtype in (torch.int8, torch.uint8):
        codes = torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8)
        return codes.view(tensor.dtype)
    return (torch.randn(tensor.shape, generator=generator) * 0.1).to(tensor.dtype)


def sound(form: str) -> Any:
    """A module with values."""
    options = FORMS[form]
    if options is not None:
        module = gpu_experts(**options)
    elif form == "BF16":
        module = small_qwen(256, 128).model.layers[0].mlp.experts
        module.config._experts_implementation = "deep_moe"
    else:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        config = transformers.GptOssConfig(
            hidden_size=256, intermediate_size=128, num_local_experts=8, swiglu_limit=1.0
        )
        config._experts_implementation = "deep_moe"
        module = GptOssExperts(config).bfloat16()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in own_tensors(module).items():
        set_tensor(module, name, value_of(name, tensor, generator))
    return module


def set_tensor(module: Any, name: str, tensor: torch.Tensor) -> None:
    setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False))


class Damaged:
    """A module, and what is drawn for it."""

    def __init__(self, form: str, seed: int) -> None:
        self.module = sound(form)
        self.drawn = random.Random(seed)
        self.name = self.drawn.choice(sorted(own_tensors(self.module)))

    def of_layers(self) -> list[str]:
        """The tensor alone, or that of both layers."""
        if self.drawn.random() < 0.5:
            return [self.name]
        rest = self.name.removeprefix(LAYERS[0]).removeprefix(LAYERS[1])
        return [layer + rest for layer in LAYERS]

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Words:
        for name in self.of_layers():
            set_tensor(self.module, name, change(getattr(self.module, name).detach()))
        return [*LAYERS, "weights of", "scale", "bias"]


def missing(own: Damaged) -> Words:
    delattr(own.module, own.name)
    if own.drawn.random() < 0.5:
        setattr(own.module, own.name, None)
    return [own.name]


def converted(own: Damaged) -> Words:
    """Of another size, for one of the same might be a type that the format takes, too: as may bytes
    where a float stands for an exponent."""
    tensor = getattr(own.module, own.name)
    is_exponent = own.name.endswith(SCALES) and tensor.dtype == torch.float32
    bytes_ = (torch.uint8, torch.float8_e8m0fnu) if is_exponent else ()
    size = tensor.element_size()
    dtype = own.drawn.choice([d for d in DTYPES if d.itemsize != size and d not in bytes_])
    return own.change(lambda tensor: tensor.float().to(dtype))


def read_as_another_type(own: Damaged) -> Words:
    tensor = getattr(own.module, own.name)
    same = [each for each in DTYPES if each.itemsize == tensor.element_size()]
    # Bytes are E2M1's, or an exponent's, whether they have a sign or not.
    same = [each for each in same if each not in (torch.bool, tensor.dtype)]
    if tensor.dtype in (torch.int8, torch.uint8, torch.float8_e8m0fnu):
        same = [torch.float8_e5m2]
    dtype = own.drawn.choice(same)
    return own.change(lambda tensor: tensor.view(dtype))


def reshaped(own: Damaged) -> Words:
    tensor = getattr(own.module, own.name).detach()
    for change in own.drawn.sample(SHAPES, len(SHAPES)):
        try:
            if change(tensor).shape != tensor.shape:
                break
        except (RuntimeError, IndexError):
            continue

    def made(tensor: torch.Tensor) -> torch.Tensor:
        try:
            return change(tensor).clone()
        except (RuntimeError, IndexError):
            return tensor

    return own.change(made)


def no_number(own: Damaged) -> Words:
    """In a tensor of scales, if there is one in floats."""
    scales = [own for own in own_tensors(own.module).items() if own[0].endswith(SCALES)]
    for name, tensor in scales:
        if tensor.dtype == torch.float32:
            changed = tensor.detach().clone()
            wrong = own.drawn.choice([torch.nan, torch.inf, -torch.inf, -1.0])
            changed.view(-1)[own.drawn.randrange(changed.numel())] = wrong
            set_tensor(own.module, name, changed)
            break
    return [*LAYERS, "expert"]


def added(own: Damaged) -> Words:
    """A tensor of a name that says that it belongs to the weights."""
    own.name = own.drawn.choice(LAYERS)
    suffix = own.drawn.choice(["_zero_point", "_scale_2", "_bias_2", ".g_idx", "_lora_a"])
    name = (own.name + suffix).replace(".", "_")
    if own.drawn.random() < 0.5:
        set_tensor(own.module, name, torch.ones(8, 3))
    else:
        own.module.register_buffer(name, torch.ones(8, 3))
    return [name]


def on_meta(own: Damaged) -> Words:
    return own.change(lambda tensor: tensor.to("meta"))


def strided(own: Damaged) -> Words:
    """Other memory, the same values."""
    own.change(lambda tensor: torch.stack([tensor, tensor], -1)[..., 0])
    return []


VALUES: list[Any] = [None, True, -1, 0, 1.5, 2**70, "", "silu", [], [3], {}, (64, 64), torch.nan]


def attribute(own: Damaged) -> Words:
    """Of those that say what tensors mean."""
    names = ["has_gate", "has_post_expert_norm", "has_bias", "num_experts", "block_size", "limit"]
    name = own.drawn.choice([n for n in names if hasattr(own.module, n)] or ["has_gate"])
    is_number = name == "limit"  # of which others are other activations
    values = [v for v in VALUES if not (is_number and isinstance(v, (int, float, type(None))))]
    setattr(own.module, name, own.drawn.choice(values))
    return [name, "activation", *LAYERS, "scale"]


def activation(own: Damaged) -> Words:
    """Another function, or none."""

    def raises(gate_up: torch.Tensor) -> torch.Tensor:
        raise TypeError("no function")

    functions: list[Any] = [
        raises,
        lambda gate_up: None,
        lambda gate_up: gate_up,
        lambda gate_up: gate_up[:, 0] * torch.nan,
        lambda gate_up: gate_up[:1, :1],
        lambda gate_up: 3.0,
        None,
    ]
    own.module._apply_gate = own.drawn.choice(functions)
    return ["activation"]


DAMAGES = (
    *(missing, converted, read_as_another_type, reshaped, no_number, added, on_meta, strided),
    *(attribute, attribute, activation),
)


def output(module: Any) -> torch.Tensor:
    with torch.no_grad():
        y: torch.Tensor = experts_forward(module, *random_call(5))
    return y


def fault(form: str, damage: Callable[[Damaged], Words], seed: int) -> str | None:
    """What is wrong with the answer to one draw."""
    expected = output(sound(form))
    own = Damaged(form, seed)
    words = damage(own)
    given = {name: tensor.detach() for name, tensor in own_tensors(own.module).items()}
    given = {name: t if t.is_meta else t.clone() for name, t in given.items()}
    try:
        path = path_of(own.module, None, 2)
    except DeepMoEError as error:
        return None if any(word in str(error) for word in words) else f"{words}: {error}"
    except Exception as error:
        return repr(error)
    if path.layer is None:
        if any(word in path.reason for word in words):
            return None
        return f"the reason names none of {words}: {path.reason}"
    if not torch.equal(output(own.module), expected):
        return "other values, no reason"
    adapter.release(torch.nn.ModuleDict({"experts": own.module}))
    for name, tensor in own_tensors(own.module).items():
        if tensor.dtype != given[name].dtype or not torch.equal(
            tensor.contiguous().view(torch.uint8), given[name].contiguous().view(torch.uint8)
        ):
            return f"{name} was not given back"
    return None


@pytest.mark.parametrize("form", FORMS)
def test_it_is_left_to_transformers_or_harmless(form: str) -> None:
    faults = []
    for seed in range(NUM_DRAWS * len(DAMAGES)):
        damage = DAMAGES[seed % len(DAMAGES)]
        found = fault(form, damage, seed + 1000 * [*FORMS].index(form))
        if found is not None:
            faults.append(f"{seed} {damage.__name__}: {found}")
    assert faults == [], "\n".join(faults)
