// A router's rule: a token's experts and their weights, from its logits. A warp has a token.
//
// Scores are float32; of a logit that is not a number it is 0, but in the third. Softmax adds up
// each lane's in their order and then the lanes' by halves, so that its bits do not depend on the
// number of tokens. Of equal choices the lower expert comes first. A choice that is not a number
// comes behind all others.
//
// Which lane has which logits, approximate functions, the order of sums and one factor for all
// weights are as in vLLM's kernels: those for powers of two and multiples of 64, and DeepSeek-V4's
// for the root of softplus. The bits are the same. The fast ones are as in SGLang's kernel: there
// choices of softmax are logits, a choice that is not a number is -1e30, and its score stays one.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

// Config::router_scoring.
inline constexpr uint32_t softmax_scoring = 0, sigmoid_scoring = 1, sqrt_softplus_scoring = 2,
                          tanh_sigmoid_scoring = 3, fast_softmax_scoring = 4,
                          fast_sigmoid_scoring = 5;

// Larger for larger values. NaN is 1; 0 is less than all of them.
__device__ __forceinline__ uint32_t choice_key(float value) {
    if (value != value) return 1;
    const uint32_t bits = __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Of a key that is neither NaN's nor 0.
__device__ __forceinline__ float value_of_key(uint32_t key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

template <class Config>
class TokenRouter {
    static constexpr uint32_t num_experts = Config::num_router_experts;
    static constexpr uint32_t logit_bytes = Config::has_bf16_logits ? 2 : 4;
    // Of logits that a lane loads at once: 16 bytes, or two where vLLM's kernel takes two.
    static constexpr bool is_power_of_two = (num_experts & (num_experts - 1)) == 0;
    static constexpr bool is_fast = Config::router_scoring == fast_softmax_scoring ||
                                    Config::router_scoring == fast_sigmoid_scoring;
    static constexpr uint32_t vector_size =
        is_fast || is_power_of_two || num_experts % 64 != 0 ? 16 / logit_bytes : 2;
    static constexpr uint32_t vector_words = vector_size * logit_bytes / 4;
    static constexpr uint32_t num_vectors = ceil_div(num_experts, warp_size* vector_size);
    static constexpr uint32_t num_values = num_vectors * vector_size;
    // Otherwise they are added up in the order of a token's slots.
    static constexpr bool adds_by_halves = Config::router_scoring == sqrt_softplus_scoring ||
                                           Config::router_scoring == tanh_sigmoid_scoring;
    static constexpr uint32_t group_size = num_experts / Config::num_expert_groups;
    static_assert(Config::num_expert_groups * group_size == num_experts, "groups must be equal");
    static_assert(Config::num_expert_groups <= warp_size, "a lane has a group's score");

 public:
    // logits: of the token. bias: of each expert, if Config::has_correction_bias. All 32 lanes.
    __device__ TokenRouter(const void* logits, const float* bias) {
        constexpr bool chooses_logits = Config::router_scoring == fast_softmax_scoring;
        load(logits);
        if constexpr (chooses_logits) make_keys(bias);
        make_scores();
        if constexpr (!chooses_logits) make_keys(bias);
        if constexpr (Config::num_chosen_groups < Config::num_expert_groups) drop_groups();
    }

    // A slot's expert, -1 if there is none left, and its weight: each lane gets those of the slot
    // of its own number. All 32 lanes.
    __device__ void choose(uint32_t num_topk, double scale, int64_t& expert, float& weight) {
        expert = -1;
        weight = 0.0f;
        float sum = 0.0f;
        for (uint32_t slot = 0; slot < num_topk; ++slot) {
            float score;
            const Choice best = take_best(score);
            if (best.key == 0) break;
            sum += score;
            if (ptx::lane_idx() == slot) {
                expert = best.expert;
                weight = score;
            }
        }
        if constexpr (adds_by_halves) sum = sum_by_halves(weight);
        if constexpr (is_fast) sum = sum_by_vectors(weight);
        const float divisor = sum > 0.0f ? sum : 1.0f;
        if constexpr (Config::router_scoring == tanh_sigmoid_scoring) {
            weight = static_cast<float>(weight * scale);
            if constexpr (Config::renormalizes) weight = __fdiv_rn(weight, divisor);
        } else if constexpr (is_fast) {
            if constexpr (Config::renormalizes) weight = ptx::div_full(weight, divisor);
            weight *= static_cast<float>(scale);
        } else {
            float factor = static_cast<float>(scale);
            if constexpr (Config::renormalizes) factor = quotient(factor, divisor);
            weight *= factor;
        }
    }

 private:
    struct Choice {
        uint32_t key, expert;
    };

    static __device__ float quotient(float a, float b) {
        if constexpr (Config::router_scoring == sqrt_softplus_scoring) {
            return ptx::div_full(a, b);
        } else {
            return __fdiv_rn(a, b);
        }
    }

    // Of all lanes' values.
    static __device__ float sum_by_halves(float value) {
#pragma unroll
        for (uint32_t distance = warp_size / 2; distance > 0; distance /= 2) {
            value += __shfl_xor_sync(full_warp, value, distance);  //~ halves_added
        }
        return value;
    }

    // Of as many slots as a lane has logits in a vector, by pairs; and then of these sums.
    static __device__ float sum_by_vectors(float value) {
#pragma unroll
        for (uint32_t distance = 1; distance < vector_size; distance *= 2) {
            value += __shfl_xor_sync(full_warp, value, distance);  //~ pairs_added
        }
#pragma unroll
        for (uint32_t distance = warp_size / 2; distance >= vector_size; distance /= 2) {
            value += __shfl_xor_sync(full_warp, value, distance);
        }
        return value;
    }

    // Of this lane's scores: in their order, or by pairs, pairs of pairs and so on.
    __device__ float sum_of_lane() const {
        if constexpr (!is_fast) {
            float sum = 0.0f;
#pragma unroll
            for (uint32_t i = 0; i < num_values; ++i) sum += scores_[i];
            return sum;
        } else {
            float sums[num_values];
#pragma unroll
            for (uint32_t i = 0; i < num_values; ++i) sums[i] = scores_[i];
#pragma unroll
            for (uint32_t distance = 1; distance < num_values; distance *= 2) {
#pragma unroll
                for (uint32_t i = 0; i + distance < num_values; i += 2 * distance) {
                    sums[i] += sums[i + distance];
                }
            }
            return sums[0];
        }
    }

    __device__ void load(const void* logits) {
#pragma unroll
        for (uint32_t vector = 0; vector < num_vectors; ++vector) {
            const uint32_t first = expert_idx(vector * vector_size);
            uint32_t words[vector_words];
            if constexpr (vector_words == 4 && num_experts % vector_size == 0) {
                const uint4 loaded = first < num_experts
                                         ? static_cast<const uint4*>(logits)[first / vector_size]
                                         : uint4{};
                words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
            } else {
#pragma unroll
                for (uint32_t word = 0; word < vector_words; ++word) {
                    words[word] = load_word(logits, first + word * (4 / logit_bytes));
                }
            }
#pragma unroll
            for (uint32_t j = 0; j < vector_size; ++j) {
                uint32_t bits = words[j * logit_bytes / 4];
                if constexpr (Config::has_bf16_logits) {
                    bits = j % 2 == 0 ? bits << 16 : bits & 0xffff0000u;
                }
                const uint32_t i = vector * vector_size + j;
                scores_[i] = expert_idx(i) < num_experts ? __uint_as_float(bits)
                                                         : __uint_as_float(0xff800000u);
            }
        }
    }

    // One logit, or two in BF16, of which the second may not exist.
    static __device__ uint32_t load_word(const void* logits, uint32_t expert) {
        if constexpr (Config::has_bf16_logits) {
            const auto* halves = static_cast<const uint16_t*>(logits);
            const uint32_t low = expert < num_experts ? halves[expert] : 0;
            const uint32_t high = expert + 1 < num_experts ? halves[expert + 1] : 0;
            return low | high << 16;
        } else {
            return expert < num_experts ? static_cast<const uint32_t*>(logits)[expert] : 0;
        }
    }

    // Of the scores, or of logits that are none yet.
    __device__ void make_keys(const float* bias) {
#pragma unroll
        for (uint32_t i = 0; i < num_values; ++i) {
            keys_[i] = 0;
            if (expert_idx(i) >= num_experts) continue;
            float choice = scores_[i];
            if constexpr (Config::has_correction_bias) choice += bias[expert_idx(i)];
            if constexpr (is_fast) {
                // -0 is 0.
                choice = choice == choice ? choice + 0.0f : -1e30f;  //~ choice_of_no_number
            }
            keys_[i] = choice_key(choice);
        }
    }

    __device__ void make_scores() {
        if constexpr (Config::router_scoring == softmax_scoring ||
                      Config::router_scoring == fast_softmax_scoring) {
            float largest = scores_[0];
#pragma unroll
            for (uint32_t i = 1; i < num_values; ++i) largest = fmaxf(largest, scores_[i]);
#pragma unroll
            for (uint32_t distance = warp_size / 2; distance > 0; distance /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(full_warp, largest, distance));
            }
#pragma unroll
            for (uint32_t i = 0; i < num_values; ++i) {
                const float shifted = scores_[i] - largest;
                const float power = is_fast ? __expf(shifted) : expf(shifted);
                scores_[i] = expert_idx(i) < num_experts ? power : 0.0f;
            }
            const float sum = sum_by_halves(sum_of_lane());
            const float factor = __frcp_rn(sum);
#pragma unroll
            for (uint32_t i = 0; i < num_values; ++i) {
                scores_[i] = is_fast ? ptx::div_full(scores_[i], sum) : scores_[i] * factor;
            }
        } else {
#pragma unroll
            for (uint32_t i = 0; i < num_values; ++i) scores_[i] = score_alone(scores_[i]);
        }
        if constexpr (Config::router_scoring != sqrt_softplus_scoring && !is_fast) {
#pragma unroll
            for (uint32_t i = 0; i < num_values; ++i) {
                if (scores_[i] != scores_[i]) scores_[i] = 0.0f;  //~ score_of_no_number
            }
        }
    }

    // Which does not depend on other experts' logits.
    static __device__ float score_alone(float logit) {
        if constexpr (Config::router_scoring == sigmoid_scoring) {
            return __frcp_rn(1.0f + __expf(-logit));
        } else if constexpr (is_fast) {
            return ptx::div_full(1.0f, 1.0f + __expf(-logit));
        } else if constexpr (Config::router_scoring == tanh_sigmoid_scoring) {
            return 0.5f * tanhf(0.5f * logit) + 0.5f;
        } else {
            return ptx::sqrt_approx_ftz(logit > 20.0f ? logit : logf(1.0f + __expf(logit)));
        }
    }

    // The best choice is none any more. score: the expert's.
    __device__ Choice take_best(float& score) {
        uint32_t key = 0, own = num_experts;
        score = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < num_values; ++i) {
            if (keys_[i] > key) key = keys_[i], own = expert_idx(i), score = scores_[i];
        }
        const uint32_t best_key = ptx::redux_sync_max(key);
        //~ lower_of_equals
        const uint32_t expert = ptx::redux_sync_min(key == best_key ? own : num_experts);
#pragma unroll
        for (uint32_t i = 0; i < num_values; ++i) {
            if (expert_idx(i) == expert) keys_[i] = 0;  //~ choice_taken
        }
        score = __shfl_sync(full_warp, score, expert / vector_size % warp_size);
        return {best_key, expert};
    }

    // Experts of other groups than the best ones are none to choose. A group is as good as its best
    // choice, or with a bias as the sum of its two best ones.
    __device__ void drop_groups() {
        uint32_t group_key = 0;  // of the group of this lane's number
#pragma unroll 1
        for (uint32_t group = 0; group < Config::num_expert_groups; ++group) {
            uint32_t first = 0, second = 0;
#pragma unroll
            for (uint32_t i = 0; i < num_values; ++i) {
                if (expert_idx(i) / group_size != group || keys_[i] <= second) continue;
                second = min(first, keys_[i]);
                first = max(first, keys_[i]);
            }
            uint32_t key = ptx::redux_sync_max(first);
            if constexpr (Config::has_correction_bias) {
                // One lane that has the best one brings its second instead.
                const uint32_t owner = __ffs(__ballot_sync(full_warp, first == key)) - 1;
                const uint32_t next =
                    ptx::redux_sync_max(ptx::lane_idx() == owner ? second : first);
                // Without two numbers in it, a group comes behind those that have them.
                //~ sum_of_two
                key = next > 1 ? choice_key(value_of_key(key) + value_of_key(next)) : 1;
            }
            if (ptx::lane_idx() == group) group_key = key;
        }
        uint32_t chosen = 0;  // bits of groups
#pragma unroll 1
        for (uint32_t i = 0; i < Config::num_chosen_groups; ++i) {
            const uint32_t best = ptx::redux_sync_max(group_key);
            const uint32_t group = __ffs(__ballot_sync(full_warp, group_key == best)) - 1;
            chosen |= 1u << group;
            if (ptx::lane_idx() == group) group_key = 0;
        }
#pragma unroll
        for (uint32_t i = 0; i < num_values; ++i) {
            if ((chosen >> (expert_idx(i) / group_size) & 1) == 0) keys_[i] = 0;  //~ group_dropped
        }
    }

    // Of a lane's i-th value; beyond the last expert, num_experts or more.
    static __device__ uint32_t expert_idx(uint32_t i) {
        return (i / vector_size * warp_size + ptx::lane_idx()) * vector_size + i % vector_size;
    }

    float scores_[num_values];
    uint32_t keys_[num_values];  // 0: none to choose
};

}  // namespace deep_moe
