"""Plants bugs into the layer over several domains; each has to be noticed by a case of
`deep-moe fuzz`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deep_moe.activations import Swiglu
from deep_moe.split import domain_relay, two_level, two_level_layer
from deep_moe.trial import two_level as trial
from deep_moe.trial.two_level_fuzzing import TwoLevelCase
from tests.everyday import parametrize

from .catalogue import Mutation
from .planting import ROOT, plant_into_module, text_edit, with_text_edit
from .two_level_catalogue import TWO_LEVEL_MUTATIONS

BASE = {
    "weights": "mxfp4 x mxfp8",
    "shape": (2, 4, 8, 3, 256, 96),
    "shared experts": 0,
    "tile": 0,
    "biases": "none",
    "activation": Swiglu(),
    "chunks": 1,
    "sizes": "fixed",
    "room": "for all",
    "most tokens": "known",
    "ids": torch.int64,
    "routing weights": torch.float32,
    "out": "x",
    "tokens": "many",
    "slots": "unused",
    "values": "numbers",
}
USERS = (two_level, domain_relay, two_level_layer, trial)


def outcome(values: Mapping[str, Any]) -> str:
    return TwoLevelCase(1, "sm_90a", {**BASE, **values}).run()


def plant(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever uses what the module has gets it anew. Ranks are forked, and have it, too."""
    original = importlib.import_module(module.__name__)
    for name, value in vars(original).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for user in USERS:
            if getattr(user, name, None) is value:
                monkeypatch.setattr(user, name, getattr(module, name))


@pytest.mark.parametrize("mutation", TWO_LEVEL_MUTATIONS, ids=lambda mutation: mutation.name)
def test_edit_changes_the_source(mutation: Mutation) -> None:
    text = Path(ROOT, text_edit(mutation).file).read_text()
    assert with_text_edit(text_edit(mutation), text) != text


CASES = {mutation.name: mutation for mutation in TWO_LEVEL_MUTATIONS}


@parametrize("name", list(CASES), everyday=["ranks_of_the_domain_are_not_told"])
def test_bug_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = CASES[name]
    assert outcome(mutation.arguments) == ""
    plant(plant_into_module(text_edit(mutation)), monkeypatch)
    assert outcome(mutation.arguments) != ""
