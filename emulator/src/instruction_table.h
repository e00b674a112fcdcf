// The table of instructions: one entry per mnemonic, which decodes a parsed statement into an `Op`
// and names the body that runs it. Everything the emulator can do is in this table; it also makes
// the coverage listing.
//
// How to add an instruction:
//   1. Write a body in the instructions_*.cpp file of its family:
//          static Flow my_body(Warp& w, const Op& op) {
//              auto a = w.in<uint32_t>(op.operands[1]);
//              auto d = w.out<uint32_t>(op.operands[0]);
//              w.for_each_lane([&](int lane) { d.set(lane, a[lane] + 1); });
//              return Flow::next;
//          }
//      Bodies run for the lanes in `w.exec` (guard already applied). They throw `Fault` on misuse.
//      A body that cannot go on calls `return w.block(queue, "text %llx", value)` and is run again
//      from its start when somebody calls `machine->wake(queue)`; `w.current.token` (0 at first)
//      survives between those runs. Asynchronous effects go through
//      `w.machine->enqueue_async(...)`. Registers are written at issue, never later (the decoder
//      re-uses registers that are dead).
//   2. Write a decoder that consumes the modifiers it knows and emits the op:
//          static void decode_my(Decoder& d) {
//              d.take("relaxed");                       // optional modifier, in any position
//              Type type = d.take_type({Type::u32});    // error when it is something else
//              d.expect_operands(2);
//              d.emit(my_body, {d.destination(0, type), d.source(1, type)}, /*aux=*/0);
//          }
//      What is left unconsumed is reported as unsupported, with mnemonic and PTX line.
//   3. Add it to the family's table: {"my.op", decode_my, "one line for the listing"}. The longest
//      matching name wins, so "cp.async.bulk.tensor" is found before "cp.async.bulk". Collectives
//      say d.op.meeting = ...
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "machine.h"
#include "program.h"
#include "register_watch.h"

namespace deep_moe::emulator {

// A statement's operand as parsed.
struct ParsedOperand {
    enum class Kind {
        reg,
        immediate,
        float_immediate,
        address,
        vector,
        symbol,
        sink,
        special,
        parenthesis
    };
    Kind kind = Kind::sink;
    std::string name;      // register, symbol, special register; base of an address (may be empty)
    bool negated = false;  // !p
    int64_t value = 0;     // integer immediate; displacement of an address
    uint64_t bits = 0;     // of a floating immediate
    bool is_double = false;  // of a floating immediate: 0d... rather than 0f...
    std::vector<ParsedOperand>
        elements;        // {a, b}; further parts of an address such as [map, {x, y}]
    std::string second;  // q of `p|q`
};

struct Statement {
    std::string guard;  // predicate register or empty
    bool guard_negated = false;
    std::string mnemonic;
    std::vector<ParsedOperand> operands;
    int line = 0;
    int source = -1;
    int scope = 0;
};

class Decoder {
 public:
    const Statement& statement;
    Op op{};

    // Modifiers.
    bool take(std::string_view modifier);  // e.g. "sync", "shared::cta"
    // The first of `choices` that is there, or "".
    std::string_view take_any(std::initializer_list<std::string_view> choices);
    bool take_prefix(std::string_view prefix, std::string& whole);  // e.g. "x" for ".x32"
    bool has(std::string_view modifier) const;
    void ignore(
        std::initializer_list<std::string_view> modifiers);  // hints without functional effect
    Type take_type();  // next type modifier, error if there is none
    Type take_type(std::initializer_list<Type> allowed);  // error if it is another one
    bool peek_type(Type& type) const;
    Space take_space(Space otherwise = Space::generic);  // .global, .shared{::cta,::cluster}, ...

    // Operands.
    size_t num_operands() const { return statement.operands.size(); }
    void expect_operands(size_t low, size_t high = 0);
    const ParsedOperand& parsed(size_t i) const;  // error if there are not so many
    Operand destination(size_t i, Type type);
    Operand source(size_t i, Type type);
    Operand second(size_t i);   // q of `p|q` in operand i; a sink if not given
    Operand address(size_t i);  // [reg + displacement] or [symbol + displacement]
    Operand destination(const ParsedOperand& p, Type type);
    Operand source(const ParsedOperand& p, Type type);
    Operand address(const ParsedOperand& p);
    // {a, b, ...}; a single operand counts as a vector of one.
    std::vector<Operand> destinations(size_t i, Type type);
    std::vector<Operand> sources(size_t i, Type type);
    uint64_t immediate(size_t i);       // error if it is not one
    uint32_t immediate_u32(size_t i);   // the same of 32 bits
    bool is_predicate(size_t i) const;  // whether operand i is a predicate register
    int num_bits_of(size_t i) const;    // of register operand i
    Operand constant(uint64_t value, int bits = 32);

    void emit(Body body, std::initializer_list<Operand> operands, uint64_t aux = 0);
    void emit(Body body, std::vector<Operand> operands, uint64_t aux = 0);

    [[noreturn]] void unsupported(const std::string& why);
    [[noreturn]] void invalid(const std::string& why);

    // Instead of what the mnemonic says.
    void set_use(RegisterUse use) { use_ = use; }

    // Registers touched so far. `emit` hands them over; source() and destination() fill them.
    std::vector<int> reads, writes;
    Space symbol_space = Space::generic;  // of the variable in the last address()
    void branch_to(const std::string& label);

    // Engine.
    Decoder(const Statement& statement, class ProgramBuilder& builder);
    void start();
    void finish();
    ProgramBuilder& builder;
    std::vector<std::string> modifiers;  // not consumed yet
    size_t name_length = 0;

 private:
    std::optional<RegisterUse> use_;
    struct Widening {
        Operand narrow, wide;
        bool is_signed;
    };
    Operand frame_address(const Operand& in_frame, int bits);
    bool reads_timer() const;
    static Body narrow_body();  // these four: instructions_move.cpp
    static Body widen_body();
    static Body widen_signed_body();
    static Body frame_address_body(int bits);
    static bool special_operand(const std::string& name, Operand& out);
    std::vector<Widening> widenings;
};

struct Instruction {
    const char* name;  // dotted: "add", "tcgen05.mma"
    void (*decode)(Decoder&);
    const char* summary;
};

using InstructionTable = std::vector<Instruction>;

// One per family, each in its instructions_<family>.cpp.
InstructionTable integer_instructions();
InstructionTable logic_instructions();
InstructionTable comparison_instructions();
InstructionTable float_instructions();
InstructionTable convert_instructions();
InstructionTable move_instructions();
InstructionTable memory_instructions();
InstructionTable control_instructions();
InstructionTable warp_instructions();
InstructionTable barrier_instructions();
InstructionTable mbarrier_instructions();  // mbarrier.*
InstructionTable
bulk_copy_instructions();              // cp.async.bulk*, cp.reduce.async.bulk, prefetch.tensormap
InstructionTable copy_instructions();  // cp.async, not .bulk
InstructionTable tensormap_instructions();       // tensormap.replace, tensormap.cp_fenceproxy
InstructionTable remote_instructions();          // st.async, red.async
InstructionTable wmma_instructions();            // wmma.*
InstructionTable simd_instructions();            // vadd2, vabsdiff4, ...
InstructionTable multimem_instructions();        // multimem.*
InstructionTable matrix_instructions();          // ldmatrix, stmatrix, movmatrix, mma.sync
InstructionTable tcgen05_instructions();         // tcgen05.*
InstructionTable wgmma_instructions();           // wgmma.*
InstructionTable launch_control_instructions();  // clusterlaunchcontrol.*

// A call of a function that the driver provides, such as vprintf; false if it is another's.
bool decode_runtime_call(Decoder& d);

// st and red, which st.async and red.async to global memory are here.
void decode_st(Decoder& d);
void decode_red(Decoder& d);

// All of them, sorted by name.
const InstructionTable& all_instructions();
const Instruction* find_instruction(std::string_view mnemonic);

}  // namespace deep_moe::emulator
