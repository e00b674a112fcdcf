"""Which kernels a deployment needs, and that they are built once."""

from itertools import pairwise

import pytest

from deep_moe.fused.deployment import deployment_configs
from deep_moe.heuristics import PRESETS, choose_config, preset_shape


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("num_max_tokens", [1, 7, 700])
def test_every_number_of_tokens_is_in_the_range_of_its_config(model: str, num_max_tokens: int):
    shape = preset_shape(model, num_ranks=8, num_max_tokens_per_rank=num_max_tokens)
    found = deployment_configs(lambda n: choose_config(shape, n), num_max_tokens)
    for first, last, config in found:
        for num_tokens in range(first, last + 1):
            assert choose_config(shape, num_tokens) == config
    assert [last for _, last, _ in found[:-1]] == [first - 1 for first, _, _ in found[1:]]
    assert (found[0][0], found[-1][1]) == (0, num_max_tokens)


def test_neighbouring_configs_differ():
    shape = preset_shape("deepseek-v3", num_ranks=8, num_max_tokens_per_rank=512)
    found = deployment_configs(lambda n: choose_config(shape, n), 512)
    assert all(one != other for (_, _, one), (_, _, other) in pairwise(found))
    assert len(found) > 3
