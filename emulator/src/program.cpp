// Names and sizes of PTX types, and the words for an instruction's place in error messages.
#include "program.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "machine.h"
#include "ptx_parser.h"

namespace deep_moe::emulator {

namespace {

struct TypeRow {
    Type type;
    const char* name;
    int bits;
};

constexpr TypeRow type_rows[] = {
    {Type::none, "", 0},
    {Type::pred, "pred", 1},
    {Type::b8, "b8", 8},
    {Type::b16, "b16", 16},
    {Type::b32, "b32", 32},
    {Type::b64, "b64", 64},
    {Type::b128, "b128", 128},
    {Type::u8, "u8", 8},
    {Type::u16, "u16", 16},
    {Type::u32, "u32", 32},
    {Type::u64, "u64", 64},
    {Type::s8, "s8", 8},
    {Type::s16, "s16", 16},
    {Type::s32, "s32", 32},
    {Type::s64, "s64", 64},
    {Type::f16, "f16", 16},
    {Type::bf16, "bf16", 16},
    {Type::f32, "f32", 32},
    {Type::f64, "f64", 64},
    {Type::tf32, "tf32", 32},
    {Type::f16x2, "f16x2", 32},
    {Type::bf16x2, "bf16x2", 32},
    {Type::f32x2, "f32x2", 64},
    {Type::e4m3, "e4m3", 8},
    {Type::e5m2, "e5m2", 8},
    {Type::e2m1, "e2m1", 8},
    {Type::e2m3, "e2m3", 8},
    {Type::e3m2, "e3m2", 8},
    {Type::ue8m0, "ue8m0", 8},
    {Type::e4m3x2, "e4m3x2", 16},
    {Type::e5m2x2, "e5m2x2", 16},
    {Type::e2m1x2, "e2m1x2", 8},
    {Type::e2m3x2, "e2m3x2", 16},
    {Type::e3m2x2, "e3m2x2", 16},
    {Type::ue8m0x2, "ue8m0x2", 16},
    {Type::e4m3x4, "e4m3x4", 32},
    {Type::e5m2x4, "e5m2x4", 32},
    {Type::e2m1x4, "e2m1x4", 16},
    {Type::e2m3x4, "e2m3x4", 32},
    {Type::e3m2x4, "e3m2x4", 32},
    {Type::u16x2, "u16x2", 32},
    {Type::s16x2, "s16x2", 32},
    {Type::u8x4, "u8x4", 32},
    {Type::s8x4, "s8x4", 32},
    {Type::u4, "u4", 4},
    {Type::s4, "s4", 4},
    {Type::u2, "u2", 2},
    {Type::s2, "s2", 2},
    {Type::b1, "b1", 1},
};

const TypeRow& row(Type type) {
    for (const TypeRow& r : type_rows)
        if (r.type == type) return r;
    return type_rows[0];
}

}  // namespace

int num_bits(Type type) {
    return row(type).bits;
}
const char* name_of(Type type) {
    return row(type).name;
}

bool is_signed(Type type) {
    return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64 ||
           type == Type::s4 || type == Type::s2;
}

bool is_float(Type type) {
    return type == Type::f16 || type == Type::bf16 || type == Type::f32 || type == Type::f64 ||
           type == Type::tf32;
}

bool parse_type(std::string_view text, Type& type) {
    if (text.empty()) return false;
    for (const TypeRow& r : type_rows) {
        if (text == r.name) {
            type = r.type;
            return true;
        }
    }
    return false;
}

const char* name_of(Space space) {
    switch (space) {
        case Space::generic:
            return "generic";
        case Space::global:
            return "global";
        case Space::shared:
            return "shared";
        case Space::shared_cluster:
            return "shared::cluster";
        case Space::local:
            return "local";
        case Space::constant:
            return "const";
        case Space::param:
            return "param";
    }
    return "";
}

std::string format(const char* pattern, ...) {
    char buffer[1024];
    va_list arguments, again;
    va_start(arguments, pattern);
    va_copy(again, arguments);
    const int length = std::vsnprintf(buffer, sizeof buffer, pattern, arguments);
    va_end(arguments);
    std::string text = buffer;
    if (length >= int(sizeof buffer)) {
        text.resize(size_t(length));
        std::vsnprintf(text.data(), text.size() + 1, pattern, again);
    }
    va_end(again);
    return text;
}

namespace {

// Where two paths part: behind the last folder that they share.
size_t shared_folders(const std::string& a, const std::string& b) {
    size_t end = 0;
    for (size_t i = 1; i < std::min(a.size(), b.size()) && a[i] == b[i]; ++i)
        if (a[i] == '/') end = i + 1;
    return end;
}

// Long lists of registers by their first two and their number.
std::string shorten_lists(const std::string& text) {
    constexpr size_t max_elements = 8;
    std::string result;
    for (size_t at = 0; at < text.size();) {
        const size_t open = text.find('{', at);
        const size_t close = open == std::string::npos ? open : text.find('}', open);
        if (close == std::string::npos) return result + text.substr(at);
        const std::string list = text.substr(open, close - open);
        const size_t count = size_t(std::count(list.begin(), list.end(), ',')) + 1;
        const size_t second = list.find(',', list.find(',') + 1);
        result +=
            text.substr(at, open - at) +
            (count <= max_elements ? list
                                   : list.substr(0, second) + format(", ... (%zu in all)", count)) +
            "}";
        at = close + 1;
    }
    return result;
}

}  // namespace

std::string describe_source(const Program& program, int index) {
    std::string text, first;
    while (index >= 0) {
        const SourceLine& s = program.source_lines[size_t(index)];
        if (text.empty())
            first = s.file;
        else
            text += ", inlined at ";
        // The path of the first file tells where the others lie.
        text += format("%s:%d", s.file.c_str() + (text.empty() ? 0 : shared_folders(first, s.file)),
                       s.line);
        index = s.inlined_at == index ? -1 : s.inlined_at;
    }
    return text;
}

std::string ptx_of(const Program& program, uint32_t pc) {
    return shorten_lists(quoted_line(*program.lines, program.infos[pc].ptx_line, SIZE_MAX));
}

std::string describe_instruction(const Program& program, uint32_t pc) {
    const OpInfo& info = program.infos[pc];
    std::string text = format("%s, PTX line %d: ", program.module_name.c_str(), info.ptx_line);
    text += ptx_of(program, pc);
    std::string source = describe_source(program, info.source);
    if (!source.empty()) text += "\n    source " + source;
    return text;
}

std::string describe_site(const Where& where) {
    const OpInfo& info = where.program->infos[where.pc];
    const std::string source = describe_source(*where.program, info.source);
    return format("CTA %u, ", where.cta) + describe_warp(*where.grid, where.warp) + " at " +
           (source.empty() ? format("PTX line %d", info.ptx_line) : source);
}

std::string describe(const Where& where, int lane) {
    std::string text = "  kernel " + readable_name(where.program->name) +
                       format(", rank %u, CTA %u, ", where.grid->rank->index, where.cta) +
                       describe_warp(*where.grid, where.warp);
    if (lane >= 0) text += format(", lane %d", lane);
    return text + "\n  " + describe_instruction(*where.program, where.pc);
}

}  // namespace deep_moe::emulator
