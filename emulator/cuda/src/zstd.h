// Decompression of what compilers put into fat binaries: Zstandard frames (RFC 8878) and LZ4
// blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace deep_moe::cuda {

// Throw std::runtime_error where the data is damaged or longer than `num_bytes` when decompressed.
std::string decompress_zstd(std::span<const uint8_t> data, size_t num_bytes);
std::string decompress_lz4(std::span<const uint8_t> data, size_t num_bytes);

}  // namespace deep_moe::cuda
