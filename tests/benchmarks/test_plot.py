"""What the plots are drawn from."""

from benchmarks.plot import curves


def report(model: str, tokens: int, us: float, **others: float) -> dict:
    result = {"model": model, "tokens_per_rank": tokens, "us": us, "floor_us": us / 2}
    result |= {name: {"us": other} for name, other in others.items()}
    return {"results": [result]}


def test_paths_are_gathered_over_reports_and_the_first_report_counts():
    found = curves(
        [report("a", 1, 10.0, unfused=30.0), report("a", 1, 11.0, peer=20.0), report("b", 8, 5.0)]
    )
    assert found["a"] == {
        "fused": {1: 10.0},
        "floor": {1: 5.0},
        "unfused": {1: 30.0},
        "peer": {1: 20.0},
    }
    assert found["b"]["fused"] == {8: 5.0}
