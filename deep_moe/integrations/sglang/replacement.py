"""New weights of a served layer, on their way from SGLang's loaders into the kernel's memory.

A loader brings a part of one expert's tensor at a time, in any order, and an update may take many
calls. An expert is laid out as soon as it has all of its tensors: what has memory of its own are
the experts that were begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deep_moe.errors import DeepMoEError
from deep_moe.weights.layers import LayerTensors

from ..completeness import Part, in_words, layer_of, missing_parts
from ..served_experts import ServedExperts
from ..unsupported import UnsupportedError


@dataclass
class _NewExpert:
    """expert: its id in checkpoints. tensors: by name, as they are loaded, [1, ...]; parts: which
    of theirs have come."""

    expert: int
    tensors: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    parts: set[Part] = field(default_factory=set)


class Replacement:
    """layer: its name. parameters: of all local experts, by tensors' names, when a checkpoint has
    been loaded into them: values of both layers, w13 and w2, each followed by its scales."""

    def __init__(
        self, layer: str, served: ServedExperts, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._layer = layer
        self._served = served
        # Without memory.
        self._forms = {name: p.data[:1].to("meta") for name, p in parameters.items()}
        self._waiting: dict[int, _NewExpert] = {}  # by place
        self._refusals: list[str] = []
        self._lock = threading.Lock()  # SGLang loads in several threads

    def load(
        self,
        part: Part,
        place: int,
        expert: int,
        parameter: torch.nn.Parameter,
        write: Callable[[torch.nn.Parameter], None],
    ) -> None:
        """Let `write` put a part into a tensor of one expert, [1, ...], that stands in for the
        layer's `parameter`; lay the expert out if this was its last.

        place: among the local experts. expert: its id in checkpoints.
        """
        tensor, _ = part
        with self._lock:
            new = self._waiting.get(place)
            if new is None or new.expert != expert:  # or a load balancer has put another one here
                new = self._waiting[place] = _NewExpert(expert)
            if tensor not in new.tensors:
                new.tensors[tensor] = self._like(parameter, self._forms[tensor])
        write(new.tensors[tensor])
        with self._lock:
            new.parts.add(part)
            if self._waiting.get(place) is not new or missing_parts(new.parts, self._forms):
                return
            del self._waiting[place]
        self._lay_out(place, new)

    def refuse(self, reason: str) -> None:
        """Let the end of this update say why something was not replaced."""
        with self._lock:
            self._refusals.append(reason)

    def end(self, expert_ids: Sequence[int]) -> str | None:
        """Of an update. Experts that only one of the two layers came of get that one. Others that
        lack something stay as they were: what that is, or None. Begins anew.

        expert_ids: of the local experts, by place, as they are now.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        missing: dict[int, tuple[Part, ...]] = {}
        for place, new in sorted(waiting.items()):
            begun = {layer_of(name) for name in new.tensors}
            of_begun = [name for name in self._forms if layer_of(name) in begun]
            if expert_ids[place] != new.expert:
                self.refuse(f"expert {new.expert} was moved while its weights came")
            elif lacking := missing_parts(new.parts, of_begun):
                missing[new.expert] = lacking
            else:
                self._lay_out(place, new)
        with self._lock:
            reasons, self._refusals = self._refusals, []
        if missing:
            reasons.insert(0, f"there is no {in_words(missing)}")
        return f"{self._layer}: {'; '.join(reasons)}" if reasons else None

    def take_token_scale(self, experts: Any) -> None:
        """Before `end`: the scale of tokens that has come with an update, or that was there."""
        served = self._served
        if served.local_token_scale is None or served.form is None:
            return
        try:
            served.local_token_scale = served.form.token_scale_of(experts)
        except UnsupportedError as error:
            self.refuse(str(error))

    def renew(self) -> None:
        """Behind an update; see `ServedExperts.renew`."""
        self._served.renew()

    def _lay_out(self, place: int, new: _NewExpert) -> None:
        try:
            self._served.replace_expert(
                place, self._tensors_of(new, "w13"), self._tensors_of(new, "w2")
            )
        except DeepMoEError as error:
            self.refuse(f"expert {new.expert}: {error}")

    def _tensors_of(self, new: _NewExpert, layer: str) -> LayerTensors | None:
        """One layer's values and scales, if they have come."""
        names = [name for name in self._forms if layer_of(name) == layer]
        if names[0] not in new.tensors:
            return None
        return tuple(new.tensors[name].data for name in names)

    @staticmethod
    def _like(parameter: torch.nn.Parameter, form: torch.Tensor) -> torch.nn.Parameter:
        """With the attributes by which a loader knows how to write. Tensors that are made in
        inference mode cannot be written to by a thread outside of it."""
        with torch.inference_mode(False):
            memory = torch.empty_like(form, device=parameter.device)
            made = torch.nn.Parameter(memory, requires_grad=False)
        made.__dict__.update(parameter.__dict__)
        return made
