"""Stand-ins for other libraries, by their names: `deep_gemm` for DeepGEMM's Mega MoE, `deep_ep` for
DeepEP's all-to-alls, `tilelang_ops` for the activation between DeepGEMM's unfused products."""

from typing import TYPE_CHECKING

from deep_moe.lazy import names_on_use

if TYPE_CHECKING:
    from . import deep_ep, deep_gemm, tilelang_ops

__all__ = ["deep_ep", "deep_gemm", "tilelang_ops"]

if not TYPE_CHECKING:  # so that type checkers find names that do not exist
    __getattr__, __dir__ = names_on_use(__name__, {}, __all__)
