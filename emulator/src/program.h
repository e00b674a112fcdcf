// What the decoder makes of PTX text and what the engine runs: operands as places that hold 32
// lanes, one compact `Op` per PTX instruction, and the tables that lead from an op back to its PTX
// and source lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "op_cost.h"

namespace deep_moe::emulator {

struct Warp;
struct Program;

constexpr int warp_size = 32;
constexpr uint32_t full_mask = 0xffffffffu;

constexpr uint32_t shared_base = 0x400;          // the first KiB of the window is reserved
constexpr uint32_t runtime_shared_base = 0x2c0;  // the part of it that CUDA's own headers use

// PTX fundamental and packed types.
enum class Type : uint8_t {
    none,
    pred,
    b8,
    b16,
    b32,
    b64,
    b128,
    u8,
    u16,
    u32,
    u64,
    s8,
    s16,
    s32,
    s64,
    f16,
    bf16,
    f32,
    f64,
    tf32,
    f16x2,
    bf16x2,
    f32x2,
    e4m3,
    e5m2,
    e2m1,
    e2m3,
    e3m2,
    ue8m0,
    e4m3x2,
    e5m2x2,
    e2m1x2,
    e2m3x2,
    e3m2x2,
    ue8m0x2,
    e4m3x4,
    e5m2x4,
    e2m1x4,
    e2m3x4,
    e3m2x4,
    u16x2,
    s16x2,
    u8x4,
    s8x4,
    u4,
    s4,
    u2,
    s2,
    b1,
};
int num_bits(Type type);
bool is_signed(Type type);
bool is_float(Type type);
const char* name_of(Type type);
bool parse_type(std::string_view text, Type& type);

enum class Space : uint8_t { generic, global, shared, shared_cluster, local, constant, param };
const char* name_of(Space space);

// Which block of memory an operand's lanes lie in.
enum class Base : uint8_t {
    registers,  // this warp's register file
    constants,  // immediates and symbol addresses, one broadcast value per entry
    special,    // this warp's %tid, %ctaid, ... (see `Special` in machine.h)
};

// A value operand: 32 lanes, 4 bytes apart for types of up to 32 bits, 8 bytes apart for 64-bit
// ones, two such rows (low halves, high halves) for 128 bits. A predicate is one 32-bit mask. An
// address operand: the base value (0 for a bare symbol or number) plus `displacement`.
struct Operand {
    uint32_t offset = 0;  // bytes from the base
    Base base = Base::constants;
    uint8_t bits = 0;        // 1 (predicate), 32, 64 or 128: how the lanes are stored
    bool sink = false;       // `_`: nothing is written
    bool negated = false;    // `!p`
    bool high_half = false;  // of a 128-bit register, seen as 64 bits
    int64_t displacement = 0;
};

// What the engine does after an instruction's body.
enum class Flow : uint8_t {
    next,     // go on with the following instruction
    jumped,   // the body moved the group (branch, call, return, exit)
    blocked,  // `Warp::block` was called: the same instruction runs again when the warp is woken
    yield,    // go on, but let others run first (failed polls, nanosleep)
};
struct Op;
using Body = Flow (*)(Warp&, const Op&);

enum class Guard : uint8_t { always, if_true, if_false };

// How the lanes of a warp must meet before the body runs.
enum class Meeting : uint8_t {
    none,
    member_mask,  // lanes named by the mask operand (`Op::mask_operand`)
    whole_warp,   // all lanes that have not exited (`.aligned`)
};

struct Op {
    Body body = nullptr;
    const Operand* operands = nullptr;
    uint64_t aux = 0;  // whatever the decoder wants to tell the body (modifiers, immediates)
    uint32_t guard_offset = 0;  // in the register file
    uint32_t target = 0;        // branch target
    uint16_t num_operands = 0;
    Guard guard = Guard::always;
    Meeting meeting = Meeting::none;
    uint8_t mask_operand = 0;
    bool meets_anywhere = false;  // lanes may come to different instructions (bar.warp.sync)
    bool leader =
        false;  // first instruction of a basic block: here diverged groups of lanes may meet
    // For control flow; set by decoders of branches.
    bool is_branch = false;            // to `target`
    bool is_table_branch = false;      // to one of branch_tables[aux]
    bool never_falls_through = false;  // unless the guard says so
    bool ends_block = false;           // the following op is a leader
};

struct SourceLine {
    std::string file;
    int line = 0;
    int inlined_at = -1;   // index into Program::source_lines
    std::string function;  // of an inlined call, if named
};

// Per op, for messages only.
struct OpInfo {
    int ptx_line = 0;
    int source = -1;  // index into Program::source_lines
};

struct Symbol {  // a module-scope or static variable
    std::string name;
    Space space = Space::global;
    uint64_t size = 0;
    uint64_t alignment = 1;
    uint64_t address =
        0;  // shared: shared address; local, function parameters: offset in the function's frame
    bool dynamic = false;      // .extern .shared x[]
    bool is_floating = false;  // a parameter of a floating-point type
    std::vector<std::byte> initializer;
    std::vector<std::pair<uint64_t, std::string>>
        pointers;  // offsets in the initializer that hold addresses
};

struct KernelParameter {
    std::string name;
    uint64_t offset = 0, size = 0, alignment = 1;
    bool is_floating = false;
};

// An immediate (the bits, broadcast), or an address that differs from launch to launch or CTA to
// CTA.
struct Constant {
    uint64_t low = 0, high = 0;
    uint8_t bits = 32;
    uint32_t offset = 0;
    const Symbol* symbol = nullptr;  // low += address of this variable
    bool parameter = false;          // low += address of the launch's parameter block
};

constexpr uint32_t frame_alignment = 128;
constexpr uint32_t max_stack_bytes = 512 * 1024;  // of local memory per thread

// Where a variable lies in its function's frame. Frames lie one behind the other in the lane's
// local memory: a call opens one, a return closes it.
struct FrameSlot {
    uint32_t offset = 0, bytes = 0;
};

struct RegisterPlace {
    uint32_t offset = 0;
    uint8_t bits = 0;
};

struct Callable {
    std::string name;
    uint32_t target = 0;  // first op
    uint32_t frame_bytes = 0;
    std::vector<FrameSlot> parameters, results;
    std::vector<RegisterPlace> registers;
};

struct CallSite {
    int callee = -1;  // index into Program::callables; -1: the address in operand 0 tells
    uint32_t caller = 0;
    std::vector<FrameSlot> arguments, results;  // in the caller's frame
    bool is_recursive = false;  // the callee may call the caller: its registers are kept
};

// One entry function with everything that it calls.
struct Program {
    const struct Module* module = nullptr;
    std::string module_name, name;
    std::shared_ptr<const std::vector<std::string>> lines;  // the PTX text
    std::vector<Op> ops;
    std::vector<OpInfo> infos;
    std::vector<OpCost> costs;  // on a simulated clock
    std::deque<std::vector<Operand>> operand_lists;
    std::vector<SourceLine> source_lines;
    std::vector<Constant> constants;
    std::map<std::string, Symbol> symbols;  // variables that the code refers to
    std::vector<std::vector<uint32_t>> branch_tables;
    std::vector<CallSite> calls;
    std::shared_ptr<const struct RegisterPlan> register_plan;  // register_watch.h; may be null
    std::vector<Callable> callables;                           // 0: the kernel itself
    std::map<uint64_t, uint32_t> callables_by_address;
    bool uses_grid_workspace = false;  // %envreg1 and 2 hold its address
    uint32_t constant_bytes = 0;
    uint32_t register_bytes = 0;  // per warp
    uint32_t local_bytes = 0;     // per lane: a frame of every function
    uint32_t static_shared_bytes = 0;
    uint32_t shared_begin = shared_base;  // shared addresses below it are out of bounds
    uint32_t dynamic_shared_offset = 0;   // shared address where dynamic shared memory starts
    std::vector<KernelParameter> parameters;
    uint32_t parameter_bytes = 0;
    uint32_t cluster[3] = {0, 0, 0};           // .reqnctapercluster, 0 if not given
    uint32_t required_threads[3] = {0, 0, 0};  // .reqntid
    uint32_t max_threads = 0;                  // .maxntid
    uint32_t max_registers = 0;                // .maxnreg
    uint32_t largest_budget = 0;               // of its setmaxnreg, 0 without any
    std::string target;                        // sm_100a
};

// Everything that was loaded from one PTX text.
struct Module {
    std::string name;
    std::map<std::string, Symbol> variables;    // of module scope
    std::map<std::string, uint64_t> functions;  // their addresses
    std::map<std::string, std::unique_ptr<Program>> programs;
};

// Parses and decodes PTX; throws Fault.
std::unique_ptr<Module> load_module(std::string_view ptx, const std::string& name);

}  // namespace deep_moe::emulator
