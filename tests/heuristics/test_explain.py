"""The explanation: complete, true to the config, and plain JSON."""

import dataclasses
import json

import pytest

from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config

SHAPE = MoEShape(8, 256, 8, 7168, 2048, 1024)


def test_every_field_has_a_reason():
    config = choose_config(SHAPE, 1024)
    fields = {field.name: field for field in config.explain().fields}
    assert list(fields) == list(config.to_dict())
    for name, value in config.to_dict().items():
        assert fields[name].value == value
        assert fields[name].reason


def test_reasons_say_what_the_caller_set():
    config = choose_config(SHAPE, 1024, overrides={"block_m": 64, "num_stages": 3})
    reasons = {field.name: field.reason for field in config.explain().fields}
    assert reasons["block_m"] == "set by the caller"
    assert reasons["num_stages"] == "set by the caller"
    assert reasons["store_block_m"] == "goes with block_m 64"
    free = {field.name: field.reason for field in choose_config(SHAPE, 1024).explain().fields}
    assert free["block_m"].startswith("256 tokens per expert expected: the least")


def test_maps_add_up_to_the_sizes_beside_them():
    explanation = choose_config(SHAPE, 100).explain()
    assert sum(row.size for row in explanation.smem_map) == explanation.smem_bytes
    assert sum(row.size for row in explanation.tmem_map) == explanation.tmem_columns
    assert sum(row.size for row in explanation.symm_buffer_map) == explanation.symm_buffer_bytes


def test_schedule_of_the_worked_case():
    config = choose_config(SHAPE, 1024, overrides={"block_m": 128})
    schedule = config.explain().schedule
    assert schedule.expected_tokens_per_expert == 256
    assert schedule.num_m_blocks_per_expert == 2
    assert schedule.num_routed_m_blocks == 32 * 2
    assert schedule.num_l1_blocks_per_turn == 32
    assert schedule.num_l2_blocks_per_turn == 56
    assert schedule.num_blocks == 64 * (32 + 56)
    assert schedule.num_rounds == 39  # 5632 blocks on 148 CTAs
    assert schedule.last_round_occupancy == pytest.approx((5632 % 148) / 148)


def test_an_odd_number_of_blocks_leaves_the_last_pair_half_empty():
    config = choose_config(MoEShape(1, 2, 1, 384, 128, 4), 4, num_sms=4)
    schedule = config.explain().schedule
    assert (schedule.num_l1_blocks_per_turn, schedule.num_l2_blocks_per_turn) == (4, 6)
    assert schedule.num_rounds == 3  # 2 experts * (1 + 2) pairs on 2 clusters
    assert schedule.last_round_occupancy == 1.0


def test_a_full_last_round_is_not_an_empty_one():
    config = choose_config(SHAPE, 1024, num_sms=128, overrides={"block_m": 128})
    assert config.explain().schedule.last_round_occupancy == 1.0


def test_no_tokens_no_blocks():
    schedule = choose_config(SHAPE, 0).explain().schedule
    assert (schedule.num_blocks, schedule.last_round_occupancy) == (0, 0.0)


@pytest.mark.parametrize("clamp", [None, 10.0])
def test_dict_is_plain_json(clamp):
    explanation = choose_config(SHAPE, 7, activation_clamp=clamp).explain()
    plain = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
    values = {field["name"]: field["value"] for field in plain["fields"]}
    assert values["activation"] == "swiglu"
    assert values["activation_clamp"] == clamp
    assert values["num_experts"] == 256
    assert plain["smem_map"][0]["name"] == "expert_count"
    assert plain["schedule"]["num_tokens"] == 7


def test_a_config_from_elsewhere_cannot_be_explained():
    config = dataclasses.replace(choose_config(SHAPE, 7), decision=None)
    with pytest.raises(ValueError, match="config must come from choose_config"):
        config.explain()
