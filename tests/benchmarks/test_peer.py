"""What is known of the peer without running it."""

import importlib.machinery
import importlib.metadata
import sys
import types

import pytest
import torch

from benchmarks import peer
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import random_layer, random_tokens


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


def call(y, *others, activation_clamp, fast_math, num_tokens_bound=None):
    """The peer's call as far as it matters: what it was told goes into y."""
    y.fill_(num_tokens_bound)


def test_a_release_whose_call_takes_no_bound_on_tokens_is_not_the_peer(
    monkeypatch: pytest.MonkeyPatch,
):
    pretend(monkeypatch, fp8_mega_moe=lambda y, activation_clamp: None)
    assert not peer.is_available()


def test_its_version_is_reported(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, fp8_mega_moe=call)
    monkeypatch.setattr(importlib.metadata, "version", {"sgl-deep-gemm": "0.2.5"}.__getitem__)
    assert peer.is_available()
    assert peer.version() == "0.2.5"


def test_a_call_is_told_how_many_tokens_a_rank_has_at_most(monkeypatch: pytest.MonkeyPatch):
    shape = MoEShape(1, 2, 1, 256, 128, 16)
    views = {
        "x": torch.empty(16, 256, dtype=torch.float8_e4m3fn),
        "x_sf": torch.empty(16, 2),
        "topk_idx": torch.empty(16, 1, dtype=torch.int64),
        "topk_weights": torch.empty(16, 1),
    }
    pretend(
        monkeypatch,
        fp8_mega_moe=call,
        transform_weights_for_mega_moe_sm90=lambda l1, l2: (l1, l2),
        get_symm_buffer_for_sm90_mega_moe=lambda *_: types.SimpleNamespace(**views),
    )
    layer = peer.PeerLayer(shape, random_layer(shape), None)
    tokens = random_tokens(shape, 3, seed=0)
    layer.fill(tokens, num_tokens_bound=5)
    assert layer(torch.empty(3), 10.0).tolist() == [5, 5, 5]
    assert torch.equal(layer.buffer.topk_idx[:3], tokens.topk_idx)
