// What is known of registers beyond their values: which lanes have never been written, and what an
// asynchronous instruction still reads or writes. Kept only for the registers for which it can
// matter, by a check around each instruction that touches one of them.
//
// Unwritten: a register that some path reaches before any write, and whatever is computed from it.
// That alone is no error, since compilers leave registers undefined where nobody looks. It is one
// when the value decides something: as an address, a predicate, a stored value, an operand of
// anything but moves and arithmetic. What comes out of bitwise instructions counts as written,
// because they often put whole words together from parts, and so does what another lane's shuffle
// brings. It is known per quarter of a register: of a pair packed from a written and an unwritten
// half, the written one may be used.
//
// Asynchronous: the accumulators and A fragments of a wgmma until wgmma.wait_group has waited for
// its group; with Machine::strict_tcgen05 also what a tcgen05.ld brings until tcgen05.wait::ld,
// although hardware respects that dependency. A wgmma needs a wgmma.fence behind ordinary accesses
// to its registers. Plain moves, which compilers put anywhere, do not
// count as accesses: what they copy stays as it is.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "program.h"

namespace deep_moe::emulator {

enum class RegisterUse : uint8_t {
    copy,         // mov
    pack,         // mov of a vector into one register
    unpack,       // mov of one register into a vector
    low_half,     // the low half of a register, in one of half the width
    compute,      // the result is unwritten where an input is
    compute_two,  // the same of each half
    select,       // selp: only the chosen input counts
    bits,         // the result counts as written
    decide,       // every input must have been written
    wgmma,        // decides; accumulators and A fragments stay in use
    wgmma_fence,  // and so on: what the waits and fences of the above say
    wgmma_commit,
    wgmma_wait,
    tensor_load,
    tensor_load_wait,
};

RegisterUse register_use(std::string_view mnemonic);

// What an instruction does with virtual registers, by number.
struct RegisterTraffic {
    RegisterUse use = RegisterUse::decide;
    // In the order of the operands, -1 for constants and what is thrown away, of select (a, b and
    // the predicate), pack and unpack.
    std::vector<int> reads, writes;
    int guard = -1;
};

// Of one instruction that touches watched registers.
struct RegisterCheck {
    static constexpr uint32_t unwatched = ~0u;
    Body body = nullptr;  // the instruction's own
    RegisterUse use = RegisterUse::decide;
    uint32_t guard = unwatched;
    std::vector<uint32_t> reads, writes;  // in order: as above, unwatched ones included
    std::vector<uint32_t> fragments;      // wgmma: those of the reads that are A
};

struct RegisterPlan {
    struct Watched {
        std::string name;
        bool starts_unwritten = false;
    };
    std::vector<Watched> registers;
    std::vector<RegisterCheck> checks;
    std::vector<uint32_t> check_of_op;
};

// Which registers of a program to watch, and puts the checks around its instructions. `bits` and
// `names` are by register number. Null if there is nothing to watch.
std::shared_ptr<const RegisterPlan> watch_registers(std::vector<Op>& ops,
                                                    const std::vector<RegisterTraffic>& traffic,
                                                    const std::vector<int>& live_at_entry,
                                                    const std::vector<uint8_t>& bits,
                                                    const std::vector<std::string>& names);

constexpr int num_quarters = 4;
using Quarters = std::array<uint32_t, num_quarters>;  // lanes, by quarter from the low end

struct RegisterState {
    Quarters unwritten = {};
    uint32_t written_by = 0;  // group of wgmmas that writes it, counted from 1
    uint32_t read_by = 0;     // the same, reads
    uint32_t loaded_by = 0;   // tcgen05.ld, counted from 1
    uint32_t async_pc = 0;    // of that wgmma or tcgen05.ld
    // Ordinary accesses: the number of wgmma.fences before the last one, plus 1, and where it was.
    struct Access {
        uint32_t fences = 0, pc = 0;
    } read, write;
};

// One warp's.
struct RegisterWatch {
    explicit RegisterWatch(const RegisterPlan& plan);
    std::vector<RegisterState> states;
    uint32_t num_fences = 0;
    uint32_t num_groups = 0, num_complete_groups = 0;  // of wgmmas: committed, waited for
    uint32_t num_loads = 0, num_complete_loads = 0;
};

// The guard decides also where it is false.
void check_guard(Warp& w);

// Runs an instruction that has a RegisterCheck.
Flow run_checked(Warp& w, const Op& op);

}  // namespace deep_moe::emulator
