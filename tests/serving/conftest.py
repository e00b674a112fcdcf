"""Adapters with the engines' own classes, on a CPU, with the emulator in place of a GPU. Engines
are no dependency of the tests: `make test-serving` fetches them."""

from __future__ import annotations

import os

# Read by vLLM when it is first imported: its CPU platform needs none of its compiled operators.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
