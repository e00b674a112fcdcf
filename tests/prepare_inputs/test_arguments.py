"""Every refusal names the argument, what it was, and what is allowed; nothing is written. That
holds for a first call, and after one with otherwise equal arguments, which leaves a plan behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.fused.bounded_cache import BoundedCache
from deep_moe.fused.input_preparation import check_inputs

from .conftest import FILL, VIEWS, Target, bits

CPU = Target("cpu", None)


@pytest.fixture(params=["first_call", "later_call"], autouse=True)
def plans(request, monkeypatch: pytest.MonkeyPatch) -> BoundedCache:
    plans: BoundedCache = BoundedCache(64)
    monkeypatch.setattr("deep_moe.fused.input_preparation._plans", plans)
    if request.param == "later_call":
        with monkeypatch.context() as patched:
            patched.setattr("deep_moe.fused.input_preparation.run_emulated", lambda *_, **__: None)
            for num_tokens in (4, 3):
                inputs = {name: tensor[:num_tokens] for name, tensor in valid().items()}
                deep_moe.prepare_inputs(**inputs, sym_buffer=CPU.buffer())
        assert len(plans) == 2
    return plans


def valid() -> dict[str, Any]:
    return {
        "x": torch.ones(4, 256, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(4, 2, dtype=torch.int64),
        "topk_weights": torch.ones(4, 2),
    }


def shifted(num_elements: int) -> torch.Tensor:
    """Four tokens that start `num_elements` behind a 16-byte boundary."""
    storage = torch.zeros(4 * 256 + 8, dtype=torch.bfloat16)
    return storage[num_elements : num_elements + 4 * 256].view(4, 256)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("x", None, TypeError, "x must be a tensor; got NoneType"),
        ("x", torch.ones(4, 256), TypeError, "x must be torch.bfloat16; got torch.float32"),
        (
            "x",
            torch.ones(1024, dtype=torch.bfloat16),
            ValueError,
            r"x must be 2-dimensional \[tokens, hidden\]; got shape \(1024,\)",
        ),
        (
            "x",
            torch.ones(4, 128, dtype=torch.bfloat16),
            ValueError,
            r"x must have shape \(4, 256\) for this buffer; got \(4, 128\)",
        ),
        (
            "x",
            torch.ones(17, 256, dtype=torch.bfloat16),
            ValueError,
            r"x must have at most num_max_tokens_per_rank \(16\) tokens; got 17",
        ),
        (
            "x",
            torch.ones(256, 4, dtype=torch.bfloat16).T,
            ValueError,
            r"x must be contiguous; got strides \(1, 4\)",
        ),
        ("x", shifted(1), ValueError, "x must start at a multiple of 16 bytes; got 0x"),
        ("topk_idx", [[0, 1]], TypeError, "topk_idx must be a tensor; got list"),
        (
            "topk_idx",
            torch.zeros(4, 2, dtype=torch.int16),
            TypeError,
            "topk_idx must be torch.int64 or torch.int32; got torch.int16",
        ),
        (
            "topk_idx",
            torch.zeros(3, 2, dtype=torch.int64),
            ValueError,
            r"topk_idx must have shape \(4, 2\) for this buffer; got \(3, 2\)",
        ),
        (
            "topk_idx",
            torch.zeros(4, 3, dtype=torch.int64),
            ValueError,
            r"topk_idx must have shape \(4, 2\) for this buffer; got \(4, 3\)",
        ),
        (
            "topk_idx",
            torch.zeros(2, 4, dtype=torch.int64).T,
            ValueError,
            r"topk_idx must be contiguous; got strides \(1, 4\)",
        ),
        ("topk_weights", 1.0, TypeError, "topk_weights must be a tensor; got float"),
        (
            "topk_weights",
            torch.ones(4, 2, dtype=torch.float16),
            TypeError,
            "topk_weights must be torch.float32 or torch.bfloat16; got torch.float16",
        ),
        (
            "topk_weights",
            torch.ones(4, 1),
            ValueError,
            r"topk_weights must have shape \(4, 2\) for this buffer; got \(4, 1\)",
        ),
        (
            "topk_weights",
            torch.ones(4, 4)[:, ::2],
            ValueError,
            r"topk_weights must be contiguous; got strides \(4, 2\)",
        ),
        ("sym_buffer", None, TypeError, "sym_buffer must be a SymmBuffer; got NoneType"),
        ("arch", "sm_80", ValueError, "arch must be one of sm_90a, sm_100a, sm_103a; got 'sm_80'"),
    ],
)
def test_refusals(name: str, value: Any, error: type[Exception], message: str) -> None:
    buffer = CPU.buffer()
    arguments = {**valid(), "sym_buffer": buffer, name: value}
    with pytest.raises(error, match=message):
        deep_moe.prepare_inputs(**arguments)
    for view in VIEWS:
        assert bool((bits(getattr(buffer, view)) == FILL).all())


@pytest.mark.parametrize("name", ["topk_idx", "topk_weights"])
def test_an_input_inside_the_buffer_is_refused(name: str) -> None:
    buffer = CPU.buffer()
    arguments = {**valid(), name: getattr(buffer, name)[1:5]}
    with pytest.raises(ValueError, match=f"{name} must not lie in the buffer"):
        deep_moe.prepare_inputs(**arguments, sym_buffer=buffer)


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights"])
def test_tensors_on_another_device(name: str) -> None:
    """Below the operator, which PyTorch itself skips for the only other device at hand."""
    buffer = CPU.buffer()
    arguments = {**valid(), name: valid()[name].to("meta")}
    with pytest.raises(ValueError, match=f"{name} must be on cpu, as the buffer is; got meta"):
        check_inputs(**arguments, input_x=buffer.x, input_topk_idx=buffer.topk_idx)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights"])
def test_tensors_on_the_cpu_for_a_buffer_on_a_gpu(name: str) -> None:
    buffer = Target("cuda", None).buffer()
    arguments = {key: value.cuda() for key, value in valid().items()}
    arguments[name] = arguments[name].cpu()
    with pytest.raises(ValueError, match=f"{name} must be on cuda:0, as the buffer is; got cpu"):
        deep_moe.prepare_inputs(**arguments, sym_buffer=buffer)


def test_a_closed_buffer_is_refused() -> None:
    buffer = CPU.buffer()
    buffer.close()
    with pytest.raises(ValueError, match="sym_buffer must be an open buffer; this one is closed"):
        deep_moe.prepare_inputs(**valid(), sym_buffer=buffer)


def test_a_buffer_of_a_failed_call_can_be_filled() -> None:
    """Inputs survive a reset, so they may be there before it."""
    buffer = CPU.buffer()
    buffer.mark_failed("a test")
    deep_moe.prepare_inputs(**valid(), sym_buffer=buffer)
    buffer.reset()
    assert bool((buffer.topk_weights[:4] == 1).all())


def test_tokens_that_start_at_a_multiple_of_16_bytes_are_taken() -> None:
    buffer = CPU.buffer()
    deep_moe.prepare_inputs(**{**valid(), "x": shifted(8)}, sym_buffer=buffer)
    assert not buffer.x[:4].view(torch.uint8).any()


def test_a_buffer_of_another_top_k_is_refused_after_one_that_fits() -> None:
    """Its other views have the same form."""
    x, ids = torch.ones(4, 256, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int64)
    two, three = (
        deep_moe.get_symm_buffer_for_mega_moe(None, 8, 16, num_topk, 256, 128, device="cpu")
        for num_topk in (2, 3)
    )
    deep_moe.prepare_inputs(x, ids, torch.ones(4, 2), two)
    with pytest.raises(ValueError, match=r"topk_idx must have shape \(4, 3\) for this buffer"):
        deep_moe.prepare_inputs(x, ids, torch.ones(4, 2), three)
