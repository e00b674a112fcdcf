"""The kernels, in the emulator with all of its checks, against the same steps in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe.activations import Activation, Situ, Swiglu, SwigluOai
from deep_moe.heuristics.training import TrainingConfig
from deep_moe.training import grouped_product, kernel_steps
from deep_moe.training.kernel_steps import KernelSteps
from deep_moe.training.plain_steps import PlainSteps, mxfp8_rounded
from deep_moe.training.quantized import QuantizedColumns, parts_of_rows
from deep_moe.training.rows import Rows
from deep_moe.training.steps import Biases

from .plain_layer import Layer, assert_close

KERNELS = KernelSteps("sm_90a", None)
PLAIN = PlainSteps()
NUM_EXPERTS, NUM_TOKENS, NUM_TOPK, HIDDEN, INTERMEDIATE = 4, 9, 3, 40, 24
ACTIVATIONS = (Swiglu(), Swiglu(clamp=0.75), SwigluOai(limit=1.5), Situ(beta=1.0, linear_beta=2.0))


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def routed(num_topk: int = NUM_TOPK, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    topk_idx = torch.randint(-1, NUM_EXPERTS, (NUM_TOKENS, num_topk), generator=generator)
    return PLAIN.route(topk_idx, NUM_EXPERTS)


def used(rows: Rows) -> slice:
    return slice(0, int(rows.offs[-1]))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def assert_last_place(a: torch.Tensor, b: torch.Tensor) -> None:
    """Of BF16: exponentials differ in float32's last places, and may fall to the other side of a
    rounding."""
    assert a.dtype == b.dtype == torch.bfloat16
    torch.testing.assert_close(a, b, rtol=2.0**-7, atol=1e-6, equal_nan=True)
    assert (a != b).float().mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_experts"), [(1, 1, 1), (5, 3, 7), (700, 6, 40), (9, 8, 1024)]
)
def test_slots_are_sorted(
    num_tokens: int, num_topk: int, num_experts: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    size = (num_tokens, num_topk)
    topk_idx = torch.randint(-2, num_experts + 2, size, generator=generator, dtype=dtype)
    ours, plain = KERNELS.route(topk_idx, num_experts), PLAIN.route(topk_idx, num_experts)
    assert torch.equal(ours.offs, plain.offs)
    assert torch.equal(ours.row_of_slot, plain.row_of_slot)
    assert torch.equal(ours.slot_of_row, plain.slot_of_row)


def test_every_expert_in_one() -> None:
    topk_idx = torch.full((600, 4), 3)
    ours, plain = KERNELS.route(topk_idx, 5), PLAIN.route(topk_idx, 5)
    assert torch.equal(ours.row_of_slot, plain.row_of_slot)
    assert ours.offs.tolist() == [0, 0, 0, 2400, 2400]


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("hidden", [32, 1312])
def test_gathered_rows_are_bit_equal(hidden: int, rounds: bool) -> None:
    rows = routed()
    tokens = random(NUM_TOKENS, hidden).bfloat16()
    tokens[1, 3], tokens[2, 5], tokens[3] = float("nan"), float("inf"), 0
    tokens[4] *= 2.0**-120
    ours = KERNELS.gather(tokens, rows, rounds_to_mxfp8=rounds)[used(rows)]
    plain = PLAIN.gather(tokens, rows, rounds_to_mxfp8=rounds)[used(rows)]
    is_nan = plain.isnan()
    assert torch.equal(ours.isnan(), is_nan)
    assert torch.equal(bits(ours)[~is_nan], bits(plain)[~is_nan])


@pytest.mark.parametrize("num_topk", [1, 3, 8, 32])
def test_scattered_rows_are_bit_equal(num_topk: int) -> None:
    rows = routed(num_topk)
    first = random(rows.num_rows, HIDDEN).bfloat16()
    weights = random(NUM_TOKENS, num_topk, seed=1)
    ours = KERNELS.scatter(first, None, rows, topk_weights=weights)
    assert torch.equal(bits(ours), bits(PLAIN.scatter(first, None, rows, topk_weights=weights)))


@pytest.mark.parametrize("options", ["second", "bias", "all"])
def test_what_is_added_to_rows(options: str) -> None:
    rows = routed()
    first = random(rows.num_rows, 264).bfloat16()
    second = random(rows.num_rows, 264, seed=1).bfloat16() if options != "bias" else None
    bias = random(NUM_EXPERTS, 264, seed=2) if options != "second" else None
    weights = random(NUM_TOKENS, NUM_TOPK, seed=3) if options == "all" else None
    results = [
        steps.scatter(first, second, rows, topk_weights=weights, bias=bias)
        for steps in (KERNELS, PLAIN)
    ]
    assert torch.equal(bits(results[0]), bits(results[1]))


def halves(rows: Rows, is_fused: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    if is_fused:
        gate, up = random(rows.num_rows, 2 * INTERMEDIATE, seed=seed).bfloat16().chunk(2, 1)
        return gate, up
    return tuple(random(rows.num_rows, INTERMEDIATE, seed=s).bfloat16() for s in (seed, seed + 1))  # type: ignore[return-value]


def random_biases() -> Biases:
    sizes = (INTERMEDIATE, INTERMEDIATE, HIDDEN)
    return Biases(*(random(NUM_EXPERTS, n, seed=7 + i) for i, n in enumerate(sizes)))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize(("is_fused", "has_biases"), [(False, True), (True, False)])
def test_activation_and_its_gradients(
    activation: Activation, is_fused: bool, has_biases: bool
) -> None:
    rows = routed()
    biases = random_biases() if has_biases else None
    gate, up = halves(rows, is_fused, seed=0)
    forward = [s.activate(gate, up, biases, activation, rows) for s in (KERNELS, PLAIN)]
    assert_last_place(*(tensor[used(rows)] for tensor in forward))

    d_activated = random(rows.num_rows, INTERMEDIATE, seed=4).bfloat16()
    # Gradients arrive at padding rows where weights are not finite.
    is_padding = rows.slot_of_row < 0
    d_activated[is_padding] = float("nan")
    d_rows = random(rows.num_rows, HIDDEN, seed=5).bfloat16()
    weights = random(NUM_TOKENS, NUM_TOPK, seed=6)
    results: list[dict[str, torch.Tensor]] = []
    for steps in (KERNELS, PLAIN):
        d_gate, d_up = halves(rows, is_fused, seed=9)
        weighted, d_weights = steps.activate_backward(
            gate,
            up,
            biases,
            activation,
            rows,
            d_activated=d_activated,
            d_rows=d_rows,
            topk_weights=weights,
            d_gate=d_gate,
            d_up=d_up,
        )
        results.append({"weighted": weighted, "d_gate": d_gate, "d_up": d_up})
        results[-1]["d_weights"] = d_weights
    ours, plain = results
    for name in ("weighted", "d_gate", "d_up"):
        assert (ours[name][used(rows)][is_padding[used(rows)]] == 0).all()
        assert_last_place(ours[name][used(rows)], plain[name][used(rows)])
    torch.testing.assert_close(ours["d_weights"], plain["d_weights"], rtol=1e-5, atol=1e-5)
    assert (ours["d_weights"][rows.row_of_slot < 0] == 0).all()


def test_activation_is_rounded_to_mxfp8() -> None:
    """Bit for bit, of what it is in BF16."""
    rows = routed()
    gate, up = (random(rows.num_rows, 64, seed=seed).bfloat16() for seed in (0, 1))
    plain, rounded = (
        KERNELS.activate(gate, up, None, Swiglu(), rows, rounds_to_mxfp8=rounds)[used(rows)]
        for rounds in (False, True)
    )
    assert torch.equal(bits(rounded), bits(mxfp8_rounded(plain)))
    assert not torch.equal(rounded, plain)


def test_a_view_that_begins_anywhere_is_gathered() -> None:
    """Kernels load 16 bytes at once."""
    rows = routed()
    tokens = random(NUM_TOKENS * HIDDEN + 1).bfloat16()[1:].view(NUM_TOKENS, HIDDEN)
    assert tokens.data_ptr() % 16 == 2
    ours, plain = (steps.gather(tokens, rows)[used(rows)] for steps in (KERNELS, PLAIN))
    assert torch.equal(bits(ours), bits(plain))


def test_rounded_weights_are_bit_equal() -> None:
    weights = random(2, 64, 40, scale=3.0).bfloat16()
    weights[0, :32, 1] = 0
    weights[1, 40, 2] = float("nan")
    weights[1, 3, 6] *= 2.0**60
    ours, plain = KERNELS.round_weights(weights), PLAIN.round_weights(weights)
    is_nan = plain.isnan()
    assert is_nan.sum() == 32
    assert torch.equal(ours.isnan(), is_nan)
    assert torch.equal(bits(ours)[~is_nan], bits(plain)[~is_nan])


@pytest.mark.parametrize("num_values", [128, 640])
def test_quantized_rows_are_bit_equal(num_values: int) -> None:
    """And gathered ones: padding is zero."""
    rows = routed()
    tokens = random(NUM_TOKENS, num_values).bfloat16()
    tokens[1, 3], tokens[2, 5], tokens[3] = float("nan"), float("inf"), 0
    tokens[4] *= 2.0**-120
    ours, plain = KERNELS.quantize_rows(tokens), PLAIN.quantize_rows(tokens)
    for own, other in zip(
        quantized_bytes(ours, num_values), quantized_bytes(plain, num_values), strict=True
    ):
        assert torch.equal(own, other)
    gathered = KERNELS.gather(ours, rows)
    values, scales = parts_of_rows(gathered, num_values)
    padding = (rows.slot_of_row < 0) & (torch.arange(rows.num_rows) < rows.offs[-1])
    assert padding.any()
    assert not values[padding].view(torch.uint8).any()
    assert not scales[padding].any()
    first = rows.slot_of_row[0] // NUM_TOPK
    assert torch.equal(gathered[0].view(torch.int16), ours[first].view(torch.int16))


def quantized_bytes(rows: torch.Tensor, num_values: int) -> list[torch.Tensor]:
    return [part.contiguous().view(torch.uint8) for part in parts_of_rows(rows, num_values)]


def test_dequantized_rows_are_bit_equal() -> None:
    rows = PLAIN.quantize_rows(random(NUM_TOKENS, 640).bfloat16())
    ours, plain = (steps.dequantize_rows(rows, 640) for steps in (KERNELS, PLAIN))
    assert torch.equal(bits(ours), bits(plain))


@pytest.mark.parametrize("by_columns", [False, True])
def test_quantized_weights_are_bit_equal(by_columns: bool) -> None:
    weights = random(2, 256, 200, scale=3.0).bfloat16()
    weights[0, :128, :128] = 0
    weights[1, 200, 150] = float("nan")
    weights[1, 3, 6] *= 2.0**60
    if by_columns:
        weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
    ours, plain = KERNELS.quantize_weights(weights), PLAIN.quantize_weights(weights)
    assert torch.equal(bits(ours.scales), bits(plain.scales))
    assert torch.equal(ours.values.view(torch.uint8), plain.values.view(torch.uint8))
    assert ours.values.float().isnan().sum() == 128 * 72


@pytest.mark.parametrize("by_columns", [False, True])
def test_weights_quantized_both_ways_are_those_of_each(by_columns: bool) -> None:
    weights = random(2, 256, 384, scale=3.0).bfloat16()
    if by_columns:
        weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
    expected = PLAIN.quantize_weights(weights), PLAIN.quantize_weights(weights.transpose(1, 2))
    for both in (KERNELS.quantize_weights_both_ways(weights), expected):
        for ours, plain in zip(both, expected, strict=True):
            assert torch.equal(bits(ours.scales), bits(plain.scales))
            assert torch.equal(ours.values.view(torch.uint8), plain.values.view(torch.uint8))


@pytest.mark.parametrize("by_columns", [False, True])
def test_weights_are_compared_with_what_was_made_of_them(by_columns: bool) -> None:
    """In the weights' own order and transposed; the last columns are no whole block."""
    weights = random(2, 256, 200, scale=3.0).bfloat16()
    weights[0, :128, :128] = 0
    weights[1, 200, 150] = float("nan")
    if by_columns:
        weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
    quantized = KERNELS.quantize_weights(weights)

    def is_changed(steps: KernelSteps | PlainSteps) -> bool:
        return bool(steps.num_differences(weights, quantized))

    assert not is_changed(KERNELS)
    assert not is_changed(PLAIN)
    for expert, row, column in ((0, 0, 0), (0, 255, 199), (1, 127, 128), (1, 128, 7)):
        before = weights[expert, row, column].clone()
        weights[expert, row, column] = 2 * before + 1
        assert is_changed(KERNELS)
        assert is_changed(PLAIN)
        weights[expert, row, column] = before
    # Twice the weights have the same E4M3 values and other scales.
    weights[1, :128, :128] *= 2
    assert is_changed(KERNELS)
    assert is_changed(PLAIN)


def columns_of_experts(columns: QuantizedColumns, rows: Rows) -> list[torch.Tensor]:
    """The bits that mean something."""
    counts = rows.offs.diff(prepend=rows.offs.new_zeros(1)).tolist()
    own = slice(sum(max(-(-count // 128), 1) for count in counts))
    return [columns.values[own].view(torch.uint8), bits(columns.scales[own])]


@pytest.mark.parametrize("gathers", [False, True])
def test_quantized_columns_are_bit_equal(gathers: bool) -> None:
    """Of experts with several blocks, with one and with none; more experts than a warp has
    lanes."""
    topk_idx = torch.full((150, 2), -1)
    topk_idx[:, 0], topk_idx[:9, 1] = 1, 39
    rows = PLAIN.route(topk_idx, 41)
    values = random(150 if gathers else rows.num_rows, 384).bfloat16()
    values[3, 5], values[140, 200], values[:, 256:] = float("nan"), float("inf"), 0
    ours, plain = (s.quantize_columns(values, rows, gathers=gathers) for s in (KERNELS, PLAIN))
    found, expected = columns_of_experts(ours, rows), columns_of_experts(plain, rows)
    assert len(found[0]) == 42
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


def test_rows_and_columns_quantized_at_once_are_those_of_each() -> None:
    topk_idx = torch.tensor([[0, 2]]).expand(130, 2).contiguous()
    rows = PLAIN.route(topk_idx, 4)
    values = random(rows.num_rows, 256).bfloat16()
    quantized, columns = KERNELS.quantize_both(values, rows)
    expected = quantized_bytes(PLAIN.quantize_rows(values), 256)
    for own, other in zip(quantized_bytes(quantized, 256), expected, strict=True):
        assert torch.equal(own[used(rows)], other[used(rows)])
    apart = columns_of_experts(PLAIN.quantize_columns(values, rows), rows)
    for found in (columns, PLAIN.quantize_both(values, rows)[1]):
        for own, other in zip(columns_of_experts(found, rows), apart, strict=True):
            assert torch.equal(own, other)


def test_activation_is_quantized() -> None:
    """Bit for bit, of what it is in BF16."""
    rows = routed()
    gate, up = (random(rows.num_rows, 384, seed=seed).bfloat16() for seed in (0, 1))
    plain = KERNELS.activate(gate, up, None, Swiglu(), rows)
    quantized = KERNELS.activate(gate, up, None, Swiglu(), rows, quantizes=True)
    expected = quantized_bytes(PLAIN.quantize_rows(plain), 384)
    for own, other in zip(quantized_bytes(quantized, 384), expected, strict=True):
        assert torch.equal(own[used(rows)], other[used(rows)])


@pytest.mark.parametrize("precision", ["fp8", "fp8_wgrad"])
@pytest.mark.parametrize("options", [{}, {"biases": True, "fused": True}])
def test_whole_layers_of_quantized_products(options: dict[str, Any], precision: str) -> None:
    layer = Layer.random(hidden=256, intermediate=128, precision=precision, **options)
    assert_close(layer.run(arch="sm_90a"), layer.run(), bound=2.0**-9)


def test_quantized_products_of_another_target_are_refused() -> None:
    layer = Layer.random(hidden=128, intermediate=128, precision="fp8")
    with pytest.raises(ValueError, match="precision must be 'bf16' or 'mxfp8' on sm_100a"):
        layer.run(arch="sm_100a")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("options", [{}, {"biases": True, "fused": True, "precision": "mxfp8"}])
def test_whole_layers(options: dict[str, Any], arch: str) -> None:
    """What differs is a few values' last place, through four products."""
    layer = Layer.random(hidden=32, intermediate=64, **options)
    assert_close(layer.run(arch=arch), layer.run(), bound=2.0**-9)


def test_nothing_behind_the_last_end_is_read() -> None:
    """Nor written: a layer's products leave these rows as they find them."""
    rows = routed()
    behind = slice(int(rows.offs[-1]), None)
    assert rows.num_rows > rows.offs[-1]
    first = random(rows.num_rows, HIDDEN).bfloat16()
    clean = KERNELS.scatter(first, None, rows)
    first[behind] = float("nan")
    assert torch.equal(KERNELS.scatter(first, None, rows), clean)


def test_a_launch_touches_only_its_tensors() -> None:
    """The emulator faults on any other memory; a row out of place would be seen."""
    from deep_moe.emulator import EmulatorError

    rows = routed()
    wrong = Rows(rows.offs, rows.row_of_slot + 10_000, rows.slot_of_row)
    with pytest.raises(EmulatorError):
        KERNELS.scatter(random(rows.num_rows, HIDDEN).bfloat16(), None, wrong)


def test_configs_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the host longer to make than a launch does."""
    seen: list[TrainingConfig] = []
    for module in (kernel_steps, grouped_product):
        monkeypatch.setattr(module, "launch", lambda gpu, config, *_: seen.append(config))
    layer = Layer.random(hidden=128, intermediate=128, precision="fp8_wgrad", arch="sm_90a")
    for _ in range(2):
        layer.run()
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) == len(second) > 20
    assert all(a is b for a, b in zip(first, second, strict=True))
