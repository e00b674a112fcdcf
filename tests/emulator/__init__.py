"""Tests of the emulator import it as `warpcheck`, its own distribution's name, to run where that
alone is installed. In a checkout of deep_moe it is `deep_moe.emulator`."""

import importlib
import importlib.util
import sys

MODULES = ("", ".cuda", ".cuda.causes", ".library", ".machine", ".nvrtc", ".tensor_map")

if importlib.util.find_spec("warpcheck") is None:
    for name in MODULES:
        sys.modules[f"warpcheck{name}"] = importlib.import_module(f"deep_moe.emulator{name}")
