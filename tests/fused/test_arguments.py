"""Every refusal names the argument, what it was, and what is allowed; nothing is launched. That
holds for a first call, and after calls with otherwise equal arguments, which leave plans behind."""

import pytest
import torch

import deep_moe
from benchmarks.host_overhead import SHAPE as GPU_SHAPE
from benchmarks.host_overhead import Layers, UndrivenGpu, gpu_path_on_cpu
from deep_moe.activations import Swiglu
from deep_moe.fused.emulated_call import prepare_launch
from deep_moe.fused.options import CallOptions

RUN_EMULATED = "deep_moe.fused.emulated_call.run_emulated"


@pytest.fixture(params=["first_call", "later_call"], autouse=True)
def _nothing_is_launched(request, example, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "later_call":
        stats = torch.zeros(4, dtype=torch.int32)
        monkeypatch.setattr("deep_moe.fused.emulated_call.run_emulated", lambda *_, **__: None)
        for num_tokens in (16, 4):
            example(y=example.y[:num_tokens])
            example(y=example.y[:num_tokens], cumulative_local_expert_recv_stats=stats)
        layer = example.layer
        weights = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch="sm_90a")
        example(l1_weights=weights.l1, l2_weights=weights.l2, arch="sm_90a")
        assert len(example.sym_buffer.caches.plans) == 5

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a call with a bad argument was launched")

    monkeypatch.setattr("deep_moe.fused.emulated_call.run_emulated", refuse)


def refused(example, error: type[Exception], message: str, **changes: object) -> None:
    before = example.sym_buffer.memory.tensor.clone()
    with pytest.raises(error, match=message):
        example(**changes)
    assert torch.equal(example.sym_buffer.memory.tensor, before)


@pytest.mark.parametrize(
    ("y", "error", "message"),
    [
        (torch.empty(4, 256), TypeError, "y must be torch.bfloat16; got torch.float32"),
        (torch.empty(4, 128, dtype=torch.bfloat16), ValueError, r"y must have shape \(4, 256\)"),
        (torch.empty(256, dtype=torch.bfloat16), ValueError, "y must be 2-dimensional"),
        (
            torch.empty(17, 256, dtype=torch.bfloat16),
            ValueError,
            r"y must have at most num_max_tokens_per_rank \(16\) tokens; got 17",
        ),
        (
            torch.empty(256, 4, dtype=torch.bfloat16).T,
            ValueError,
            r"y must be contiguous; got strides \(1, 4\)",
        ),
        (
            torch.empty(4 * 256 + 1, dtype=torch.bfloat16)[1:].view(4, 256),
            ValueError,
            "y must start at a multiple of 16 bytes",
        ),
        ([1.0], TypeError, "y must be a tensor; got list"),
        (None, TypeError, "y must be a tensor; got NoneType"),
    ],
)
def test_outputs(example, y: object, error: type[Exception], message: str) -> None:
    refused(example, error, message, y=y)


def test_tensors_on_another_device(example) -> None:
    """Below the operator, which PyTorch itself skips for the only other device at hand."""
    y = torch.empty(4, 256, dtype=torch.bfloat16, device="meta")
    arguments = (example.l1_weights, example.l2_weights, example.sym_buffer, {}, CallOptions())
    with pytest.raises(ValueError, match="y must be on cpu, as the buffer is; got meta"):
        prepare_launch(y, *arguments)


@pytest.mark.parametrize("layer", ["l1_weights", "l2_weights"])
def test_weights_that_are_no_pair(example, layer: str) -> None:
    weight, sf = getattr(example, layer)
    refused(example, TypeError, rf"{layer} must be a pair .* got Tensor", **{layer: weight})
    refused(example, ValueError, rf"{layer} must be a pair .* got 3", **{layer: (weight, sf, sf)})
    refused(example, TypeError, rf"{layer}\[1\] must be a tensor", **{layer: (weight, None)})


@pytest.mark.parametrize("layer", ["l1_weights", "l2_weights"])
def test_weights_of_other_formats(example, layer: str) -> None:
    """B15: FP8 bytes are not FP4, scales per 128 are not scales per 32."""
    weight, sf = getattr(example, layer)
    experts, rows, packed = weight.shape
    fp8 = torch.zeros(experts, rows, packed * 2, dtype=torch.float8_e4m3fn)
    refused(example, TypeError, rf"{layer}\[0\] must be torch.int8", **{layer: (fp8, sf)})
    unpacked = torch.zeros(experts, rows, packed * 2, dtype=torch.int8)
    refused(example, ValueError, rf"{layer}\[0\] must have shape", **{layer: (unpacked, sf)})
    floats = sf.float()
    refused(example, TypeError, rf"{layer}\[1\] must be torch.int32", **{layer: (weight, floats)})
    sparse = torch.zeros(experts, max(sf.shape[1] // 4, 1), rows // 4, dtype=torch.int32)
    refused(example, ValueError, rf"{layer}\[1\] must have shape", **{layer: (weight, sparse)})


def test_weights_that_were_not_transformed(example) -> None:
    raw_l1 = (example.layer.l1.weight, example.layer.l1.sf)
    refused(example, ValueError, r"l1_weights\[1\] must have shape", l1_weights=raw_l1)


def test_weights_of_another_layer_size(example) -> None:
    fewer = tuple(tensor[:2] for tensor in example.l1_weights)
    refused(
        example, ValueError, r"l1_weights\[0\] must have shape \(4, 256, 128\)", l1_weights=fewer
    )


def test_weights_whose_strides_do_not_fit(example) -> None:
    """B16: the tensor map follows the tensor's own strides, or the call is refused."""
    weight, sf = example.l1_weights
    columns = weight.transpose(1, 2).contiguous().transpose(1, 2)
    refused(
        example, ValueError, r"l1_weights\[0\] must have contiguous rows", l1_weights=(columns, sf)
    )
    uneven = torch.zeros(4, 300, 128, dtype=torch.int8)[:, :256]
    refused(
        example, ValueError, r"l1_weights\[0\] must have evenly spaced", l1_weights=(uneven, sf)
    )
    shifted = torch.zeros(4 * 256 * 128 + 16, dtype=torch.int8)[16:].view(4, 256, 128)
    refused(
        example, ValueError, r"l1_weights\[0\] does not fit .* address", l1_weights=(shifted, sf)
    )


def test_weights_for_sm90(example) -> None:
    """Plain blocks of bytes: shape, contiguity and alignment must be right."""
    layer = example.layer
    l1, l2 = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch="sm_90a")
    example.l1_weights, example.l2_weights = l1, l2
    refused(example, ValueError, r"l1_weights\[0\] must have shape", arch="sm_100a")
    spread = torch.stack([l1.weight, l1.weight], dim=-1)[..., 0]
    message = r"l1_weights\[0\] must be contiguous"
    refused(example, ValueError, message, arch="sm_90a", l1_weights=(spread, l1.sf))
    shifted = torch.zeros(l2.weight.numel() + 8, dtype=torch.int8)[8:].view(l2.weight.shape)
    message = r"l2_weights\[0\] must start at a multiple of 16 bytes"
    refused(example, ValueError, message, arch="sm_90a", l2_weights=(shifted, l2.sf))
    words = l2.sf.view(torch.int32)
    message = r"l2_weights\[1\] must be torch.float32"
    refused(example, TypeError, message, arch="sm_90a", l2_weights=(l2.weight, words))


@pytest.mark.parametrize(
    ("stats", "error", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), TypeError, "must be torch.int32"),
        (torch.zeros(5, dtype=torch.int32), ValueError, r"must have shape \(4,\)"),
        (torch.zeros(8, dtype=torch.int32)[::2], ValueError, "must be contiguous"),
        ([0, 0, 0, 0], TypeError, "must be a tensor or None"),
    ],
)
def test_statistics(example, stats: object, error: type[Exception], message: str) -> None:
    name = "cumulative_local_expert_recv_stats"
    refused(example, error, f"{name} {message}", **{name: stats})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"recipe": (1, 1, 128)}, ValueError, r"recipe must be \(1, 1, 32\).*got \(1, 1, 128\)"),
        ({"recipe": "111"}, TypeError, "recipe must be a tuple"),
        (
            {"activation": "gelu"},
            ValueError,
            "activation must be one of 'gelu_tanh', .*; got 'gelu'",
        ),
        ({"activation": None}, TypeError, "activation must be 'gelu_tanh', .* got NoneType"),
        ({"activation": Swiglu}, TypeError, "activation must be 'gelu_tanh', .* object of"),
        (
            {"activation": "situ", "activation_clamp": 7.0},
            ValueError,
            "activation_clamp must be None with activation 'situ'",
        ),
        (
            {"activation": Swiglu(2.0), "activation_clamp": 7.0},
            ValueError,
            "activation_clamp must be None beside Swiglu",
        ),
        ({"activation_clamp": 0.0}, ValueError, "activation_clamp must be .*positive"),
        ({"activation_clamp": -1.0}, ValueError, "activation_clamp must be .*positive"),
        ({"activation_clamp": float("nan")}, ValueError, "activation_clamp must be .*positive"),
        ({"activation_clamp": "7"}, TypeError, "activation_clamp must be a number or None"),
        ({"fast_math": 1}, TypeError, "fast_math must be a bool"),
        ({"arch": "sm_80"}, ValueError, "arch must be one of .*sm_100a.*got 'sm_80'"),
        ({"num_sms": 3}, ValueError, "num_sms must be even"),
        ({"num_sms": 0}, ValueError, "num_sms must be even"),
        ({"expected_tokens_per_rank": -1}, ValueError, "expected_tokens_per_rank must be 0 to"),
        ({"expected_tokens_per_rank": 1.5}, TypeError, "expected_tokens_per_rank must be an int"),
        ({"overrides": {"block_m": 17}}, ValueError, "block_m must be one of"),
        ({"overrides": {"hidden": 128}}, ValueError, "overrides must name one of"),
        ({"overrides": {"block_m": "16"}}, TypeError, r"overrides\['block_m'\] must be an int"),
        ({"overrides": ["block_m"]}, TypeError, "overrides must be a dict"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be a positive number .*; got 0"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s must be a positive number"),
        ({"timeout_s": 1e300}, ValueError, r"timeout_s must be .* at most 1e\+09; got 1e\+300"),
        ({"timeout_s": True}, TypeError, "timeout_s must be a number or None; got True"),
        ({"activation_clamp": 1e300}, ValueError, r"activation_clamp must .*float32.*1e\+300"),
        ({"activation_clamp": 1e-46}, ValueError, r"activation_clamp must .*float32.*1e-46"),
        ({"activation_clamp": True}, TypeError, "activation_clamp must be a number or None"),
        ({"num_sms": 4.0}, TypeError, "num_sms must be an int or None; got 4.0"),
        ({"num_sms": True}, TypeError, "num_sms must be an int or None; got True"),
        ({"arch": 90}, TypeError, "arch must be a str or None; got 90"),
        ({"checked": "yes"}, TypeError, "checked must be a bool or None; got 'yes'"),
        ({"schedule_seed": 2**63}, ValueError, "schedule_seed must be within 64 bits"),
        (
            {"overrides": {"num_stages": 2**64}},
            ValueError,
            r"'num_stages'\] must be within",
        ),
        ({"overrides": {"num_stages": 2**40}}, ValueError, "num_stages must be 2 to 32"),
        ({"num_sms": 1_000_000}, ValueError, "num_sms must be fewer: .* CTAs .* GiB are free"),
        ({"overrides": {"num_sms": 1_000_000}}, ValueError, "num_sms must be fewer: .* 1000000"),
        ({"time_out_s": 1.0}, TypeError, r"fp8_fp4_mega_moe\(\) got an unexpected .*'time_out_s'"),
        ({"schedule_seed": -1}, ValueError, "schedule_seed must be at least 0; got -1"),
        ({"schedule_seed": 1.5}, TypeError, "schedule_seed must be an int"),
        ({"sym_buffer": None}, TypeError, "sym_buffer must be a SymmBuffer"),
    ],
)
def test_options(example, changes: dict, error: type[Exception], message: str) -> None:
    refused(example, error, message, **changes)


@pytest.mark.parametrize("expert", [-2, 4, 2**40])
def test_expert_ids_out_of_range(example, expert: int) -> None:
    """B13: garbage in an unused slot is found before anybody uses it as an index."""
    example.sym_buffer.topk_idx[3, 1] = expert
    message = f"topk_idx must hold expert ids 0 to 3, or -1 .*got {expert} for token 3, slot 1"
    refused(example, ValueError, message)


def test_expert_ids_behind_the_tokens_do_not_matter(example, monkeypatch) -> None:
    launched = []
    monkeypatch.setattr(
        "deep_moe.fused.emulated_call.run_emulated", lambda *_, **__: launched.append(1)
    )
    example.sym_buffer.topk_idx[3:] = 99
    example(y=example.y[:3])
    assert launched == [1]


def test_more_ctas_than_the_gpu_has_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_path_on_cpu(UndrivenGpu()):
        layers = Layers(GPU_SHAPE, 1, torch.device("cpu"))
        for options in ({"num_sms": 134}, {"overrides": {"num_sms": 134}}):
            with pytest.raises(ValueError, match="num_sms must be at most 132, the SMs of no GPU"):
                deep_moe.fp8_fp4_mega_moe(
                    layers.ys[0], *layers.weights[0], layers.buffer, **options
                )


def test_a_closed_buffer(example) -> None:
    example.sym_buffer.close()
    with pytest.raises(ValueError, match="sym_buffer must be an open buffer"):
        example()


def test_a_warm_calls_options_are_of_the_right_types_too(example, monkeypatch) -> None:
    """4.0 and 4 are equal, and so is what is looked up by them."""
    monkeypatch.setattr(RUN_EMULATED, lambda *_, **__: None)
    example(num_sms=4, timeout_s=1)
    refused(example, TypeError, "num_sms must be an int", num_sms=4.0, timeout_s=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be"),
        ({"num_topk": 0}, "num_topk must be 1 to 32"),
        ({"num_topk": 5}, r"num_topk must be at most num_experts \(4\)"),
        ({"hidden": 200}, "hidden must be a positive multiple of 32; got 200"),
        ({"intermediate_hidden": 48}, "intermediate_hidden must be a positive multiple of 32"),
        ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank must be at least 1"),
        ({"device": "meta"}, "device must be a CPU or a CUDA device; got meta"),
    ],
)
def test_buffers(changes: dict, message: str) -> None:
    arguments = {
        "num_experts": 4,
        "num_max_tokens_per_rank": 16,
        "num_topk": 2,
        "hidden": 256,
        "intermediate_hidden": 128,
        "device": "cpu",
    }
    with pytest.raises(ValueError, match=message):
        deep_moe.get_symm_buffer_for_mega_moe(None, **{**arguments, **changes})


def test_buffers_of_wrong_types() -> None:
    with pytest.raises(TypeError, match="hidden must be an int"):
        deep_moe.get_symm_buffer_for_mega_moe(None, 4, 16, 2, 256.0, 128, device="cpu")
    with pytest.raises(TypeError, match=r"group must be a torch\.distributed process group"):
        deep_moe.get_symm_buffer_for_mega_moe("world", 4, 16, 2, 256, 128, device="cpu")
