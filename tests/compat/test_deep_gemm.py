"""The stand-in for DeepGEMM's Mega MoE: used as its own test uses it, and what it refuses."""

import pytest
import torch
import torch.distributed as dist

import deep_moe
import deep_moe.compat.deep_gemm as deep_gemm
from deep_moe.activations import Situ, activation_of
from deep_moe.compat.deep_gemm.testing import calc_diff
from deep_moe.compat.deep_gemm.utils import (
    align,
    cast_back_from_fp4,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
)
from deep_moe.formats.block_scaled import ue8m0_to_float, unpack_ue8m0
from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config, target_of, target_of_device
from deep_moe.trial.reference import reference_mega_moe

NUM_EXPERTS, TOPK, HIDDEN, INTERMEDIATE, MAX_TOKENS, NUM_TOKENS = 4, 2, 256, 128, 10, 7
CLAMP = 0.5


@pytest.fixture
def group(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def buffer():
    made = deep_gemm.get_symm_buffer_for_mega_moe(
        None, NUM_EXPERTS, MAX_TOKENS, TOPK, HIDDEN, INTERMEDIATE, device="cpu"
    )
    yield made
    made.destroy()


def bf16_weights():
    torch.manual_seed(0)
    l1 = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16) / 8
    l2 = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16) / 8
    return l1, l2


def fp4_weights(bf16: torch.Tensor):
    """Expert by expert, with float32 scales that are packed afterwards."""
    num_groups, n, k = bf16.shape
    weight = torch.empty((num_groups, n, k // 2), dtype=torch.int8)
    sf = torch.empty((num_groups, n, k // 32), dtype=torch.float)
    for i in range(num_groups):
        weight[i], sf[i] = per_token_cast_to_fp4(bf16[i], use_ue8m0=True, gran_k=32)
    return weight, deep_gemm.transform_sf_into_required_layout(sf, n, k, (1, 32), num_groups)


def inputs():
    torch.manual_seed(1)
    x = per_token_cast_to_fp8(
        torch.randn(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16),
        use_ue8m0=True,
        gran_k=32,
        use_packed_ue8m0=True,
    )
    topk_weights, topk_idx = torch.topk(torch.randn(NUM_TOKENS, NUM_EXPERTS), TOPK, dim=-1)
    topk_idx[2, 1] = -1
    topk_weights[2, 1] = 0
    return x, topk_idx, topk_weights


def expected_y(l1, l2, x, topk_idx, topk_weights, arch):
    return reference_mega_moe(
        *x,
        topk_idx,
        topk_weights,
        l1,
        l2,
        activation_clamp=CLAMP,
        numerics=target_of(arch).weights_of().numerics,
    )


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_its_own_tests_usage(group, arch):
    deep_gemm.use_deterministic_algorithms(True)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        group,
        NUM_EXPERTS,
        MAX_TOKENS,
        TOPK,
        HIDDEN,
        INTERMEDIATE,
        num_shared_experts=0,
        mma_type="fp8xfp4",
    )
    block_m = deep_gemm.get_block_m_for_mega_moe(
        1, NUM_EXPERTS, buffer.num_max_tokens_per_rank, NUM_TOKENS, TOPK, "fp8xfp4"
    )
    shape = MoEShape(1, NUM_EXPERTS, TOPK, HIDDEN, INTERMEDIATE, 384)
    current = target_of_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert block_m == choose_config(shape, NUM_TOKENS, arch=current.name).block_m
    l1_weights, l2_weights = map(fp4_weights, bf16_weights())
    x, topk_idx, topk_weights = inputs()
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(l1_weights, l2_weights, arch=arch)
    stats = torch.tensor([3, 0, 5, 1], dtype=torch.int)
    before = stats.clone()

    buffer.x[:NUM_TOKENS].copy_(x[0])
    buffer.x_sf[:NUM_TOKENS].copy_(x[1])
    buffer.topk_idx[:NUM_TOKENS].copy_(topk_idx)
    buffer.topk_weights[:NUM_TOKENS].copy_(topk_weights)
    y = torch.empty((NUM_TOKENS, HIDDEN), dtype=torch.bfloat16)
    deep_gemm.fp8_fp4_mega_moe(
        y,
        l1,
        l2,
        buffer,
        cumulative_local_expert_recv_stats=stats,
        activation_clamp=CLAMP,
        fast_math=True,
        arch=arch,
    )

    expected = expected_y(l1_weights, l2_weights, x, topk_idx, topk_weights, arch)
    assert calc_diff(y, expected) < 1e-5
    counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=NUM_EXPERTS)
    assert torch.equal(stats - before, counts.int())
    buffer.destroy()


def block_scaled(bf16: torch.Tensor, ue8m0: bool):
    """FP8 weights with a float32 scale for every 128 x 128, as per_block_cast_to_fp8 makes them."""
    blocks = bf16.float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    sf = blocks.abs().amax(dim=(2, 4)) / 448
    if ue8m0:
        sf = torch.exp2(sf.log2().ceil())
    values = (blocks / sf[:, :, None, :, None]).flatten(3).flatten(1, 2)
    return values.to(torch.float8_e4m3fn), sf


@pytest.mark.parametrize("ue8m0", [True, False])
def test_fp8_weights(ue8m0):
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        None, NUM_EXPERTS, MAX_TOKENS, TOPK, HIDDEN, INTERMEDIATE, mma_type="fp8xfp8", device="cpu"
    )
    raw = [block_scaled(own, ue8m0) for own in bf16_weights()]
    if ue8m0:
        l1, l2 = deep_gemm.transform_weights_for_mega_moe(*raw, mma_type="fp8xfp8")
    else:
        with pytest.raises(ValueError, match=r"l1_weights: expert 0, .* must be a power of two"):
            deep_gemm.transform_weights_for_mega_moe(*raw, mma_type="fp8xfp8")
        with pytest.warns(deep_moe.RequantizationWarning, match="l2_weights: rounded anew"):
            l1, l2 = deep_gemm.transform_weights_for_mega_moe(
                *raw, mma_type="fp8xfp8", requantize=True
            )
    x, topk_idx, topk_weights = inputs()
    views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    for view, value in zip(views, (*x, topk_idx, topk_weights), strict=True):
        view[:NUM_TOKENS].copy_(value)
    y = torch.empty((NUM_TOKENS, HIDDEN), dtype=torch.bfloat16)
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer, activation_clamp=CLAMP)

    expected = reference_mega_moe(
        *x,
        topk_idx,
        topk_weights,
        *raw,
        activation_clamp=CLAMP,
        numerics=target_of("sm_100a").weights_of("fp8").numerics,
    )
    assert calc_diff(y, expected) < (1e-5 if ue8m0 else 1e-2)
    with pytest.raises(ValueError, match="sym_buffer must be made with mma_type 'fp8xfp4'"):
        deep_gemm.fp8_fp4_mega_moe(y, l1, l2, buffer)
    with pytest.raises(ValueError, match=r"recipe must be \(1, 1, 32\)"):
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer, recipe=(128, 128, 128))
    with pytest.raises(TypeError, match="sym_buffer must be of deep_moe"):
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer.own)
    buffer.destroy()


def test_fp8_weights_by_the_names_for_hopper():
    """Float32 scales of tokens are not rounded to powers of two."""
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
        None, NUM_EXPERTS, MAX_TOKENS, TOPK, HIDDEN, INTERMEDIATE, device="cpu"
    )
    assert buffer.x_sf.dtype == torch.float32
    raw = [block_scaled(own, False) for own in bf16_weights()]
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*raw)
    _, topk_idx, topk_weights = inputs()
    tokens = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    x = per_token_cast_to_fp8(tokens, False, 128)
    views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    deep_gemm.mega_moe_pre_dispatch_sm90(
        tokens, topk_idx, topk_weights / 2, *views, NUM_TOKENS, routed_scaling_factor=2.0
    )
    for view, value in zip(views, (*x, topk_idx, topk_weights), strict=True):
        assert torch.equal(view[:NUM_TOKENS].float(), value.float())
    assert (buffer.topk_idx[NUM_TOKENS:] == -1).all()
    y = torch.empty((NUM_TOKENS, HIDDEN), dtype=torch.bfloat16)
    deep_gemm.fp8_mega_moe(
        y,
        l1,
        l2,
        buffer,
        recipe=(128, 128, 128),
        activation_clamp=CLAMP,
        num_tokens_bound=NUM_TOKENS,
        arch="sm_90a",
    )
    expected = reference_mega_moe(
        *x,
        topk_idx,
        topk_weights,
        *raw,
        activation_clamp=CLAMP,
        numerics=target_of("sm_90a").weights_of("fp8", "fp8_128").numerics,
    )
    assert calc_diff(y, expected) < 1e-5
    with pytest.raises(TypeError, match="buf_x_sf must be int32"):
        deep_gemm.mega_moe_pre_dispatch(tokens, topk_idx, topk_weights, *views, NUM_TOKENS)
    with pytest.raises(ValueError, match="group_size must be 128"):
        deep_gemm.mega_moe_pre_dispatch_sm90(
            tokens, topk_idx, topk_weights, *views, NUM_TOKENS, group_size=32
        )
    with pytest.raises(ValueError, match="use_fp8_dispatch must be True"):
        deep_gemm.get_symm_buffer_for_sm90_mega_moe(
            None, NUM_EXPERTS, MAX_TOKENS, TOPK, HIDDEN, INTERMEDIATE, False, device="cpu"
        )
    buffer.destroy()


@pytest.mark.parametrize("mma_type", [None, "bf16xbf16"])
def test_bf16_weights(mma_type):
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        None,
        NUM_EXPERTS,
        MAX_TOKENS,
        TOPK,
        HIDDEN,
        INTERMEDIATE,
        mma_type="bf16xbf16",
        device="cpu",
    )
    raw = [own.bfloat16() for own in bf16_weights()]
    options = {} if mma_type is None else {"mma_type": mma_type}
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(*raw, **options)
    _, topk_idx, topk_weights = inputs()
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    views = (buffer.x, buffer.topk_idx, buffer.topk_weights)
    for view, value in zip(views, (x, topk_idx, topk_weights), strict=True):
        view[:NUM_TOKENS].copy_(value)
    y = torch.empty((NUM_TOKENS, HIDDEN), dtype=torch.bfloat16)
    stats = torch.zeros(NUM_EXPERTS, dtype=torch.int32)
    deep_gemm.bf16_mega_moe(
        y, l1, l2, buffer, cumulative_local_expert_recv_stats=stats, activation_clamp=CLAMP
    )
    empty = torch.empty(NUM_EXPERTS, 0)
    expected = reference_mega_moe(
        x,
        buffer.x_sf[:NUM_TOKENS],
        topk_idx,
        topk_weights,
        (raw[0], empty),
        (raw[1], empty),
        activation_clamp=CLAMP,
        numerics=target_of("sm_100a").weights_of("bf16").numerics,
    )
    assert calc_diff(y, expected) < 1e-5
    assert int(stats.sum()) > 0
    with pytest.raises(ValueError, match="sym_buffer must be made with mma_type 'fp8xfp8'"):
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
    with pytest.raises(ValueError, match="shared_l1_weights must be None"):
        deep_gemm.bf16_mega_moe(y, l1, l2, buffer, raw[0])
    buffer.destroy()


class TestBuffer:
    def test_attributes(self, buffer):
        assert buffer.num_experts == NUM_EXPERTS
        assert buffer.num_max_tokens_per_rank == align(MAX_TOKENS, 384) == 384
        assert (buffer.num_topk, buffer.hidden, buffer.intermediate_hidden) == (2, 256, 128)
        assert buffer.buffer.dtype == torch.int8
        assert buffer.buffer.nbytes == buffer.own.nbytes
        assert buffer.handle.buffer_ptrs == [buffer.buffer.data_ptr()]
        assert buffer.x.shape == (384, HIDDEN)
        assert buffer.x_sf.shape == (384, HIDDEN // 128)

    def test_the_views_lie_in_the_buffer(self, buffer):
        buffer.buffer.zero_()
        buffer.topk_idx.fill_(-1)
        assert int((buffer.buffer == -1).sum()) == buffer.topk_idx.nbytes

    @pytest.mark.parametrize(("given", "rounded"), [(1, 384), (384, 384), (385, 768)])
    def test_the_capacity_is_rounded_up(self, given, rounded):
        made = deep_gemm.SymmBuffer(None, 1, given, 1, 128, 128, device="cpu")
        assert made.num_max_tokens_per_rank == rounded
        assert made.topk_idx.shape == (rounded, 1)
        made.destroy()

    def test_destroyed(self, buffer):
        buffer.destroy()
        assert buffer.buffer is None
        assert buffer.x is None
        with pytest.raises(ValueError, match="sym_buffer must be an open buffer"):
            deep_gemm.fp8_fp4_mega_moe(
                torch.empty(1, HIDDEN, dtype=torch.bfloat16), *transformed(), buffer
            )

    def test_the_pool_is_not_theirs(self, buffer):
        with pytest.raises(AttributeError, match="SymmBuffer has no l1_acts: the kernel's pool"):
            _ = buffer.l1_acts
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = buffer.nothing

    def test_use_fp8_dispatch(self):
        sizes = (None, 1, 1, 1, 128, 128)
        with pytest.warns(DeprecationWarning, match="use_fp8_dispatch is deprecated"):
            deep_gemm.get_symm_buffer_for_mega_moe(
                *sizes, use_fp8_dispatch=True, device="cpu"
            ).destroy()
        with pytest.warns(DeprecationWarning, match="use_fp8_dispatch"):  # where it was seventh
            deep_gemm.get_symm_buffer_for_mega_moe(*sizes, True, device="cpu").destroy()
        with pytest.raises(ValueError, match="use_fp8_dispatch must be True or None"):
            deep_gemm.get_symm_buffer_for_mega_moe(*sizes, use_fp8_dispatch=False)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"mma_type": "fp4xfp4"}, "mma_type must be 'fp8xfp4' or 'fp8xfp8'.*'fp4xfp4'"),
            ({"activation": "swiglu_oai"}, "activation must be 'swiglu' or 'situ'; .*'swiglu_oai'"),
            ({"num_shared_experts": 1}, "num_shared_experts must be 0: .*; got 1"),
        ],
    )
    def test_what_no_kernel_does(self, option, message):
        with pytest.raises(ValueError, match=message):
            deep_gemm.get_symm_buffer_for_mega_moe(None, 1, 1, 1, 128, 128, **option)

    def test_memory_is_not_shared_among_buffers(self, buffer):
        with pytest.raises(ValueError, match="base must be None"):
            deep_gemm.SymmBuffer(None, 1, 1, 1, 128, 128, base=buffer)


def transformed():
    return deep_gemm.transform_weights_for_mega_moe(*map(fp4_weights, bf16_weights()))


def tensors_of(weights):
    return [tensor for pair in weights for tensor in pair]


def assert_same(a, b):
    for left, right in zip(tensors_of(a), tensors_of(b), strict=True):
        assert torch.equal(left, right)


class TestWeights:
    @pytest.fixture
    def pairs(self):
        return [deep_moe.quantize_mxfp4(weight) for weight in bf16_weights()]

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float4_e2m1fn_x2])
    @pytest.mark.parametrize("scales", ["int32", "mn_major", "bytes", "e8m0", "float32"])
    def test_formats(self, pairs, dtype, scales):
        as_given = {
            "int32": lambda sf: sf,
            # As DeepGEMM's own function leaves them: MN-major, rows aligned to 16 bytes.
            "mn_major": lambda sf: sf.mT.contiguous().mT,
            "bytes": unpack_ue8m0,
            "e8m0": lambda sf: unpack_ue8m0(sf).view(torch.float8_e8m0fnu),
            "float32": lambda sf: ue8m0_to_float(unpack_ue8m0(sf), torch.float32),
        }[scales]
        given = [(weight.view(dtype), as_given(sf)) for weight, sf in pairs]
        result = deep_gemm.transform_weights_for_mega_moe(*given)
        assert_same(result, deep_moe.transform_weights_for_mega_moe(*pairs))

    def test_activation_is_the_third_argument(self, pairs):
        assert_same(deep_gemm.transform_weights_for_mega_moe(*pairs, "swiglu"), transformed())
        assert_same(deep_gemm.transform_weights_for_mega_moe(*pairs, "situ"), transformed())
        with pytest.raises(ValueError, match=r"activation must be 'swiglu' or 'situ'; .*'gelu'"):
            deep_gemm.transform_weights_for_mega_moe(*pairs, "gelu")
        with pytest.raises(ValueError, match="mma_type must be 'fp8xfp4'"):
            deep_gemm.transform_weights_for_mega_moe(*pairs, mma_type="fp4xfp4")
        with pytest.raises(TypeError, match=r"l1_weights\[0\] must be bfloat16 for bf16 weights"):
            deep_gemm.transform_weights_for_mega_moe(*pairs, mma_type="bf16xbf16")

    def test_other_weights_are_refused(self, pairs):
        l1, l2 = bf16_weights()
        with pytest.raises(
            TypeError, match=r"l1_weights must be a pair .* got one tensor of torch.b"
        ):
            deep_gemm.transform_weights_for_mega_moe(l1, l2, mma_type="fp8xfp8")
        with pytest.raises(TypeError, match=r"l1_weights\[0\] must be bfloat16 .* got torch.float"):
            deep_gemm.transform_weights_for_mega_moe(l1.float(), l2.float())
        fp8 = l1.to(torch.float8_e4m3fn)
        with pytest.raises(TypeError, match=r"l1_weights\[0\] must be packed E2M1.* got .*e4m3fn"):
            deep_gemm.transform_weights_for_mega_moe((fp8, pairs[0].sf), pairs[1])
        half = pairs[1].sf.half()
        with pytest.raises(
            TypeError, match=r"l2_weights\[1\] must be float32, .*got torch.float16"
        ):
            deep_gemm.transform_weights_for_mega_moe(pairs[0], (pairs[1].weight, half))


class TestScales:
    @pytest.mark.parametrize("num_groups", [None, 3])
    def test_float_scales_are_packed(self, num_groups):
        rows = (8,) if num_groups is None else (num_groups, 8)
        exponents = torch.arange(8 * len(rows) ** 9 * 8)[: torch.Size(rows).numel() * 8] % 255
        exponents = exponents.reshape(*rows, 8).to(torch.uint8)
        sf = ue8m0_to_float(exponents, torch.float32)
        result = deep_gemm.transform_sf_into_required_layout(sf, 8, 256, (1, 32), num_groups)
        assert result.shape == (*rows, 2)
        assert torch.equal(unpack_ue8m0(result), exponents)
        again = deep_gemm.transform_sf_into_required_layout(
            result, 8, 256, (1, 1, 32), num_groups, is_sfa=True
        )
        assert torch.equal(again, result)

    @pytest.mark.parametrize("value", [0.0, 1.5, -2.0, float("nan"), float("inf"), 2.0**-128])
    def test_floats_that_ue8m0_does_not_hold(self, value):
        sf = torch.ones(2, 8, 8)
        sf[1, 3, 5] = value
        with pytest.raises(ValueError, match=r"sf must hold powers of two.* at \[1, 3, 5\]"):
            deep_gemm.transform_sf_into_required_layout(sf, 8, 256, (1, 32), 2)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"recipe": (128, 128)}, r"recipe must be \(1, 32\).*got \(128, 128\)"),
            ({"recipe": (1, 128)}, "recipe must be"),
            ({"recipe": (1, 1, 32)}, "is_sfa must go with a recipe of three"),
            ({"is_sfa": False}, "is_sfa must go with a recipe of three"),
            ({"disable_ue8m0_cast": True}, "disable_ue8m0_cast must be False"),
            ({"psum_layout": torch.ones(1)}, "psum_layout must be None"),
            ({"k": 224}, "k must be a multiple of 128; got 224"),
            ({"mn": 9}, r"sf must hold one scale per 32 values, shape \(2, 9, 8\)"),
            ({"num_groups": None}, r"shape \(8, 8\); got \(2, 8, 8\)"),
        ],
    )
    def test_refusals(self, arguments, message):
        usual = {"mn": 8, "k": 256, "recipe": (1, 32), "num_groups": 2}
        with pytest.raises(ValueError, match=message):
            deep_gemm.transform_sf_into_required_layout(
                torch.ones(2, 8, 8), **{**usual, **arguments}
            )

    def test_casts_there_and_back(self):
        torch.manual_seed(0)
        x = torch.randn(6, 256, dtype=torch.bfloat16)
        x[2, 32:64] = 0
        packed, sf = per_token_cast_to_fp4(x, use_ue8m0=True, gran_k=32)
        assert (packed.shape, sf.shape, sf.dtype) == ((6, 128), (6, 8), torch.float32)
        values = cast_back_from_fp4(packed, sf, gran_k=32)
        assert torch.equal(values, deep_moe.dequantize_mxfp4(*deep_moe.quantize_mxfp4(x)))
        for cast in (per_token_cast_to_fp4, per_token_cast_to_fp8):
            with pytest.raises(ValueError, match="use_ue8m0 must be True"):
                cast(x, use_ue8m0=False, gran_k=32)
            with pytest.raises(ValueError, match=r"gran_k must be 32.*; got 128"):
                cast(x, use_ue8m0=True)


class TestCall:
    def call(self, buffer, *args, **kwargs):
        y = torch.empty(1, HIDDEN, dtype=torch.bfloat16)
        l1, l2 = transformed()
        deep_gemm.fp8_fp4_mega_moe(y, l1, l2, buffer, *args, **kwargs)

    @pytest.mark.parametrize(
        ("args", "kwargs", "message"),
        [
            (
                (torch.zeros(4, dtype=torch.int),),
                {},
                "shared_l1_weights .*got a tensor of torch.int",
            ),
            (((1, 1, 32),), {}, r"shared_l1_weights .*got \(1, 1, 32\). Name the arguments"),
            ((), {"shared_l2_weights": (1.0, 2.0)}, "shared_l2_weights must be None.* got tuple"),
            ((), {"situ_beta": 4.0}, "situ_beta must be None with .* 'swiglu': .*'situ'; got 4.0"),
            ((), {"situ_linear_beta": 4.0}, "situ_linear_beta must be None with .*; got 4.0"),
            ((), {"activation": "situ", "situ_beta": 0.0}, "beta must be a positive number"),
            (
                (),
                {"activation": "situ", "activation_clamp": 7.0},
                "activation_clamp must be None with activation 'situ'",
            ),
            ((), {"activation": "swiglu_oai"}, "activation must be 'swiglu' or 'situ'; .* got 'sw"),
            ((), {"recipe": (128, 128, 128)}, "recipe must be"),
        ],
    )
    def test_what_no_kernel_does(self, buffer, args, kwargs, message):
        with pytest.raises(ValueError, match=message):
            self.call(buffer, *args, **kwargs)

    @pytest.mark.parametrize(
        ("given", "activation"),
        [
            ({}, Situ()),
            ({"situ_beta": 3.0}, Situ(beta=3.0)),
            ({"situ_beta": 3.0, "situ_linear_beta": 20.0}, Situ(3.0, 20.0)),
        ],
    )
    def test_situ_is_passed_on(self, buffer, given, activation, monkeypatch):
        taken = []
        monkeypatch.setattr(deep_moe, "fp8_fp4_mega_moe", lambda *args, **_: taken.extend(args))
        self.call(buffer, activation="situ", **given)
        assert activation_of(taken[6]) == activation
        assert taken[7] is None

    def test_a_buffer_of_another_kind(self, buffer):
        with pytest.raises(TypeError, match=r"sym_buffer must be of deep_moe.compat.* SymmBuffer"):
            self.call(buffer.own)

    def test_names_that_are_not_there(self):
        for name in ("bf16_gemm_nt", "fp8_gemm_nt", "nvfp4_mega_moe"):
            assert not hasattr(deep_gemm, name)
        with pytest.raises(
            AttributeError, match="no attribute 'fp8_gemm_nt': it is DeepGEMM's Mega"
        ):
            _ = deep_gemm.fp8_gemm_nt

    def test_the_number_of_sms_reaches_the_call(self, buffer, monkeypatch):
        monkeypatch.setattr(deep_gemm.mega, "_num_sms", None)
        usual = deep_gemm.get_num_sms()
        assert usual > 0
        seen = []
        monkeypatch.setattr(
            deep_moe, "fp8_fp4_mega_moe", lambda *args, **kwargs: seen.append(kwargs["num_sms"])
        )
        self.call(buffer)
        deep_gemm.set_num_sms(6)
        assert deep_gemm.get_num_sms() == 6
        self.call(buffer)
        assert seen == [None, 6]
        with pytest.raises(ValueError, match="num_sms must be a positive int; got 0"):
            deep_gemm.set_num_sms(0)


class TestPreDispatch:
    def test_rows_behind_the_tokens_name_nobody(self, buffer):
        torch.manual_seed(0)
        x = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
        topk_idx = torch.randint(0, NUM_EXPERTS, (5, TOPK), dtype=torch.int32)
        topk_weights = torch.rand(5, TOPK)
        buffer.topk_weights.fill_(9)
        views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
        deep_gemm.mega_moe_pre_dispatch(x, topk_idx, topk_weights, *views, num_tokens=3)
        values, sf = deep_moe.quantize_mxfp8(x[:3])
        assert torch.equal(buffer.x[:3].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(buffer.x_sf[:3], sf)
        assert torch.equal(buffer.topk_idx[:3], topk_idx[:3].long())
        assert torch.equal(buffer.topk_weights[:3], topk_weights[:3])
        assert bool((buffer.topk_idx[3:] == -1).all())
        assert bool((buffer.topk_weights[3:] == 0).all())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"group_size": 128}, "group_size must be 32.*; got 128"),
            ({"use_fp4_acts": True}, "use_fp4_acts must be False"),
            ({"num_tokens": 6}, "num_tokens must be 0 to the 5 rows of x; got 6"),
        ],
    )
    def test_refusals(self, buffer, options, message):
        routing = torch.zeros(5, TOPK, dtype=torch.int64), torch.zeros(5, TOPK)
        views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
        given = (torch.zeros(5, HIDDEN, dtype=torch.bfloat16), *routing, *views)
        with pytest.raises(ValueError, match=message):
            deep_gemm.mega_moe_pre_dispatch(*given, **{"num_tokens": 5, **options})


def test_calc_diff():
    x = torch.randn(100)
    assert calc_diff(x, x) == 0
    assert calc_diff(x, -x) == pytest.approx(2)
    assert calc_diff(torch.zeros(3), torch.zeros(3)) == 0
    assert calc_diff(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1
