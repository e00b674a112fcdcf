// What the checks found, as data. In a run that does not stop at findings each cause is listed
// once.
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

struct Where;

// One of the instructions that a finding is about, and who executed it.
struct Involved {
    std::string access;  // such as "asynchronous write"; "" if it is not about memory
    uint32_t rank = 0, cta = 0, warp = 0;
    int lane = -1;  // -1: no single one
    std::string role;
    std::string file;  // of the source, "" without line information
    int line = 0, ptx_line = 0;
    std::string kernel, instruction;
};

struct Finding {
    FaultKind kind = FaultKind::internal;
    std::string text;
    std::string space;  // of the memory that it is about: a state space, "tensor", or "" for none
    uint64_t address = 0;
    bool same_value = false;         // a race of two writes of one value
    std::vector<Involved> involved;  // in the order in which they came; the last one was caught

    std::string json() const;
};

Involved involved_at(const Where& where, int lane, std::string access = "");

// One instruction of one program; without a program, none.
struct Place {
    const Program* program = nullptr;
    uint32_t pc = 0;
};

class Findings {
 public:
    // Whether no finding by this check at these two instructions, whichever came first, is known.
    // Instructions of one source line, which an unrolled loop makes many of, count as one.
    bool is_new(const void* check, Place place, Place other);
    bool is_known(const void* check, Place place, Place other);
    void add(Finding finding) { all_.push_back(std::move(finding)); }
    const std::vector<Finding>& all() const { return all_; }

 private:
    using Key = std::tuple<const void*, uint32_t, uint32_t>;
    Key key_of(const void* check, Place place, Place other);
    uint32_t line_of(Place place);

    std::vector<Finding> all_;
    std::set<Key> known_;
    std::map<std::string, uint32_t> line_ids_;
    std::map<const Program*, std::vector<uint32_t>> lines_;  // by instruction, 0 until asked for
};

}  // namespace deep_moe::emulator
