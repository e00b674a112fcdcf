"""`TokenFormat`: everything that Python knows of a format of tokens. Nothing here imports PyTorch
before a method needs it, because shapes and configs use it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from . import TokenFormatName

    Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class TokenFormat:
    """Tokens as a caller or an all-to-all has them, and Linear1's output.

    name: what the format is chosen by, and of its folder. values: of which type, as kernels and
    errors name it. value_bits: of a value. values_per_scale: along a token; 0 without scales, or
    with one for the whole token (scales_whole_tokens), however long. scale_dtype: of a word of
    scales, "u32" for UE8M0 bytes, "f32" for numbers. values_per_word: whose scales a word holds.
    rounds_scales: whether scales are powers of two. has_token_scale: whether a float32 of the whole
    token stands in front of the words, by which all of it is multiplied, too.
    in_products: the name of what the experts' products make of the tokens: this one, or another
    that has the same scales in other words. Only the former can be a symmetric buffer's.
    local_scales: the struct that reads the words, in include/deep_moe/tokens/<name>.
    """

    name: TokenFormatName
    values: str
    value_bits: int
    in_products: TokenFormatName
    local_scales: str
    values_per_scale: int = 0
    scale_dtype: str | None = None
    values_per_word: int = 0
    rounds_scales: bool = False
    scales_whole_tokens: bool = False
    has_token_scale: bool = False

    @property
    def block_k(self) -> int:
        """Values of a k-block: a row of 128 bytes in shared memory, the span of its swizzle."""
        return 8 * 128 // self.value_bits

    def num_bytes(self, num_values: int) -> int:
        """Of so many values, without their scales."""
        return num_values * self.value_bits // 8

    def num_scale_words(self, num_values: int) -> int:
        """32-bit words of the scales of a token of so many values.

        >>> from deep_moe.tokens import token_format
        >>> [token_format(name).num_scale_words(7168) for name in ("mxfp8", "fp8_token", "bf16")]
        [56, 1, 0]
        """
        if self.scales_whole_tokens:
            return 1
        return -(-num_values // self.values_per_word) if self.has_scales else 0

    def num_output_scale_words(self, num_values: int) -> int:
        """The same of Linear1's output, of which nobody knows all values when some are rounded: so
        one scale is for 128 of them at most."""
        return (
            -(-num_values // 128) if self.scales_whole_tokens else self.num_scale_words(num_values)
        )

    def num_row_words(self, num_values: int) -> int:
        """All 32-bit words that a token of so many values has beside them.

        >>> from deep_moe.tokens import token_format
        >>> token_format("nvfp4").num_scale_words(7168), token_format("nvfp4").num_row_words(7168)
        (112, 113)
        """
        return self.num_scale_words(num_values) + self.has_token_scale

    def num_elements(self, num_values: int) -> int:
        """Of PyTorch's `dtype`, that hold so many values."""
        return self.num_bytes(num_values) // self.dtype.itemsize

    @property
    def has_scales(self) -> bool:
        return self.values_per_scale > 0 or self.scales_whole_tokens

    @property
    def has_one_scale(self) -> bool:
        """Whether a float32 is for all values of a token, which `prepare_inputs` may be given."""
        return self.scales_whole_tokens or self.has_token_scale

    @property
    def has_float_scales(self) -> bool:
        """Whether scales are floats of any size."""
        return self.has_scales and not self.rounds_scales

    @property
    def promotes_scales(self) -> bool:
        """Whether products of SM90 multiply each k-block's sums by floats of its tokens."""
        return self.has_float_scales and not self.scales_whole_tokens

    @property
    def is_of_all_to_alls(self) -> bool:
        """Whether the dispatch of the split path carries such tokens."""
        return not self.has_one_scale

    @property
    def packs_scales(self) -> bool:
        """Whether a word holds several scales, of more than 128 values."""
        return self.values_per_word > max(128, self.values_per_scale)

    @property
    def is_of_products(self) -> bool:
        """Whether products take the tokens as they are."""
        return self.in_products == self.name

    @property
    def dtype(self) -> torch.dtype:
        """Of values in PyTorch."""
        import torch

        return {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e2m1": torch.uint8}[
            self.values
        ]

    @property
    def scale_torch_dtype(self) -> torch.dtype | None:
        """Of scales in PyTorch."""
        import torch

        return {None: None, "u32": torch.int32, "f32": torch.float32}[self.scale_dtype]
