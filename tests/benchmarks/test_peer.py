"""What is known of the peer without running it."""

import importlib.machinery
import importlib.metadata
import sys
import types

import pytest

from benchmarks import peer


def pretend(monkeypatch: pytest.MonkeyPatch, **functions) -> None:
    """As if a package deep_gemm with these functions were installed."""
    module = types.ModuleType("deep_gemm")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)


def test_another_deep_gemm_is_not_the_peer(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch)
    assert not peer.is_available()
    assert peer.version() is None


def test_its_version_is_reported(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, fp8_mega_moe=print)
    monkeypatch.setattr(importlib.metadata, "version", {"sgl-deep-gemm": "0.1.4"}.__getitem__)
    assert peer.is_available()
    assert peer.version() == "0.1.4"
