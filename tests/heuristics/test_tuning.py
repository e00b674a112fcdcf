"""Tuning tables: where a measurement holds, where it does not, and what the file may hold."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from deep_moe.heuristics import MoEShape, Tuning, TuningTable
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
from deep_moe.targets import TARGETS, choose_config
from deep_moe.targets.config import MegaMoEConfig

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


def nested_list(depth: int) -> Any:
    """Less deep than the parser allows."""
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


def outcome(config: MegaMoEConfig) -> str:
    return config.explain().tuning.outcome


class TestLookUp:
    def test_a_measured_size_gets_the_faster_kernel_with_its_reason(self):
        config = formula_config(tuning=tuning_of(entry_at(128)))
        assert config.block_m == other_tile(formula_config())
        reasons = {field.name: field.reason for field in config.explain().fields}
        assert reasons["block_m"] == (
            f"formula: {formula_config().block_m}; measured on NVIDIA H200 with 4 ranks x "
            "256 experts, top-6, 128 tokens/rank: 100.0 µs, the formula's choice 110.0 (+10.0%); "
            "2026-11-21, a table"
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
            "formula: on NVIDIA H200 with 4 ranks x 256 experts, top-6, 128 tokens/rank nothing "
            "that was tried is faster beyond noise (a table)"
        )

    @pytest.mark.parametrize("num_tokens", [0, 1, 45, 363, 8192])
    def test_far_from_what_was_measured_the_formula_chooses(self, num_tokens: int):
        config = formula_config(num_tokens, tuning=tuning_of(*map(entry_at, MEASURED)))
        assert config == formula_config(num_tokens)
        assert outcome(config) == (
            "formula: measured on NVIDIA H200 with 6, 12, 24 tokens per expert, none of which is "
            f"near {num_tokens * 6 / 64:.4g}"
        )

    @pytest.mark.parametrize(
        "changes",
        [
            {"device": "NVIDIA H20"},
            {"num_sms": 78},
            {"arch": "sm_100a"},
            {"num_ranks": 8},  # 32 experts per rank, not 64
            {"num_experts": 128},
            {"hidden": 7168},
            {"intermediate_hidden": 3072},
            {"weights": "fp8"},
            {"num_shared_experts": 1},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_another_part_or_device_does_not_count(self, changes):
        config = formula_config(tuning=tuning_of(entry_at(128), **changes))
        assert config == formula_config()
        assert outcome(config) == (
            "formula: no layer with 64 experts per rank of 4096 x 2048 in mxfp4 x mxfp8 has been "
            "measured on NVIDIA H200 with 132 SMs"
        )

    @pytest.mark.parametrize("measured", [None, 384, 3840])
    @pytest.mark.parametrize("called", [None, 384])
    def test_how_many_rows_the_pool_has_does_not_matter(self, measured, called):
        tuning = tuning_of(entry_at(128), num_pool_tokens=measured)
        shape = dataclasses.replace(SHAPE, num_pool_tokens=called)
        config = choose_config(shape, 128, arch="sm_90a", tuning=tuning)
        assert config.block_m == other_tile(formula_config())

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


def layer_of(*entries: TunedEntry, measured, **key_changes) -> TunedLayer:
    key = TunedLayerKey.of(SHAPE, device=GPU, arch="sm_90a", num_sms=132)
    return TunedLayer(dataclasses.replace(key, **key_changes), measured, entries)


def tuning_of_layers(*tables: list[TunedLayer]) -> Tuning:
    names = ("first", "second")
    found = (TuningTable(name, tuple(layers)) for name, layers in zip(names, tables, strict=False))
    return Tuning(GPU, tuple(found))


def entry_for(num_tokens: int, at: int, which: int = 0) -> TunedEntry:
    """What was measured with `num_tokens` tokens per rank of a layer whose experts receive as many
    as those of SHAPE with `at`; `which` other tile was faster."""
    faster = (("block_m", formula_config(at).candidates["block_m"][which]),)
    return dataclasses.replace(entry_at(at), num_tokens=num_tokens, overrides=faster)


TWO_RANKS = {"num_ranks": 2, "num_experts": 128}  # 64 experts per rank, as SHAPE
EIGHT_RANKS = {"num_ranks": 8, "num_experts": 512}


class TestOtherLayers:
    """A rank's part counts: its experts and the tokens that each receives."""

    @pytest.mark.parametrize("key", [TWO_RANKS, EIGHT_RANKS], ids=["fewer", "more"])
    def test_a_measurement_holds_for_another_number_of_ranks(self, key):
        tuning = tuning_of_layers([layer_of(entry_for(128, at=128), measured=(128,), **key)])
        config = formula_config(tuning=tuning)
        assert config == formula_config(overrides={"block_m": other_tile(formula_config())})
        assert outcome(config) == (
            f"measured on NVIDIA H200 with {key['num_ranks']} ranks x {key['num_experts']} "
            "experts, top-6, 128 tokens/rank: 100.0 µs, the formula's choice 110.0 (+10.0%); "
            "2026-11-21, first"
        )

    def test_two_ranks_stand_for_four_and_eight_with_as_many_local_experts(self):
        """DeepSeek-V4-Pro's width: 96 experts per rank, of 192, 384 and 768."""

        def choose(num_ranks: int, num_tokens: int, tuning: Tuning | None = None) -> MegaMoEConfig:
            shape = MoEShape(num_ranks, 96 * num_ranks, 6, 7168, 3072, 8192)
            return choose_config(shape, num_tokens, arch="sm_90a", tuning=tuning)

        for num_tokens in (64, 512, 2048):
            measured = choose(2, num_tokens)
            key = TunedLayerKey.of(measured.shape, device=GPU, arch="sm_90a", num_sms=132)
            faster = (("block_m", other_tile(measured)),)
            formula = tuple(measured.tunable.items())
            entry = TunedEntry(num_tokens, faster, formula, 100.0, 110.0, "2026-11-21", "abc")
            tuning = tuning_of_layers([TunedLayer(key, (num_tokens,), (entry,))])
            for num_ranks in (2, 4, 8):
                config = choose(num_ranks, num_tokens, tuning)
                assert config.block_m == other_tile(measured)
                words = f"with 2 ranks x 192 experts, top-6, {num_tokens} tokens/rank"
                assert words in outcome(config)

    def test_tokens_per_expert_count_not_tokens_per_rank(self):
        """With top-3, 256 tokens per rank are as many per expert as 128 with top-6."""
        entry = entry_for(256, at=128)
        tuning = tuning_of_layers([layer_of(entry, measured=(256,), num_topk=3)])
        taken = []
        for num_tokens in range(1, 600):
            config = formula_config(num_tokens, tuning=tuning)
            if config != formula_config(num_tokens):
                taken.append(num_tokens)
                assert formula_config(num_tokens).tunable == formula_config(128).tunable
        assert 128 in taken
        assert min(taken) >= 91
        assert max(taken) <= 181
        assert "top-3, 256 tokens/rank" in outcome(formula_config(tuning=tuning))

    @pytest.mark.parametrize("key", [{"num_ranks": 2}, {"num_experts": 512}, {"num_ranks": 1}])
    def test_another_number_of_local_experts_does_not_match(self, key):
        """Though an expert receives as many tokens: top-k is changed along with it."""
        changed = dataclasses.replace(SHAPE, **key)
        topk = 6 * changed.num_experts_per_rank // 64
        entry = entry_for(128, at=128)
        layer = layer_of(entry, measured=(128,), **{**key, "num_topk": topk})
        assert layer.key.tokens_per_expert(128) == SHAPE.expected_tokens_per_expert(128)
        config = formula_config(tuning=tuning_of_layers([layer]))
        assert config == formula_config()
        assert "no layer with 64 experts per rank" in outcome(config)

    def test_where_the_formula_chooses_otherwise_it_is_not_taken(self):
        """The measurement at 128 tokens, said to be of a formula that chose what it does at 256."""
        entry = entry_for(128, at=256)
        tuning = tuning_of_layers([layer_of(entry, measured=(128,), **TWO_RANKS)])
        config = formula_config(tuning=tuning)
        assert config == formula_config()
        assert "with 2 ranks x 128 experts, top-6, 128 tokens/rank beat another" in outcome(config)

    @pytest.mark.parametrize("own_is_first", [True, False])
    def test_the_layers_own_measurement_wins_though_another_is_nearer(self, own_is_first: bool):
        """In whichever table it stands, and also where it says that nothing is faster."""
        other = [layer_of(entry_for(128, at=128), measured=(128,), **EIGHT_RANKS)]
        for own, block_m in (
            (layer_of(entry_for(120, at=128, which=1), measured=(120,)), 1),
            (layer_of(measured=(120,)), None),
        ):
            tables = ([own], other) if own_is_first else (other, [own])
            for tuning in (tuning_of_layers(*tables), tuning_of_layers([*tables[0], *tables[1]])):
                config = formula_config(tuning=tuning)
                assert "with 4 ranks x 256 experts, top-6, 120 tokens/rank" in outcome(config)
                if block_m is None:
                    assert config == formula_config()
                else:
                    assert config.block_m == formula_config().candidates["block_m"][block_m]

    def test_far_from_the_layers_own_measurements_others_count(self):
        own = layer_of(measured=(8, 1024))
        other = layer_of(entry_for(128, at=128), measured=(128,), **TWO_RANKS)
        config = formula_config(tuning=tuning_of_layers([own, other]))
        assert config.block_m == other_tile(formula_config())

    def test_among_others_the_first_table_the_nearest_and_most_ranks_count(self):
        def taken(*tables: list[TunedLayer]) -> str:
            """Of the layer whose size counts; in whatever order the tables list them."""
            found = {
                outcome(formula_config(tuning=tuning_of_layers(*order)))
                for order in (tables, [layers[::-1] for layers in tables])
            }
            (text,) = found
            return text

        two = layer_of(measured=(128,), **TWO_RANKS)
        eight = layer_of(measured=(128,), **EIGHT_RANKS)
        eight_further = layer_of(measured=(120,), **EIGHT_RANKS)
        assert "8 ranks" in taken([two, eight])
        assert "2 ranks" in taken([two, eight_further])
        assert "2 ranks" in taken([two], [eight])
        assert "8 ranks" in taken([eight_further], [two])
        # As many per expert: 64 tokens with top-12, 128 with top-6, 256 with top-3.
        top3 = layer_of(measured=(256,), num_topk=3, **TWO_RANKS)
        top12 = layer_of(measured=(64,), num_topk=12, **TWO_RANKS)
        assert "top-12" in taken([top3, top12, two])
        assert "8 ranks" in taken([top3, top12, two, eight])
        # 96 and 171 tokens are not equally far from 128; 96 and 170.67 would be.
        assert "96 tokens" in taken([layer_of(measured=(96, 171), **TWO_RANKS)])

    def test_what_does_not_fit_here_is_left_to_the_formula(self):
        """Of the layer itself that is a mistake in the table, of another there may be reasons: more
        experts take more shared memory."""
        entry = dataclasses.replace(entry_at(128), overrides=(("num_stages", 32),))
        own, other = (
            tuning_of_layers([layer_of(entry, measured=(128,), **key)]) for key in ({}, TWO_RANKS)
        )
        with pytest.raises(ValueError, match="tuning table: shared memory limit: num_stages 32"):
            formula_config(tuning=own)
        config = formula_config(tuning=other)
        assert config == formula_config()
        assert outcome(config).startswith("formula: shared memory limit: num_stages 32")
        assert "2 ranks x 128 experts" in outcome(config)

    def test_the_explanation_lists_the_layers_own_measurements_first(self):
        tables = [
            [layer_of(measured=(64, 128), **TWO_RANKS), layer_of(measured=(8,), num_experts=128)],
            [layer_of(entry_at(256), measured=(256,))],
        ]
        rows = formula_config(tuning=tuning_of_layers(*tables)).explain().tuning.rows
        assert [(row.num_ranks, row.num_experts, row.num_tokens) for row in rows] == [
            (4, 256, 256),
            (2, 128, 64),
            (2, 128, 128),
        ]
        assert [row.tokens_per_expert for row in rows] == [24.0, 6.0, 12.0]


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

    def test_the_pool_is_kept_and_unbounded_where_a_file_does_not_say(self):
        (table,) = tuning_of(entry_at(64), num_pool_tokens=768).tables
        document = json.loads(format_table(table))
        assert parse_table(json.dumps(document), "a table").layers == table.layers
        del document["layers"][0]["num_pool_tokens"]
        (layer,) = parse_table(json.dumps(document), "a table").layers
        assert layer.key == dataclasses.replace(table.layers[0].key, num_pool_tokens=None)
        document["layers"][0]["num_pool_tokens"] = "384"
        with pytest.raises(ValueError, match="num_pool_tokens"):
            parse_table(json.dumps(document), "a table")

    def test_shared_experts_are_kept_and_none_where_a_file_does_not_say(self):
        (table,) = tuning_of(entry_at(64), num_shared_experts=2).tables
        assert "and 2 shared" in table.layers[0].key.words()
        document = json.loads(format_table(table))
        assert parse_table(json.dumps(document), "a table").layers == table.layers
        del document["layers"][0]["num_shared_experts"]
        (layer,) = parse_table(json.dumps(document), "a table").layers
        assert layer.key == dataclasses.replace(table.layers[0].key, num_shared_experts=0)

    def test_the_format_of_weights_is_kept_and_mxfp4_where_a_file_does_not_say(self):
        (table,) = tuning_of(entry_at(64), weights="fp8").tables
        document = json.loads(format_table(table))
        assert parse_table(json.dumps(document), "a table") == table
        del document["layers"][0]["weights"]
        (layer,) = parse_table(json.dumps(document), "a table").layers
        assert layer.key == dataclasses.replace(table.layers[0].key, weights="mxfp4")
        document["layers"][0]["weights"] = "nvfp3"
        with pytest.raises(ValueError, match="tuning table, a table: weights must be one of mxfp4"):
            parse_table(json.dumps(document), "a table")

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda d: d.pop("schema"), "schema is missing"),
            (lambda d: d.update(schema=2), "schema must be 1; got 2: .*deep-moe tune"),
            (lambda d: d.update(layers={}), "layers must be a list"),
            (lambda d: d["layers"][0].pop("device"), "device is missing"),
            (
                lambda d: d["layers"][0].update(num_sms="132"),
                "num_sms must be an int of 32 bits; got '132'",
            ),
            (lambda d: d["layers"][0].update(num_topk=0), r"must be positive; got {'num_topk': 0}"),
            (lambda d: d["layers"][0].update(num_experts=255), r"multiple of num_ranks \(4\)"),
            (lambda d: d["layers"][0].update(measured_tokens=[0]), "must be positive ints"),
            (lambda d: d["layers"][0].update(measured_tokens=[1]), r"of measured_tokens \[1\]"),
            (lambda d: d["layers"][0]["entries"][0].update(overrides={}), "overrides must set"),
            (
                lambda d: d["layers"][0]["entries"][0].update(overrides={"num_sms": 64}),
                "overrides must set fields of `formula`",
            ),
            (
                lambda d: d["layers"][0]["entries"][0]["overrides"].update(block_m=True),
                "block_m must be an int of 32 bits; got True",
            ),
            (lambda d: d["layers"][0]["entries"][0].update(us="9"), "us must be a finite number"),
            (lambda d: d["layers"][0]["entries"][0].update(us=10**400), "us must be a finite numb"),
            (
                lambda d: d["layers"][0]["entries"][0].update(formula_us=float("inf")),
                "formula_us must be a finite number; got inf",
            ),
            (
                lambda d: d["layers"][0]["entries"][0].update(us=float("nan")),
                "us must be a finite number; got nan",
            ),
            (lambda d: d["layers"][0].update(num_topk=10**400), "num_topk must be an int of 32"),
            (lambda d: d["layers"][0].update(hidden=2**31), "hidden must be an int of 32 bits"),
            (
                lambda d: d["layers"][0].update(measured_tokens=[10**400]),
                "measured_tokens must be positive ints",
            ),
            (lambda d: d["layers"][0].update(measured_tokens=[True]), "must be positive ints"),
            (
                lambda d: d["layers"][0]["entries"][0].update(date="\x1b[2J"),
                "date must be a string of at most 200 printable characters",
            ),
            (lambda d: d["layers"][0]["entries"][0].update(date="[/]"), r"got '\[/\]'"),
            (
                lambda d: d["layers"][0]["entries"][0].update(commit="\ud800"),
                "commit must be a string of at most 200 printable",
            ),
            (lambda d: d["layers"][0].update(device="x" * 10**6), "device must be a string of"),
            (lambda d: d["layers"][0].update(device=nested_list(500)), "device must be a string"),
            (lambda d: d.update(layers=[nested_list(500)]), "device is missing in"),
            (
                lambda d: d["layers"][0]["entries"][0]["formula"].update({"\x1b" * 999: 1}),
                "overrides and formula must have names of fields",
            ),
            (lambda d: d["layers"][0]["entries"][0].update(us=111), "us must be positive and belo"),
        ],
    )
    def test_what_is_wrong_with_a_file_is_said(self, damage, message):
        document = json.loads(format_table(tuning_of(entry_at(128)).tables[0]))
        damage(document)
        with pytest.raises(ValueError, match=rf"tuning table, my\.json: .*{message}") as refused:
            parse_table(json.dumps(document), "my.json")
        assert len(str(refused.value)) < 400

    @pytest.mark.parametrize(
        "text", ["{", "[" * 200_000, b"\xff\xfe\xfa", "1" * 5000, '{"schema": 1e999999', ""]
    )
    def test_no_json_at_all(self, text: str | bytes):
        with pytest.raises(ValueError, match=r"tuning table, my\.json: not JSON") as refused:
            parse_table(text, "my.json")
        assert len(str(refused.value)) < 400

    def test_what_is_no_file_of_a_table_s_size_is_refused(self, tmp_path, monkeypatch):
        pipe, large = tmp_path / "pipe", tmp_path / "large"
        os.mkfifo(pipe)
        large.write_text(" " * 1000)
        monkeypatch.setattr("deep_moe.heuristics.tuning.MAX_TABLE_BYTES", 999)
        for path, words in (
            (pipe, "not a file"),
            (Path("/dev/zero"), "not a file"),
            (tmp_path, "not a file|cannot be read"),
            (large, "more than 999 bytes"),
            (large / "below", "cannot be read: Not a directory"),
        ):
            with pytest.raises(ValueError, match=rf"tuning table, {path}: {words}"):
                read_table(path)

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


@pytest.mark.parametrize("arch", TARGETS)
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
    assert num_accepted >= 3


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
