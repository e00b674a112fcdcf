"""Damage drawn at random, from seeds, to modules of experts that transformers made. The kernel runs
them as it ran them before, bit for bit, or leaves them to transformers for a reason that names what
was damaged; and gives back what it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import deep_moe.integrations.transformers as adapter
from deep_moe.errors import DeepMoEError

from .drawn_damage import DAMAGES as OF_TENSORS
from .drawn_damage import Damaged, Naming, Words, names_one_of

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
NAMING = Naming(LAYERS, SCALES, ["_zero_point", "_scale_2", "_bias_2", "_g_idx", "_lora_a"])


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
        value = torch.nn.Parameter(value_of(name, tensor, generator), requires_grad=False)
        setattr(module, name, value)
    return module


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


DAMAGES = (*OF_TENSORS, attribute, attribute, activation)


def output(module: Any) -> torch.Tensor:
    with torch.no_grad():
        y: torch.Tensor = experts_forward(module, *random_call(5))
    return y


def fault(
    form: str, damage: Callable[[Damaged], Words], seed: int, expected: torch.Tensor
) -> str | None:
    """What is wrong with the answer to one draw. expected: of the module without damage."""
    module = sound(form)
    own = Damaged(module, [*own_tensors(module)], NAMING, seed, ["weights of", "scale", "bias"])
    words = damage(own)
    given = {name: tensor.detach() for name, tensor in own_tensors(own.module).items()}
    given = {n: t.clone() if t.untyped_storage().nbytes() else t for n, t in given.items()}
    try:
        path = path_of(own.module, None, 2)
    except DeepMoEError as error:
        return names_one_of(words, str(error))
    except Exception as error:
        return repr(error)
    if path.layer is None:
        return names_one_of(words, path.reason)
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
    expected = output(sound(form))
    for seed in range(NUM_DRAWS * len(DAMAGES)):
        damage = DAMAGES[seed % len(DAMAGES)]
        found = fault(form, damage, seed + 1000 * [*FORMS].index(form), expected)
        if found is not None:
            faults.append(f"{seed} {damage.__name__}: {found}")
    assert faults == [], "\n".join(faults)
