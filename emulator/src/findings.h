// What the checks found in a run that does not stop at findings, each pair of source lines once.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "fault.h"
#include "program.h"

namespace deep_moe::emulator {

struct Finding {
    FaultKind kind;
    std::string text;
};

// One instruction of one program; without a program, none.
struct Place {
    const Program* program = nullptr;
    uint32_t pc = 0;
};

class Findings {
 public:
    // Whether no finding of this kind at these two instructions is known. Instructions of one
    // source line, which an unrolled loop makes many of, count as one.
    bool is_new(FaultKind kind, Place place, Place other);
    void add(FaultKind kind, std::string text) { all_.push_back({kind, std::move(text)}); }
    const std::vector<Finding>& all() const { return all_; }

 private:
    uint32_t line_of(Place place);

    std::vector<Finding> all_;
    std::set<std::tuple<FaultKind, uint32_t, uint32_t>> known_;
    std::map<std::string, uint32_t> line_ids_;
    std::map<const Program*, std::vector<uint32_t>> lines_;  // by instruction, 0 until asked for
};

}  // namespace deep_moe::emulator
