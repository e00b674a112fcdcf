// What the clock knows of an instruction before it runs: what it takes of its scheduler's pipes,
// and which queue its effect goes through.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

namespace deep_moe::emulator {

struct Op;
struct Program;

enum class OpKind : uint8_t {
    plain,
    branch,
    slow,  // its results come later: special functions, shuffles
    load,  // of memory, by a thread
    store,
    atomic,     // with a result
    reduction,  // without one
    fence_cta,
    fence_proxy,
    fence_gpu,
    fence_sys,
    mbarrier,  // arrivals and the like
    mbarrier_wait,
    barrier,
    barrier_arrive,
    cluster_arrive,
    cluster_wait,
    copy,  // asynchronous: its body asks for the moment at which it is done
    mma,   // mma.sync
    wgmma,
    wgmma_commit,
    wgmma_wait,
    tensor_load,  // tcgen05.ld and st
    tensor_wait,
    timer,
    set_registers,
};

struct OpCost {
    // Quarters of machine instructions, 16 bits each: all, and those of the ALU, the FMA pipe and
    // the special-function unit.
    uint64_t work = 0;
    uint16_t depth = 0;  // its part of the longest chain of its basic block, in quarters, too
    // Sixteenths of cycles that its warp takes by itself, if `is_scheduled`: those come from the
    // machine code, waits for results that always come as late are among them.
    uint32_t own = 0;
    bool is_scheduled = false;
    uint64_t touches = 0;                       // registers read or written, hashed
    uint16_t size = 0;                          // load and store: bytes of a lane; wgmma: N
    uint8_t extra = 0;                          // cycles that its warp waits besides
    uint8_t first_result = 0, num_results = 0;  // operands that come later
    uint8_t address = 0;                        // operand
    uint8_t space = 0;                          // of the address
    OpKind kind = OpKind::plain;
    bool is_ordered = false;     // others can tell when it happens
    bool has_registers = false;  // wgmma: A comes from registers
    bool is_release = false;     // waits for the thread's own stores
    bool reaches_system = false;
    bool is_shuffle = false;
    bool is_pure = false;    // all that it does is to write registers
    bool is_unused = false;  // what it writes only products of matrices read
};

constexpr uint64_t pipe_work(uint64_t issue, uint64_t alu = 0, uint64_t fma = 0, uint64_t xu = 0) {
    return issue | alu << 16 | fma << 32 | xu << 48;
}

// By mnemonic: how many machine instructions ptxas makes of one of PTX in the mean, and of what
// kind. What a kernel's own machine code says comes before it (`set_line_costs`).
OpCost cost_of(std::string_view mnemonic, const Op& op);

// What the machine code has for a line of PTX, executed once: instructions in all and of three
// pipes, cycles that the warp takes by itself, and whether there is a branch.
struct LineCost {
    double issue, alu, fma, xu, cycles;
    bool has_branch;
};
// Lines that are not named cost nothing. costs: by line of the text, from 1.
void set_line_costs(Program& program, const std::map<int, LineCost>& costs);

uint64_t touched_registers(const Op& op);
inline uint64_t register_bit(uint32_t offset) {
    return 1ull << (((offset >> 2) * 0x9E3779B1u) >> 26);
}

}  // namespace deep_moe::emulator
