"""vLLM's layer of routed experts, and the method by which it makes, loads and applies weights.

vLLM lets a class of this adapter stand in for its `RoutedExperts`. That class asks vLLM for the
method that the checkpoint's format calls for, whatever name the format has, and puts ours in front
of it where the kernel can run the layer. vLLM's own method still makes the tensors that checkpoints
are loaded into.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group, get_tensor_model_parallel_world_size, get_tp_group
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.platforms import current_platform

from deep_moe.errors import DeepMoEError

from ..completeness import ALL_SHARDS, LoadedParts, shards_of
from ..engine_form import LAYERS, EngineForm, check_known, own_tensors
from ..kernel_parameters import KernelParameters
from ..served_experts import ServedExperts, arch_on, check_sizes, static_scales
from ..shared_steps import SharedSteps, Steps, check_step_sizes
from ..shares import on_own_share
from ..switch import (
    FUSED,
    LOW_LATENCY,
    read_num_pool_tokens,
    read_path,
    read_token_format,
)
from ..token_format import served_token_format
from ..unsupported import UnsupportedError
from .all_to_all import make_step_kernel
from .backend_option import BACKEND, add_backend, take_request
from .experts import make_kernel
from .forms import form_of
from .routing import route_in_preparation
from .support import Plan, check_steps, plan_of

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

# vLLM shows the lines of loggers below its own.
logger = logging.getLogger("vllm.deep_moe")

_DUMMY = "dummy"  # vLLM's load format of weights that are made up

_HOW_TO_LOAD = "vLLM's reload_weights and its weight transfer engines load new ones"

# Of all models of this process, as the buffers of the fused path.
steps = SharedSteps()


def install(emulated_arch: str | None) -> None:
    """From now on, vLLM makes its layers of routed experts by this adapter, and its `--moe-backend`
    names deep_moe.

    emulated_arch: the target that is emulated where there is no GPU; None: vLLM runs experts there.
    """
    DeepMoERoutedExperts.emulated_arch = emulated_arch
    for replaced, own in _REPLACED.items():
        installed = op_registry_oot.get(replaced)
        if installed not in (None, own):
            raise DeepMoEError(
                f"another plugin, {installed.__module__}, replaces vLLM's {replaced}"
            )
    add_backend()
    for replaced, own in _REPLACED.items():
        if replaced not in op_registry_oot:
            PluggableLayer.register_oot(own, name=replaced)


class DeepMoERoutedExperts(RoutedExperts):
    """vLLM's layer, with our method where the kernel runs its experts."""

    emulated_arch: str | None = None
    is_asked_for = False  # by vLLM's own option: what cannot run is an error

    def _get_quant_method(
        self, prefix: str, quant_config: Any, moe_config: FusedMoEConfig
    ) -> FusedMoEMethodBase:
        self.is_asked_for = take_request(moe_config)
        engine = super()._get_quant_method(prefix, quant_config, moe_config)
        self.loaded_parts = LoadedParts()
        try:
            form = form_of(engine)
            device = torch.device(current_platform.device_type)
            arch = arch_on(device, self.emulated_arch)
            path = read_path()
            plan = plan_of(
                self,
                form.weights,
                form.token_format
                or served_token_format(form.weights, read_token_format(), arch, device),
                get_tensor_model_parallel_world_size(),
                is_gpt_oss=form.has_biases,
                num_pool_tokens=(
                    read_num_pool_tokens()
                    if path == FUSED
                    # The steps' work space; what a bounded one costs was not measured.
                    else read_num_pool_tokens(default=None)
                ),
            )
            own_sizes = plan.sizes, plan.num_ranks, plan.max_tokens_per_rank
            check_sizes(*own_sizes, arch, device, form, has_gate=plan.activation.has_gate)
            if path == LOW_LATENCY:
                check_steps(
                    self,
                    get_tensor_model_parallel_world_size(),
                    has_gate=plan.activation.has_gate,
                )
                check_step_sizes(*own_sizes)
            _check_process()
        except UnsupportedError as error:
            self.fall_back(prefix, engine, str(error))
            return engine
        return DeepMoEMethod(moe_config, engine, form, plan, arch, path)

    def fall_back(self, prefix: str, engine: FusedMoEMethodBase, reason: str) -> None:
        """Log that vLLM's method runs the layer, or raise DeepMoEError if ours was asked for."""
        if self.is_asked_for:
            raise DeepMoEError(
                f"{prefix}: moe_backend={BACKEND!r} was asked for, but deep_moe cannot run the "
                f"experts: {reason}; with moe_backend='auto' vLLM runs them"
            )
        logger.warning("%s: experts run by vLLM (%s): %s", prefix, engine.method_name, reason)

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM's, which notes what it has loaded."""
        method = self.quant_method
        if isinstance(method, DeepMoEMethod) and method.parameters is not None:
            method.parameters.refuse_parts(param)
        with _engines_own(self):
            result = super().weight_loader(
                param,
                loaded_weight,
                weight_name,
                shard_id,
                expert_id,
                return_success=return_success,
            )
        # Models call it by names of their own.
        tensor = next((name for name, own in self._parameters.items() if own is param), None)
        if tensor is None:
            return result
        # gpt-oss has gate and up in one tensor, of one expert or of all local ones.
        # Without a gate, up is all that the first layer has, and comes in the gate's place.
        is_whole = shard_id not in ALL_SHARDS or not self.moe_config.is_act_and_mul
        shards = shards_of(tensor) if is_whole else (shard_id,)
        if expert_id is None or loaded_weight.dim() == 3:
            local: Iterable[int] = range(self.local_num_experts)
        else:
            local = [self._map_global_expert_id_to_local_expert_id(expert_id)]
        for shard in shards:
            self.loaded_parts.add(tensor, shard, local)
        return result

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]


class DeepMoEGptOssRoutedExperts(DeepMoERoutedExperts, GptOssRoutedExperts):
    """The same in place of the class that gpt-oss has, which loads experts in its own way."""


_REPLACED: dict[str, type[DeepMoERoutedExperts]] = {
    RoutedExperts.__name__: DeepMoERoutedExperts,
    GptOssRoutedExperts.__name__: DeepMoEGptOssRoutedExperts,
}


class DeepMoEMethod(FusedMoEMethodBase):
    """How a layer's weights are made, loaded and applied.

    engine: vLLM's own method, which makes the tensors, and takes the layer back if its weights turn
    out not to be what the kernel takes. path: what `read_path` gives.
    """

    def __init__(
        self,
        moe: FusedMoEConfig,
        engine: FusedMoEMethodBase,
        form: EngineForm,
        plan: Plan,
        arch: str | None,
        path: str,
    ) -> None:
        super().__init__(moe)
        self.engine = engine
        self.form = form
        self.plan = plan
        self.arch = arch
        self.is_in_steps = path == LOW_LATENCY
        self.static_scales = static_scales(form, plan.sizes)
        config = get_current_vllm_config()
        self.is_dummy = config.load_config.load_format == _DUMMY
        self.runners = config.compilation_config.static_forward_context
        self.served: ServedExperts | None = None
        self.parameters: KernelParameters | None = None  # that are the kernel's own tensors
        self.is_rounded_up = False

    @property
    def supports_eplb(self) -> bool:
        return True

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        own = hidden_size, intermediate_size_per_partition
        others = self.engine.maybe_roundup_sizes(*own, act_dtype, moe_parallel_config)
        self.is_rounded_up = others != own
        return own

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.engine.create_weights(
            layer=layer,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size_per_partition,
            params_dtype=params_dtype,
            **extra_weight_attrs,
        )

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def process_weights_after_loading(self, layer: DeepMoERoutedExperts) -> None:
        """Lay the weights out, on every rank, and let the layer's parameters be the kernel's own
        tensors, which a load balancer permutes. vLLM calls this again when it has loaded other
        weights: those are written into the same tensors."""
        if self.parameters is not None and not self.parameters.need_all(layer):
            return  # nothing was loaded
        names = self.form.tensors
        scales = layer.loaded_parts.begun(filter(None, [self.static_scales]))
        is_new = self.served is None
        first = self.moe.moe_parallel_config.ep_rank * layer.local_num_experts
        # vLLM itself misses a tensor that no part was loaded of, but not when it loads others.
        begun = layer.loaded_parts.begun(names)
        layer.loaded_parts.require_all(
            layer.layer_name,
            [*(names if begun and not is_new else begun), *scales],
            range(first, first + layer.local_num_experts),
            ", as vLLM places them",
        )
        served, reason = self.served, None
        try:
            if is_new and not begun and not self.is_dummy:
                raise UnsupportedError(
                    "weights came past vLLM's loaders of experts, and may have the layout of "
                    "another kernel"
                )
            served = self._laid_out(layer, are_made_up=self.is_dummy and not begun)
            served.has_static_scales = self.static_scales is not None
            served.local_token_scale = self.form.token_scale_of(layer) if scales else None
        except UnsupportedError as error:
            if not is_new:
                raise DeepMoEError(
                    f"{layer.layer_name}: weights that replace others cannot be laid out: {error}"
                ) from error
            reason = str(error)
        reason = self._first_reason(reason)
        if reason is None and self.served is None:
            assert served is not None
            try:
                self.moe_kernel = self._make_kernel(served)
            except UnsupportedError as error:  # on all ranks
                reason = str(error)
        if reason is not None:
            self._give_back(layer, reason)
            return
        assert served is not None
        tensors = dict(zip(self.form.kernel_tensors, served.tensors(), strict=True))
        self.parameters = KernelParameters(layer.layer_name, layer, tensors, _HOW_TO_LOAD)
        if self.served is not None:
            self._renew()
            return
        self.served = served
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        ranks = f", {self.plan.num_ranks} ranks" if self.plan.num_ranks > 1 else ""
        path = ", low-latency steps" if self.is_in_steps else ""
        routed = ", chosen where tokens are prepared" if self._routes(layer) else ""
        scaled = "" if served.token_scale is None else ", tokens by the checkpoint's scale"
        logger.info(
            "%s: experts run by deep_moe (%s%s%s%s%s%s)",
            layer.layer_name,
            self.form.weights,
            ranks,
            path,
            routed,
            scaled,
            served.rounding_words,
        )

    def _routes(self, layer: RoutedExperts) -> bool:
        """Take the rule of the layer's router over, where the kernel gets tokens as the router
        does; whether that is so."""
        if self.is_in_steps or layer.apply_router_weight_on_input or self.served is None:
            return False
        runner = self.runners.get(layer.layer_name)
        if runner is None or runner.routed_experts is not layer:
            return False
        return route_in_preparation(runner.router, self.served, self.plan.num_sharers)

    def _laid_out(self, layer: RoutedExperts, *, are_made_up: bool) -> ServedExperts:
        """Its weights as the kernel reads them, or UnsupportedError."""
        if getattr(layer, "_loaded_expert_biases", None) and not self.form.has_biases:
            raise UnsupportedError("experts have biases, which the model does not declare")
        check_known(layer, self.form.tensors)
        own = own_tensors(layer, self.form.tensors)
        l1, l2 = (tuple(own[name] for name in self.form.tensors_of(of)) for of in LAYERS)
        biases = tuple(own[name] for name in self.form.biases)
        served = self.served or ServedExperts(
            self.plan.sizes,
            self.plan.activation,
            get_ep_group().device_group if self.plan.num_ranks > 1 else None,
            l1[0].device,
            self.plan.max_tokens_per_rank,
            self.arch,
            self.form,
        )
        served.load(
            l1,
            l2,
            (biases[0], biases[1]) if biases else None,
            is_interleaved=self.form.is_interleaved,
            are_made_up=are_made_up,
        )
        return served

    def _make_kernel(self, served: ServedExperts) -> FusedMoEKernel:
        """Before vLLM looks how much memory is left, and before any graph: ranks meet."""
        if self.is_in_steps:
            return make_step_kernel(self.moe, served, self._steps(served), self.plan.num_sharers)
        served.prepare()
        return make_kernel(self.moe, served, self.plan.num_sharers)

    def _steps(self, served: ServedExperts) -> Steps:
        return steps.steps(
            served.group,
            served.device,
            self.plan.sizes,
            self.plan.activation,
            self.plan.max_tokens_per_rank,
            self.arch,
        )

    def _renew(self) -> None:
        """Behind a replacement; see `ServedExperts.renew`."""
        assert self.served is not None
        if not self.is_in_steps:
            self.served.renew()
        elif self.served.group is None:
            self._steps(self.served).reset()

    def _first_reason(self, reason: str | None) -> str | None:
        """Of the first rank that cannot take its weights. A rank alone cannot go vLLM's way. The
        first time only: weights that replace others raise."""
        if self.plan.num_ranks == 1 or self.served is not None:
            return reason
        reasons: list[str | None] = [None] * self.plan.num_ranks
        dist.all_gather_object(reasons, reason, group=get_ep_group().cpu_group)
        return next((one for one in reasons if one is not None), None)

    def _give_back(self, layer: DeepMoERoutedExperts, reason: str) -> None:
        if self.is_rounded_up:
            raise DeepMoEError(
                f"{layer.layer_name}: deep_moe cannot run the experts: {reason}; and "
                f"{self.engine.method_name} needs them in other sizes. DEEP_MOE_VLLM=0 serves "
                "without deep_moe"
            )
        layer.fall_back(layer.layer_name, self.engine, reason)
        layer._replace_quant_method(self.engine)
        self.engine.process_weights_after_loading(layer)

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        kernel, parameters = self.moe_kernel, self.parameters
        assert kernel is not None
        assert parameters is not None
        parameters.require(layer)

        def run(
            x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
        ) -> torch.Tensor:
            return kernel.apply(
                hidden_states=x,
                w1=getattr(layer, self.form.tensors_of(LAYERS[0])[0]),
                w2=getattr(layer, self.form.tensors_of(LAYERS[1])[0]),
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )

        if self.is_in_steps and self.plan.num_sharers > 1:
            output = torch.empty_like(x)
            on_own_share(
                get_tp_group(),
                self.plan.num_sharers,
                output,
                x,
                topk_ids,
                topk_weights,
                lambda own, *call: own.copy_(run(*call)),
            )
            return output
        if not self.is_in_steps and x.shape[0] == 0:
            # vLLM's kernel returns at once. Here the other ranks wait for this one.
            output = torch.empty_like(x)
            kernel.fused_experts.run(output, x, topk_ids, topk_weights)
            return output
        return run(x, topk_ids, topk_weights)


@contextmanager
def _engines_own(layer: DeepMoERoutedExperts) -> Iterator[None]:
    """vLLM's loader of a part goes by its own method's class and attributes."""
    method = layer.quant_method
    if not isinstance(method, DeepMoEMethod):
        yield
        return
    # Some of vLLM's methods are modules, which would become children of the layer.
    layer.__dict__["quant_method"] = method.engine
    try:
        yield
    finally:
        layer.__dict__["quant_method"] = method


def _check_process() -> None:
    """What concerns all layers of a process."""
    parallel = get_current_vllm_config().parallel_config
    if parallel.use_ubatching:
        raise UnsupportedError("two batches overlap, and would call with one buffer")
    if parallel.enable_elastic_ep:
        raise UnsupportedError("expert parallelism is elastic")
