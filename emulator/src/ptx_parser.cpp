// A hand-written tokenizer and a recursive-descent parser for the PTX that compilers emit.
#include "ptx_parser.h"

#include <array>
#include <bit>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace deep_moe::emulator {

namespace {

struct Token {
    enum class Kind { word, number, text, symbol, end };
    Kind kind = Kind::end;
    std::string_view text;
    int line = 0;
};

bool is_word_start(char c) {
    return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
           c == '.';
}
bool is_word_char(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
           c == '.';
}

struct UnfinishedToken {
    const char* what;
    int line;  // where it begins
};

class Tokenizer {
 public:
    explicit Tokenizer(std::string_view text) : text_(text) {}

    // Throws UnfinishedToken.
    std::vector<Token> run() {
        std::vector<Token> tokens;
        tokens.reserve(text_.size() / 4);
        while (skip_space()) tokens.push_back(next());
        tokens.push_back({Token::Kind::end, {}, line_});
        return tokens;
    }

 private:
    bool skip_space() {
        while (at_ < text_.size()) {
            char c = text_[at_];
            if (c == '\n') {
                ++line_;
                ++at_;
            } else if (std::isspace(static_cast<unsigned char>(c)) || c == '\0') {
                ++at_;
            } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '/') {
                while (at_ < text_.size() && text_[at_] != '\n') ++at_;
            } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '*') {
                const int begin = line_;
                at_ += 2;
                while (text_.substr(at_, 2) != "*/") {
                    if (at_ >= text_.size()) throw UnfinishedToken{"a comment", begin};
                    if (text_[at_] == '\n') ++line_;
                    ++at_;
                }
                at_ += 2;
            } else {
                return true;
            }
        }
        return false;
    }

    Token next() {
        size_t start = at_;
        char c = text_[at_];
        if (c == '"') {
            const size_t end = text_.find('"', start + 1);
            const std::string_view inside = text_.substr(start + 1, end - start - 1);
            if (end == std::string_view::npos || inside.find('\n') != std::string_view::npos)
                throw UnfinishedToken{"a string", line_};
            at_ = end + 1;
            return {Token::Kind::text, inside, line_};
        }
        if (std::isdigit(static_cast<unsigned char>(c))) {
            bool hex_float =
                c == '0' && at_ + 1 < text_.size() && std::strchr("fFdDxXbB", text_[at_ + 1]);
            ++at_;
            while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) ||
                                          (text_[at_] == '.' && !hex_float) ||
                                          ((text_[at_] == '+' || text_[at_] == '-') && !hex_float &&
                                           (text_[at_ - 1] == 'e' || text_[at_ - 1] == 'E'))))
                ++at_;
            return {Token::Kind::number, text_.substr(start, at_ - start), line_};
        }
        if (is_word_start(c)) {
            while (at_ < text_.size()) {
                // Directives may be written without a space between them: .reg.b16
                if (c == '.' && text_[at_] == '.' && at_ > start) break;
                if (is_word_char(text_[at_])) {
                    ++at_;
                } else if (text_.substr(at_, 2) == "::") {
                    at_ += 2;
                } else {
                    break;
                }
            }
            return {Token::Kind::word, text_.substr(start, at_ - start), line_};
        }
        ++at_;
        return {Token::Kind::symbol, text_.substr(start, 1), line_};
    }

    std::string_view text_;
    size_t at_ = 0;
    int line_ = 1;
};

// An unsigned number as PTX writes it: decimal, 0x, 0b or octal, with or without U behind. Nothing
// if the text is none, or needs more than 64 bits.
std::optional<uint64_t> parse_integer(std::string_view text) {
    if (!text.empty() && (text.back() == 'U' || text.back() == 'u')) text.remove_suffix(1);
    int base = 10;
    if (text.size() > 1 && text[0] == '0') {
        const char kind = char(std::tolower(static_cast<unsigned char>(text[1])));
        base = kind == 'x' ? 16 : kind == 'b' ? 2 : 8;
        text.remove_prefix(base == 8 ? 1 : 2);
    }
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return value;
}

// Brackets and blocks inside of each other. The parser calls itself for each.
constexpr int max_nesting = 256;
constexpr uint32_t max_threads_per_cta = 1024, max_ctas_per_cluster = 16, max_registers = 255;
constexpr size_t max_operands = 1024;  // of an instruction, and of a list in it
// No variable is larger; what a kernel's variables take together is looked at when all are known.
constexpr uint64_t max_variable_bytes = uint64_t(1) << 40;

class Parser {
 public:
    Parser(std::string_view text, const std::string& name)
        : module_(std::make_unique<ParsedModule>()) {
        module_->name = name;
        size_t start = 0;
        while (start <= text.size()) {
            size_t end = text.find('\n', start);
            if (end == std::string_view::npos) end = text.size();
            module_->lines.emplace_back(text.substr(start, end - start));
            start = end + 1;
        }
        try {
            tokens_ = Tokenizer(text).run();
        } catch (const UnfinishedToken& token) {
            fail(std::string(token.what) + " does not end", token.line);
        }
        collect_files();
        collect_info_strings();
    }

    std::unique_ptr<ParsedModule> run() {
        while (peek().kind != Token::Kind::end) top_level();
        return std::move(module_);
    }

 private:
    // ---- tokens

    const Token& peek(size_t ahead = 0) const {
        return tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
    }
    const Token& take() {
        const Token& t = peek();
        if (at_ + 1 < tokens_.size()) ++at_;
        return t;
    }
    bool is(std::string_view text, size_t ahead = 0) const {
        const Token& t = peek(ahead);
        return t.kind != Token::Kind::text && t.kind != Token::Kind::end && t.text == text;
    }
    bool accept(std::string_view text) {
        if (!is(text)) return false;
        take();
        return true;
    }
    void expect(std::string_view text) {
        if (!accept(text)) fail("expected '" + std::string(text) + "', found " + found());
    }
    [[noreturn]] void fail(const std::string& why) const { fail(why, peek().line); }
    [[noreturn]] void fail(const std::string& why, int line) const {
        throw Fault(FaultKind::invalid_ptx,
                    format("%s: PTX line %d: %s\n    %s", module_->name.c_str(), line, why.c_str(),
                           quoted_line(module_->lines, line).c_str()));
    }
    std::string found() const {
        if (peek().kind == Token::Kind::end) return "the end of the text";
        return "'" + std::string(peek().text.substr(0, 80)) + "'";
    }
    std::string word() {
        if (peek().kind != Token::Kind::word) fail("expected a name, found " + found());
        return std::string(take().text);
    }
    // 64 bits: a negative number is in two's complement.
    uint64_t bits_of_integer() {
        bool negative = accept("-");
        if (peek().kind != Token::Kind::number) fail("expected a number, found " + found());
        const std::optional<uint64_t> value = parse_integer(peek().text);
        if (!value) fail("expected an integer of at most 64 bits, found " + found());
        take();
        return negative ? 0 - *value : *value;
    }
    int64_t integer() { return int64_t(bits_of_integer()); }
    uint64_t integer_in(uint64_t low, uint64_t high, const char* what) {
        const bool negative = is("-");
        const uint64_t value = bits_of_integer();
        if (negative || value < low || value > high)
            fail(format("%s must be %llu to %llu, not %s%llu", what, (unsigned long long)low,
                        (unsigned long long)high, negative ? "-" : "",
                        (unsigned long long)(negative ? 0 - value : value)));
        return value;
    }
    uint64_t alignment() {
        const uint64_t value = integer_in(1, 1 << 16, ".align");
        if (!std::has_single_bit(value))
            fail(format(".align must be a power of two, not %llu", (unsigned long long)value));
        return value;
    }
    void skip_statement(const char* what) {
        while (!accept(";")) {
            if (peek().kind == Token::Kind::end) fail(std::string(what) + " does not end");
            take();
        }
    }

    // One more bracket or block that is open.
    struct Nested {
        explicit Nested(Parser& parser) : depth(parser.depth_) {
            if (depth == max_nesting)
                parser.fail(format("brackets are nested more than %d deep", max_nesting));
            ++depth;
        }
        ~Nested() { --depth; }
        int& depth;
    };

    // ---- module scope

    void top_level() {
        if (accept(".version")) {
            module_->version = std::string(take().text);
        } else if (accept(".target")) {
            module_->target = word();
            while (accept(",")) word();
        } else if (accept(".address_size")) {
            if (integer() != 64) fail("only .address_size 64 is supported");
        } else if (accept(".file")) {
            parse_file();
        } else if (accept(".section")) {
            skip_section();
        } else if (accept(".pragma")) {
            skip_statement("a .pragma");
        } else if (accept(".alias")) {
            fail(".alias is not supported");
        } else if (accept(";")) {
        } else {
            declaration();
        }
    }

    void parse_file() {
        integer();
        take();
        while (accept(",")) integer();
    }

    void skip_section() {
        word();
        expect("{");
        int depth = 1;
        while (depth) {
            if (peek().kind == Token::Kind::end) fail("a .section does not end");
            if (is("{")) ++depth;
            if (is("}")) --depth;
            take();
        }
    }

    // .file directives may stand behind the code that names them by number.
    void collect_files() {
        for (size_t i = 0; i + 2 < tokens_.size(); ++i) {
            if (tokens_[i].text == ".file" && tokens_[i + 1].kind == Token::Kind::number)
                files_[int(parse_integer(tokens_[i + 1].text).value_or(0))] =
                    std::string(tokens_[i + 2].text);
        }
    }

    // The names of inlined functions are byte strings in .debug_str, behind the code that uses
    // them.
    void collect_info_strings() {
        for (size_t i = 0; i + 3 < tokens_.size(); ++i) {
            if (tokens_[i].text != ".section" || tokens_[i + 1].text != ".debug_str") continue;
            std::string* current = nullptr;
            for (i += 3; i + 1 < tokens_.size() && tokens_[i].text != "}"; ++i) {
                if (tokens_[i].kind == Token::Kind::word && tokens_[i + 1].text == ":") {
                    current = &info_strings_[std::string(tokens_[i].text)];
                } else if (tokens_[i].kind == Token::Kind::number && current) {
                    const uint64_t value = parse_integer(tokens_[i].text).value_or(0);
                    if (value) current->push_back(char(value));
                }
            }
        }
    }

    void declaration() {
        bool external = false;
        for (;;) {
            if (accept(".extern")) {
                external = true;
            } else if (accept(".visible") || accept(".weak") || accept(".common")) {
            } else {
                break;
            }
        }
        if (accept(".entry")) {
            parse_function(true);
        } else if (accept(".func")) {
            parse_function(false);
        } else {
            Space space;
            if (!accept_space(space)) fail("unknown directive " + found());
            for (Variable& v : parse_variables(space, external)) {
                auto [known, is_new] = module_->variables.try_emplace(v.symbol.name);
                // A declaration and a definition are one variable, two definitions are none.
                if (!is_new && !known->second.external && !v.external)
                    fail("variable '" + v.symbol.name + "' is defined twice", v.line);
                if (is_new || known->second.external) known->second = std::move(v);
            }
        }
    }

    bool accept_space(Space& space) {
        if (accept(".global"))
            space = Space::global;
        else if (accept(".const"))
            space = Space::constant;
        else if (accept(".shared"))
            space = Space::shared;
        else if (accept(".local"))
            space = Space::local;
        else if (accept(".param"))
            space = Space::param;
        else
            return false;
        return true;
    }

    // `.align 16 .b8 a[4][2] = {..}, b;` after the state space.
    std::vector<Variable> parse_variables(Space space, bool external) {
        std::vector<Variable> all;
        uint64_t alignment = 0;
        int vector = 1;
        Type type = Type::none;
        while (peek().kind == Token::Kind::word && peek().text[0] == '.') {
            std::string w = word();
            if (w == ".align")
                alignment = this->alignment();
            else if (w == ".v2")
                vector = 2;
            else if (w == ".v4")
                vector = 4;
            else if (w == ".attribute")
                skip_parenthesis();
            else if (!parse_type(w.substr(1), type))
                fail("unknown type '" + w + "' in a variable");
        }
        if (type == Type::none) fail("a variable has no type");
        const uint64_t element = element_bytes(type, "a variable");
        do {
            Variable v;
            v.line = peek().line;
            v.external = external;
            v.symbol.name = word();
            v.symbol.space = space;
            uint64_t count = uint64_t(vector);
            while (accept("[")) {
                if (is("]")) {
                    v.symbol.dynamic = true;
                    count = 0;
                } else {
                    const uint64_t limit =
                        max_variable_bytes / element / std::max<uint64_t>(count, 1);
                    count *= integer_in(0, limit, "an array's size");
                }
                expect("]");
            }
            v.symbol.alignment = alignment ? alignment : element * uint64_t(vector);
            v.symbol.size = count * element;
            if (accept("=")) {
                if (space != Space::global && space != Space::constant)
                    fail(std::string("a variable in .") + name_of(space) + " has no initializer");
                initializer(v.symbol, type, element);
                const uint64_t given = v.symbol.initializer.size();
                if (v.symbol.dynamic) v.symbol.size = given;
                if (given > v.symbol.size)
                    fail(format("the initializer of '%s' has %llu entries, the variable %llu",
                                v.symbol.name.c_str(), (unsigned long long)(given / element),
                                (unsigned long long)(v.symbol.size / element)));
                v.symbol.dynamic = false;
            }
            all.push_back(std::move(v));
        } while (accept(","));
        expect(";");
        return all;
    }

    // Of a type that an array in memory may have.
    uint64_t element_bytes(Type type, const char* what) const {
        const int bits = num_bits(type);
        if (bits < 8 || bits % 8) fail(std::string(what) + " cannot be of type ." + name_of(type));
        return uint64_t(bits) / 8;
    }

    void skip_parenthesis() {
        expect("(");
        int depth = 1;
        while (depth) {
            if (peek().kind == Token::Kind::end) fail("a parenthesis does not end");
            if (is("(")) ++depth;
            if (is(")")) --depth;
            take();
        }
    }

    void initializer(Symbol& symbol, Type type, uint64_t element) {
        if (accept("{")) {
            const Nested nested(*this);
            while (!accept("}")) {
                initializer(symbol, type, element);
                accept(",");
            }
            return;
        }
        uint64_t bits = 0;
        if (peek().kind == Token::Kind::word) {
            std::string name = word();
            if (name == "generic") {
                expect("(");
                name = word();
                expect(")");
            }
            if (accept("+")) bits = uint64_t(integer());
            if (element != 8) fail("an address in an initializer needs 8 bytes");
            symbol.pointers.emplace_back(symbol.initializer.size(), name);
        } else {
            const ParsedOperand value = number();
            bits = value.kind == ParsedOperand::Kind::float_immediate ? float_bits(value, type)
                                                                      : uint64_t(value.value);
        }
        if (element > sizeof bits)
            fail(std::string("an initializer cannot be of type .") + name_of(type));
        size_t at = symbol.initializer.size();
        symbol.initializer.resize(at + element);
        std::memcpy(symbol.initializer.data() + at, &bits, element);
    }

    // Of a floating number in an initializer of this type; 0f and 0d may stand for raw bits, too.
    uint64_t float_bits(const ParsedOperand& value, Type type) const {
        double d = 0;
        float f = 0;
        uint64_t bits = 0;
        std::memcpy(&d, &value.bits, 8);
        std::memcpy(&f, &value.bits, 4);
        if (type == Type::f32) {
            if (value.is_double) f = float(d);
            std::memcpy(&bits, &f, 4);
        } else if (type == Type::f64) {
            if (!value.is_double) d = f;
            std::memcpy(&bits, &d, 8);
        } else if (num_bits(type) == (value.is_double ? 64 : 32)) {
            bits = value.bits;
        } else {
            fail(std::string("a floating number does not fit into a .") + name_of(type));
        }
        return bits;
    }

    // ---- functions

    std::vector<Variable> parse_parameters() {
        std::vector<Variable> all;
        if (!accept("(")) return all;
        while (!accept(")")) {
            if (accept(".reg")) fail("register parameters are not supported");
            expect(".param");
            uint64_t alignment = 0, element = 0;
            bool is_floating = false;
            while (peek().kind == Token::Kind::word && peek().text[0] == '.') {
                std::string w = word();
                Type type;
                if (w == ".align") {
                    const uint64_t value = this->alignment();
                    if (!element) alignment = value;  // behind the type it belongs to .ptr
                } else if (w == ".ptr" || w == ".global" || w == ".shared" || w == ".const" ||
                           w == ".local" || w == ".surfref" || w == ".texref" ||
                           w == ".samplerref") {
                } else if (parse_type(w.substr(1), type)) {
                    element = element_bytes(type, "a parameter");
                    is_floating = w[1] == 'f';
                } else {
                    fail("unknown '" + w + "' in a parameter");
                }
            }
            Variable v;
            v.line = peek().line;
            v.symbol.name = word();
            v.symbol.space = Space::param;
            uint64_t count = 1;
            if (accept("[")) {
                count = is("]") ? 0 : integer_in(0, max_variable_bytes / 16, "a parameter's size");
                expect("]");
            }
            if (!element) fail("parameter '" + v.symbol.name + "' has no type");
            v.symbol.size = element * count;
            v.symbol.is_floating = is_floating;
            v.symbol.alignment = alignment ? alignment : element;
            all.push_back(std::move(v));
            accept(",");
        }
        return all;
    }

    // Sizes in three dimensions, of at most `limit` together.
    void three(uint32_t out[3], uint32_t limit, const char* what) {
        for (int i = 0; i < 3; ++i)
            out[i] = i == 0 || accept(",") ? uint32_t(integer_in(1, limit, what)) : 1;
        const uint64_t all = uint64_t(out[0]) * out[1] * out[2];
        if (all > limit)
            fail(format("%s has %llu in all; at most %u", what, (unsigned long long)all, limit));
    }

    void parse_function(bool entry) {
        Function f;
        f.entry = entry;
        f.line = peek().line;
        if (!entry) f.results = parse_parameters();
        f.name = word();
        f.parameters = parse_parameters();
        for (;;) {
            if (accept(".maxntid")) {
                uint32_t n[3];
                three(n, max_threads_per_cta, ".maxntid");
                f.max_threads = n[0] * n[1] * n[2];
            } else if (accept(".reqntid")) {
                three(f.required_threads, max_threads_per_cta, ".reqntid");
            } else if (accept(".minnctapersm") || accept(".maxclusterrank") ||
                       accept(".abi_preserve") || accept(".abi_preserve_control")) {
                integer();
            } else if (accept(".maxnreg")) {
                f.max_registers = uint32_t(integer_in(1, max_registers, ".maxnreg"));
            } else if (accept(".reqnctapercluster")) {
                three(f.cluster, max_ctas_per_cluster, ".reqnctapercluster");
            } else if (accept(".explicitcluster") || accept(".noreturn") ||
                       accept(".blocksareclusters")) {
            } else if (accept(".pragma")) {
                skip_statement("a .pragma");
            } else {
                break;
            }
        }
        if (accept(";")) {  // a declaration
            if (!module_->functions.count(f.name)) module_->functions[f.name] = std::move(f);
            return;
        }
        auto known = module_->functions.find(f.name);
        if (known != module_->functions.end() && known->second.defined)
            fail("function '" + f.name + "' is defined twice");
        expect("{");
        f.defined = true;
        function_ = &f;
        f.scopes.emplace_back();
        scope_ = 0;
        source_ = -1;
        while (!accept("}")) body_item();
        function_ = nullptr;
        module_->functions[f.name] = std::move(f);
    }

    void open_scope() {
        Scope inner;
        inner.parent = scope_;
        function_->scopes.push_back(std::move(inner));
        scope_ = int(function_->scopes.size()) - 1;
    }

    void body_item() {
        if (peek().kind == Token::Kind::end) fail("the function does not end");
        if (accept(";")) return;
        if (accept("{")) {
            const Nested nested(*this);
            int outer = scope_;
            open_scope();
            while (!accept("}")) body_item();
            scope_ = outer;
            return;
        }
        if (peek().kind == Token::Kind::word && is(":", 1)) {
            label();
            return;
        }
        if (accept(".reg")) return registers();
        if (accept(".loc")) return location();
        if (accept(".pragma")) return skip_statement("a .pragma");
        if (accept(".file")) return parse_file();
        Space space;
        bool external = accept(".extern");
        if (accept_space(space)) {
            for (Variable& v : parse_variables(space, external)) {
                const int index = int(function_->variables.size());
                if (!scope().variables.emplace(v.symbol.name, index).second)
                    fail("variable '" + v.symbol.name + "' is defined twice", v.line);
                function_->variables.push_back(std::move(v));
            }
            return;
        }
        statement();
    }

    Scope& scope() { return function_->scopes[size_t(scope_)]; }

    void label() {
        std::string name = word();
        expect(":");
        if (accept(".branchtargets")) {
            auto& targets = scope().branch_targets[name];
            do targets.push_back(word());
            while (accept(","));
            expect(";");
        } else if (accept(".calltargets") || accept(".callprototype")) {
            skip_statement("a list of calls");
        } else {
            if (!scope().labels.emplace(name, function_->statements.size()).second)
                fail("label '" + name + "' is defined twice");
        }
    }

    void registers() {
        std::string type_name = word();
        Type type;
        if (type_name == ".v2" || type_name == ".v4") fail("vector registers are not supported");
        if (!parse_type(type_name.substr(1), type))
            fail("unknown register type '" + type_name + "'");
        do {
            RegisterDeclaration d;
            d.name = word();
            d.type = type;
            if (accept("<")) {
                d.count = int(integer_in(0, INT32_MAX, "the number of registers"));
                expect(">");
                scope().ranges[d.name] = d;
            } else {
                scope().registers[d.name] = d;
            }
        } while (accept(","));
        expect(";");
    }

    using LocationKey = std::array<int, 3>;  // file, line, column

    LocationKey location_key() {
        LocationKey key;
        for (int& part : key) part = int(integer());
        return key;
    }

    void location() {
        LocationKey key = location_key();
        SourceLine source{file_name(key[0]), key[1], -1, ""};
        if (accept(",")) {
            if (word() != "function_name") fail("expected function_name in .loc");
            auto found = info_strings_.find(word());
            if (found != info_strings_.end()) source.function = found->second;
            if (accept("+")) integer();
            expect(",");
            if (word() != "inlined_at") fail("expected inlined_at in .loc");
            LocationKey outer = location_key();
            auto [entry, is_new] =
                location_index_.try_emplace(outer, int(module_->source_lines.size()));
            if (is_new) module_->source_lines.push_back({file_name(outer[0]), outer[1], -1, ""});
            source.inlined_at = entry->second;
        }
        source_ = int(module_->source_lines.size());
        module_->source_lines.push_back(source);
        location_index_[key] = source_;  // a later inlined_at names its call site by this key
    }

    std::string file_name(int index) const {
        auto found = files_.find(index);
        return found == files_.end() ? "file " + std::to_string(index) : found->second;
    }

    // ---- statements

    void statement() {
        Statement s;
        s.line = peek().line;
        s.source = source_;
        s.scope = scope_;
        if (accept("@")) {
            s.guard_negated = accept("!");
            s.guard = resolve(word());
            if (s.guard.empty() || function_->register_types.at(s.guard) != Type::pred)
                fail("the guard is not a predicate register");
        }
        if (peek().kind != Token::Kind::word) fail("expected an instruction, found " + found());
        s.mnemonic = word();
        if (s.mnemonic[0] == '.') fail("unknown directive '" + s.mnemonic + "'");
        while (!accept(";")) {
            if (peek().kind == Token::Kind::end) fail("the instruction does not end");
            s.operands.push_back(operand());
            if (s.operands.size() > max_operands) fail("the instruction has too many operands");
            if (!is(";")) expect(",");
        }
        function_->statements.push_back(std::move(s));
    }

    ParsedOperand number() {
        ParsedOperand p;
        bool negative = accept("-");
        if (peek().kind != Token::Kind::number) fail("expected a number, found " + found());
        const std::string text(peek().text);
        p.kind = ParsedOperand::Kind::immediate;
        const bool is_decimal =
            text.size() < 2 || text[0] != '0' || !std::strchr("xXfFdDbB", text[1]);
        const auto hexadecimal = [&](size_t digits, char kind) {
            return text.size() == digits + 2 && text[0] == '0' &&
                   std::tolower(static_cast<unsigned char>(text[1])) == kind &&
                   text.find_first_not_of("0123456789abcdefABCDEF", 2) == std::string::npos;
        };
        if (hexadecimal(8, 'f')) {
            p.kind = ParsedOperand::Kind::float_immediate;
            p.bits = std::strtoull(text.c_str() + 2, nullptr, 16);
            if (negative) p.bits ^= 0x80000000ull;
        } else if (hexadecimal(16, 'd')) {
            p.kind = ParsedOperand::Kind::float_immediate;
            p.is_double = true;
            p.bits = std::strtoull(text.c_str() + 2, nullptr, 16);
            if (negative) p.bits ^= 0x8000000000000000ull;
        } else if (is_decimal && text.find_first_of(".eE") != std::string::npos) {
            p.kind = ParsedOperand::Kind::float_immediate;
            p.is_double = true;
            char* end = nullptr;
            double value = std::strtod(text.c_str(), &end) * (negative ? -1 : 1);
            if (*end) fail("expected a number, found " + found());
            std::memcpy(&p.bits, &value, 8);
        } else {
            const std::optional<uint64_t> value = parse_integer(text);
            if (!value) fail("expected a number of at most 64 bits, found " + found());
            p.value = int64_t(negative ? 0 - *value : *value);
        }
        take();
        return p;
    }

    ParsedOperand operand() {
        const Nested nested(*this);
        ParsedOperand p;
        if (accept("[")) return address();
        if (accept("{")) {
            p.kind = ParsedOperand::Kind::vector;
            while (!accept("}")) {
                p.elements.push_back(operand());
                if (p.elements.size() > max_operands) fail("a list has too many elements");
                accept(",");
            }
            return p;
        }
        if (accept("(")) {
            p.kind = ParsedOperand::Kind::parenthesis;
            while (!accept(")")) {
                p.elements.push_back(operand());
                if (p.elements.size() > max_operands) fail("a list has too many elements");
                accept(",");
            }
            return p;
        }
        if (accept("!")) {
            p = operand();
            p.negated = !p.negated;
            return p;
        }
        if (is("-") || peek().kind == Token::Kind::number) return number();
        named(p, word());
        if (p.kind == ParsedOperand::Kind::symbol) {
            if (accept("+"))
                p.value = integer();
            else if (is("-"))
                p.value = integer();
        }
        if (accept("|")) p.second = resolve(word());
        return p;
    }

    void named(ParsedOperand& p, const std::string& name) {
        if (name == "_") {
            p.kind = ParsedOperand::Kind::sink;
            return;
        }
        std::string resolved = resolve(name);
        p.name = resolved.empty() ? name : resolved;
        if (!resolved.empty())
            p.kind = ParsedOperand::Kind::reg;
        else if (name[0] == '%')
            p.kind = ParsedOperand::Kind::special;
        else
            p.kind = ParsedOperand::Kind::symbol;
    }

    ParsedOperand address() {
        ParsedOperand p, base;
        if (peek().kind == Token::Kind::number || is("-")) {
            base.kind = ParsedOperand::Kind::immediate;
            base.value = integer();
        } else {
            named(base, word());
        }
        p.kind = ParsedOperand::Kind::address;
        p.name = base.name;
        p.bits = uint64_t(base.kind);  // what the name is
        p.value = base.value;
        while (is("+") || is("-")) {
            accept("+");
            p.value = int64_t(uint64_t(p.value) + bits_of_integer());
        }
        const bool has_name = base.kind != ParsedOperand::Kind::immediate;
        if (has_name && (p.value < INT32_MIN || p.value > int64_t(UINT32_MAX)))
            fail("the offset of an address has more than 32 bits");
        while (accept(",")) {
            p.elements.push_back(operand());
            if (p.elements.size() > max_operands) fail("an address has too many parts");
        }
        expect("]");
        return p;
    }

    // The unique name of a register visible here, or "" if there is none. Names of inner scopes get
    // a suffix.
    std::string resolve(const std::string& name) {
        size_t digits = name.size();
        while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
        for (int s = scope_; s >= 0; s = function_->scopes[size_t(s)].parent) {
            const Scope& scope = function_->scopes[size_t(s)];
            const RegisterDeclaration* found = nullptr;
            auto exact = scope.registers.find(name);
            if (exact != scope.registers.end()) {
                found = &exact->second;
            } else if (digits < name.size()) {
                for (size_t cut = digits; cut < name.size() && !found; ++cut) {
                    auto range = scope.ranges.find(std::string_view(name).substr(0, cut));
                    if (range != scope.ranges.end() &&
                        std::strtoull(name.c_str() + cut, nullptr, 10) <
                            uint64_t(range->second.count))
                        found = &range->second;
                }
            }
            if (found) {
                std::string unique = s == 0 ? name : name + "@" + std::to_string(s);
                function_->register_types.emplace(unique, found->type);
                return unique;
            }
        }
        return "";
    }

    std::unique_ptr<ParsedModule> module_;
    std::vector<Token> tokens_;
    size_t at_ = 0;
    std::map<int, std::string> files_;
    std::map<std::string, std::string> info_strings_;
    std::map<LocationKey, int> location_index_;
    Function* function_ = nullptr;
    int scope_ = 0;
    int source_ = -1;
    int depth_ = 0;  // of open brackets and blocks
};

}  // namespace

std::string quoted_line(const std::vector<std::string>& lines, int number, size_t max_shown) {
    if (number < 1 || size_t(number) > lines.size()) return "";
    const std::string& line = lines[size_t(number) - 1];
    const size_t start = line.find_first_not_of(" \t");
    if (start == std::string::npos) return "";
    return line.size() - start > max_shown ? line.substr(start, max_shown) + " ..."
                                           : line.substr(start);
}

// No memory is there: functions are only called.
uint64_t ParsedModule::function_address(const std::string& function) const {
    constexpr uint64_t code_window = 0x0300'0000'0000'0000ull, distance = 16;
    auto found = functions.find(function);
    if (found == functions.end() || !found->second.defined || found->second.entry) return 0;
    return code_window + distance * uint64_t(std::distance(functions.begin(), found) + 1);
}

std::unique_ptr<ParsedModule> parse_ptx(std::string_view text, const std::string& name) {
    return Parser(text, name).run();
}

}  // namespace deep_moe::emulator
