// Tokens in the caller's rows. Each expert has a run of rows, anywhere among them. A token's result
// goes to the same row of y.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/layout/token_source.cuh"

namespace deep_moe {

// The rows of an expert, from the caller's tensors. A negative number there is a large number here.
struct LocalRowRange {
    uint32_t begin;
    uint32_t count;

    __device__ LocalRowRange(const KernelArgs& args, uint32_t expert_idx)
        : begin(begin_of(args, expert_idx)),
          count(static_cast<uint32_t>(args.expert_count[expert_idx])) {}

    static __device__ uint32_t begin_of(const KernelArgs& args, uint32_t expert_idx) {
        //~ expert_begin
        return args.expert_begin == nullptr ? expert_idx * args.max_expert_rows
                                            : static_cast<uint32_t>(args.expert_begin[expert_idx]);
    }
    // Whether they are rows of x, and not more than the expert may have.
    __device__ bool is_inside(const KernelArgs& args) const {
        return count <= args.max_expert_rows && count <= args.num_tokens &&
               begin <= args.num_tokens - count;
    }
};

// For pull_tokens and the epilogues, what RankBuffers is where tokens come from other ranks. A
// TokenSource has only its token_idx then, the row. `Scales`: see tokens/<format>/local_scales.cuh.
template <class Config, class Scales>
class LocalRows {
    static_assert(Config::num_ranks == 1 && Config::num_topk == 1, "a row is one expert's");
    static constexpr uint32_t row_bytes = SymmBuffer<Config>::token_bytes;

 public:
    // Keeps a reference: `args` is the kernel's __grid_constant__ parameter.
    __device__ explicit LocalRows(const KernelArgs& args) : args_(args) {}

    // The work space.
    __device__ SymmBuffer<Config> local() const {
        return SymmBuffer<Config>(args_.rank_buffers[0]);
    }
    __device__ uint32_t begin_of(uint32_t expert_idx) const {
        return LocalRowRange::begin_of(args_, expert_idx);
    }

    __device__ const LocalRows& of(uint32_t) const { return *this; }
    __device__ const uint8_t* input_x(uint32_t row_idx) const {
        return args_.local_x + uint64_t{row_idx} * row_bytes;
    }
    __device__ Scales input_x_sf(uint32_t row_idx) const {
        constexpr uint32_t num_words = Scales::num_words(Config::hidden);
        return Scales{args_.local_x_sf + uint64_t{row_idx} * num_words};  //~ scales_of_row
    }

    __device__ uint16_t* result_row(const TokenSource& source) const {
        //~ result_row
        return static_cast<uint16_t*>(args_.y) + uint64_t{source.token_idx} * Config::output_hidden;
    }

 private:
    const KernelArgs& args_;
};

}  // namespace deep_moe
