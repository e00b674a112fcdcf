"""deep_moe as the experts of Megatron-core's mixture-of-experts layers.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from deep_moe.integrations import megatron as deep_moe_megatron

    spec = get_gpt_layer_local_spec(num_experts=64)
    spec.submodules.mlp = deep_moe_megatron.moe_spec(spec.submodules.mlp)

docs/training.md says what is supported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..engine_version import require_version

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from deep_moe.fused.buffer import SymmBuffer
    from deep_moe.split.throughput import AllToAll
    from deep_moe.training.experts import Precision
    from deep_moe.training.functional import Forward

__all__ = ["moe_spec"]

# The versions whose interfaces this was written for.
OLDEST, TOO_NEW = (0, 16), (0, 17)


def moe_spec(
    spec: ModuleSpec,
    *,
    group: AllToAll | None = None,
    precision: Precision = "bf16",
    recompute: bool = False,
    max_recv_slots: int | None = None,
    keep_received: bool = False,
    quantize_kept: bool = False,
    forward: Forward = "training",
    sym_buffer: SymmBuffer | None = None,
) -> ModuleSpec:
    """Megatron's spec of a mixture-of-experts layer, with our layer in place of its dispatcher and
    its experts. Router, losses and shared experts stay Megatron's.

    Args:
        spec: of Megatron's `MoELayer`, as `get_moe_module_spec` makes it; left as it is.
        group: an `AllToAll` of the ranks that share the experts. None: Megatron's own
            expert-parallel group.
        precision: as of `deep_moe.moe`.
        recompute: as of `deep_moe.moe`.
        max_recv_slots: as of `deep_moe.moe`.
        keep_received: as of `deep_moe.moe`.
        quantize_kept: as of `deep_moe.moe`.
        forward: as of `deep_moe.moe`.
        sym_buffer: as of `deep_moe.moe`.

    A layer is refused when it is built, with a ValueError that names the option of Megatron's
    config which our experts do not have, and its value. Raises MissingPackageError without
    megatron-core, DeepMoEError for a version that this was not written for, and TypeError or
    ValueError for a spec that is not of Megatron's `MoELayer`.
    """
    require_version("megatron-core", OLDEST, TOO_NEW)
    from .layer import replaced_spec

    options: dict[str, Any] = {
        "group": group,
        "precision": precision,
        "recompute": recompute,
        "max_recv_slots": max_recv_slots,
        "keep_received": keep_received,
        "quantize_kept": quantize_kept,
        "forward": forward,
        "sym_buffer": sym_buffer,
    }
    return replaced_spec(spec, options)
