#include "findings.h"

#include "machine.h"

namespace deep_moe::emulator {

bool Findings::is_new(FaultKind kind, Place place, Place other) {
    return known_.emplace(kind, line_of(place), line_of(other)).second;
}

uint32_t Findings::line_of(Place place) {
    if (!place.program) return 0;
    std::vector<uint32_t>& lines = lines_[place.program];
    lines.resize(place.program->ops.size());
    uint32_t& line = lines[place.pc];
    if (!line) {
        const OpInfo& info = place.program->infos[place.pc];
        std::string key = describe_source(*place.program, info.source);
        if (key.empty()) key = format("line %d", info.ptx_line);
        key = place.program->name + " " + key;
        line = line_ids_.try_emplace(key, uint32_t(line_ids_.size() + 1)).first->second;
    }
    return line;
}

}  // namespace deep_moe::emulator
