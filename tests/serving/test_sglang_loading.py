"""SGLang's own loaders and updates of weights, with layers that the kernel runs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="make test-serving installs it")

from deep_moe.errors import CheckpointError
from deep_moe.integrations import served_experts
from deep_moe.integrations.sglang import hooks, loading
from deep_moe.trial.rank_processes import run_on_ranks

from . import sglang_stage
from .test_sglang import (
    CASES,
    Model,
    block,
    empty_layer,
    forward,
    layer,
    load,
    named,
    started,
)
from .test_vllm import EXPERTS, Weights, checkpoint, tokens

Tensors = list[tuple[str, torch.Tensor]]
OLD, NEW = 0, 9  # seeds


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    served_experts.buffers.close()


@pytest.fixture(autouse=True)
def _group_of_one() -> Iterator[None]:
    """SGLang's ranks meet behind an update."""
    is_own = not torch.distributed.is_initialized()
    if is_own:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    yield
    if is_own:
        torch.distributed.destroy_process_group()


class Server:
    """SGLang's own objects that update weights, around one model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        updaters = sglang_stage.module("model_executor.model_runner_components.weight_updater")
        self.updater = updaters.WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=SimpleNamespace(model_path="", dtype=torch.bfloat16),
            custom_weight_loaders={},
            get_model=lambda: model,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: SimpleNamespace(model=model),
        )
        self.received: Tensors = []
        receiver = SimpleNamespace(receive_weights_from_distributed=lambda **_: self.received)
        runners = [("target", SimpleNamespace(weight_updater=self.updater))]
        managers = sglang_stage.module("managers.scheduler_components.weight_updater")
        self.manager = managers.SchedulerWeightUpdaterManager(
            tp_worker=SimpleNamespace(
                weight_update_runners=lambda: runners,
                model_runner=SimpleNamespace(weight_updater=receiver),
                deserialize_own_rank=lambda tensors: tensors,
            ),
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=lambda **_: True,
            is_fully_idle=lambda **_: True,
            scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
        )

    def from_disk(self, tensors: Tensors) -> Any:
        sglang_stage.Loader.checkpoint = tensors
        return self.manager.update_weights_from_disk(
            _request(model_path="new", load_format="auto", recapture_cuda_graph=False)
        )

    def from_tensors(self, tensors: Tensors, load_format: str | None = None) -> Any:
        return self._in_session(
            lambda given: self.manager.update_weights_from_tensor(
                _request(serialized_named_tensors=given, load_format=load_format)
            ),
            _halves(tensors),
        )

    def from_bucket(self, tensors: Tensors) -> Any:
        bucket = sglang_stage.module("weight_sync.tensor_bucket").FlattenedTensorBucket

        def update(given: Tensors) -> Any:
            flat = bucket(named_tensors=given)
            return self.manager.update_weights_from_tensor(
                _request(
                    serialized_named_tensors={
                        "flattened_tensor": flat.get_flattened_tensor(),
                        "metadata": flat.get_metadata(),
                    },
                    load_format="flattened_bucket",
                )
            )

        return self._in_session(update, _halves(tensors))

    def from_distributed(self, tensors: Tensors) -> Any:
        def update(given: Tensors) -> Any:
            self.received = given
            sent = dict.fromkeys(("names", "dtypes", "shapes", "group_name", "load_format"))
            return self.manager.update_weights_from_distributed(_request(**sent))

        return self._in_session(update, _halves(tensors))

    def from_ipc(self, tensors: Tensors) -> Any:
        sglang_stage.stand_in(
            "sglang.srt.checkpoint_engine.checkpoint_engine_worker",
            SGLangCheckpointEngineWorkerExtensionImpl=lambda runner: SimpleNamespace(
                update_weights_from_ipc=lambda handles: (
                    sglang_stage.Loader.load_weights_and_postprocess(runner.model, tensors, None)
                )
            ),
        )
        return self.manager.update_weights_from_ipc(_request(zmq_handles=None))

    def _in_session(self, update: Any, parts: Iterable[Tensors]) -> Any:
        assert self.manager.begin_weight_update(_request()).success
        for part in parts:
            answer = update(part)
            assert answer.success, answer.message
        return self.manager.end_weight_update(_request())


WAYS = {
    "disk": Server.from_disk,
    "tensors": Server.from_tensors,
    "bucket": Server.from_bucket,
    "distributed": Server.from_distributed,
    "ipc": Server.from_ipc,
}


def _request(**fields: Any) -> Any:
    given = {"selector": "target", "weight_version": None, "flush_cache": False}
    return SimpleNamespace(**{**given, **fields})


def _halves(tensors: Tensors) -> list[Tensors]:
    """In calls of which one ends within an expert."""
    middle = len(tensors) // 2 + 1
    return [tensors[:middle], tensors[middle:]]


def serve(weights: str, source: Weights, rank: int = 0, num_ranks: int = 1, **changes: Any) -> Any:
    """A layer that the kernel runs, with these weights from the start."""
    experts = layer(weights, source, rank, num_ranks, **changes)
    experts.quant_method.process_weights_after_loading(experts)
    assert hooks.served_of(experts) is not None
    return experts


def mixed(take: Any) -> Weights:
    """Old weights with new ones where `take(layer, expert)` says so, layers 0 and 1."""
    old, new = checkpoint("mxfp4", OLD), checkpoint("mxfp4", NEW)
    made = []
    for i in range(2):
        is_new = torch.tensor([take(i, expert) for expert in range(EXPERTS)])[:, None, None]
        made.append(tuple(torch.where(is_new, n, o) for n, o in zip(new[i], old[i], strict=True)))
    return made[0], made[1]


def assert_same(experts: Any, other: Any) -> None:
    for (name, own), expected in zip(experts.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(own.view(torch.uint8), expected.view(torch.uint8)), name


def addresses(experts: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in experts.parameters()]


def new_tensors(*, without: str = "nothing", only: str = "") -> Tensors:
    return [
        (name, tensor)
        for name, tensor in named("mxfp4", checkpoint("mxfp4", NEW))
        if without not in name and only in name
    ]


def check_new_weights(way: Any, weights: str, module: Any, x: Any, logits: Any) -> None:
    experts = serve(weights, checkpoint(weights, OLD))
    before, where = forward(module, block(experts), x, logits), addresses(experts)
    answer = way(Server(Model(experts)), named(weights, checkpoint(weights, NEW)))
    assert answer.success, answer.message
    assert addresses(experts) == where
    from_the_start = serve(weights, checkpoint(weights, NEW))
    assert_same(experts, from_the_start)
    after = forward(module, block(experts), x, logits)
    assert torch.equal(after, forward(module, block(from_the_start), x, logits))
    assert not torch.equal(after, before)


@pytest.mark.parametrize(("weights", "arch"), CASES)
def test_new_weights_go_into_the_same_memory(weights, arch, monkeypatch):
    module = started(monkeypatch.setenv, arch)
    check_new_weights(Server.from_disk, weights, module, *tokens(5))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_an_update_ends_there(way, monkeypatch):
    module = started(monkeypatch.setenv, "sm_90a")
    check_new_weights(WAYS[way], "mxfp4", module, *tokens(5))


def test_new_weights_for_tokens_in_bf16(monkeypatch):
    monkeypatch.setenv("DEEP_MOE_MXFP4_TOKENS", "bf16")
    module = started(monkeypatch.setenv, "sm_90a")
    check_new_weights(Server.from_disk, "mxfp4", module, *tokens(5))


def test_tensors_may_come_in_any_order_again_and_in_threads(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    experts = serve("mxfp4", checkpoint("mxfp4", OLD))

    class ThreadedModel(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda one: Model.load_weights(self, [one]), weights))

    tensors = new_tensors()
    random.Random(1).shuffle(tensors)
    server = Server(ThreadedModel(experts))
    with torch.inference_mode():  # as SGLang's scheduler runs; threads are outside of it
        Model.load_weights(server.model, tensors[:5])
        answer = server.from_tensors(tensors)
    assert answer.success, answer.message
    assert_same(experts, serve("mxfp4", checkpoint("mxfp4", NEW)))


def test_only_experts_that_were_begun_take_memory(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    experts = serve("mxfp4", checkpoint("mxfp4", OLD))
    waiting = experts.__dict__[loading._REPLACEMENT]._waiting
    most = 0
    for tensor in new_tensors():
        Model(experts).load_weights([tensor])
        most = max(most, len(waiting))
    assert most == 1
    assert not waiting


PARTIAL: dict[str, tuple[str, Any]] = {
    "one expert": ("experts.5.", lambda layer_idx, expert: expert == 5),
    "down only": (".w2.", lambda layer_idx, expert: layer_idx == 1),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_whole_experts_or_one_of_their_layers_may_come_alone(name, monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    only, take = PARTIAL[name]
    experts = serve("mxfp4", checkpoint("mxfp4", OLD))
    answer = Server(Model(experts)).from_tensors(new_tensors(only=only))
    assert answer.success, answer.message
    assert_same(experts, serve("mxfp4", mixed(take)))


@pytest.mark.parametrize("way", ["disk", "tensors", "ipc"])
def test_an_expert_that_lacks_something_stays_as_it_was(way, monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    experts = serve("mxfp4", checkpoint("mxfp4", OLD))
    server = Server(Model(experts))
    answer = WAYS[way](server, new_tensors(without="experts.5.w3."))
    assert not answer.success
    words = "layer 3: there is no w3 for w13_weight, w3 for w13_weight_scale_inv of experts 5."
    assert words in answer.message
    assert_same(experts, serve("mxfp4", mixed(lambda layer_idx, expert: expert != 5)))
    # The next update has nothing left of this one.
    assert not WAYS[way](server, new_tensors(only="experts.5.w3.")).success
    assert WAYS[way](server, new_tensors()).success
    assert_same(experts, serve("mxfp4", checkpoint("mxfp4", NEW)))


def test_of_many_layers_some_are_named(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    layers = [serve("mxfp4", checkpoint("mxfp4", OLD), layer_id=i) for i in range(6)]
    server = Server(torch.nn.ModuleList(layers))
    assert server.manager.begin_weight_update(_request()).success
    for experts in layers:
        Model(experts).load_weights(new_tensors(only="experts.5.w2.weight_scale_inv"))
    answer = server.manager.end_weight_update(_request())
    lines = ". ".join(f"layer {i}: there is no w2 for w2_weight of experts 5" for i in range(4))
    assert f"{lines}. And so in 2 more layers. These experts are as they were" in answer.message


def test_values_do_not_come_without_their_scales(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    experts = serve("mxfp4", checkpoint("mxfp4", OLD))
    answer = Server(Model(experts)).from_disk(new_tensors(without="w2.weight_scale_inv"))
    assert not answer.success
    assert "no w2 for w2_weight_scale_inv of experts 0, 1, 2, 3, 4, 5, 6, 7." in answer.message
    assert_same(experts, serve("mxfp4", checkpoint("mxfp4", OLD)))


def test_weights_that_the_kernel_cannot_take_are_refused(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    experts = serve("mxfp4", checkpoint("mxfp4", OLD))
    tensors = dict(new_tensors())
    scales = tensors["experts.2.w1.weight_scale_inv"].clone()
    scales[0, 0] = 3.0  # no power of two
    tensors["experts.2.w1.weight_scale_inv"] = scales
    answer = Server(Model(experts)).from_disk(list(tensors.items()))
    assert not answer.success
    assert "layer 3: expert 2: weights that replace others cannot be laid out" in answer.message
    assert "got 3.0" in answer.message
    assert_same(experts, serve("mxfp4", mixed(lambda layer_idx, expert: expert != 2)))


def test_what_would_write_over_the_kernels_layout_is_refused(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    experts = serve("mxfp4", checkpoint("mxfp4", OLD))
    server = Server(Model(experts))
    whole = torch.zeros_like(experts.w2_weight)
    assert server.manager.begin_weight_update(_request()).success
    answer = server.manager.update_weights_from_tensor(
        _request(serialized_named_tensors=[("experts.w2_weight", whole)], load_format="direct")
    )
    assert not answer.success
    assert "experts.w2_weight holds the layout of deep_moe's kernel" in answer.message
    experts.weight_loader_fused(experts.w2_weight, whole, "experts.w2_weight", "w2")
    answer = server.manager.end_weight_update(_request())
    assert not answer.success
    assert "w2_weight of all experts in one tensor cannot replace others" in answer.message
    assert_same(experts, serve("mxfp4", checkpoint("mxfp4", OLD)))


def located(*, ids: list[int], num_logical: int) -> None:
    """Let SGLang's load balancer have placed experts so, all on one rank."""
    locations = sglang_stage.module("eplb.expert_location")
    num_layers, num_physical = 4, len(ids)
    physical = torch.tensor(ids).repeat(num_layers, 1)
    logical = torch.full((num_layers, num_logical, num_physical), -1)
    for expert in range(num_logical):
        places = [place for place, own in enumerate(ids) if own == expert]
        logical[:, expert, : len(places)] = torch.tensor(places)
    locations.set_global_expert_location_metadata(
        locations.ExpertLocationMetadata(
            physical_to_logical_map=physical,
            physical_to_logical_map_cpu=physical,
            logical_to_all_physical_map=logical,
            logical_to_all_physical_map_cpu=logical,
            logical_to_all_physical_map_num_valid=(logical >= 0).sum(-1),
            ep_size=1,
            logical_to_rank_dispatch_physical_map=None,
        ),
        allow_overwrite=True,
    )


FIRST_PLACES, LATER_PLACES = [0, 1, 2, 3, 4, 5, 0, 3], [5, 5, 0, 4, 1, 2, 3, 0]


def six(seed: int) -> Weights:
    """A checkpoint of six experts, which eight places have copies of."""
    l1, l2 = checkpoint("mxfp4", seed)
    return (l1[0][:6], l1[1][:6]), (l2[0][:6], l2[1][:6])


def at_places(source: Weights, places: list[int]) -> Weights:
    (w1, sf1), (w2, sf2) = source
    return (w1[places], sf1[places]), (w2[places], sf2[places])


def serve_six(seed: int) -> Model:
    located(ids=FIRST_PLACES, num_logical=6)
    model = Model(empty_layer("mxfp4"), 6)
    model.load_weights(named("mxfp4", six(seed)))
    model.experts.quant_method.process_weights_after_loading(model.experts)
    return model


def in_order(weights: Weights) -> Any:
    """A layer with these weights in their places, without a load balancer."""
    experts = empty_layer("mxfp4", uses_expert_location=False)
    load(experts, "mxfp4", weights)
    experts.quant_method.process_weights_after_loading(experts)
    return experts


def rebalance(experts: Any) -> None:
    moved = [FIRST_PLACES.index(expert) for expert in LATER_PLACES]
    for parameter in experts.parameters():
        parameter.copy_(parameter[moved].clone())
    located(ids=LATER_PLACES, num_logical=6)


def test_new_weights_go_where_a_load_balancer_has_put_experts(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    model = serve_six(OLD)
    assert_same(model.experts, in_order(at_places(six(OLD), FIRST_PLACES)))
    rebalance(model.experts)
    assert_same(model.experts, in_order(at_places(six(OLD), LATER_PLACES)))
    answer = Server(model).from_tensors(named("mxfp4", six(NEW)))
    assert answer.success, answer.message
    assert_same(model.experts, in_order(at_places(six(NEW), LATER_PLACES)))


def test_missing_experts_are_named_as_checkpoints_do(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    model = serve_six(OLD)
    rebalance(model.experts)
    tensors = [one for one in named("mxfp4", six(NEW)) if "experts.3.w1" not in one[0]]
    answer = Server(model).from_tensors(tensors)
    assert "no w1 for w13_weight, w1 for w13_weight_scale_inv of experts 3." in answer.message


@pytest.mark.parametrize("only", ["", ".w2."])
def test_experts_that_are_moved_while_their_weights_come_are_refused(only, monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    model = serve_six(OLD)
    server = Server(model)
    tensors = [one for one in named("mxfp4", six(NEW)) if "experts.1." in one[0] and only in one[0]]
    assert server.manager.begin_weight_update(_request()).success
    model.load_weights(tensors[:3])
    rebalance(model.experts)
    model.load_weights(tensors[3:])
    answer = server.manager.end_weight_update(_request())
    assert not answer.success
    assert "expert 1 was moved while its weights came" in answer.message
    assert_same(model.experts, in_order(at_places(six(OLD), LATER_PLACES)))


def test_a_place_that_another_expert_has_got_begins_anew(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    model = serve_six(OLD)
    tensors = named("mxfp4", six(NEW))
    # Expert 1 lies at place 1, which expert 5 gets.
    model.load_weights([one for one in tensors if "experts.1.w1" in one[0]])
    rebalance(model.experts)
    # The part that had come for expert 1 comes last of expert 5.
    of_five = [one for one in reversed(tensors) if "experts.5.w" in one[0]]
    answer = Server(model).from_tensors(of_five)
    assert answer.success, answer.message
    expected = at_places(six(OLD), LATER_PLACES)
    for pair, new in zip(expected, at_places(six(NEW), LATER_PLACES), strict=True):
        for tensor, new_tensor in zip(pair, new, strict=True):
            tensor[:2] = new_tensor[:2]
    assert_same(model.experts, in_order(expected))


def test_a_checkpoint_without_an_expert_is_refused(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    experts = empty_layer("mxfp4")
    tensors = named("mxfp4", checkpoint("mxfp4"))
    Model(experts).load_weights([one for one in tensors if "experts.5." not in one[0]])
    words = (
        "^layer 3: the checkpoint has no w1, w3 for w13_weight, w1, w3 for w13_weight_scale_inv, "
        "w2 for w2_weight, w2 for w2_weight_scale_inv of experts 5$"
    )
    with pytest.raises(CheckpointError, match=words):
        experts.quant_method.process_weights_after_loading(experts)


def test_a_checkpoint_without_scales_is_refused(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    experts = empty_layer("fp8")
    tensors = named("fp8", checkpoint("fp8"))
    Model(experts).load_weights([one for one in tensors if "w2.weight_scale" not in one[0]])
    with pytest.raises(CheckpointError, match="no w2 for w2_weight_scale_inv of experts 0, 1, 2,"):
        experts.quant_method.process_weights_after_loading(experts)


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state"])
def test_weights_that_no_loader_brought(load_format, monkeypatch, caplog):
    """They are made up, or may have the layout of another kernel."""
    started(monkeypatch.setenv, "sm_90a")
    runtime = sglang_stage.module("runtime_context")
    monkeypatch.setattr(runtime, "get_model", lambda: SimpleNamespace(load_format=load_format))
    experts = empty_layer("fp8")
    experts.quant_method.process_weights_after_loading(experts)
    is_ours = load_format == "dummy"
    assert (hooks.served_of(experts) is not None) == is_ours
    assert ("weights came past SGLang's loaders" in caplog.text) != is_ours


def test_a_layer_that_sglang_runs_is_loaded_as_without_deep_moe(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    tensors = named("fp8", checkpoint("fp8", NEW))
    experts = empty_layer("fp8", with_bias=True)
    Model(experts).load_weights(tensors[:-6])  # not all of them
    experts.quant_method.process_weights_after_loading(experts)
    assert hooks.served_of(experts) is None
    assert experts._mega_moe_sm90_fp8_weights  # by SGLang's own function
    # Not even if, the second time, nothing would speak against the kernel.
    experts.with_bias = False
    answer = Server(Model(experts)).from_disk(tensors)
    assert answer.success, answer.message
    assert hooks.served_of(experts) is None
    values, scales = checkpoint("fp8", NEW)[0]
    assert torch.equal(experts.w13_weight.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(experts.w13_weight_scale_inv, scales)


def test_two_ranks_get_new_weights_and_answer_alike():
    run_on_ranks(replace_on_two_ranks, 2, "cpu", start_method="spawn")


def replace_on_two_ranks(device: torch.device) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.group.WORLD
    group = SimpleNamespace(world_size=2, device_group=world, cpu_group=world)
    module = started(os.environ.__setitem__, "sm_90a", group)
    experts = serve("mxfp4", checkpoint("mxfp4", OLD), rank, 2)
    where, server = addresses(experts), Server(Model(experts))
    # Expert 5 is the second rank's.
    answers = [
        server.from_disk(new_tensors(without="experts.5.w3.")),
        server.from_tensors(new_tensors(without="experts.5.w3.")),
    ]
    for answer in answers:
        assert not answer.success
        assert "of experts 5." in answer.message
    half_new = serve("mxfp4", mixed(lambda layer_idx, expert: expert != 5), rank, 2)
    assert_same(experts, half_new)
    answer = server.from_tensors(new_tensors())
    assert answer.success, answer.message
    assert addresses(experts) == where
    from_the_start = serve("mxfp4", checkpoint("mxfp4", NEW), rank, 2)
    assert_same(experts, from_the_start)
    x, logits = tokens(5) if rank == 0 else tokens(3, seed=1)
    after = forward(module, block(experts), x, logits)
    assert torch.equal(after, forward(module, block(from_the_start), x, logits))
    lacking = empty_layer("mxfp4", rank, 2)
    Model(lacking).load_weights(new_tensors(without="experts.5."))
    with pytest.raises(CheckpointError, match=r"w2 for w2_weight_scale_inv of experts 5$"):
        lacking.quant_method.process_weights_after_loading(lacking)
    served_experts.buffers.close()
