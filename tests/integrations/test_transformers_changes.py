"""Experts whose weights are changed, read, copied or replaced after they were laid out for the
kernel: the next call is of the weights as they are."""

from __future__ import annotations

import copy
import io
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

import deep_moe.integrations.transformers as adapter
from deep_moe.integrations.transformers.taken import loan_of, take
from tests.everyday import parametrize as parametrize_tests

# In front of what has the same condition: a second import of a skipped module finds half of it.
transformers = pytest.importorskip("transformers", minversion="5.16.1")

from .test_transformers import gpu_experts, laid_out, random_call, small_qwen  # noqa: E402

IDS = torch.tensor([[3, 1, 4, 1, 5]])
PROJECTIONS = ("gate_up_proj", "down_proj")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    adapter.register()
    yield
    adapter.close_buffers()


def experts_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits.clone()


def fresh_logits(model: Any) -> torch.Tensor:
    """Of a model that never ran, with the same values."""
    fresh = small_qwen()
    with torch.no_grad():
        for own, other in zip(fresh.parameters(), model.parameters(), strict=True):
            own.copy_(other.detach().clone())
    return logits(fresh)


def trained(**options: Any) -> Callable[[Any, Any], None]:
    def change(model: Any, experts: Any) -> None:
        for parameter in experts.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(experts.parameters(), lr=0.1, **options).step()

    return change


def each(change: Callable[[torch.nn.Parameter], object]) -> Callable[[Any, Any], None]:
    @torch.no_grad()
    def changed(model: Any, experts: Any) -> None:
        for parameter in experts.parameters():
            change(parameter)

    return changed


def trained_elsewhere(model: Any, experts: Any) -> None:
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.SGD(experts.parameters(), lr=50.0)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.set_experts_implementation("deep_moe")


def vector(model: Any, experts: Any) -> None:
    both = torch.nn.utils.parameters_to_vector(experts.parameters())
    torch.nn.utils.vector_to_parameters(2 * both, experts.parameters())


def loaded(**options: Any) -> Callable[[Any, Any], None]:
    def change(model: Any, experts: Any) -> None:
        state = {k: 2 * v if ".experts." in k else v for k, v in model.state_dict().items()}
        model.load_state_dict(state, **options)

    return change


def replaced(model: Any, experts: Any) -> None:
    experts.down_proj = torch.nn.Parameter(2 * experts.down_proj.detach())


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "fused optimizer": trained(fused=True),
    "foreach optimizer": trained(foreach=True),
    "optimizer": trained(foreach=False),
    "trained by another implementation": trained_elsewhere,
    "in place": each(lambda p: p.mul_(2)),
    "data": each(lambda p: p.data.mul_(2)),
    "new data": each(lambda p: setattr(p, "data", p.data * 2)),
    "set": each(lambda p: p.set_(p.detach() * 2)),
    "detached": each(lambda p: p.detach().mul_(2)),
    "a view": each(lambda p: p[:, 1:].mul_(2)),
    "numpy": each(lambda p: p.detach().view(torch.int16).numpy().__iadd__(1)),
    "foreach": each(lambda p: torch._foreach_mul_([p], 2)),
    "a vector": vector,
    "load_state_dict": loaded(),
    "load_state_dict(assign=True)": loaded(assign=True),
    "load_state_dict(strict=False)": loaded(strict=False),
    "one is replaced": replaced,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_is_of_the_weights_as_they_are_now(change: str) -> None:
    model = small_qwen()
    before = logits(model)
    experts = experts_of(model)
    assert laid_out(experts) is not None
    CHANGES[change](model, experts)
    expected = fresh_logits(model)
    assert not torch.equal(expected, before)
    assert torch.equal(logits(model), expected)


@parametrize_tests("name", PROJECTIONS, everyday=["down_proj"])
@parametrize_tests("alias", ["data", "view", "state dict"], everyday=["state dict"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_write_through_other_tensors_is_seen(
    name: str, alias: str, is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors that have the memory of the weights, from before the first call or after it."""
    model = small_qwen()
    experts = experts_of(model)
    if not is_first:
        logits(model)
    parameter = getattr(experts, name)
    others = {
        "data": lambda: parameter.data,
        "view": lambda: parameter.detach()[1:],
        "state dict": lambda: model.state_dict()[f"model.layers.0.mlp.experts.{name}"],
    }[alias]()
    before = logits(model)
    assert torch.equal(before, fresh_logits(model))
    others.mul_(2)
    assert torch.equal(logits(model), fresh_logits(model))
    assert not torch.equal(logits(model), before)
    assert laid_out(experts) is None
    assert f"laid out anew in each call: other tensors have the memory of {name}" in caplog.text
    del others
    logits(model)
    assert laid_out(experts) is not None


def test_tensors_that_are_taken_hold_no_memory() -> None:
    experts = experts_of(small_qwen())
    with torch.no_grad():
        experts(torch.ones(2, 128).bfloat16(), torch.zeros(2, 2).long(), torch.ones(2, 2))
    assert laid_out(experts) is not None
    for parameter in experts.parameters():
        with torch._C.DisableTorchFunctionSubclass():
            assert parameter.untyped_storage().nbytes() == parameter.element_size()
            assert parameter.isnan().all()


def test_what_says_nothing_of_values_leaves_them_to_the_kernel() -> None:
    model = small_qwen()
    experts = experts_of(model)
    logits(model)
    layer = laid_out(experts)
    named = dict(experts.named_parameters())
    assert [tuple(named[name].shape) for name in PROJECTIONS] == [(4, 256, 128), (4, 128, 128)]
    assert (model.dtype, model.device.type, experts.down_proj.grad) == (torch.bfloat16, "cpu", None)
    model.num_parameters()
    model.get_memory_footprint()
    model.eval().requires_grad_(False).zero_grad()
    assert not experts.down_proj.requires_grad
    assert isinstance(experts.down_proj, torch.nn.Parameter)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert len(set(model.parameters())) == len(list(model.parameters()))
    assert laid_out(experts) is layer is not None


def test_a_trained_model_goes_on_training_with_the_same_parameters() -> None:
    model = small_qwen()
    experts = experts_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parameters, values = (
        list(experts.parameters()),
        [p.detach().clone() for p in experts.parameters()],
    )
    logits(model)
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    adapter.release(model)
    model.set_experts_implementation("grouped_mm")
    for now, then, value in zip(experts.parameters(), parameters, values, strict=True):
        assert now is then
        assert type(now) is torch.nn.Parameter
        assert now.requires_grad
        assert torch.equal(now, value)
    for each_optimizer in (optimizer, late):
        before = experts.down_proj.detach().clone()
        model(IDS, labels=IDS).loss.backward()
        each_optimizer.step()
        assert not torch.equal(experts.down_proj, before)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_models_are_released_in_any_order(order: tuple[int, int]) -> None:
    models = [small_qwen(), small_qwen()]
    values = [p.detach().clone() for p in experts_of(models[0]).parameters()]
    for model in models:
        logits(model)
    for i in order:
        adapter.release(models[i])
        adapter.release(models[i])
    for model in models:
        for parameter, value in zip(experts_of(model).parameters(), values, strict=True):
            assert torch.equal(parameter, value)


def test_copies_have_weights_of_their_own() -> None:
    model = small_qwen()
    before = logits(model)
    other = copy.deepcopy(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    file = io.BytesIO()
    logits(model)
    torch.save(model, file)
    file.seek(0)
    loaded_model = torch.load(file, weights_only=False)
    with torch.no_grad():
        experts_of(model).down_proj.mul_(2)
    for each_model in (other, averaged.module, loaded_model):
        assert torch.equal(logits(each_model), before)
    assert not torch.equal(logits(model), before)


def test_weights_rounded_to_mxfp4_come_back_unrounded() -> None:
    adapter.register(quantize=True)
    model = small_qwen()
    experts = experts_of(model)
    values = [p.detach().clone() for p in experts.parameters()]
    logits(model)
    layer = laid_out(experts)
    assert layer is not None
    assert layer.sizes.weights == "mxfp4"
    adapter.release(model)
    for parameter, value in zip(experts.parameters(), values, strict=True):
        assert torch.equal(parameter, value)


class Delta(torch.nn.Module):
    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


@pytest.mark.parametrize("name", PROJECTIONS)
def test_adapters_come_and_go(name: str) -> None:
    """As peft does it, which registers a parametrization in each forward pass."""
    model, merged = small_qwen(), small_qwen()
    experts = experts_of(model)
    delta = (0.3 * torch.randn(getattr(experts, name).shape)).bfloat16()
    with torch.no_grad():
        getattr(experts_of(merged), name).add_(delta)
    for _ in range(2):
        base = logits(model)
        parametrize.register_parametrization(experts, name, Delta(delta))
        adapted = logits(model)
        parametrize.remove_parametrizations(experts, name, leave_parametrized=False)
        assert torch.allclose(adapted, logits(merged), atol=0.02)
        assert torch.equal(logits(model), base)
        assert not torch.allclose(adapted, base, atol=0.1)


def test_functional_calls_have_the_weights_that_they_are_given() -> None:
    model, other = small_qwen(), small_qwen()
    with torch.no_grad():
        experts_of(other).down_proj.mul_(2)
    own, expected = logits(model), logits(other)
    for of in (lambda p: p, lambda p: p.detach().clone()):
        given = {name: of(p) for name, p in other.named_parameters()}
        with torch.no_grad():
            called = torch.func.functional_call(model, given, (IDS,)).logits
        assert torch.allclose(called, expected, atol=0.02)
        assert torch.equal(logits(model), own)


def test_tied_layers_share_what_is_laid_out_if_they_compute_alike() -> None:
    first, second = experts_of(small_qwen()), experts_of(small_qwen())
    for name in PROJECTIONS:
        setattr(second, name, getattr(first, name))
    x, idx, weights = torch.randn(3, 128).bfloat16(), torch.zeros(3, 2).long(), torch.ones(3, 2)
    with torch.no_grad():
        y = first(x, idx, weights)
        layer = laid_out(first)
        assert torch.equal(second(x, idx, weights), y)
        assert laid_out(second) is layer is not None
    other = experts_of(small_qwen())
    for name in PROJECTIONS:
        setattr(other, name, getattr(first, name))
    other.swiglu_limit = 0.01
    other._apply_gate = _clamped
    with torch.no_grad():
        clamped = other(x, idx, weights)
        assert not torch.equal(clamped, y)
        assert torch.equal(first(x, idx, weights), y)


def _clamped(pairs: torch.Tensor) -> torch.Tensor:
    gate, up = pairs.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=0.01)) * up.clamp(-0.01, 0.01)


def test_other_options_lay_out_anew() -> None:
    model = small_qwen()
    exact = logits(model)
    adapter.register(quantize=True)
    assert not torch.equal(logits(model), exact)
    layer = laid_out(experts_of(model))
    assert layer is not None
    assert layer.sizes.weights == "mxfp4"
    adapter.register()
    assert torch.equal(logits(model), exact)


@pytest.mark.parametrize("name", ["gate_up_proj_bias", "down_proj_bias"])
def test_biases_are_as_they_are_now(name: str) -> None:
    config = transformers.GptOssConfig(
        hidden_size=128, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "deep_moe"

    def make() -> Any:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        torch.manual_seed(0)
        module = GptOssExperts(config)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return module.bfloat16()

    module, fresh = make(), make()
    call = (torch.randn(3, 128).bfloat16(), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
    with torch.no_grad():
        before = module(*call)
        assert laid_out(module) is not None
        for each_module in (module, fresh):
            getattr(each_module, name).data.add_(1)
        after = module(*call)
        assert torch.equal(after, fresh(*call))
        assert not torch.equal(after, before)


@pytest.mark.filterwarnings("ignore::deep_moe.RequantizationWarning")
@torch.no_grad()
def test_fp8_that_had_to_be_rounded_is_loaded_anew() -> None:
    adapter.register(quantize=True, arch="sm_100a")

    def make(seed: int) -> Any:
        module = gpu_experts(block_size=(128, 128))
        generator = torch.Generator().manual_seed(seed)
        for parameter in module.parameters():
            values = torch.rand(parameter.shape, generator=generator) + 0.1
            parameter.data = values.to(parameter.dtype)
        return module

    module, other = make(0), make(1)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    call = random_call(5)
    before = module(*call)
    assert laid_out(module) is not None
    module.load_state_dict(other.state_dict())
    after = module(*call)
    assert torch.equal(after, other(*call))
    assert not torch.equal(after, before)
    module.load_state_dict(state)
    assert torch.equal(module(*call), before)


# ---- what is not taken, and models of other kinds


def test_weights_that_a_graph_holds_are_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """A rollout between a forward pass and its backward pass."""
    model = small_qwen()
    experts = experts_of(model)
    model.set_experts_implementation("grouped_mm")
    loss = model(IDS, labels=IDS).loss
    model.set_experts_implementation("deep_moe")
    logits(model)
    assert laid_out(experts) is None
    assert "is held by a graph of autograd's" in caplog.text
    loss.backward()
    assert experts.down_proj.grad.isfinite().all()
    del loss
    logits(model)
    assert laid_out(experts) is not None


def test_trained_experts_are_refused_in_grad_mode() -> None:
    """Also where tokens need no gradient."""
    experts = experts_of(small_qwen())
    with pytest.raises(NotImplementedError, match=r"no backward pass.*torch.no_grad"):
        experts(torch.ones(2, 128).bfloat16(), torch.zeros(2, 2).long(), torch.ones(2, 2))


def test_a_model_that_is_moved_or_cast_is_laid_out_anew() -> None:
    model = small_qwen()
    before = logits(model)
    assert torch.equal(logits(model.to("cpu")), before)
    model.half()
    assert experts_of(model).down_proj.dtype == torch.float16
    model.bfloat16()
    assert torch.equal(logits(model), fresh_logits(model))


def test_offloaded_experts_are_left_to_transformers() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = small_qwen()
    expected = logits(model)
    adapter.release(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    (reason,) = adapter.prepare(model).values()
    assert reason == "transformers: accelerate brings its weights anew for each call"
    assert torch.allclose(logits(model), expected, atol=0.02)
    assert experts_of(model).down_proj.is_meta


def test_experts_without_a_gate_are_left_to_transformers() -> None:
    config = transformers.NemotronHConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, moe_intermediate_size=128,
        n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, n_group=1, topk_group=1, layers_block_type=["attention", "moe"],
        moe_shared_expert_intermediate_size=128,
    )  # fmt: skip
    model = transformers.NemotronHForCausalLM(config).bfloat16().eval()
    model.set_experts_implementation("deep_moe")
    (reason,) = adapter.prepare(model).values()
    assert reason == "transformers: experts with has_gate=False are not supported"
    with torch.no_grad():
        assert model(IDS, use_cache=False).logits.isfinite().all()


def test_no_config_has_to_name_the_number_of_slots() -> None:
    """Aria's calls it moe_topk."""
    config = transformers.AriaTextConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, moe_num_experts=4, moe_topk=2,
        moe_num_shared_experts=1, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AriaTextForCausalLM(config).bfloat16().eval()
    model.set_experts_implementation("deep_moe")
    assert set(adapter.prepare(model).values()) == {"deep_moe"}
    assert logits(model).isfinite().all()


def test_more_slots_than_the_kernel_takes_are_left_to_transformers() -> None:
    module = experts_of(small_qwen())
    num_topk = 33
    x, idx = torch.randn(2, 128).bfloat16(), torch.zeros(2, num_topk).long()
    with torch.no_grad():
        module(x, idx[:, :2], torch.ones(2, 2))
        assert laid_out(module) is not None
        y = module(x, idx, torch.ones(2, num_topk))
        assert laid_out(module) is None
    assert y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    expected = logits(small_qwen())
    model = small_qwen()
    torch.set_default_dtype(dtype)
    try:
        assert set(adapter.prepare(model).values()) == {"deep_moe"}
        got = logits(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(got, expected, atol=0.02)


def test_another_default_device_changes_nothing() -> None:
    model = experts_of(small_qwen())
    call = (torch.randn(3, 128).bfloat16(), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
    with torch.no_grad():
        expected = model(*call)
        adapter.release(torch.nn.ModuleDict({"experts": model}))
        adapter.close_buffers()
        with torch.device("meta"):
            assert torch.equal(model(*call), expected)


def test_more_experts_than_a_rank_takes_keep_their_weights() -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=32, num_experts=513, num_experts_per_tok=2
    )
    config._experts_implementation = "deep_moe"
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    module = Qwen3MoeExperts(config).bfloat16()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    model = torch.nn.ModuleDict({"experts": module})
    (reason,) = adapter.prepare(model).values()
    assert reason.startswith("transformers: num_experts must be at most 512 per rank")
    assert type(module.down_proj) is torch.nn.Parameter


# ---- the mechanism


def taken(value: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(value.clone(), requires_grad=value.is_floating_point())
    take({"p": parameter}, "content", lambda: {"p": value.clone()})
    assert loan_of({"p": parameter}) is not None
    return parameter


@pytest.mark.parametrize(
    "read",
    [
        lambda p: copy.deepcopy(p),
        lambda p: copy.copy(p),
        lambda p: p.float(),
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p[:],
        lambda p: torch.stack([p, p])[1],
        lambda p: torch.cat(tensors=(p,)),
        lambda p: torch._foreach_add([p], 0)[0],
        lambda p: torch.where(p == p, p, 0),
        lambda p: torch.frombuffer(p.detach().numpy().tobytes(), dtype=p.dtype).view(p.shape),
        lambda p: torch.tensor(p.tolist()),
        lambda p: torch.nn.utils.parameters_to_vector([p]).view(p.shape),
        lambda p: torch.nn.functional.linear(p, torch.eye(p.shape[1])),
        lambda p: torch.from_dlpack(p.detach()),
    ],
)
def test_whoever_reads_gets_the_values(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    value = torch.randn(3, 4)
    parameter = taken(value)
    assert torch.equal(read(parameter), value)
    assert type(parameter) is torch.nn.Parameter
    assert torch.equal(parameter, value)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8, torch.uint8, torch.float16]
)
def test_every_dtype_is_taken(dtype: torch.dtype) -> None:
    value = torch.rand(2, 3).to(dtype)
    parameter = taken(value)
    assert (parameter.shape, parameter.dtype) == (value.shape, dtype)
    assert torch.equal(parameter.view(torch.uint8), value.view(torch.uint8))


def test_values_come_back_as_trainable_from_inference_mode() -> None:
    parameter = taken(torch.randn(3, 4))
    with torch.inference_mode():
        parameter.sum()
    (parameter * parameter).sum().backward()
    assert parameter.grad is not None


def test_what_is_laid_out_goes_with_the_last_parameter() -> None:
    class Content:
        pass

    parameter, content = torch.nn.Parameter(torch.randn(3)), Content()
    take({"p": parameter}, content, dict)
    gone = weakref.ref(content)
    del content
    assert gone() is not None
    del parameter
    assert gone() is None


def test_ends_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        taken(torch.randn(3)).add(1)
    assert ".add was called on one of them; the next call lays them out again" in caplog.text
