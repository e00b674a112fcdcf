"""Adapters with the engines' own classes. Engines are no dependency of the tests: `make test-serving`
makes an environment that has them. They run here on a CPU, with the emulator in place of a GPU."""

from __future__ import annotations

import os

# Read by vLLM when it is first imported: its CPU platform needs none of its compiled operators.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
