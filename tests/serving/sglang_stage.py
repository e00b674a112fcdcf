"""SGLang's own files for fused experts, their loaders, updates of weights and hooks, without the
rest of SGLang: what they import of it is replaced by the few values that they read. The rest of
SGLang imports compiled kernels that need a GPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_QUANTIZATION = "sglang.srt.layers.quantization"
_SCHEMES = f"{_QUANTIZATION}.compressed_tensors.schemes"

PACKAGES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.plugins",
    "sglang.srt.layers",
    "sglang.srt.layers.moe",
    "sglang.srt.layers.moe.fused_moe_triton",
    _QUANTIZATION,
    f"{_QUANTIZATION}.compressed_tensors",
    _SCHEMES,
    *(
        f"{_QUANTIZATION}.{exporter}{part}"
        for exporter in ("awq", "quark")
        for part in ("", ".schemes")
    ),
    "sglang.srt.eplb",
    "sglang.srt.managers",
    "sglang.srt.managers.scheduler_components",
    "sglang.srt.model_executor",
    "sglang.srt.model_executor.model_runner_components",
    "sglang.srt.weight_sync",
)

# The files that are SGLang's own. All others that these import have stand-ins, with any name.
OWN = (
    "sglang.srt.eplb.expert_location",
    f"{_QUANTIZATION}.awq.awq",
    f"{_QUANTIZATION}.awq.schemes.awq_moe",
    f"{_QUANTIZATION}.awq.schemes.awq_scheme",
    f"{_QUANTIZATION}.base_config",
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors",
    f"{_QUANTIZATION}.fp8",
    f"{_QUANTIZATION}.modelopt_quant",
    f"{_QUANTIZATION}.quark.quark",
    f"{_QUANTIZATION}.quark.schemes.quark_scheme",
    f"{_QUANTIZATION}.quark.schemes.quark_w8a8_fp8_moe",
    f"{_QUANTIZATION}.unquant",
    f"{_QUANTIZATION}.w4afp8",
    f"{_SCHEMES}.compressed_tensors_scheme",
    f"{_SCHEMES}.compressed_tensors_w4a16_nvfp4_moe",
    f"{_SCHEMES}.compressed_tensors_w4a4_nvfp4_moe",
    f"{_SCHEMES}.compressed_tensors_w4a8_fp8_moe",
    f"{_SCHEMES}.compressed_tensors_w8a8_fp8_moe",
    f"{_SCHEMES}.compressed_tensors_wNa16_moe",
    "sglang.srt.layers.moe.fused_moe_triton.layer",
    "sglang.srt.layers.moe.mega_moe",
    "sglang.srt.layers.moe.mega_moe_sm90",
    "sglang.srt.layers.parameter",
    "sglang.srt.managers.scheduler_components.weight_updater",
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "sglang.srt.plugins.hook_registry",
    "sglang.srt.weight_sync.tensor_bucket",
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
        for module in model.modules():
            if hasattr(getattr(module, "quant_method", None), "restore_weights_before_loading"):
                module.quant_method.restore_weights_before_loading(module)

    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, device: Any) -> None:
        model.load_weights(weights)
        Loader.postprocess_weights(model, device)

    @staticmethod
    def postprocess_weights(model: Any, device: Any) -> None:
        for module in model.modules():
            if getattr(module, "quant_method", None) is not None:
                module.quant_method.process_weights_after_loading(module)


class _Settings:
    """SGLang's environment: what nobody has set is off."""

    def __init__(self, **values: Any) -> None:
        vars(self).update({name: _Setting(value) for name, value in values.items()})

    def __getattr__(self, name: str) -> _Setting:
        return _Setting(False)


class _Questions:
    """What SGLang asks of its backends and platforms: `answer` to all questions but some."""

    def __init__(self, answer: Any, **others: Any) -> None:
        self._answer = answer
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("is_"):
            raise AttributeError(name)
        return self._answer


class _Others(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for all modules of SGLang that are not its own here."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("sglang.") or name in OWN:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Unread(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


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
    if not any(isinstance(finder, _Others) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Others())
    stand_in("sglang.kernels.ops.moe.dsv4", mega_moe_pre_dispatch=None)
    stand_in("sglang.kernels.ops.gemm.bf16_fp32", hpc_bf16xfp32_gemm_enabled=lambda: False)
    stand_in(
        "sglang.srt.environ",
        envs=_Settings(
            SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK=max_tokens,
            SGLANG_OPT_DEEPGEMM_MEGA_MOE_FUSE_SHARED_EXPERTS=True,
        ),
    )
    stand_in("sglang.srt.layers.attention.dsa.utils", is_dsa_enable_prefill_cp=lambda: False)
    stand_in("sglang.srt.layers.linear", set_weight_attrs=set_attributes)
    stand_in("sglang.srt.layers.dp_attention", get_dp_global_num_tokens=lambda: None)
    stand_in(
        "sglang.srt.layers.moe.mega_gate",
        run_mega_gate=_never,
        should_use_mega_gate=lambda moe, hidden_states, forward_batch: True,
    )
    a2a = _Questions(lambda: False, is_megamoe=lambda: True)
    runner = _Questions(lambda: False, is_marlin=lambda: True)
    backends = {"get_moe_a2a_backend": lambda: a2a, "get_moe_runner_backend": lambda: runner}
    vars(sys.modules["sglang.srt.layers.moe"]).update(backends)
    stand_in(
        "sglang.srt.layers.moe.utils",
        **backends,
        get_moe_weight_sizes=lambda size, **_: (2 * size, size, False),
    )
    stand_in(
        f"{_QUANTIZATION}.utils",
        swizzle_blockscale=torch.clone,
        get_scalar_types=lambda: (None, SimpleNamespace(uint4=None, uint8=None)),
    )
    stand_in(
        "sglang.srt.layers.moe.topk", TopK=type("TopK", (), {"forward_cuda": _sglangs_own_choice})
    )
    stand_in("sglang.srt.model_executor.runner", get_is_capture_mode=lambda: False)
    stand_in("sglang.srt.models.deepseek_common.utils", _device_sm=90)
    stand_in("sglang.srt.multimodal.dsv41.vl_routing", vision_topk=_never)
    utilities = {
        "is_cuda": lambda: False,
        "is_hip": lambda: False,
        "is_cpu": lambda: False,
        "is_npu": lambda: False,
        "is_sm100_supported": lambda: True,
        "cpu_has_amx_support": lambda: False,
        "get_bool_env_var": lambda name, default="false": False,
        "get_available_gpu_memory": lambda *_, **__: 0.0,
        "set_weight_attrs": set_attributes,
    }
    stand_in("sglang.srt.utils", **utilities)
    stand_in("sglang.srt.utils.common", **utilities)
    stand_in("sglang.srt.utils.custom_op", register_custom_op=lambda **_: lambda function: function)
    stand_in("sglang.srt.utils.patch_torch", monkey_patch_torch_reductions=lambda: None)
    parallel = SimpleNamespace(moe_ep_group=group, tp_group=group, tp_rank=0)
    resources = SimpleNamespace(expert_location_metadata=None)
    moe = SimpleNamespace(elastic_ep_backend=None)
    platform = _Questions(False, is_sm90=True)
    stand_in(
        "sglang.srt.runtime_context",
        get_parallel=lambda: parallel,
        get_resources=lambda: resources,
        get_exec=lambda: SimpleNamespace(moe=moe),
        get_model=lambda: SimpleNamespace(weight_cache_mode="off", load_format="auto"),
        get_platform=lambda: platform,
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
    schemes = sys.modules[_SCHEMES]
    base = importlib.import_module(f"{_SCHEMES}.compressed_tensors_scheme")
    vars(schemes).update(
        CompressedTensorsMoEScheme=base.CompressedTensorsMoEScheme, WNA16_SUPPORTED_BITS=[4, 8]
    )
    layer = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    package = sys.modules["sglang.srt.layers.moe.fused_moe_triton"]
    vars(package).update(FusedMoeWeightScaleSupported=layer.FusedMoeWeightScaleSupported)
    importlib.import_module("sglang.srt.layers.moe.mega_moe_sm90")
    return importlib.import_module("sglang.srt.layers.moe.mega_moe")


def module(name: str) -> Any:
    """One of SGLang's own, with hooks."""
    return importlib.import_module(f"sglang.srt.{name}")


def set_attributes(weight: torch.Tensor, attributes: dict[str, Any] | None) -> None:
    for name, value in (attributes or {}).items():
        setattr(weight, name, value)


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
    vars(module).update(values, __path__=[])
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


def _sglangs_own_choice(*_: Any, **__: Any) -> None:
    raise AssertionError("these tests have routers of their own")


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("deep_moe's layers do not come here")
