"""Everything around the tensor cores: tokens reach their experts' pools, contributions come back,
and the control words are ready for the next call.

In place of the two linear layers, the epilogue warps of the test kernel send back each pool token's
bytes times its routing weight, so that the result depends on every byte that dispatch moves but the
scales, which are compared in the pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deep_moe.jit.status import site_text
from deep_moe.targets import MegaMoEConfig
from tests.everyday import parametrize

SECOND = 1_000_000_000

KERNEL = r"""
#include <deep_moe/combine/combine.cuh>
#include <deep_moe/dispatch/dispatch.cuh>
#include <deep_moe/experts/block_walk.cuh>

using namespace deep_moe;

struct ScalesBesideTokens {
    __device__ void store_scales(const SymmBuffer<Config>& local, const SymmBuffer<Config>& source,
                                 const PulledToken& token) const {
        for (uint32_t i = ptx::lane_idx(); i < Config::hidden / 128; i += warp_size) {
            *local.l1_token_sf(i, token.pool_token_idx) =
                source.input_x_sf(token.source.token_idx)[i];
        }
    }
    __device__ void rewrite_token(const PulledToken&, uint32_t) const {}
};

// A pool block's tokens, as soon as all have arrived, each to where it came from.
__device__ bool send_back(const RankBuffers<Config>& buffers, const Block& block, uint32_t warp_idx,
                          Waiter& waiter) {
    const SymmBuffer<Config> local = buffers.local();
    const bool arrived = waiter.warp_until(
        WaitSite::l1_block_arrival, block.num_valid_rows,
        [&] { return ptx::ld_acquire_gpu(local.l1_arrival_count(block.pool_block_idx)); });
    if (!arrived) return false;
    for (uint32_t row = warp_idx; row < block.num_valid_rows; row += Config::num_epilogue_warps) {
        const uint32_t pool_token_idx = block.pool_block_idx * Config::block_m + row;
        const TokenSource source = *local.token_src_metadata(pool_token_idx);
        const float weight = *local.l1_topk_weights(pool_token_idx);
        const uint8_t* token = local.l1_tokens(pool_token_idx);
        uint16_t* row_out =
            buffers.of(source.rank_idx).combine(source.topk_idx, source.token_idx);
        for (uint32_t i = ptx::lane_idx(); i < Config::hidden; i += warp_size) {
            const float value = static_cast<float>(token[i]) * weight;
            row_out[i] = static_cast<uint16_t>(ptx::cvt_rn_bf16x2_f32(0, value));
        }
    }
    __syncwarp();
    return true;
}

__device__ void compute(const KernelArgs& args, uint32_t warp_idx, Waiter& waiter) {
    const RankBuffers<Config> buffers(args);
    ExpertCounts<Config> counts;
    if (!counts.fetch(args, buffers.local(), waiter)) return;
    BlockWalk<Config> walk(counts, blockIdx.x);
    uint32_t pair_idx = blockIdx.x / Config::cluster_size;
    for (Block block; walk.find(block);) {
        walk.go_to(pair_idx += Config::num_sms / Config::cluster_size);
        if (block.phase == Phase::linear1 && block.n_block_idx == 0 &&
            !send_back(buffers, block, warp_idx, waiter)) {
            return;
        }
    }
}

extern "C" __global__ void __launch_bounds__(Config::num_threads, 1)
kernel(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const uint32_t shared_memory = ptx::shared_address(shared_bytes);
    const uint32_t warp_idx = ptx::warp_idx();
    if (threadIdx.x < Config::num_dispatch_warps) {
        ptx::mbarrier_init(shared_memory + Config::Smem::pull_barriers_offset + 8 * threadIdx.x, 1);
    }
    if (threadIdx.x < 2 * Config::num_epilogue_warps) {
        ptx::mbarrier_init(shared_memory + Config::Smem::combine_barriers_offset + 8 * threadIdx.x,
                           1);
    }
    __syncthreads();
    constexpr uint32_t first_epilogue = Config::num_dispatch_warps + 4;
    if (warp_idx < Config::num_dispatch_warps) {
        dispatch<Config, ScalesBesideTokens>(args, shared_memory, [](const auto&...) {});
    } else {
        Waiter waiter(args);
        if (warp_idx >= first_epilogue) compute(args, warp_idx - first_epilogue, waiter);
        sync_compute_done<Config>(waiter);
        if (warp_idx >= first_epilogue) {
            combine<Config>(args, shared_memory, warp_idx - first_epilogue, waiter);
        }
    }
}
"""


def bf16(values: np.ndarray) -> np.ndarray:
    """FP32 rounded to BF16, as bits."""
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def bf16_as_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Call:
    """One call's inputs on all ranks, and what must come of them."""

    def __init__(self, ranks: Any, num_tokens: list[int], generator: np.random.Generator) -> None:
        self.ranks = ranks
        self.config = ranks.config
        self.num_tokens = num_tokens
        for rank in range(self.config.num_ranks):
            x = ranks.segment(rank, "input_x")
            x[:] = generator.integers(0, 256, x.shape)
            sf = ranks.segment(rank, "input_x_sf")
            sf[:] = generator.integers(0, 2**32, sf.shape)
            idx = ranks.segment(rank, "input_topk_idx")
            idx[:] = generator.integers(0, self.config.num_experts, idx.shape)
            weights = ranks.segment(rank, "input_topk_weights")
            weights[:] = generator.random(weights.shape)
            ranks.output(rank, np.uint16, num_tokens[rank], self.config.hidden)[:] = 0xFFFF

    def run(self, arch: str, *, kernel: str = KERNEL, **options: Any) -> None:
        self.ranks.run(
            kernel,
            arch=arch,
            num_threads=self.config.num_threads,
            shared_bytes=self.config.smem_bytes,
            num_tokens=self.num_tokens,
            **options,
        )

    def routed(self) -> dict[int, set[tuple[int, int, int]]]:
        """Which (rank, token, slot) each expert must receive."""
        slots: dict[int, set[tuple[int, int, int]]] = {
            expert: set() for expert in range(self.config.num_experts)
        }
        for rank, num_tokens in enumerate(self.num_tokens):
            idx = self.ranks.segment(rank, "input_topk_idx")[:num_tokens]
            for (token, slot), expert in np.ndenumerate(idx):
                if int(expert) in slots:
                    slots[int(expert)].add((rank, token, slot))
        return slots

    def check_results(self) -> None:
        for rank, num_tokens in enumerate(self.num_tokens):
            assert self.ranks.statuses[rank].code == 0
            y = self.ranks.output(rank, np.uint16, num_tokens, self.config.hidden)
            np.testing.assert_array_equal(y, self.expected_y(rank))
            assert not self.ranks.zeroed_control(rank).any()

    def expected_y(self, rank: int) -> np.ndarray:
        num_tokens = self.num_tokens[rank]
        x = self.ranks.segment(rank, "input_x")[:num_tokens].astype(np.float32)
        idx = self.ranks.segment(rank, "input_topk_idx")[:num_tokens]
        weights = self.ranks.segment(rank, "input_topk_weights")[:num_tokens]
        total = np.zeros_like(x)
        for slot in range(self.config.num_topk):
            valid = (idx[:, slot] >= 0) & (idx[:, slot] < self.config.num_experts)
            part = bf16_as_float(bf16(x * weights[:, slot, None]))
            total[valid] += part[valid]
        return bf16(total)

    def check_pools(self) -> None:
        """Each pool holds its experts' tokens: each once, with its own bytes, scales and weight."""
        per_rank = self.config.num_experts_per_rank
        for expert, expected in self.routed().items():
            rank = expert // per_rank
            if expert % per_rank == 0:
                row = 0
            pool = {
                name: self.ranks.segment(rank, name)
                for name in ("token_src_metadata", "l1_tokens", "l1_token_sf", "l1_topk_weights")
            }
            found = [tuple(pool["token_src_metadata"][row + i]) for i in range(len(expected))]
            assert len(set(found)) == len(found)
            assert set(found) == expected
            for i, (source, token, slot) in enumerate(found):
                inputs = self.ranks
                np.testing.assert_array_equal(
                    pool["l1_tokens"][row + i], inputs.segment(source, "input_x")[token]
                )
                np.testing.assert_array_equal(
                    pool["l1_token_sf"][:, row + i], inputs.segment(source, "input_x_sf")[token]
                )
                weights = inputs.segment(source, "input_topk_weights")
                assert pool["l1_topk_weights"][row + i] == weights[token, slot]
            row += -(-len(expected) // self.config.block_m) * self.config.block_m


def make_call(
    make_config: Any, make_ranks: Any, num_tokens: list[int], *, seed: int = 0, **shape: Any
) -> Call:
    config = make_config(max(*num_tokens, 1), num_ranks=len(num_tokens), **shape)
    ranks = make_ranks(config, output_bytes=2 * max(num_tokens) * config.hidden + 16, seed=seed)
    return Call(ranks, num_tokens, np.random.default_rng(seed))


def test_tokens_reach_their_experts_and_come_back(
    arch: str, make_config: Any, make_ranks: Any
) -> None:
    call = make_call(make_config, make_ranks, [5, 8], num_experts=6, num_topk=3, hidden=384)
    call.run(arch)
    call.check_results()
    call.check_pools()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"num_tokens": [7], "num_experts": 3, "num_topk": 1}, id="one rank"),
        pytest.param({"num_tokens": [0, 9, 0], "num_experts": 6}, id="two idle ranks"),
        pytest.param({"num_tokens": [0, 0], "num_experts": 4}, id="no tokens at all"),
        pytest.param({"num_tokens": [3, 2], "num_experts": 80, "num_topk": 32}, id="topk 32"),
        pytest.param({"num_tokens": [9, 40], "num_experts": 2, "num_sms": 4}, id="several blocks"),
        pytest.param({"num_tokens": [150, 100], "hidden": 128}, id="many tokens and few"),
        pytest.param({"num_tokens": [3], "hidden": 7168}, id="several chunks"),
        pytest.param({"num_tokens": [2], "hidden": 16384, "num_topk": 4}, id="widest"),
        pytest.param(
            {"num_tokens": [3], "hidden": 128, "num_experts": 140}, id="140 local experts"
        ),
    ],
)
@parametrize("seed", [0, 1], everyday=[0])
def test_shapes_at_the_edges(
    make_config: Any, make_ranks: Any, shape: dict[str, Any], seed: int
) -> None:
    call = make_call(make_config, make_ranks, seed=seed, **shape)
    call.run("sm_100a")
    call.check_results()
    call.check_pools()


def test_more_ranks_than_lanes(make_config: Any, make_ranks: Any) -> None:
    call = make_call(make_config, make_ranks, [2] * 33, num_experts=33, num_topk=3)
    call.run("sm_100a")
    call.check_results()
    call.check_pools()


def test_calls_follow_each_other_on_the_same_buffers(make_config: Any, make_ranks: Any) -> None:
    call = make_call(make_config, make_ranks, [6, 8], num_experts=4)
    received = np.zeros((2, 2), np.int32)
    for seed in range(5):
        num_tokens = [(6, 8), (0, 3), (1, 0), (0, 0), (6, 2)][seed]
        call = Call(call.ranks, list(num_tokens), np.random.default_rng(seed))
        call.run("sm_100a")
        call.check_results()
        call.check_pools()
        received += np.array([len(slots) for slots in call.routed().values()]).reshape(2, 2)
        assert [stats.tolist() for stats in call.ranks.stats] == received.tolist()


NEXT_INPUTS = """
#include <deep_moe/layout/rank_buffers.cuh>

using namespace deep_moe;

// What a caller does between two calls: other tokens, other routing.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    const SymmBuffer<Config> local = RankBuffers<Config>(args).local();
    const uint32_t thread_idx = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t num_threads = gridDim.x * blockDim.x;
    const uint32_t num_tokens = Config::num_max_tokens_per_rank;
    for (uint32_t i = thread_idx; i < num_tokens * Config::hidden; i += num_threads) {
        ++local.input_x(0)[i];
    }
    for (uint32_t i = thread_idx; i < num_tokens * Config::num_topk; i += num_threads) {
        int64_t* const expert_idx = local.input_topk_idx(i);
        *expert_idx = (*expert_idx + 1) % Config::num_experts;
    }
}
"""


# Of each rank, call by call. In one CTA sends for its rank, or, where it has many tokens, all do.
FEW_TOKENS = [(6, 8, 1), (0, 3, 0), (8, 8, 8), (2, 0, 0), (0, 0, 0), (5, 8, 2)]
MANY_TOKENS = [(130, 2, 1), (3, 140, 0), (130, 129, 135), (0, 3, 131)]


@pytest.mark.parametrize("schedule", ["random", "slow_rank", "round_robin"])
@parametrize(
    ("counts", "seed"),
    [*((FEW_TOKENS, seed) for seed in range(3)), *((MANY_TOKENS, seed) for seed in range(3))],
    everyday=[*((FEW_TOKENS, seed) for seed in range(3)), (MANY_TOKENS, 0)],
)
def test_ranks_run_ahead_of_each_other(
    make_config: Any,
    make_ranks: Any,
    make_queued: Any,
    schedule: str,
    counts: list[tuple[int, ...]],
    seed: int,
) -> None:
    """A rank begins its next call, with other inputs, as soon as its last one has ended."""
    most = max(map(max, counts))
    config = make_config(most, num_ranks=3, num_experts=6, hidden=128)
    y_bytes = most * 2 * config.hidden
    ranks = make_ranks(config, output_bytes=len(counts) * y_bytes, seed=seed)
    call = Call(ranks, [most, most, most], np.random.default_rng(seed))
    queues: list[list[Any]] = [[], [], []]
    for rank, queue in enumerate(queues):
        ranks.outputs[rank][:] = 0xFF
        for i, num_tokens in enumerate(counts):
            queue.append(
                make_queued(
                    KERNEL, config.num_threads, config.smem_bytes, num_tokens[rank], i * y_bytes
                )
            )
            queue.append(make_queued(NEXT_INPUTS, num_threads=64))
    ranks.run_queues(queues, schedule=schedule)

    received = np.zeros((3, 2), np.int32)
    for i in reversed(range(len(counts))):
        for rank in range(3):  # back to what they were
            ranks.segment(rank, "input_x")[:] -= 1
            idx = ranks.segment(rank, "input_topk_idx")
            idx[:] = (idx + config.num_experts - 1) % config.num_experts
        call.num_tokens = list(counts[i])
        for rank, num_tokens in enumerate(counts[i]):
            y = ranks.output(rank, np.uint16, len(counts), most, 128)[i, :num_tokens]
            np.testing.assert_array_equal(y, call.expected_y(rank))
        received += np.array([len(slots) for slots in call.routed().values()]).reshape(3, 2)
    for rank in range(3):
        assert ranks.statuses[rank].code == 0
        assert not ranks.zeroed_control(rank).any()
        assert ranks.segment(rank, "rank_barrier_counter") == 2 * len(counts)
        assert ranks.stats[rank].tolist() == received[rank].tolist()


def slow_pull(ns: int) -> str:
    """The kernel, whose warps take so long for a token that they pull."""
    own = "__device__ void rewrite_token(const PulledToken&, uint32_t) const {"
    assert own in KERNEL
    return KERNEL.replace(
        own,
        f"""{own}
        const uint64_t start = ptx::globaltimer();
        while (ptx::globaltimer() - start < {ns}) ptx::nanosleep(1'000'000);""",
    )


@parametrize(("num_tokens", "seed"), [(24, 0), (24, 1), (280, 2)], everyday=[(24, 0), (24, 1)])
def test_calls_behind_one_that_gave_up_leave_the_other_ranks_alone(
    make_config: Any, make_ranks: Any, make_queued: Any, num_tokens: int, seed: int
) -> None:
    """Rank 0 has done its part of a call and waits for the others when its time is up. Its later
    calls are queued already. Rank 1 is only late: it still pulls the tokens of the first one."""
    config = make_config(num_tokens, num_ranks=2, num_experts=2, num_topk=1, hidden=128, num_sms=2)
    y_bytes = num_tokens * 2 * config.hidden
    ranks = make_ranks(config, output_bytes=3 * y_bytes, seed=seed)
    call = Call(ranks, [num_tokens, num_tokens], np.random.default_rng(seed))
    # So many that those of two calls would take more than one rank's share of the lists.
    ranks.segment(0, "input_topk_idx")[:] = 1

    def queue(rank: int, *sources: str, timeout_ns: int) -> list[Any]:
        ranks.outputs[rank][:] = 0xFF
        return [
            make_queued(
                source, config.num_threads, config.smem_bytes, num_tokens, i * y_bytes, timeout_ns
            )
            for i, source in enumerate(sources)
        ]

    early = queue(0, KERNEL, KERNEL, KERNEL, timeout_ns=SECOND)
    late = queue(1, slow_pull(48 * SECOND // num_tokens), KERNEL, timeout_ns=20 * SECOND)
    ranks.run_queues([early, late])

    first, second = ranks.statuses
    assert site_text(first.site) == "rank barrier before combine"
    assert (first.code, list(first.missing_ranks)) == (1, [0b10, 0])
    # Rank 0's later calls have left the lists alone, but its caller may have written new inputs.
    np.testing.assert_array_equal(
        ranks.output(1, np.uint16, 3, num_tokens, config.hidden)[0], call.expected_y(1)
    )
    assert site_text(second.site) == "rank barrier after clean-up"
    assert (second.code, list(second.missing_ranks)) == (1, [0b1, 0])
    for rank in range(2):
        ys = ranks.output(rank, np.uint16, 3, num_tokens, config.hidden)
        assert (ys[rank:] == 0xFFFF).all()
        assert ranks.segment(rank, "grid_gather_counter") >> 31 == 1


def test_slots_out_of_range_are_ignored_and_repeated_experts_count(
    make_config: Any, make_ranks: Any
) -> None:
    call = make_call(make_config, make_ranks, [4, 4], num_experts=4, num_topk=3)
    idx = call.ranks.segment(0, "input_topk_idx")
    idx[0] = [-1, -1, -1]
    idx[1] = [4, 2, 2**40]
    idx[2] = [3, 3, 3]
    idx[3] = [-(2**62), 1, 1 << 32]
    call.run("sm_100a")
    call.check_results()
    call.check_pools()
    y = call.ranks.output(0, np.uint16, 4, call.config.hidden)
    assert not y[0].any()


@pytest.mark.parametrize("bad", [-1, 4, 1 << 32, -(2**62)])
@pytest.mark.parametrize("slots", [slice(None), slice(2, 3)])
def test_slots_out_of_range_in_the_last_token_alone(
    make_config: Any, make_ranks: Any, bad: int, slots: slice
) -> None:
    call = make_call(make_config, make_ranks, [90, 3], num_experts=4, num_topk=3)
    for rank, num_tokens in enumerate(call.num_tokens):
        call.ranks.segment(rank, "input_topk_idx")[num_tokens - 1, slots] = bad
    call.run("sm_100a")
    call.check_results()
    call.check_pools()


def test_an_overfull_pool_is_reported_and_nothing_is_written(
    make_config: Any, make_ranks: Any
) -> None:
    """Everything that ranks can send fits, so the kernel is told of a pool that is too small."""

    def make_smaller(*arguments: Any, **options: Any) -> MegaMoEConfig:
        return replace(make_config(*arguments, **options), num_pool_tokens=768)

    call = make_call(
        make_smaller,
        make_ranks,
        [200, 200],
        num_experts=2,
        num_topk=2,
        hidden=128,
        overrides={"block_m": 16},
    )
    for rank in range(2):
        call.ranks.segment(rank, "input_topk_idx")[:] = 0
    call.run("sm_100a", timeout_ns=SECOND)
    owner, other = call.ranks.statuses
    assert (owner.code, owner.expected, owner.seen) == (2, 768, 800)
    for name in ("l1_tokens", "l1_token_sf", "l1_topk_weights", "token_src_metadata"):
        assert not call.ranks.segment(0, name).any()
    # The owner does not go on to the next rank barrier, so that the other rank hears of it.
    assert (other.code, list(other.missing_ranks)) == (1, [0b1, 0])
    assert site_text(other.site) == "rank barrier before combine"


def test_a_rank_that_never_starts_is_named_and_the_others_stop(
    make_config: Any, make_ranks: Any
) -> None:
    call = make_call(make_config, make_ranks, [4, 4, 4], num_experts=6)
    call.run("sm_100a", only=[0, 2], timeout_ns=SECOND)
    for rank in (0, 2):
        status = call.ranks.statuses[rank]
        assert status.code == 1
        assert site_text(status.site) == "token counts of a local expert from all ranks"
        assert (status.peer_rank, list(status.missing_ranks)) == (1, [0b10, 0])
        # Nothing came out of combine.
        assert (call.ranks.output(rank, np.uint16, 4, call.config.hidden) == 0xFFFF).all()


def compute_that_gives_up(condition: str) -> str:
    """The kernel, where a lane of each epilogue warp for which `condition` holds gives up."""
    gives_up = f"""
    if ({condition} && ptx::lane_idx() == 5) {{
        waiter.fail(WaitCode::timeout, WaitSite::accumulator_full, 1, 0);
    }}
    if (!waiter.warp_agrees(!waiter.aborted())) return;
"""
    signature = (
        "__device__ void compute(const KernelArgs& args, uint32_t warp_idx, Waiter& waiter) {"
    )
    assert signature in KERNEL
    return KERNEL.replace(signature, signature + gives_up)


def test_a_warp_that_gives_up_stops_its_rank_and_the_other_ranks_hear_of_it(
    make_config: Any, make_ranks: Any
) -> None:
    call = make_call(make_config, make_ranks, [4, 4], num_experts=4, num_sms=4)
    kernel = compute_that_gives_up("args.rank_idx == 0 && blockIdx.x == 1 && warp_idx == 2")
    call.run("sm_100a", kernel=kernel, timeout_ns=SECOND)
    first, second = call.ranks.statuses
    assert (first.code, first.cta, first.warp) == (1, 1, 10)
    assert site_text(first.site) == "a complete accumulator, to read"
    assert (second.code, list(second.missing_ranks)) == (1, [0b1, 0])
    assert site_text(second.site) == "rank barrier before combine"
    for rank in range(2):
        assert (call.ranks.output(rank, np.uint16, 4, call.config.hidden) == 0xFFFF).all()


def test_calls_behind_one_that_gave_up_compute_nothing(
    make_config: Any, make_ranks: Any, make_queued: Any
) -> None:
    """Rank 0 gives up where it would compute. What it has pulled is there still, and counted."""
    config = make_config(4, num_ranks=2, num_experts=4)
    ranks = make_ranks(config, output_bytes=4 * 2 * config.hidden)
    Call(ranks, [4, 4], np.random.default_rng(0))
    for rank in range(2):
        ranks.segment(rank, "input_topk_idx")[:] = [0, 1]  # rank 0's experts
    queues = [
        [
            make_queued(source, config.num_threads, config.smem_bytes, 4, timeout_ns=SECOND)
            for source in (compute_that_gives_up("args.rank_idx == 0"), KERNEL)
        ]
        for _ in range(2)
    ]
    ranks.run_queues(queues)
    for rank in range(2):
        assert ranks.statuses[rank].code == 1
        assert not ranks.segment(rank, "combine").any()
