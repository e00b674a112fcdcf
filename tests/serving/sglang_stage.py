"""SGLang's own files for fused experts and for hooks, without the rest of SGLang: what they import
of it is replaced by the few values that they read. The rest of SGLang imports compiled kernels that
need a GPU."""

from __future__ import annotations

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


def set_up(group: Any, max_tokens: int) -> Any:
    """SGLang's module `mega_moe`, with stand-ins for what it imports. group: of expert parallel
    ranks, with world_size, device_group, cpu_group."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    root = source_of("sglang.__init__").parent
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    a2a = SimpleNamespace(is_megamoe=lambda: True)
    _stand_in("sglang.kernels.ops.moe.dsv4", mega_moe_pre_dispatch=None)
    _stand_in(
        "sglang.srt.environ",
        envs=SimpleNamespace(
            SGLANG_AMD_USE_FLYDSL_MEGA_MOE=_Setting(False),
            SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK=_Setting(max_tokens),
            SGLANG_OPT_DEEPGEMM_MEGA_MOE_FUSE_SHARED_EXPERTS=_Setting(True),
        ),
    )
    _stand_in("sglang.srt.layers.attention.dsa.utils", is_dsa_enable_prefill_cp=lambda: False)
    _stand_in("sglang.srt.layers.dp_attention", get_dp_global_num_tokens=lambda: None)
    _stand_in(
        "sglang.srt.layers.moe.mega_gate",
        run_mega_gate=_never,
        should_use_mega_gate=lambda moe, hidden_states, forward_batch: True,
    )
    _stand_in("sglang.srt.layers.moe.utils", get_moe_a2a_backend=lambda: a2a)
    _stand_in("sglang.srt.model_executor.runner", get_is_capture_mode=lambda: False)
    _stand_in("sglang.srt.models.deepseek_common.utils", _device_sm=90)
    _stand_in("sglang.srt.multimodal.dsv41.vl_routing", vision_topk=_never)
    _stand_in("sglang.srt.utils", is_hip=lambda: False, is_sm100_supported=lambda: True)
    _stand_in(
        "sglang.srt.runtime_context",
        get_parallel=lambda: SimpleNamespace(moe_ep_group=group),
    )
    importlib.import_module("sglang.srt.layers.moe.mega_moe_sm90")
    return importlib.import_module("sglang.srt.layers.moe.mega_moe")


def _stand_in(name: str, **values: Any) -> None:
    module = ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("deep_moe's layers do not come here")
