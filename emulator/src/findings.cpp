#include "findings.h"

#include <algorithm>

#include "machine.h"

namespace deep_moe::emulator {

namespace {

std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\')
            result += {'\\', c};
        else if (static_cast<unsigned char>(c) < 0x20)
            result += format("\\u%04x", c);
        else
            result += c;
    }
    return result + "\"";
}

std::string json_of(const Involved& i) {
    return "{\"access\":" + quoted(i.access) +
           format(",\"rank\":%u,\"cta\":%u,\"warp\":%u,\"lane\":%d", i.rank, i.cta, i.warp,
                  i.lane) +
           ",\"role\":" + quoted(i.role) + ",\"file\":" + quoted(i.file) +
           format(",\"line\":%d,\"ptx_line\":%d", i.line, i.ptx_line) +
           ",\"kernel\":" + quoted(i.kernel) + ",\"instruction\":" + quoted(i.instruction) + "}";
}

}  // namespace

std::string Finding::json() const {
    std::string list;
    for (const Involved& i : involved) list += (list.empty() ? "" : ",") + json_of(i);
    return format("{\"kind\":%d", int(kind)) + ",\"text\":" + quoted(text) +
           ",\"space\":" + quoted(space) +
           format(",\"address\":%llu", (unsigned long long)address) +
           ",\"same_value\":" + (same_value ? "true" : "false") + ",\"involved\":[" + list + "]}";
}

Involved involved_at(const Where& where, int lane, std::string access) {
    const OpInfo& info = where.program->infos[where.pc];
    Involved i;
    i.access = std::move(access);
    i.rank = where.grid->rank->index;
    i.cta = where.cta;
    i.warp = where.warp;
    i.lane = lane;
    i.role = role_of(*where.grid, where.warp);
    if (info.source >= 0) {
        i.file = where.program->source_lines[size_t(info.source)].file;
        i.line = where.program->source_lines[size_t(info.source)].line;
    }
    i.ptx_line = info.ptx_line;
    i.kernel = readable_name(where.program->name);
    i.instruction = ptx_of(*where.program, where.pc);
    return i;
}

Findings::Key Findings::key_of(const void* check, Place place, Place other) {
    const auto [low, high] = std::minmax({line_of(place), line_of(other)});
    return {check, low, high};
}

bool Findings::is_new(const void* check, Place place, Place other) {
    return known_.insert(key_of(check, place, other)).second;
}

bool Findings::is_known(const void* check, Place place, Place other) {
    return known_.count(key_of(check, place, other)) != 0;
}

uint32_t Findings::line_of(Place place) {
    if (!place.program) return 0;
    std::vector<uint32_t>& lines = lines_[place.program];
    lines.resize(place.program->ops.size());
    uint32_t& line = lines[place.pc];
    if (!line) {
        const OpInfo& info = place.program->infos[place.pc];
        std::string key = describe_source(*place.program, info.source);
        // Instances of a template have their lines in common.
        if (key.empty()) key = format("%s line %d", place.program->name.c_str(), info.ptx_line);
        line = line_ids_.try_emplace(key, uint32_t(line_ids_.size() + 1)).first->second;
    }
    return line;
}

}  // namespace deep_moe::emulator
