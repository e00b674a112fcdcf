"""Tuning tables: where a measurement holds, where it does not, and what the file may hold."""

from __future__ import annotations

import dataclasses
import json

import pytest

from deep_moe.heuristics import ARCHITECTURES, MoEShape, Tuning, TuningTable, choose_config
from deep_moe.heuristics.config import MegaMoEConfig
from deep_moe.heuristics.tuning import (
    SHIPPED_FOLDER,
    TunedEntry,
    TunedLayer,
    TunedLayerKey,
    device_file_name,
    format_table,
    parse_table,
    read_table,
    shipped_devices,
    shipped_table,
)

GPU = "NVIDIA H200"
SHAPE = MoEShape(4, 256, 6, 4096, 2048, 8192)
MEASURED = (64, 128, 256)


def formula_config(num_tokens: int = 128, **options) -> MegaMoEConfig:
    return choose_config(SHAPE, num_tokens, arch="sm_90a", **options)


def other_tile(config: MegaMoEConfig) -> int:
    return config.candidates["block_m"][0]


def entry_at(num_tokens: int, **changes) -> TunedEntry:
    """At this size, the nearest other tile was 10 % faster."""
    config = formula_config(num_tokens)
    entry = TunedEntry(
        num_tokens=num_tokens,
        overrides=(("block_m", other_tile(config)),),
        formula=tuple(config.tunable.items()),
        us=100.0,
        formula_us=110.0,
        date="2026-11-21",
        commit="abc",
    )
    return dataclasses.replace(entry, **changes)


def tuning_of(*entries: TunedEntry, measured=MEASURED, **key_changes) -> Tuning:
    key = TunedLayerKey.of(SHAPE, device=GPU, arch="sm_90a", num_sms=132)
    key = dataclasses.replace(key, **key_changes)
    return Tuning(GPU, (TuningTable("a table", (TunedLayer(key, measured, entries),)),))


def outcome(config: MegaMoEConfig) -> str:
    return config.explain().tuning.outcome


class TestLookUp:
    def test_a_measured_size_gets_the_faster_kernel_with_its_reason(self):
        config = formula_config(tuning=tuning_of(entry_at(128)))
        assert config.block_m == other_tile(formula_config())
        reasons = {field.name: field.reason for field in config.explain().fields}
        assert reasons["block_m"] == (
            f"formula: {formula_config().block_m}; measured on NVIDIA H200 with 128 tokens per "
            "rank: 100.0 µs, the formula's choice 110.0 (+10.0%); 2026-11-21, a table"
        )
        assert "measured" not in reasons["num_sms"]

    def test_the_rest_of_the_config_follows_from_the_faster_tile(self):
        config = formula_config(tuning=tuning_of(entry_at(128)))
        by_hand = formula_config(overrides={"block_m": config.block_m})
        assert config == by_hand
        assert config.smem_layout.num_bytes == config.smem_bytes

    def test_between_measured_sizes_it_holds_where_the_formula_still_chooses_what_was_beaten(self):
        tuning = tuning_of(entry_at(128))
        num_changed = 0
        for num_tokens in range(1, 400):
            config = formula_config(num_tokens, tuning=tuning)
            is_near = 91 <= num_tokens <= 181  # sqrt(2) on either side of 128
            is_same = formula_config(num_tokens).tunable == formula_config(128).tunable
            if is_near and is_same:
                assert config.block_m == other_tile(formula_config(128))
                num_changed += 1
            else:
                assert config == formula_config(num_tokens)
        assert num_changed > 1

    def test_a_size_where_the_formula_was_not_beaten_is_not_taken_over_from_its_neighbour(self):
        tuning = tuning_of(entry_at(64), entry_at(256))
        config = formula_config(tuning=tuning)
        assert config == formula_config()
        assert outcome(config) == (
            "formula: on NVIDIA H200 with 128 tokens per rank nothing that was tried is faster "
            "beyond noise (a table)"
        )

    @pytest.mark.parametrize("num_tokens", [0, 1, 45, 363, 8192])
    def test_far_from_what_was_measured_the_formula_chooses(self, num_tokens: int):
        config = formula_config(num_tokens, tuning=tuning_of(*map(entry_at, MEASURED)))
        assert config == formula_config(num_tokens)
        assert outcome(config) == (
            "formula: measured on NVIDIA H200 with 64, 128, 256 tokens per rank, none of which is "
            "near"
        )

    @pytest.mark.parametrize(
        "changes",
        [
            {"device": "NVIDIA H20"},
            {"num_sms": 78},
            {"arch": "sm_100a"},
            {"num_ranks": 8},
            {"num_experts": 128},
            {"num_topk": 8},
            {"hidden": 7168},
            {"intermediate_hidden": 3072},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_another_layer_or_device_does_not_count(self, changes):
        config = formula_config(tuning=tuning_of(entry_at(128), **changes))
        assert config == formula_config()
        assert outcome(config) == (
            "formula: this layer has not been measured on NVIDIA H200 with 132 SMs"
        )

    def test_the_capacity_of_the_buffer_does_not_matter(self):
        shape = dataclasses.replace(SHAPE, num_max_tokens_per_rank=128)
        config = choose_config(shape, 128, arch="sm_90a", tuning=tuning_of(entry_at(128)))
        assert config.block_m == other_tile(formula_config())

    def test_a_measurement_against_another_formula_is_out_of_date(self):
        name, value = formula_config().tunable.popitem()
        beaten = dict(entry_at(128).formula) | {name: value + 1}
        entry = entry_at(128, formula=tuple(beaten.items()))
        config = formula_config(tuning=tuning_of(entry))
        assert config == formula_config()
        assert f"here {name} {value}, there {value + 1}" in outcome(config)

    @pytest.mark.parametrize("beyond", [{"num_sms": 66}, {"num_new_thing": 1}])
    def test_a_table_sets_nothing_but_tunable_fields(self, beyond):
        """num_sms above all: it must be equal on all ranks, whatever their tokens."""
        formula = dict(entry_at(128).formula) | dict.fromkeys(beyond, 132)
        entry = entry_at(128, overrides=tuple(beyond.items()), formula=tuple(formula.items()))
        config = formula_config(tuning=tuning_of(entry))
        assert config == formula_config()
        assert "not tunable" in outcome(config)

    def test_what_the_caller_sets_comes_first(self):
        tuning = tuning_of(entry_at(128))
        for name, value in formula_config().tunable.items():
            config = formula_config(tuning=tuning, overrides={name: value})
            assert config == formula_config()
            assert outcome(config) == f"formula: the caller sets {name}"
        others = {"num_dispatch_registers": 64}
        config = formula_config(tuning=tuning, overrides=others)
        assert config.num_dispatch_registers == 64
        assert config.block_m == other_tile(formula_config())

    def test_the_first_table_that_measured_nearby_counts(self):
        key = TunedLayerKey.of(SHAPE, device=GPU, arch="sm_90a", num_sms=132)
        own = TuningTable("own", (TunedLayer(key, (128,), ()),))
        shipped = tuning_of(*map(entry_at, MEASURED)).tables[0]
        both = Tuning(GPU, (own, shipped))
        assert formula_config(128, tuning=both) == formula_config(128)
        assert formula_config(256, tuning=both).block_m == other_tile(formula_config(256))
        sources = [row.source for row in formula_config(tuning=both).explain().tuning.rows]
        assert sources == ["own", "a table", "a table", "a table"]

    def test_without_a_device_the_formula_chooses(self):
        assert outcome(formula_config()) == "formula: no device is named"
        assert formula_config().explain().tuning.rows == ()

    def test_an_entry_beyond_a_limit_is_an_error_that_says_where_it_stands(self):
        entry = entry_at(128, overrides=(("block_m", 9),))
        with pytest.raises(ValueError, match=r"tuning table: block_m must be .*; got 9; .*a table"):
            formula_config(tuning=tuning_of(entry))

    def test_the_explanation_lists_what_was_measured(self):
        tuning = formula_config(tuning=tuning_of(entry_at(128))).explain().to_dict()["tuning"]
        tuning = json.loads(json.dumps(tuning))
        assert tuning["device"] == GPU
        assert [row["num_tokens"] for row in tuning["rows"]] == list(MEASURED)
        assert tuning["rows"][0]["entry"] is None
        assert tuning["rows"][1]["entry"]["overrides"] == dict(entry_at(128).overrides)


class TestFile:
    def test_a_table_survives_writing_and_reading(self):
        (table,) = tuning_of(entry_at(64), entry_at(256)).tables
        assert parse_table(format_table(table), "a table") == table

    def test_a_newer_measurement_replaces_its_sizes_only(self):
        (table,) = tuning_of(entry_at(64), entry_at(256)).tables
        (layer,) = table.layers
        newer = TunedLayer(layer.key, (256, 512), (entry_at(512),))
        (updated,) = table.updated(newer).layers
        assert updated.measured_tokens == (64, 128, 256, 512)
        assert [entry.num_tokens for entry in updated.entries] == [64, 512]
        elsewhere = dataclasses.replace(layer.key, num_ranks=8)
        assert len(table.updated(TunedLayer(elsewhere, (1,), ())).layers) == 2

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda d: d.pop("schema"), "schema is missing"),
            (lambda d: d.update(schema=2), "schema must be 1; got 2: .*deep-moe tune"),
            (lambda d: d.update(layers={}), "layers must be a list"),
            (lambda d: d["layers"][0].pop("device"), "device is missing"),
            (lambda d: d["layers"][0].update(num_sms="132"), "num_sms must be an int; got '132'"),
            (lambda d: d["layers"][0].update(measured_tokens=[0]), "must be positive ints"),
            (lambda d: d["layers"][0].update(measured_tokens=[1]), r"of measured_tokens \[1\]"),
            (lambda d: d["layers"][0]["entries"][0].update(overrides={}), "overrides must set"),
            (
                lambda d: d["layers"][0]["entries"][0].update(overrides={"num_sms": 64}),
                "overrides must set fields of `formula`",
            ),
            (
                lambda d: d["layers"][0]["entries"][0]["overrides"].update(block_m=True),
                "block_m must be an int; got True",
            ),
            (lambda d: d["layers"][0]["entries"][0].update(us="9"), "us must be a number"),
            (lambda d: d["layers"][0]["entries"][0].update(us=111), "us must be positive and belo"),
        ],
    )
    def test_what_is_wrong_with_a_file_is_said(self, damage, message):
        document = json.loads(format_table(tuning_of(entry_at(128)).tables[0]))
        damage(document)
        with pytest.raises(ValueError, match=rf"tuning table, my\.json: .*{message}"):
            parse_table(json.dumps(document), "my.json")

    def test_no_json_at_all(self):
        with pytest.raises(ValueError, match=r"tuning table, my\.json: not JSON"):
            parse_table("{", "my.json")

    def test_an_absent_file_is_no_table(self, tmp_path):
        assert read_table(tmp_path / "absent.json") is None
        assert shipped_table(GPU, tmp_path) is None
        assert shipped_devices(tmp_path) == []

    def test_a_shipped_file_is_found_by_the_name_of_its_device(self, tmp_path):
        table = tuning_of(entry_at(128)).tables[0]
        (tmp_path / "nvidia-h200.json").write_text(format_table(table))
        found = shipped_table(GPU, tmp_path)
        assert found is not None
        assert found.layers == table.layers
        assert shipped_table("NVIDIA H20", tmp_path) is None
        assert shipped_devices(tmp_path) == [GPU]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("num_tokens", [1, 64, 1024, 8192])
def test_candidates_are_other_values_of_tunable_fields(arch: str, num_tokens: int):
    config = choose_config(SHAPE, num_tokens, arch=arch)
    assert set(config.candidates) == set(config.tunable)
    assert "num_sms" not in config.tunable
    num_accepted = 0
    for name, values in config.candidates.items():
        assert config.tunable[name] not in values
        for value in values:
            changed = choose_config(SHAPE, num_tokens, arch=arch, overrides={name: value})
            assert changed.tunable[name] == value
            num_accepted += 1
    assert num_accepted >= 5


def test_shipped_tables_hold_measurements_of_the_present_formula():
    """Every entry is accepted, and used at the size it was measured at."""
    for path in SHIPPED_FOLDER.glob("*.json"):
        table = read_table(path)
        assert table is not None
        for layer in table.layers:
            assert path.name == device_file_name(layer.key.device)
            key = layer.key
            for entry in layer.entries:
                assert entry.gain >= 0.02
                shape = MoEShape(
                    key.num_ranks,
                    key.num_experts,
                    key.num_topk,
                    key.hidden,
                    key.intermediate_hidden,
                    entry.num_tokens,
                )
                config = choose_config(
                    shape,
                    entry.num_tokens,
                    arch=key.arch,
                    num_sms=key.num_sms,
                    tuning=Tuning(key.device, (table,)),
                )
                assert dict(entry.overrides).items() <= config.tunable.items()
