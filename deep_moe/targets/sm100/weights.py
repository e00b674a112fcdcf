"""What all weight formats have in common on SM100: interleaved rows of gate and up, UE8M0 scales
per 32 values if there are any, and tensor maps of all operands.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from deep_moe.emulator.tensor_map import DataType, Swizzle, TensorMapSpec
from deep_moe.tensor_map import map_of_rows

from ..target import Operands, TargetWeights, token_data_type
from .config import Sm100Config

if TYPE_CHECKING:
    import torch

    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.weights.layers import ExpertWeights, KernelLayer, TensorForms

    from ..config import MegaMoEConfig
    from ..target import Pair


class Sm100Weights(TargetWeights):
    """data_type: of weights in tensor maps. values_per_element: of those, where they and tokens are
    packed. gate_step: of runs of gate and up, see `interleave_gate_up`. decoded_block_bytes: of
    weights that the kernel decodes, see heuristics/sm100.py."""

    data_type: ClassVar[DataType]
    values_per_element: ClassVar[int] = 1
    gate_step: ClassVar[int] = 1
    decoded_block_bytes: ClassVar[int] = 0
    # Few stages, for a small case never comes round the ring of the default.
    fuzz_tiles = (
        {"block_m": 16, "num_stages": 5},
        {"block_m": 64, "num_stages": 2},
        {"block_m": 96, "num_stages": 3},
        {"block_m": 192, "num_stages": 2},
    )

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of weights in PyTorch."""

    @property
    def values_per_byte(self) -> int:
        return 8 // self.data_type.bits

    def inverse(self, l1: KernelLayer, l2: KernelLayer, has_gate: bool) -> ExpertWeights:
        from .layout import inverse_scaled

        return inverse_scaled(
            l1, l2, has_gate, self, dtype=self.dtype, values_per_byte=self.values_per_byte
        )

    def tensors(self, shape: MoEShape) -> TensorForms:
        from .layout import scaled_tensors

        return scaled_tensors(shape, dtype=self.dtype, values_per_byte=self.values_per_byte)

    def operands(self, config: MegaMoEConfig, buffer_address: int, l1: Pair, l2: Pair) -> Operands:
        assert isinstance(config, Sm100Config)
        box = (config.block_k // self.values_per_element, config.block_n)

        def weights(name: str, weight: torch.Tensor) -> TensorMapSpec:
            return map_of_rows(weight, self.data_type, name=name, box=box, swizzle=Swizzle.B128)

        maps = sm100_tensor_maps(config, buffer_address, self.values_per_element)
        maps["l1_weights"] = weights("l1_weights[0]", l1[0])
        maps["l2_weights"] = weights("l2_weights[0]", l2[0])
        tokens = config.tokens
        if tokens.has_scales and not tokens.scales_whole_tokens:
            maps["l1_weight_sf"] = weight_scales(config, "l1_weights[1]", l1[1])
            maps["l2_weight_sf"] = weight_scales(config, "l2_weights[1]", l2[1])
        return Operands(maps, {})

    def bias_order(self, num_rows: int, *, is_l1: bool) -> torch.Tensor:
        import torch

        from .layout import interleave_gate_up

        rows = torch.arange(num_rows, device="cpu")
        if not is_l1:
            return rows
        order = torch.empty_like(rows).unsqueeze(0)
        return interleave_gate_up(rows.unsqueeze(0), order, self.gate_step)[0]


def weight_scales(config: Sm100Config, name: str, sf: torch.Tensor) -> TensorMapSpec:
    """A map of a layer's scale words."""
    box = (config.block_n, config.tokens.num_scale_words(config.block_k))
    return map_of_rows(sf, DataType.INT32, name=name, box=box)


def sm100_tensor_maps(
    config: Sm100Config, buffer_address: int, values_per_element: int
) -> dict[str, TensorMapSpec]:
    """A spec for each tensor map of KernelArgs but those of weights: which tile of what each one
    copies. Of tokens it is the largest copy.

    buffer_address: this rank's symmetric buffer. values_per_element: of tokens, where they are
    packed.
    """
    layout = config.symm_buffer_layout
    half_m = config.block_m // 2  # each CTA of a pair loads half of the tokens
    tokens = config.tokens
    block_k = config.block_k // values_per_element
    num_words = tokens.num_scale_words(config.block_k)
    sf_box = (-(-config.block_m // 128) * 128, num_words)

    def pool(
        segment_name: str,
        data_type: DataType,
        box: tuple[int, int],
        swizzle: Swizzle = Swizzle.NONE,
    ) -> TensorMapSpec:
        segment = layout[segment_name]
        num_rows, _ = segment.shape
        row_bytes = segment.num_bytes // num_rows
        return TensorMapSpec(
            data_type=data_type,
            address=buffer_address + segment.offset,
            dims=(8 * row_bytes // data_type.bits, num_rows),
            strides=(row_bytes,),
            box=box,
            swizzle=swizzle,
        )

    data_type = token_data_type(tokens)
    tokens_box = (block_k, half_m)
    # Half of block_n: a pair of gate and up gives one value; without a gate, blocks are stored by
    # halves. A row is as long as its swizzle.
    output_box = (config.block_n // 2 // values_per_element, config.store_block_m)
    output_swizzle = Swizzle.of_row_bytes(tokens.num_bytes(config.block_n // 2))
    maps = {
        "l1_activations": pool("l1_tokens", data_type, tokens_box, Swizzle.B128),
        "l1_output": pool("l2_tokens", data_type, output_box, output_swizzle),
        "l2_activations": pool("l2_tokens", data_type, tokens_box, Swizzle.B128),
    }
    if tokens.has_scales:
        maps["l2_activation_sf"] = pool("l2_token_sf", DataType.INT32, sf_box)
    if tokens.has_scales and not tokens.scales_whole_tokens:
        maps["l1_activation_sf"] = pool("l1_token_sf", DataType.INT32, sf_box)
    return maps
