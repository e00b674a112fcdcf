"""NVFP4 weights on SM100: beside NVFP4 tokens `tcgen05.mma` of kind mxf4nvf4, with both operands
packed; beside BF16 tokens the kernel decodes them.

Beside NVFP4 tokens scales of each layer are int32 [E, rows, N]: words of four E4M3 scales,
MN-major as of all formats, those of a k-block of 256 values together; then a row of floats, by
which the products of each weight row are multiplied: the scale of its matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.emulator.tensor_map import DataType
from deep_moe.targets.sm100.decoded import Sm100DecodedWeights, decoded_block_bytes
from deep_moe.targets.sm100.weights import Sm100Weights
from deep_moe.targets.target import Operands

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from deep_moe.formats.numerics import Numerics
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.targets.config import MegaMoEConfig
    from deep_moe.targets.target import Pair

    from ..layers import ExpertWeights, KernelLayer, LayerWeights, MegaMoEWeights, TensorForms

_WORDS_PER_K_BLOCK = 4
_VALUES_PER_WORD = 64
_STEP = 2  # even rows of 16, then odd ones: of Linear1's output a thread has both values of a byte


class Sm100Nvfp4(Sm100Weights):
    weights = "nvfp4"
    token_format = "nvfp4"
    policy = "Nvfp4Weights"
    data_type = DataType.UINT8
    values_per_element = 2
    gate_step = _STEP
    scale_block = (1, 16)

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.int8

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        import torch

        from deep_moe.targets.sm100.layout import interleave_l1

        def interleaved(rows: torch.Tensor) -> torch.Tensor:
            return interleave_l1(rows, torch.empty_like(rows), out.has_gate, _STEP)

        _lay_out(l1, out.l1, interleaved)
        _lay_out(l2, out.l2, lambda rows: rows)

    def inverse(self, l1: KernelLayer, l2: KernelLayer, has_gate: bool) -> ExpertWeights:
        from deep_moe.targets.sm100.layout import separate_l1, transformed_shape

        from ..layers import ExpertWeights, check_form

        shape = transformed_shape(l1, has_gate, self, values_per_byte=2)
        check_form({"l1_weights": l1, "l2_weights": l2}, self.tensors(shape))
        return ExpertWeights(
            _read(l1, 2 if has_gate else 1, lambda rows: separate_l1(rows, has_gate, _STEP)),
            _read(l2, 1, lambda rows: rows.clone()),
        )

    def tensors(self, shape: MoEShape) -> TensorForms:
        import torch

        num_experts = shape.num_local_experts
        forms: TensorForms = {}
        sizes = {
            "l1_weights": (shape.num_l1_rows, shape.hidden),
            "l2_weights": (shape.hidden, shape.intermediate_hidden),
        }
        for name, (num_rows, num_columns) in sizes.items():
            forms[f"{name}[0]"] = (self.dtype, (num_experts, num_rows, num_columns // 2))
            forms[f"{name}[1]"] = (
                torch.int32,
                (num_experts, _num_word_rows(num_columns) + 1, num_rows),
            )
        return forms

    def operands(self, config: MegaMoEConfig, buffer_address: int, l1: Pair, l2: Pair) -> Operands:
        maps = super().operands(config, buffer_address, l1, l2).tensor_maps
        factors = {"l1_row_factors": l1[1][:, -1], "l2_row_factors": l2[1][:, -1]}
        return Operands(maps, {name: rows.data_ptr() for name, rows in factors.items()})

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import nvfp4_numerics

        from .format import FORMAT

        return nvfp4_numerics(FORMAT.dequantize)


def _num_word_rows(num_columns: int) -> int:
    """Rows of scale words, of whole k-blocks."""
    num_k_blocks = -(-num_columns // (_WORDS_PER_K_BLOCK * _VALUES_PER_WORD))
    return _WORDS_PER_K_BLOCK * num_k_blocks


def _lay_out(
    layer: LayerWeights, out: KernelLayer, in_order: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """in_order: rows [E, N, ...] as the kernel has them."""
    import torch

    from deep_moe.targets.sm100.layout import permute_sf_rows

    from ..layers import in_words

    assert layer.global_sf is not None
    out.weight.copy_(in_order(layer.weight.view(torch.int8)))
    words = in_words(layer.sf, torch.int32)
    num_words = words.shape[2]
    out.sf[:, :num_words] = permute_sf_rows(in_order(words))
    out.sf[:, num_words:-1] = 0
    rows_per_matrix = layer.weight.shape[1] // layer.global_sf.shape[1]
    factors = layer.global_sf.repeat_interleave(rows_per_matrix, dim=1)
    out.sf[:, -1] = in_order(factors).view(torch.int32)


def _read(
    layer: KernelLayer, num_matrices: int, in_order: Callable[[torch.Tensor], torch.Tensor]
) -> LayerWeights:
    """The inverse. in_order: rows as checkpoints have them, as a copy."""
    import torch

    from deep_moe.targets.sm100.layout import restore_sf_rows

    from ..layers import LayerWeights

    num_words = layer.weight.shape[2] * 2 // _VALUES_PER_WORD
    words = in_order(restore_sf_rows(layer.sf[:, :num_words]))
    factors = in_order(layer.sf[:, -1].contiguous().view(torch.float32))
    matrices = factors.unflatten(1, (num_matrices, -1))
    return LayerWeights(
        in_order(layer.weight),
        words.view(torch.uint8).view(torch.float8_e4m3fn),
        matrices[..., 0].contiguous(),
    )


class Sm100Nvfp4Bf16(Sm100DecodedWeights):
    weights = "nvfp4"
    policy = "Nvfp4Bf16Weights"
    scale_block = (1, 16)
    decoded_block_bytes = decoded_block_bytes(4)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        from .format import FORMAT

        return bf16_numerics(FORMAT.dequantize, rounds_row_factors=True)


KERNELS = (Sm100Nvfp4(), Sm100Nvfp4Bf16())
