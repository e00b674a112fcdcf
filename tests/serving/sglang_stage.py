"""SGLang's own files for fused experts, their loaders, updates of weights and hooks, without the
rest of SGLang: what they import of it is replaced by the few values that they read. The rest of
SGLang imports compiled kernels that need a GPU."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.plugins",
    "sglang.srt.layers",
    "sglang.srt.layers.moe",
    "sglang.srt.layers.moe.fused_moe_triton",
    "sglang.srt.layers.quantization",
    "sglang.srt.eplb",
    "sglang.srt.managers",
    "sglang.srt.managers.scheduler_components",
    "sglang.srt.model_executor",
    "sglang.srt.model_executor.model_runner_components",
    "sglang.srt.weight_sync",
)

# What the loaders' files import and do not read here.
UNREAD = (
    "sglang.srt.batch_overlap.single_batch_overlap",
    "sglang.srt.batch_overlap.two_batch_overlap",
    "sglang.srt.configs.load_config",
    "sglang.srt.configs.moe_model_registry",
    "sglang.srt.disaggregation.utils",
    "sglang.srt.distributed",
    "sglang.srt.distributed.device_communicators.pynccl_allocator",
    "sglang.srt.layers.moe.kt_ep_wrapper",
    "sglang.srt.layers.moe.token_dispatcher",
    "sglang.srt.layers.moe.token_dispatcher.ascend_tp",
    "sglang.srt.layers.moe.token_dispatcher.base",
    "sglang.srt.layers.moe.token_dispatcher.deepep_v2",
    "sglang.srt.layers.moe.token_dispatcher.flashinfer",
    "sglang.srt.layers.moe.token_dispatcher.standard",
    "sglang.srt.layers.moe.topk",
    "sglang.srt.layers.quantization.base_config",
    "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors",
    "sglang.srt.layers.quantization.compressed_tensors.schemes",
    "sglang.srt.layers.quantization.fp8",
    "sglang.srt.layers.quantization.fp8_utils",
    "sglang.srt.layers.quantization.minimax_m3_nvfp4",
    "sglang.srt.layers.quantization.unquant",
    "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph",
    "sglang.srt.model_loader.weight_utils",
    "sglang.srt.platforms",
    "sglang.srt.utils.network",
    "sglang.srt.utils.weight_checker",
)


def source_of(module: str) -> Path:
    """Where a module's source lies, without importing anything."""
    for folder in sys.path:
        path = Path(folder, *module.split(".")).with_suffix(".py")
        if path.exists():
            return path
    raise AssertionError(f"there is no source of {module}")


class _Setting:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


class Loader:
    """What SGLang's updates of weights ask of its `DefaultModelLoader`. checkpoint: named tensors
    of the next update from disk."""

    checkpoint: list[tuple[str, Any]]

    class Source:
        @staticmethod
        def init_new(config: Any, model: Any) -> None:
            return None

    @classmethod
    def _get_weights_iterator(cls, source: Any) -> Any:
        return iter(cls.checkpoint)

    @staticmethod
    def restore_weights_before_loading(model: Any, device: Any) -> None:
        """SGLang asks layers' methods; those of our formats have nothing to restore."""

    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, device: Any) -> None:
        model.load_weights(weights)
        Loader.postprocess_weights(model, device)

    @staticmethod
    def postprocess_weights(model: Any, device: Any) -> None:
        for module in model.modules():
            if getattr(module, "quant_method", None) is not None:
                module.quant_method.process_weights_after_loading(module)


class Nvfp4:
    """SGLang's method of NVFP4 where whole layers are given to one kernel."""

    def process_weights_after_loading(self, layer: Any) -> None:
        self._build_mega_moe_weights(layer)

    def _build_mega_moe_weights(self, layer: Any) -> None:
        """Hooks stand around it."""
        _never()


class Answer(SimpleNamespace):
    """One of SGLang's scheduler: success, message."""


ANSWERED = (
    "BeginWeightUpdate",
    "EndWeightUpdate",
    "UpdateWeightFromDisk",
    "UpdateWeightsFromDistributed",
    "UpdateWeightsFromIPC",
    "UpdateWeightsFromTensor",
)


def set_up(group: Any, max_tokens: int) -> Any:
    """SGLang's module `mega_moe`, with stand-ins for what it imports, and for what its loaders and
    its updates of weights do. group: of expert parallel ranks, with world_size, device_group,
    cpu_group."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    root = source_of("sglang.__init__").parent
    for name in PACKAGES:
        package = _Unread(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    a2a = SimpleNamespace(is_megamoe=lambda: True)
    stand_in("sglang.kernels.ops.moe.dsv4", mega_moe_pre_dispatch=None)
    stand_in("sglang.kernels.ops.gemm.bf16_fp32", hpc_bf16xfp32_gemm_enabled=lambda: False)
    stand_in(
        "sglang.srt.environ",
        envs=SimpleNamespace(
            SGLANG_AMD_USE_FLYDSL_MEGA_MOE=_Setting(False),
            SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK=_Setting(max_tokens),
            SGLANG_OPT_DEEPGEMM_MEGA_MOE_FUSE_SHARED_EXPERTS=_Setting(True),
            SGLANG_MOE_COPY_WEIGHT_VIEWS_BEFORE_H2D=_Setting(False),
        ),
    )
    stand_in("sglang.srt.layers.attention.dsa.utils", is_dsa_enable_prefill_cp=lambda: False)
    stand_in("sglang.srt.layers.dp_attention", get_dp_global_num_tokens=lambda: None)
    stand_in(
        "sglang.srt.layers.moe.mega_gate",
        run_mega_gate=_never,
        should_use_mega_gate=lambda moe, hidden_states, forward_batch: True,
    )
    stand_in("sglang.srt.layers.moe.utils", get_moe_a2a_backend=lambda: a2a)
    stand_in("sglang.srt.model_executor.runner", get_is_capture_mode=lambda: False)
    stand_in("sglang.srt.models.deepseek_common.utils", _device_sm=90)
    stand_in("sglang.srt.multimodal.dsv41.vl_routing", vision_topk=_never)
    stand_in(
        "sglang.srt.utils",
        is_hip=lambda: False,
        is_cpu=lambda: False,
        is_npu=lambda: False,
        is_sm100_supported=lambda: True,
        cpu_has_amx_support=lambda: False,
        get_bool_env_var=lambda name, default="false": False,
        get_available_gpu_memory=lambda *_, **__: 0.0,
    )
    stand_in("sglang.srt.utils.custom_op", register_custom_op=lambda **_: lambda function: function)
    stand_in("sglang.srt.utils.patch_torch", monkey_patch_torch_reductions=lambda: None)
    parallel = SimpleNamespace(moe_ep_group=group, tp_group=group, tp_rank=0)
    resources = SimpleNamespace(expert_location_metadata=None)
    moe = SimpleNamespace(elastic_ep_backend=None)
    stand_in(
        "sglang.srt.runtime_context",
        get_parallel=lambda: parallel,
        get_resources=lambda: resources,
        get_exec=lambda: SimpleNamespace(moe=moe),
        get_model=lambda: SimpleNamespace(weight_cache_mode="off", load_format="auto"),
    )
    stand_in("sglang.srt.managers.io_struct", **{f"{name}ReqOutput": Answer for name in ANSWERED})
    stand_in(
        "sglang.srt.model_loader.loader",
        DefaultModelLoader=Loader,
        get_model_loader=lambda config, model_config: Loader(),
        post_load_weights=lambda model: None,
    )
    stand_in(
        "sglang.srt.model_loader.utils",
        set_default_torch_dtype=lambda dtype: contextlib.nullcontext(),
    )
    for name in UNREAD:
        stand_in(name)
    # A class of its own in each stage, for hooks stay on it, by the name that loaders ask for.
    own = {name: value for name, value in vars(Nvfp4).items() if not name.startswith("__")}
    name = "ModelOptNvFp4FusedMoEMethod"
    stand_in("sglang.srt.layers.quantization.modelopt_quant", **{name: type(name, (), own)})
    importlib.import_module("sglang.srt.layers.moe.mega_moe_sm90")
    return importlib.import_module("sglang.srt.layers.moe.mega_moe")


def module(name: str) -> Any:
    """One of SGLang's own, with hooks."""
    return importlib.import_module(f"sglang.srt.{name}")


class _Unread(ModuleType):
    """Has any name: a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *_, **__: None})
        setattr(self, name, made)
        return made


def stand_in(name: str, **values: Any) -> None:
    module = _Unread(name)
    vars(module).update(values)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("deep_moe's layers do not come here")
