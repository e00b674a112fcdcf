// PTX text -> functions, variables and statements with resolved register names. Knows the grammar,
// no instruction.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "instruction_table.h"
#include "program.h"

namespace deep_moe::emulator {

struct RegisterDeclaration {
    std::string name;  // of one register, or the prefix of a range
    Type type = Type::none;
    int count = -1;  // of a range name0 .. name<count-1>, or -1
};

struct Scope {
    int parent = -1;
    std::map<std::string, RegisterDeclaration, std::less<>> registers, ranges;
    std::map<std::string, int, std::less<>> variables;  // index into Function::variables
    std::map<std::string, size_t, std::less<>> labels;  // statement that follows
    std::map<std::string, std::vector<std::string>, std::less<>> branch_targets;
};

struct Variable {  // .local, .shared or .param declared in a function, or a module's variable
    Symbol symbol;
    int line = 0;
    bool external = false;
};

struct Function {
    std::string name;
    bool entry = false, defined = false;
    int line = 0;
    std::vector<Variable> parameters, results;  // `results` only for .func
    std::vector<Variable> variables;
    std::vector<Scope> scopes;  // 0 is the body
    std::vector<Statement> statements;
    std::map<std::string, Type> register_types;  // by resolved name
    uint32_t cluster[3] = {0, 0, 0}, required_threads[3] = {0, 0, 0};
    uint32_t max_threads = 0, max_registers = 0;
};

struct ParsedModule {
    std::string name, target, version;
    std::vector<std::string> lines;
    std::map<std::string, Variable, std::less<>> variables;
    std::map<std::string, Function, std::less<>> functions;
    std::vector<SourceLine> source_lines;

    // Of a function with a body, 0 if there is none of this name.
    uint64_t function_address(const std::string& function) const;
};

// A line of the text for a message, without the spaces before it and not longer than one reads.
std::string quoted_line(const std::vector<std::string>& lines, int number, size_t max_shown = 400);

// Throws Fault(invalid_ptx).
std::unique_ptr<ParsedModule> parse_ptx(std::string_view text, const std::string& name);

}  // namespace deep_moe::emulator
