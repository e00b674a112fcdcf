"""Loading experts by rank from safetensors: names, shapes, shards, and what is not read."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from deep_moe.checkpoint import (
    ExpertNaming,
    StackedNaming,
    experts,
    files,
    load_biases,
    load_experts,
    save_experts,
)
from deep_moe.checkpoint.config import CONFIG_NAME
from deep_moe.checkpoint.files import INDEX_NAME
from deep_moe.checkpoint.namings import DEFAULT_NAMING, NAMINGS
from deep_moe.errors import CheckpointError
from deep_moe.formats.block_scaled import unpack_ue8m0
from deep_moe.weights.transform import transform_weights_for_mega_moe

NUM_EXPERTS, HIDDEN, INTERMEDIATE, LAYER = 6, 256, 128, 3


def random_layer(num_rows: int, num_columns: int):
    shape = (NUM_EXPERTS, num_rows, num_columns // 2)
    weight = torch.randint(-128, 128, shape, dtype=torch.int8)
    sf = torch.randint(0, 255, (NUM_EXPERTS, num_rows, num_columns // 32), dtype=torch.uint8)
    return weight, sf.view(torch.int32)


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return random_layer(2 * INTERMEDIATE, HIDDEN), random_layer(HIDDEN, INTERMEDIATE)


def assert_equal(loaded, expected, experts=slice(None)):
    for loaded_layer, expected_layer in zip(loaded, expected, strict=True):
        for tensor, whole in zip(loaded_layer, expected_layer, strict=True):
            assert tensor.dtype == whole.dtype
            assert torch.equal(tensor, whole[experts])


def stacked_tensors(weights, *, interleaved=True, blocks=True):
    (l1_weight, l1_sf), (l2_weight, l2_sf) = weights
    if interleaved:  # gate 0, up 0, gate 1, ...
        order = torch.arange(2 * INTERMEDIATE).reshape(2, INTERMEDIATE).T.flatten()
        l1_weight, l1_sf = l1_weight[:, order], l1_sf[:, order]
    shape = (16,) if blocks else ()
    prefix = f"model.layers.{LAYER}.mlp.experts."
    tensors = {}
    for name, weight, sf in (("gate_up", l1_weight, l1_sf), ("down", l2_weight, l2_sf)):
        packed = weight.view(torch.uint8)
        packed = packed.unflatten(2, (-1, *shape)) if blocks else packed
        tensors[f"{prefix}{name}_proj_blocks"] = packed.contiguous()
        tensors[f"{prefix}{name}_proj_scales"] = unpack_ue8m0(sf.contiguous())
    return tensors


class TestSeparateExperts:
    @pytest.mark.parametrize("naming", ["experts", "numbered"])
    @pytest.mark.parametrize("num_ranks", [1, 2, 6])
    def test_what_was_saved_is_loaded_by_rank(self, tmp_path, weights, naming, num_ranks):
        save_experts(tmp_path, {LAYER: weights}, naming=NAMINGS[naming], experts_per_file=4)
        per_rank = NUM_EXPERTS // num_ranks
        for rank in range(num_ranks):
            loaded = load_experts(tmp_path, LAYER, rank_idx=rank, num_ranks=num_ranks)
            assert_equal(loaded, weights, slice(rank * per_rank, (rank + 1) * per_rank))

    def test_names_and_types_in_the_files(self, tmp_path, weights):
        save_experts(tmp_path, {LAYER: weights}, experts_per_file=4)
        weight_map = json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"]
        assert len(weight_map) == NUM_EXPERTS * 3 * 2
        assert set(weight_map.values()) == {
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        }
        file = load_file(tmp_path / "model-00001-of-00002.safetensors")
        up = file["model.layers.3.mlp.experts.1.up_proj.weight"]
        scale = file["model.layers.3.mlp.experts.1.up_proj.weight_scale"]
        (l1_weight, l1_sf), _ = weights
        assert torch.equal(up, l1_weight[1, INTERMEDIATE:].view(torch.uint8))
        assert torch.equal(scale, unpack_ue8m0(l1_sf)[1, INTERMEDIATE:])

    def test_several_layers(self, tmp_path, weights):
        other = tuple((weight.flip(0), sf.flip(0)) for weight, sf in weights)
        save_experts(tmp_path, {0: weights, 1: other})
        assert_equal(load_experts(tmp_path, 0), weights)
        assert_equal(load_experts(tmp_path, 1), other)

    def test_files_of_other_ranks_are_never_opened(self, tmp_path, weights):
        save_experts(tmp_path, {LAYER: weights}, experts_per_file=2)
        (tmp_path / "model-00001-of-00003.safetensors").unlink()
        (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"damaged")
        assert_equal(load_experts(tmp_path, LAYER, rank_idx=1, num_ranks=3), weights, slice(2, 4))

    def test_a_folder_without_an_index(self, tmp_path, weights):
        save_experts(tmp_path, {LAYER: weights}, experts_per_file=2)
        (tmp_path / INDEX_NAME).unlink()
        assert_equal(load_experts(tmp_path, LAYER, rank_idx=1, num_ranks=2), weights, slice(3, 6))

    def test_a_single_file(self, tmp_path, weights):
        save_experts(tmp_path, {LAYER: weights}, experts_per_file=NUM_EXPERTS)
        file = tmp_path / "model-00001-of-00001.safetensors"
        assert_equal(load_experts(file, LAYER), weights)

    def test_names_of_ones_own(self, tmp_path, weights):
        naming = ExpertNaming(
            *(f"b{{layer}}.e{{expert}}.{part}" for part in "gud"), {"weight": ".q", "scale": ".s"}
        )
        save_experts(tmp_path, {LAYER: weights}, naming=naming)
        assert_equal(load_experts(tmp_path, LAYER, naming=naming), weights)
        with pytest.raises(CheckpointError, match="no experts of layer 3 under a known name"):
            load_experts(tmp_path, LAYER)

    def test_e8m0_scales(self, tmp_path, weights):
        save_experts(tmp_path, {LAYER: weights}, experts_per_file=NUM_EXPERTS)
        file = tmp_path / "model-00001-of-00001.safetensors"
        tensors = load_file(file)
        for name in list(tensors):
            if name.endswith("scale"):
                tensors[name] = tensors[name].view(torch.float8_e8m0fnu)
        save_file(tensors, file)
        assert_equal(load_experts(file, LAYER), weights)

    def test_the_result_goes_into_the_transform(self, tmp_path, weights):
        save_experts(tmp_path, {LAYER: weights})
        expected = transform_weights_for_mega_moe(*weights)
        assert_equal(transform_weights_for_mega_moe(*load_experts(tmp_path, LAYER)), expected)


class TestStackedExperts:
    @pytest.mark.parametrize("blocks", [True, False])
    @pytest.mark.parametrize("num_ranks", [1, 3])
    def test_alternating_rows_of_gate_and_up(self, tmp_path, weights, blocks, num_ranks):
        save_file(stacked_tensors(weights, blocks=blocks), tmp_path / "model.safetensors")
        per_rank = NUM_EXPERTS // num_ranks
        for rank in range(num_ranks):
            loaded = load_experts(tmp_path, LAYER, rank_idx=rank, num_ranks=num_ranks)
            assert_equal(loaded, weights, slice(rank * per_rank, (rank + 1) * per_rank))

    def test_gate_before_up(self, tmp_path, weights):
        save_file(stacked_tensors(weights, interleaved=False), tmp_path / "model.safetensors")
        stacked = NAMINGS["stacked"]
        assert isinstance(stacked, StackedNaming)
        naming = replace(stacked, interleaved=False)
        assert_equal(load_experts(tmp_path, LAYER, naming=naming), weights)

    def test_only_the_ranks_own_entries_are_read(self, tmp_path, weights, monkeypatch):
        save_file(stacked_tensors(weights), tmp_path / "model.safetensors")
        reads = []

        class RecordingSlice:
            def __init__(self, inner):
                self.inner = inner

            def get_shape(self):
                return self.inner.get_shape()

            def get_dtype(self):
                return self.inner.get_dtype()

            def __getitem__(self, index):
                reads.append((index.start, index.stop))
                return self.inner[index]

        class RecordingFile:
            def __init__(self, *args, **kwargs):
                self.inner = real_open(*args, **kwargs)

            def __enter__(self):
                return self

            def __exit__(self, *exception):
                self.inner.__exit__(*exception)

            def keys(self):
                return self.inner.keys()

            def get_slice(self, name):
                return RecordingSlice(self.inner.get_slice(name))

        real_open = files.safe_open
        monkeypatch.setattr(files, "safe_open", RecordingFile)
        load_experts(tmp_path, LAYER, rank_idx=1, num_ranks=3)
        assert sorted(set(reads)) == [(2, 3), (3, 4)]

    def test_biases_are_read_as_the_rows_are(self, tmp_path, weights):
        tensors = stacked_tensors(weights)
        prefix = f"model.layers.{LAYER}.mlp.experts."
        num_l1_rows = weights[0][0].shape[1]
        l1_bias = torch.arange(NUM_EXPERTS * num_l1_rows).view(NUM_EXPERTS, -1).float()
        l2_bias = torch.randn(NUM_EXPERTS, HIDDEN).bfloat16()
        save_file(tensors, tmp_path / "model.safetensors")
        assert load_biases(tmp_path, LAYER) is None
        tensors[prefix + "gate_up_proj_bias"] = l1_bias
        tensors[prefix + "down_proj_bias"] = l2_bias
        save_file(tensors, tmp_path / "model.safetensors")
        loaded = load_biases(tmp_path, LAYER, rank_idx=1, num_ranks=3)
        expected = torch.cat([l1_bias[2:4, 0::2], l1_bias[2:4, 1::2]], dim=1)
        assert torch.equal(loaded.l1, expected)
        assert torch.equal(loaded.l2, l2_bias[2:4])
        copies = load_biases(tmp_path, LAYER, experts=[5, 0, 5])
        assert torch.equal(copies.l2, l2_bias[[5, 0, 5]])
        assert_equal(load_experts(tmp_path, LAYER, biases_apart=True), weights)
        load_experts(tmp_path, LAYER, biases_apart=True, transformed=True)
        tensors[prefix + "down_proj_bias"] = l2_bias[:, 1:].contiguous()
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(
            CheckpointError, match=r"down_proj_bias must have 256 rows .* got .255."
        ):
            load_biases(tmp_path, LAYER)
        tensors[prefix + "down_proj_bias"] = l2_bias.half()
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="down_proj_bias must be bfloat16 or float32; go"):
            load_biases(tmp_path, LAYER)

    def test_biases_of_one_layer_only(self, tmp_path, weights):
        tensors = stacked_tensors(weights)
        name = f"model.layers.{LAYER}.mlp.experts.gate_up_proj_bias"
        tensors[name] = torch.zeros(NUM_EXPERTS, 4)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(
            CheckpointError, match=r"gate_up_proj_bias, but has no tensor .*down_proj_b"
        ):
            load_biases(tmp_path, LAYER)

    def test_biases_that_nobody_takes_are_refused(self, tmp_path, weights):
        tensors = stacked_tensors(weights)
        tensors[f"model.layers.{LAYER}.mlp.experts.down_proj_bias"] = torch.zeros(
            NUM_EXPERTS, HIDDEN
        )
        name = f"model.layers.{LAYER}.mlp.experts.gate_up_proj_bias"
        tensors[name] = torch.zeros(NUM_EXPERTS, weights[0][0].shape[1])
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="_bias: load biases with load_biases, and"):
            load_experts(tmp_path, LAYER)

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            (
                "gate_up_proj_blocks",
                lambda t: t.flatten(1),
                "must be a matrix for each expert; got",
            ),
            (
                "down_proj_scales",
                lambda t: t[:4],
                "must have an entry for each of the 6 experts .*; got 4",
            ),
            (
                "down_proj_blocks",
                lambda t: t[:, :, :2],
                r"must have shape \(256, 64\) .* \(256, 32",
            ),
        ],
    )
    def test_other_shapes_are_refused(self, tmp_path, weights, name, change, message):
        tensors = stacked_tensors(weights)
        full_name = f"model.layers.{LAYER}.mlp.experts.{name}"
        tensors[full_name] = change(tensors[full_name]).contiguous()
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{name} {message}"):
            load_experts(tmp_path, LAYER)


class TestNumberOfExperts:
    """It comes from config.json or the caller, never from the tensors that happen to be there."""

    GATE_OF_3 = "model.layers.3.mlp.experts.3.gate_proj.weight"

    @pytest.fixture
    def folder(self, tmp_path, weights):
        save_experts(tmp_path, {LAYER: weights}, experts_per_file=2)
        return tmp_path

    def lose_expert_3(self, folder):
        index = json.loads((folder / INDEX_NAME).read_text())
        for name in list(index["weight_map"]):
            if ".experts.3." in name:
                del index["weight_map"][name]
        (folder / INDEX_NAME).write_text(json.dumps(index))

    def write_config(self, folder, **config):
        (folder / CONFIG_NAME).write_text(json.dumps(config))

    @pytest.mark.parametrize("rank_idx", [0, 1, 2])
    def test_an_expert_that_the_index_lacks_is_named_on_every_rank(self, folder, rank_idx):
        self.lose_expert_3(folder)
        with pytest.raises(
            CheckpointError, match=rf"lacks expert 3 of the 6 of layer 3, .*tensor {self.GATE_OF_3}"
        ):
            load_experts(folder, LAYER, rank_idx=rank_idx, num_ranks=3)

    def test_a_shard_lost_without_an_index_is_named(self, folder):
        (folder / INDEX_NAME).unlink()
        (folder / "model-00003-of-00003.safetensors").unlink()
        with pytest.raises(
            CheckpointError,
            match=r"lacks experts 4, 5 of the 6 .* and 4 more; there is no file "
            r"model-00003-of-00003.safetensors",
        ):
            load_experts(folder, LAYER)

    def test_the_first_expert_may_be_the_missing_one(self, folder):
        (folder / INDEX_NAME).unlink()
        (folder / "model-00001-of-00003.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"lacks experts 0, 1 of the 6"):
            load_experts(folder, LAYER)

    def test_a_shard_lost_with_an_index_is_named_with_a_tensor(self, folder):
        file = folder / "model-00002-of-00003.safetensors"
        file.unlink()
        with pytest.raises(CheckpointError, match=rf"{file} is missing; .* holds .*experts\.2\."):
            load_experts(folder, LAYER)

    @pytest.mark.parametrize(
        "config",
        [
            {"n_routed_experts": 6, "n_shared_experts": 1},
            {"num_experts": 6, "num_experts_per_tok": 2},
            {"num_local_experts": 6},
            {"moe_num_experts": 6},
            {"num_experts": None, "n_routed_experts": 6},
            {"model_type": "vlm", "text_config": {"n_routed_experts": 6}, "vision": {"depth": 2}},
            {"num_local_experts": 6, "draft": {"num_local_experts": 4}},
        ],
    )
    def test_names_that_published_models_use(self, folder, weights, config):
        self.write_config(folder, **config)
        assert_equal(load_experts(folder, LAYER), weights)
        self.lose_expert_3(folder)
        with pytest.raises(CheckpointError, match=r"lacks expert 3 of the 6 .*config\.json"):
            load_experts(folder, LAYER)

    def test_the_caller_comes_before_the_config(self, folder, weights):
        self.write_config(folder, num_experts=8)
        assert_equal(load_experts(folder, LAYER, num_experts=6), weights)
        with pytest.raises(CheckpointError, match=r"lacks experts 6, 7 of the 8 .*config\.json"):
            load_experts(folder, LAYER)
        with pytest.raises(CheckpointError, match=r"lacks expert 6 of the 7 .*that of num_experts"):
            load_experts(folder, LAYER, num_experts=7)

    def test_experts_beyond_the_number_are_not_dropped(self, folder):
        with pytest.raises(CheckpointError, match=r"experts 4, 5 of layer 3, .*4 experts as num_e"):
            load_experts(folder, LAYER, num_experts=4)

    def test_nothing_says_how_many(self, folder, weights):
        for config in (None, {}, {"hidden_size": 256}):
            (folder / CONFIG_NAME).unlink(missing_ok=True)
            if config is not None:
                self.write_config(folder, **config)
            with pytest.raises(
                CheckpointError,
                match=r"does not say how many .*n_routed_experts.*; give num_experts. There are "
                r"tensors of experts 0, 1, 2, 3, 4, 5",
            ):
                load_experts(folder, LAYER)
            assert_equal(load_experts(folder, LAYER, num_experts=6), weights)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "must hold a JSON object"),
            ("[6]", "must hold a JSON object; got list"),
            ('{"num_experts": "6"}', "experts as a positive int; got num_experts '6'"),
            ('{"num_experts": [6, 6]}', "experts as a positive int"),
            ('{"num_experts": 0}', "experts as a positive int"),
            (
                '{"num_experts": 6, "num_local_experts": 3}',
                "one number of experts; got num_local_experts 3, num_experts 6: give num_experts",
            ),
        ],
    )
    def test_a_config_that_is_no_help(self, folder, weights, text, message):
        (folder / CONFIG_NAME).write_text(text)
        with pytest.raises(CheckpointError, match=rf"config\.json must {message}|{message}"):
            load_experts(folder, LAYER)
        if "JSON" in message:  # it may say what the weights are
            with pytest.raises(CheckpointError, match=message):
                load_experts(folder, LAYER, num_experts=6)
        else:
            assert_equal(load_experts(folder, LAYER, num_experts=6), weights)

    def test_no_experts_at_all(self, folder):
        with pytest.raises(ValueError, match="num_experts must be at least 1, or None; got 0"):
            load_experts(folder, LAYER, num_experts=0)

    def test_stacked_experts_are_as_many_as_the_config_says(self, tmp_path, weights):
        save_file(stacked_tensors(weights), tmp_path / "model.safetensors")
        self.write_config(tmp_path, num_local_experts=8)
        with pytest.raises(
            CheckpointError, match=r"gate_up_proj_blocks must have an entry for each of the 8 .* 6"
        ):
            load_experts(tmp_path, LAYER)
        assert_equal(load_experts(tmp_path, LAYER, num_experts=6), weights)

    def test_a_stack_that_is_missing_is_named(self, tmp_path, weights):
        tensors = stacked_tensors(weights)
        del tensors[f"model.layers.{LAYER}.mlp.experts.down_proj_scales"]
        save_file(tensors, tmp_path / "model-1-of-2.safetensors")
        with pytest.raises(
            CheckpointError, match=r"no tensor .*down_proj_scales; there is no file model-2-of-2"
        ):
            load_experts(tmp_path, LAYER)

    def test_what_is_saved_says_how_many(self, tmp_path, weights):
        self.write_config(tmp_path, hidden_size=HIDDEN)
        save_experts(tmp_path, {LAYER: weights})
        config = json.loads((tmp_path / CONFIG_NAME).read_text())
        assert config == {"hidden_size": HIDDEN, "num_experts": NUM_EXPERTS}
        half = tuple((weight[:3], sf[:3]) for weight, sf in weights)
        with pytest.raises(ValueError, match=r"layers must have the 6 experts of .*; got 3"):
            save_experts(tmp_path, {LAYER: half})
        with pytest.raises(ValueError, match=r"one number of experts; got \{0: 6, 1: 3\}"):
            save_experts(tmp_path, {0: weights, 1: half})


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
class TestTransformed:
    @pytest.fixture
    def weights(self):
        torch.manual_seed(0)
        layers = random_layer(2 * INTERMEDIATE, HIDDEN), random_layer(HIDDEN, INTERMEDIATE)
        return tuple((w, (sf.view(torch.uint8) % 16 + 100).view(torch.int32)) for w, sf in layers)

    @pytest.mark.parametrize("is_stacked", [False, True])
    def test_it_is_the_transformation_of_what_is_loaded(self, tmp_path, weights, arch, is_stacked):
        if is_stacked:
            save_file(stacked_tensors(weights), tmp_path / "model.safetensors")
        else:
            save_experts(tmp_path, {LAYER: weights})
        expected = transform_weights_for_mega_moe(
            *load_experts(tmp_path, LAYER, rank_idx=1, num_ranks=2), arch=arch
        )
        loaded = load_experts(tmp_path, LAYER, rank_idx=1, num_ranks=2, transformed=True, arch=arch)
        assert_equal(loaded, expected)

    def test_one_expert_at_a_time(self, tmp_path, weights, arch, monkeypatch):
        save_experts(tmp_path, {LAYER: weights})
        sizes = []
        real = experts.transform_weights_for_mega_moe

        def recorded(l1, l2, *args, **kwargs):
            sizes.append(l1.weight.untyped_storage().nbytes())
            return real(l1, l2, *args, **kwargs)

        monkeypatch.setattr(experts, "transform_weights_for_mega_moe", recorded)
        load_experts(tmp_path, LAYER, transformed=True, arch=arch)
        assert sizes == [2 * INTERMEDIATE * HIDDEN // 2] * NUM_EXPERTS


def test_what_a_target_cannot_hold_is_named_by_expert(tmp_path, weights):
    save_experts(tmp_path, {LAYER: weights})  # scales of all sizes
    with pytest.raises(
        CheckpointError, match=r"experts\.3\.gate_proj by itself: l1_weights: .* row"
    ):
        load_experts(tmp_path, LAYER, rank_idx=1, num_ranks=2, transformed=True, arch="sm_90a")


class TestRefusals:
    def test_a_scale_that_is_nan(self, single_file):
        def with_nan(scales):
            scales[77, 2] = 255
            return scales

        self.rewrite(single_file, self.SCALE, with_nan)
        with pytest.raises(CheckpointError, match=rf"{self.SCALE} must .* NaN .* in row 77"):
            load_experts(single_file, LAYER)

    @pytest.fixture
    def single_file(self, tmp_path, weights):
        save_experts(tmp_path, {LAYER: weights}, experts_per_file=NUM_EXPERTS)
        return tmp_path / "model-00001-of-00001.safetensors"

    def rewrite(self, file, name, change):
        tensors = load_file(file)
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed
        save_file(tensors, file)

    GATE = "model.layers.3.mlp.experts.2.gate_proj.weight"
    SCALE = "model.layers.3.mlp.experts.2.down_proj.weight_scale"

    def test_a_missing_tensor(self, single_file):
        self.rewrite(single_file, self.SCALE, lambda _: None)
        with pytest.raises(CheckpointError, match=f"has no tensor {self.SCALE}"):
            load_experts(single_file, LAYER)
        with pytest.raises(CheckpointError, match=f"no tensor {self.SCALE}, although the index"):
            load_experts(single_file.parent, LAYER)

    def test_a_weight_of_another_shape(self, single_file):
        self.rewrite(single_file, self.GATE, lambda t: t[:64].contiguous())
        with pytest.raises(
            CheckpointError, match=rf"{self.GATE} must have shape \(128, 128\) .* got \(64, 128\)"
        ):
            load_experts(single_file, LAYER)

    def test_scales_per_128_values(self, single_file):
        self.rewrite(single_file, self.SCALE, lambda t: t[:, ::4].contiguous())
        with pytest.raises(
            CheckpointError, match=rf"{self.SCALE} must have shape \(256, 4\) .* got \(256, 1\)"
        ):
            load_experts(single_file, LAYER)

    def test_fp8_weights(self, single_file):
        self.rewrite(single_file, self.GATE, lambda t: t.view(torch.float8_e4m3fn))
        with pytest.raises(CheckpointError, match=f"{self.GATE} must be uint8 or int8.* got torch"):
            load_experts(single_file, LAYER)

    def test_float_scales(self, single_file):
        self.rewrite(single_file, self.SCALE, lambda t: t.float())
        with pytest.raises(CheckpointError, match=f"{self.SCALE} must be uint8 .* torch.float32"):
            load_experts(single_file, LAYER)

    def test_sizes_that_no_kernel_takes(self, tmp_path):
        save_file(
            {
                template.format(layer=0, expert=0) + suffix: torch.zeros(100, 64, dtype=torch.uint8)
                for template in (DEFAULT_NAMING.gate, DEFAULT_NAMING.up, DEFAULT_NAMING.down)
                for suffix in (".weight", ".weight_scale")
            },
            tmp_path / "a.safetensors",
        )
        with pytest.raises(CheckpointError, match=r"multiples of 32; .* has 128 and 100"):
            load_experts(tmp_path, 0, num_experts=1)

    def test_a_layer_that_is_not_there(self, single_file):
        with pytest.raises(CheckpointError, match=r"no experts of layer 9 .*experts\.0\.gate_proj"):
            load_experts(single_file, 9)
        with pytest.raises(CheckpointError, match=r"layer 9 under the name given; .*layers\.9\."):
            load_experts(single_file, 9, naming=DEFAULT_NAMING)

    def test_experts_that_do_not_divide_among_the_ranks(self, single_file):
        with pytest.raises(ValueError, match=r"num_ranks must divide the 6 experts .*; got 4"):
            load_experts(single_file, LAYER, num_ranks=4)

    @pytest.mark.parametrize(("rank_idx", "num_ranks"), [(-1, 2), (2, 2), (0, 0)])
    def test_ranks_out_of_range(self, single_file, rank_idx, num_ranks):
        with pytest.raises(ValueError, match=r"(rank_idx|num_ranks) must be"):
            load_experts(single_file, LAYER, rank_idx=rank_idx, num_ranks=num_ranks)

    def test_a_path_without_files(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"must be a \.safetensors file or a folder"):
            load_experts(tmp_path, 0)
        with pytest.raises(CheckpointError, match=r"must be a \.safetensors file or a folder"):
            load_experts(tmp_path / "nowhere", 0)

    def test_a_missing_shard(self, single_file):
        single_file.unlink()
        with pytest.raises(CheckpointError, match=f"{single_file} is missing"):
            load_experts(single_file.parent, LAYER)

    def test_a_damaged_shard(self, single_file):
        single_file.write_bytes(b"not safetensors")
        with pytest.raises(CheckpointError, match="is no safetensors file"):
            load_experts(single_file.parent, LAYER)

    @pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": []}'])
    def test_a_damaged_index(self, single_file, text):
        (single_file.parent / INDEX_NAME).write_text(text)
        with pytest.raises(CheckpointError, match="must hold a JSON object"):
            load_experts(single_file.parent, LAYER)

    def test_empty_files_are_not_written(self, tmp_path, weights):
        with pytest.raises(ValueError, match="experts_per_file must be at least 1; got 0"):
            save_experts(tmp_path, {LAYER: weights}, experts_per_file=0)
