#include "names.h"

#include <cxxabi.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "machine.h"

namespace deep_moe::emulator {

namespace {

// `name`, or what the C++ compiler made of it.
std::string demangled(const std::string& name) {
    if (name.rfind("_Z", 0) != 0) return name;  // "s" is a name, though a type is called so, too
    int status = 0;
    char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
    std::string result = status == 0 && text ? text : name;
    std::free(text);
    return result;
}

// A variable of the program that covers this offset.
std::string variable_at(const Program& program, uint32_t offset) {
    for (const auto& [key, symbol] : program.symbols) {
        if (symbol.space != Space::shared || symbol.dynamic) continue;
        if (offset < symbol.address || offset - symbol.address >= symbol.size) continue;
        const std::string name = demangled(key.substr(key.rfind('/') + 1));
        const uint64_t byte = offset - symbol.address;
        return byte ? format("%s+%llu", name.c_str(), (unsigned long long)byte) : name;
    }
    return "";
}

}  // namespace

std::string qualified_name(const std::string& name) {
    if (name.rfind("_Z", 0) != 0) return name;
    std::string text;
    size_t at = name[2] == 'N' ? 3 : 2;
    while (at < name.size() && std::isdigit(static_cast<unsigned char>(name[at]))) {
        size_t length = 0;
        for (; at < name.size() && std::isdigit(static_cast<unsigned char>(name[at])); ++at)
            length = length * 10 + size_t(name[at] - '0');
        if (length > name.size() - at) return name;
        text += (text.empty() ? "" : "::") + name.substr(at, length);
        at += length;
    }
    if (text.empty()) return name;
    return text;
}

std::string readable_name(const std::string& name) {
    constexpr size_t max_arguments = 60;
    std::string text = demangled(name);
    if (text == name) {  // too long for the runtime's demangler, or not mangled
        text = qualified_name(name);
        return text == name ? name : text + "<...>";
    }
    // The parameters begin at the first parenthesis outside of template arguments; what is before
    // the name, such as the result's type, ends with the last space outside.
    const std::string anonymous = "(anonymous namespace)";
    size_t depth = 0, begin = 0, arguments = 0, end = text.size();
    for (size_t i = 0; i < end; ++i) {
        const char c = text[i];
        if (c == '<' && !depth++) arguments = i;
        if (c == '>' && depth) --depth;
        if (depth) continue;
        if (text.compare(i, anonymous.size(), anonymous) == 0)
            i += anonymous.size() - 1;
        else if (c == ' ')
            begin = i + 1;
        else if (c == '(')
            end = i;
    }
    text = text.substr(begin, end - begin);
    if (arguments > begin && arguments < end && end - arguments > max_arguments)
        text = text.substr(0, arguments - begin + max_arguments) + "...>";
    return text;
}

uint64_t NamedArray::num_bytes() const {
    uint64_t bytes = element_bytes;
    for (uint64_t size : shape)
        if (__builtin_mul_overflow(bytes, size, &bytes)) return UINT64_MAX;
    return bytes;
}

void NameMap::add(NamedArray array) {
    auto behind = std::upper_bound(
        arrays_.begin(), arrays_.end(), array.offset,
        [](uint64_t offset, const NamedArray& other) { return offset < other.offset; });
    arrays_.insert(behind, std::move(array));
}

std::string NameMap::element_at(uint64_t offset) const {
    auto behind = std::upper_bound(
        arrays_.begin(), arrays_.end(), offset,
        [](uint64_t value, const NamedArray& array) { return value < array.offset; });
    if (behind == arrays_.begin()) return "";
    const NamedArray& array = *std::prev(behind);
    if (offset - array.offset >= array.num_bytes()) return "";
    uint64_t element = (offset - array.offset) / array.element_bytes;
    std::string indices;
    for (size_t i = array.shape.size(); i-- > 0;) {
        const std::string index = std::to_string(element % array.shape[i]);
        indices = indices.empty() ? index : index + ", " + indices;
        element /= array.shape[i];
    }
    std::string text = array.name;
    if (!indices.empty()) text += "[" + indices + "]";
    const uint64_t byte = (offset - array.offset) % array.element_bytes;
    return byte ? text + "+" + std::to_string(byte) : text;
}

std::string describe_global(const Rank& rank, uint64_t address) {
    const Region* region = rank.memory.find(address);
    if (!region) return format("global address 0x%llx", (unsigned long long)address);
    const uint64_t offset = address - region->address;
    const std::string element = region->names.element_at(offset);
    const std::string place =
        format("byte %llu of '%s'", (unsigned long long)offset, region->name.c_str());
    return element.empty() ? place : element + " (" + place + ")";
}

std::string describe_shared(const Cta& cta, uint32_t offset) {
    const Program& program = *cta.grid->program;
    const std::string place = format("shared offset 0x%x", offset);
    const std::string name =
        offset >= program.dynamic_shared_offset
            ? cta.grid->shared_names.element_at(offset - program.dynamic_shared_offset)
            : variable_at(program, offset);
    return name.empty() ? place : name + " (" + place + ")";
}

std::string role_of(const Grid& grid, uint32_t warp) {
    for (const WarpRole& role : grid.roles)
        if (std::count(role.warps.begin(), role.warps.end(), warp)) return role.name;
    return "";
}

std::string describe_warp(const Grid& grid, uint32_t warp) {
    for (const WarpRole& role : grid.roles) {
        auto found = std::find(role.warps.begin(), role.warps.end(), warp);
        if (found == role.warps.end()) continue;
        if (role.warps.size() == 1) return format("%s (warp %u)", role.name.c_str(), warp);
        return format("%s warp %u (warp %u)", role.name.c_str(),
                      uint32_t(found - role.warps.begin()), warp);
    }
    return format("warp %u", warp);
}

}  // namespace deep_moe::emulator
