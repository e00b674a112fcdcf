// Collects the families' tables and looks mnemonics up.
#include "instruction_table.h"

#include <algorithm>

#include "program_builder.h"

namespace deep_moe::emulator {

const InstructionTable& all_instructions() {
    static const InstructionTable table = [] {
        InstructionTable all;
        for (auto family :
             {integer_instructions,        logic_instructions,    comparison_instructions,
              float_instructions,          convert_instructions,  move_instructions,
              memory_instructions,         control_instructions,  warp_instructions,
              barrier_instructions,        mbarrier_instructions, bulk_copy_instructions,
              matrix_instructions,         tcgen05_instructions,  wgmma_instructions,
              launch_control_instructions, copy_instructions,     tensormap_instructions,
              remote_instructions,         wmma_instructions,     simd_instructions,
              multimem_instructions}) {
            InstructionTable rows = family();
            all.insert(all.end(), rows.begin(), rows.end());
        }
        std::sort(all.begin(), all.end(), [](const Instruction& a, const Instruction& b) {
            return std::string_view(a.name) < std::string_view(b.name);
        });
        return all;
    }();
    return table;
}

// The longest entry that is the mnemonic or a prefix of it up to a dot.
const Instruction* find_instruction(std::string_view mnemonic) {
    const InstructionTable& table = all_instructions();
    for (;;) {
        auto found = std::lower_bound(
            table.begin(), table.end(), mnemonic,
            [](const Instruction& i, std::string_view m) { return std::string_view(i.name) < m; });
        if (found != table.end() && found->name == mnemonic) return &*found;
        size_t dot = mnemonic.rfind('.');
        if (dot == std::string_view::npos) return nullptr;
        mnemonic = mnemonic.substr(0, dot);
    }
}

std::unique_ptr<Module> load_module(std::string_view ptx, const std::string& name) {
    std::unique_ptr<ParsedModule> parsed = parse_ptx(ptx, name);
    auto module = std::make_unique<Module>();
    module->name = name;
    for (const auto& [key, variable] : parsed->variables) module->variables[key] = variable.symbol;
    for (const auto& [key, function] : parsed->functions) {
        if (uint64_t address = parsed->function_address(key)) module->functions[key] = address;
    }
    auto lines = std::make_shared<const std::vector<std::string>>(std::move(parsed->lines));
    for (const auto& [key, function] : parsed->functions) {
        if (!function.entry || !function.defined) continue;
        auto program = ProgramBuilder(*parsed, lines).build(function);
        program->module = module.get();
        module->programs[key] = std::move(program);
    }
    if (module->programs.empty())
        throw Fault(FaultKind::invalid_ptx, name + ": the module has no kernel");
    return module;
}

}  // namespace deep_moe::emulator
