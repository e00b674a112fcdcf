"""The benchmark of the weight transformation runs and says what it measured."""

import json

from benchmarks import weight_transform


def test_it_prints_json_with_all_targets(capsys):
    sizes = ["--experts", "2", "--hidden", "256", "--intermediate", "128"]
    weight_transform.main(["--device", "cpu", "--repeats", "2", *sizes])
    report = json.loads(capsys.readouterr().out)
    # (2 * 128 * 256 + 256 * 128) weights of half a byte, and a scale byte for 32 of them
    assert report["bytes"] == 2 * (98304 // 2 + 98304 // 32)
    assert {"sm_90a", "sm_100a"} <= set(report["targets"])
    for target in report["targets"].values():
        for times in (target["best"], target["median"]):
            assert times["seconds"] > 0
            assert times["seconds_by_expert"] > 0
        assert target["best"]["seconds"] <= target["median"]["seconds"]
