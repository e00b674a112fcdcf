// How strong an access of memory is, as instructions say it, and what the race detector learns of
// it.
#pragma once

#include "instruction_table.h"
#include "race_detector.h"

namespace deep_moe::emulator {

// aux of loads, stores and updates.
// volatile, relaxed, acquire, release: another thread may change it
constexpr uint64_t strong_bit = 1 << 4;
constexpr uint64_t release_bit = 1 << 20, acquire_bit = 1 << 21;
constexpr int scope_shift = 22;
constexpr uint64_t noncoherent = 1 << 24;  // .nc: nobody writes it while the kernel runs

inline Scope scope_of(const Op& op) {
    return Scope(op.aux >> scope_shift & 3);
}

// Tells the race detector of one lane's access at the host address `at`, and of the order that a
// strong access brings.
inline void note_access(Warp& w, const Op& op, Space space, uint64_t address, uint32_t bytes,
                        const std::byte* at, Access access, int lane, bool is_strong) {
    RaceDetector& races = *w.machine->races;
    const uint32_t flags = is_strong ? Record::strong | uint32_t(scope_of(op)) << 2 : 0;
    const bool is_watched = races.access(w, space, address, bytes, access, lane, flags);
    if (is_watched && op.aux & noncoherent) races.check_unwritten(w, address, bytes, lane);
    if (!is_watched || !is_strong) return;
    const uint64_t key = reinterpret_cast<uint64_t>(at);
    if (access != Access::write) races.read_word(w, lane, key, scope_of(op), op.aux & acquire_bit);
    if (access != Access::read)
        races.write_word(w, lane, key, scope_of(op), op.aux & release_bit,
                         access == Access::read_write);
}

struct Strength {
    bool is_strong = false;  // another thread may be waiting for, or changing, what is accessed
    uint64_t aux = 0;        // order and scope
};

// `otherwise`: the scope where the instruction names none.
inline Strength take_strength(Decoder& d, Scope otherwise) {
    Strength s;
    Scope scope = otherwise;
    if (d.take("volatile") || d.take("mmio")) s.is_strong = true, scope = Scope::sys;
    if (d.take("relaxed")) s.is_strong = true;
    if (d.take("acquire")) s.is_strong = true, s.aux |= acquire_bit;
    if (d.take("release")) s.is_strong = true, s.aux |= release_bit;
    if (d.take("acq_rel")) s.is_strong = true, s.aux |= acquire_bit | release_bit;
    if (d.take("cta")) scope = Scope::cta;
    if (d.take("cluster")) scope = Scope::cluster;
    if (d.take("gpu")) scope = Scope::gpu;
    if (d.take("sys")) scope = Scope::sys;
    s.aux |= uint64_t(scope) << scope_shift;
    return s;
}

}  // namespace deep_moe::emulator
