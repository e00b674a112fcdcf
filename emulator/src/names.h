// Names for messages: arrays inside a region or in shared memory, and what the warps of a launch
// do. They come with launches and regions; nothing but texts depends on them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deep_moe::emulator {

struct Cta;
struct Grid;
struct Rank;

struct NamedArray {
    std::string name;
    uint64_t offset = 0;
    uint64_t element_bytes = 1;
    std::vector<uint64_t> shape;
    uint64_t num_bytes() const;
};

class NameMap {
 public:
    void add(NamedArray array);
    // "tokens[3, 128]", with "+1" behind it inside an element; "" where nothing has a name.
    std::string element_at(uint64_t offset) const;

 private:
    std::vector<NamedArray> arrays_;  // by offset
};

struct WarpRole {
    std::string name;
    std::vector<uint32_t> warps;
};

// What a kernel is called in messages: of a mangled name the function, without its parameters and
// with no more of its template arguments than fit.
std::string readable_name(const std::string& name);
// The same without template arguments.
std::string qualified_name(const std::string& name);
std::string describe_global(const Rank& rank, uint64_t address);
std::string describe_shared(const Cta& cta, uint32_t offset);
// "math warp 5 (warp 9)", or "warp 9".
std::string describe_warp(const Grid& grid, uint32_t warp);
std::string role_of(const Grid& grid, uint32_t warp);  // "" without a name

}  // namespace deep_moe::emulator
