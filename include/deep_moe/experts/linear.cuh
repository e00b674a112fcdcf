// The two linear layers as data. Every difference between Linear1 and Linear2 is here and nowhere
// else. `Linear` is for code that knows the phase at compile time, `LinearOf` for code that has it
// in a register.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe {

template <class Config, Phase phase>
struct Linear;

// hidden -> gate and up, interleaved: 2 * intermediate_hidden rows of weights. For an activation
// without a gate, up alone: intermediate_hidden rows.
template <class Config>
struct Linear<Config, Phase::linear1> {
    static constexpr uint32_t num_k_blocks = Config::num_l1_k_blocks;
    static constexpr uint32_t num_n_blocks = Config::num_l1_n_blocks;

    static constexpr TraceStep await_tokens_step = TraceStep::await_l1_tokens;
    static constexpr TraceStep load_step = TraceStep::load_l1;
    static constexpr TraceStep main_loop_step = TraceStep::l1_main_loop;
    static constexpr TraceStep epilogue_step = TraceStep::l1_epilogue;

    static __device__ auto& activations(const auto& args) { return args.l1_activations; }
    static __device__ auto& activation_sf(const auto& args) { return args.l1_activation_sf; }
    static __device__ auto& weights(const auto& args) { return args.l1_weights; }
    static __device__ auto& weight_sf(const auto& args) { return args.l1_weight_sf; }
    static __device__ auto& weight_blocks(const auto& args) { return args.l1_weight_blocks; }
    static __device__ auto& row_factors(const auto& args) { return args.l1_row_factors; }
    static __device__ auto& biases(const KernelArgs& args) { return args.l1_biases; }
};

// intermediate_hidden -> hidden.
template <class Config>
struct Linear<Config, Phase::linear2> {
    static constexpr uint32_t num_k_blocks = Config::num_l2_k_blocks;
    static constexpr uint32_t num_n_blocks = Config::num_l2_n_blocks;

    static constexpr TraceStep await_tokens_step = TraceStep::await_l2_tokens;
    static constexpr TraceStep load_step = TraceStep::load_l2;
    static constexpr TraceStep main_loop_step = TraceStep::l2_main_loop;
    static constexpr TraceStep epilogue_step = TraceStep::l2_epilogue;

    static __device__ auto& activations(const auto& args) { return args.l2_activations; }
    static __device__ auto& activation_sf(const auto& args) { return args.l2_activation_sf; }
    static __device__ auto& weights(const auto& args) { return args.l2_weights; }
    static __device__ auto& weight_sf(const auto& args) { return args.l2_weight_sf; }
    static __device__ auto& weight_blocks(const auto& args) { return args.l2_weight_blocks; }
    static __device__ auto& row_factors(const auto& args) { return args.l2_row_factors; }
    static __device__ auto& biases(const KernelArgs& args) { return args.l2_biases; }
};

template <class Config>
class LinearOf {
    using First = Linear<Config, Phase::linear1>;
    using Second = Linear<Config, Phase::linear2>;

 public:
    // Of the layer that has fewer.
    static constexpr uint32_t min_k_blocks = min(First::num_k_blocks, Second::num_k_blocks);

    __device__ explicit LinearOf(Phase phase) : is_first_(phase == Phase::linear1) {}

    __device__ uint32_t num_k_blocks() const {
        return is_first_ ? First::num_k_blocks : Second::num_k_blocks;
    }
    __device__ uint32_t num_n_blocks() const {
        return is_first_ ? First::num_n_blocks : Second::num_n_blocks;
    }
    // Clusters take n-blocks in pairs (block_walk.cuh).
    template <Phase phase>
    static constexpr uint32_t num_pairs =
        ceil_div(Linear<Config, phase>::num_n_blocks, Config::cluster_size);
    // Whether that is an n-block behind an odd last one.
    static constexpr bool has_idle_blocks =
        First::num_n_blocks % Config::cluster_size + Second::num_n_blocks % Config::cluster_size >
        0;
    __device__ bool is_idle(uint32_t n_block_idx) const {
        return has_idle_blocks && n_block_idx == num_n_blocks();
    }
    __device__ uint32_t num_n_block_pairs() const {
        return is_first_ ? num_pairs<Phase::linear1> : num_pairs<Phase::linear2>;
    }
    // Local expert and n-block as one number. A cluster's CTAs may have an n-block behind an odd
    // last one: where weights are found by this number, it takes those of the last.
    __device__ uint32_t weight_block_row(const Block& block) const {
        if constexpr (has_idle_blocks && Config::num_cluster_m_blocks > 1) {
            return block.expert_idx * num_n_blocks() + min(block.n_block_idx, num_n_blocks() - 1);
        }
        return block.expert_idx * align_up(num_n_blocks(), Config::cluster_size) +
               block.n_block_idx;
    }

    __device__ TraceStep await_tokens_step() const {
        return is_first_ ? First::await_tokens_step : Second::await_tokens_step;
    }
    __device__ TraceStep load_step() const {
        return is_first_ ? First::load_step : Second::load_step;
    }
    __device__ TraceStep main_loop_step() const {
        return is_first_ ? First::main_loop_step : Second::main_loop_step;
    }
    __device__ TraceStep epilogue_step() const {
        return is_first_ ? First::epilogue_step : Second::epilogue_step;
    }

    // On SM100 several maps, by how many tokens they bring.
    __device__ auto& activations(const auto& args) const {
        return is_first_ ? First::activations(args) : Second::activations(args);
    }
    __device__ const TensorMap& activation_sf(const auto& args) const {
        return is_first_ ? First::activation_sf(args) : Second::activation_sf(args);
    }
    __device__ const TensorMap& weights(const auto& args) const {
        return is_first_ ? First::weights(args) : Second::weights(args);
    }
    __device__ const TensorMap& weight_sf(const auto& args) const {
        return is_first_ ? First::weight_sf(args) : Second::weight_sf(args);
    }
    __device__ const void* weight_blocks(const auto& args) const {
        return is_first_ ? First::weight_blocks(args) : Second::weight_blocks(args);
    }
    __device__ const float* row_factors(const auto& args) const {
        return is_first_ ? First::row_factors(args) : Second::row_factors(args);
    }
    __device__ const float* biases(const KernelArgs& args) const {
        return is_first_ ? First::biases(args) : Second::biases(args);
    }

 private:
    bool is_first_;
};

}  // namespace deep_moe
