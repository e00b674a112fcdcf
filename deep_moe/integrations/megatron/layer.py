"""Megatron-core's mixture-of-experts layer with our layer behind its router.

Megatron's layer calls five methods one after the other, and what they pass to one another is their
own affair. Here `preprocess` turns the router's dense probabilities into slots.
`routed_experts_compute` is the whole layer, dispatch and combine included. The two methods around
it pass on what they get.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from deep_moe.activations import GatedActivation, Swiglu, SwigluOai
from deep_moe.training.functional import moe
from deep_moe.training.groups import Shared, num_ranks_of

# What our experts do not have, by the names of Megatron's config, with the values that leave it
# away.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "add_bias_linear": (False,),
    "gated_linear_unit": (True,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "moe_pad_expert_input_to_capacity": (False,),
    "moe_router_padding_for_quantization": (False,),
    "moe_shared_expert_overlap": (False,),
    "overlap_moe_expert_parallel_comm": (False,),
    "delay_wgrad_compute": (False,),
    "cuda_graph_impl": ("none",),
    "fp8": (None,),
    "fp4": (None,),
    "params_dtype": (torch.bfloat16,),
}


def replaced_spec(spec: ModuleSpec, options: dict[str, Any]) -> ModuleSpec:
    """See `moe_spec`."""
    if not isinstance(spec, ModuleSpec):
        raise TypeError(f"spec must be a ModuleSpec; got {type(spec).__name__}")
    if spec.module is not MoELayer or not isinstance(spec.submodules, MoESubmodules):
        raise ValueError(f"spec must be of Megatron's MoELayer; got one of {spec.module}")
    submodules = MoESubmodules(
        experts=ExpertWeights,
        shared_experts=spec.submodules.shared_experts,
        router=spec.submodules.router,
    )
    return ModuleSpec(module=DeepMoELayer, params={**spec.params, **options}, submodules=submodules)


class ExpertWeights(MegatronModule):  # type: ignore[misc]
    """A rank's experts, one behind the other, each as Megatron's own experts have it.

    Attributes:
        linear_fc1: [local experts, 2 * intermediate, hidden], gate above up.
        linear_fc2: [local experts, hidden, intermediate].
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        self.ep_group = pg_collection.ep
        self.dp_group = pg_collection.expt_dp
        hidden, intermediate = config.hidden_size, config.moe_ffn_hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()

        def parameter(*shape: int) -> nn.Parameter:
            made = torch.empty(num_local_experts, *shape, device=device, dtype=config.params_dtype)
            return nn.Parameter(made)

        self.linear_fc1 = parameter(2 * intermediate, hidden)
        self.linear_fc2 = parameter(hidden, intermediate)
        is_spread = self.ep_group.size() > 1
        methods = {
            self.linear_fc1: config.init_method,
            self.linear_fc2: config.output_layer_init_method,
        }
        for weight, initialize in methods.items():
            # Megatron adds gradients over the ranks that have the same experts.
            weight.allreduce = not is_spread  # type: ignore[attr-defined]
            if config.perform_initialization:
                self._initialize(weight, initialize, num_local_experts)

    def _initialize(self, weight: nn.Parameter, initialize: Any, num_local_experts: int) -> None:
        """Every rank draws all experts, so that an expert does not depend on where it lies."""
        first = self.ep_group.rank() * num_local_experts
        drawn = torch.empty(weight.shape[1:], dtype=torch.float32, device=weight.device)
        with torch.no_grad():
            for expert in range(self.ep_group.size() * num_local_experts):
                initialize(drawn)
                if first <= expert < first + num_local_experts:
                    weight[expert - first].copy_(drawn)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """In the form of Megatron's own experts, whose checkpoints this loads, and they ours."""
        num_local = self.linear_fc1.shape[0]
        first, number = self.ep_group.rank() * num_local, self.ep_group.size() * num_local
        found = {}
        for name, weight in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            for expert in range(num_local):
                offsets = (*sharded_offsets, (len(sharded_offsets), first + expert, number))
                shard = ShardedTensor.from_rank_offsets(
                    f"{prefix}experts.{name}.weight",
                    weight.data[expert],
                    *offsets,
                    replica_id=(0, 0, self.dp_group.rank()),
                    prepend_axis_num=len(offsets),
                )
                if name == "linear_fc1":
                    is_apart = (metadata or {}).get("singleton_local_shards", False)
                    shard = apply_swiglu_sharded_factory(shard, offsets, is_apart)
                found[f"{prefix}{name}.{expert}"] = shard
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Of a sharded checkpoint an expert at a time, else a tensor for all of them."""
        for name in ("linear_fc1", "linear_fc2"):
            keys = [f"{prefix}{name}.{expert}" for expert in range(self.linear_fc1.shape[0])]
            if all(key in state_dict for key in keys):
                state_dict[f"{prefix}{name}"] = torch.stack([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, *others)


@dataclass(frozen=True)
class _Slots:
    """Of the tokens between `preprocess` and `postprocess`. topk_idx: [tokens, topk]."""

    shape: torch.Size
    topk_idx: torch.Tensor


class DeepMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's layer, whose experts are `deep_moe.moe`. options: of that call."""

    def __init__(
        self,
        config: Any,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        group: Any = None,
        sym_buffer: Any = None,
        **options: Any,
    ) -> None:
        for name, allowed in _REFUSED.items():
            value = getattr(config, name)
            if value not in allowed:
                raise ValueError(
                    f"{name} must be {' or '.join(map(str, allowed))} with deep_moe's experts; "
                    f"got {value}"
                )
        self.activation = activation_of_config(config)
        super().__init__(config, submodules, layer_number, pg_collection)
        if self.token_dispatcher.tp_size > 1:
            raise ValueError(
                "expert_tensor_parallel_size must be 1 with deep_moe's experts; "
                f"got {self.token_dispatcher.tp_size}"
            )
        num_ranks = self.ep_group.size()
        if group is not None and num_ranks_of(group) != num_ranks:
            raise ValueError(
                f"group must have the {num_ranks} ranks of Megatron's expert-parallel group; "
                f"got {num_ranks_of(group)}"
            )
        self._own_group = Shared(group)
        self._sym_buffer = Shared(sym_buffer)
        self._options = options
        self._slots: _Slots | None = None

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [tokens, hidden] and the weights of their slots [tokens, topk].

        probs, routing_map: [tokens, experts]. No host waits: a token with fewer experts has unused
        slots.
        """
        num_experts = routing_map.shape[1]
        experts = torch.arange(num_experts, device=routing_map.device)
        ids = experts.where(routing_map, num_experts).sort(dim=1).values
        ids = ids[:, : self.config.moe_router_topk]
        is_used = ids < num_experts
        weights = probs.gather(1, ids.clamp(max=num_experts - 1)).float() * is_used
        self._slots = _Slots(hidden_states.shape, ids.where(is_used, -1).contiguous())
        return hidden_states.reshape(-1, hidden_states.shape[-1]), weights.contiguous()

    def dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, probs

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        assert self._slots is not None
        group = self._own_group.value
        if group is None and self.ep_group.size() > 1:
            group = self.ep_group
        out = moe(
            hidden_states.contiguous(),
            self._slots.topk_idx,
            probs,
            self.experts.linear_fc1.transpose(1, 2),
            None,
            self.experts.linear_fc2.transpose(1, 2),
            group=group,
            activation=self.activation,
            sym_buffer=self._sym_buffer.value,
            **self._options,
        )
        return out, None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        return output

    def postprocess(
        self, output: torch.Tensor, shared_expert_output: torch.Tensor | None
    ) -> torch.Tensor:
        assert self._slots is not None
        output = output.view(self._slots.shape)
        self._slots = None
        return output if shared_expert_output is None else output + shared_expert_output


def activation_of_config(config: Any) -> GatedActivation:
    """Ours that computes what Megatron's config says, or a ValueError."""
    function, clamp = config.activation_func, config.activation_func_clamp_value
    offset = config.glu_linear_offset
    if function is F.silu and offset == 0:
        return Swiglu() if clamp is None else Swiglu(clamp)
    if function is quick_gelu and offset == 1 and clamp is not None:
        return SwigluOai(limit=clamp)
    raise ValueError(
        "activation_func must be silu with glu_linear_offset 0, or quick_gelu with 1 and an "
        "activation_func_clamp_value, with deep_moe's experts; got "
        f"{getattr(function, '__name__', function)} with {offset} and {clamp}"
    )
