// Decodes one entry function and everything it calls into a `Program`: addresses of variables,
// constants, register allocation, branch targets.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "instruction_table.h"
#include "program.h"
#include "ptx_parser.h"
#include "register_watch.h"

namespace deep_moe::emulator {

// Of a register or constant: in one lane, and in all of them.
inline uint8_t storage_bits(Type type) {
    if (type == Type::pred) return 1;
    int bits = num_bits(type);
    return uint8_t(bits <= 32 ? 32 : bits);
}

inline uint32_t storage_bytes(int bits) {
    return bits == 1 ? 4 : uint32_t(bits) / 8 * warp_size;
}

class ProgramBuilder {
 public:
    ProgramBuilder(const ParsedModule& module,
                   std::shared_ptr<const std::vector<std::string>> lines);
    std::unique_ptr<Program> build(const Function& entry);

    // ---- for the decoder
    Program& program() { return *program_; }
    const Function& function() const { return *function_; }
    Operand register_operand(const std::string& name);  // resolved name
    Type register_type(const std::string& name) const;
    Operand temporary(const Operand& wide);  // 32 bits that stand for a 64-bit register
    Operand temporary(int bits, const std::string& name);
    Operand constant(uint64_t low, int bits, uint64_t high = 0);
    // A variable's address, `bits` wide. Sets `space` to where it lies.
    Operand symbol_address(const std::string& name, int64_t displacement, int bits, int scope,
                           Space& space);
    void append(const Op& op, std::vector<Operand> operands, const std::vector<int>& reads,
                const std::vector<int>& writes, const Statement& statement, RegisterUse use);
    uint32_t add_branch_table(const std::string& label, const Statement& statement);
    uint32_t add_call(const Statement& statement);
    uint64_t function_address(const std::string& name) const {
        return module_.function_address(name);
    }
    size_t label_statement(const std::string& label, const Statement& statement) const;
    [[noreturn]] void fail(FaultKind kind, const Statement& statement,
                           const std::string& why) const;
    [[noreturn]] void refuse(const Variable& variable, const std::string& why) const;

    static constexpr uint32_t sink_bytes =
        512;  // start of the register file: what is written to `_`

 private:
    struct VirtualRegister {
        uint8_t bits;
        uint32_t offset = 0;
        std::string name = "";
    };
    struct FunctionRange {
        const Function* function;
        uint32_t begin = 0, end = 0;
        std::vector<uint32_t> statement_ops;  // first op of each statement
    };
    struct PendingBranch {
        uint32_t op;
        size_t statement;
        size_t range;
    };

    void decode_function(const Function& function);
    uint32_t add_callable(const Function& function);
    void add_functions_with_address();
    void mark_recursive_calls();
    std::string variable_key(const std::string& name, int scope) const;
    void lay_out_shared();
    void resolve_branches();
    void find_leaders();
    void find_chains();
    void find_unused();
    void allocate_registers(const FunctionRange& range);

    const ParsedModule& module_;
    std::shared_ptr<const std::vector<std::string>> lines_;
    std::unique_ptr<Program> program_;
    const Function* function_ = nullptr;
    std::vector<FunctionRange> ranges_;
    std::vector<const Function*> waiting_;  // called, not decoded yet
    std::map<std::string, int> register_ids_;
    std::vector<VirtualRegister> registers_;
    std::vector<RegisterTraffic> traffic_;  // per op: register ids
    std::vector<int> live_at_entry_;        // registers that may be read before they are written
    std::map<std::pair<uint64_t, std::pair<uint64_t, int>>, Operand> constant_operands_;
    std::map<std::string, uint32_t> call_targets_;
    std::vector<std::vector<size_t>> table_statements_;  // per branch table
    std::vector<size_t> table_ranges_;
    std::vector<PendingBranch> pending_;
    std::map<std::string, uint32_t> callables_;  // index into Program::callables
    std::map<std::string, std::set<std::string>> callees_;
    std::set<std::string> functions_with_address_, callers_by_address_;
    bool calls_by_address_ = false;
    uint32_t high_water_ = sink_bytes;

    friend class Decoder;
};

}  // namespace deep_moe::emulator
