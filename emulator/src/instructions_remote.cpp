// st.async and red.async: writes to shared memory of the cluster that an mbarrier counts.
#include <cstring>

#include "async_units.h"
#include "instruction_table.h"
#include "race_detector.h"
#include "reductions.h"

namespace deep_moe::emulator {
namespace {

// operands: address, mbarrier, values; aux: space, reduction
template <class T>
Flow write_remotely(Warp& w, const Op& op) {
    const auto reduction = Reduction(op.aux >> 8 & 0xff);
    const uint32_t count = op.num_operands - 2u, bytes = count * uint32_t(sizeof(T));
    Machine* machine = w.machine;
    w.for_each_lane([&](int lane) {
        const Space space = Space(op.aux & 0xff);
        const SharedPlace to = shared_place(w, space, w.address(op.operands[0], lane), lane),
                          barrier = shared_place(w, space, w.address(op.operands[1], lane), lane);
        if (to.cta != barrier.cta)
            throw Fault(FaultKind::invalid_operation,
                        "the mbarrier must be in the shared memory that is written", lane);
        if (to.offset % bytes)
            throw Fault(FaultKind::misaligned,
                        format("shared offset 0x%x is not aligned to %u bytes", to.offset, bytes),
                        lane);
        std::array<T, 4> values{};
        for (uint32_t i = 0; i < count; ++i) values[i] = w.in<T>(op.operands[2 + i])[lane];
        RaceDetector* races = machine->races.get();
        // Updates are relaxed atomics of cluster scope.
        const uint32_t flags =
            reduction == Reduction::none ? 0 : Record::strong | uint32_t(Scope::cluster) << 2;
        const auto issue = races ? races->issue_generic(w, lane, flags) : nullptr;
        const uint64_t phase = phase_of(*barrier.cta, barrier.offset);
        machine->enqueue_async(w, "remote write", 0, [=] {
            {
                RaceDetector* now = issue ? machine->races.get() : nullptr;
                const Mbarrier& counted = mbarrier_at(*barrier.cta, barrier.offset);
                const AsyncAccesses accesses(now, issue,
                                             now ? now->order_of(*barrier.cta, counted).agent : 0,
                                             uint32_t(counted.phase) + 1);
                CtaWindow window(*to.cta, "remote write");
                for (uint32_t i = 0; i < count; ++i) {
                    const uint32_t offset = to.offset + i * uint32_t(sizeof(T));
                    T old{};
                    if (reduction != Reduction::none)
                        std::memcpy(&old, window.read(offset, sizeof(T)), sizeof(T));
                    const T value = reduce_integer(reduction, old, values[i]);
                    std::memcpy(window.write(offset, sizeof(T)), &value, sizeof(T));
                }
            }
            complete_bytes_at(*barrier.cta, barrier.offset, bytes, phase);
        });
    });
    return Flow::next;
}

void decode_remote(Decoder& d, Reduction reduction) {
    d.ignore({"weak", "relaxed", "cluster", "mbarrier::complete_tx::bytes"});
    const Space space = d.take_space(Space::shared_cluster);
    const std::string_view vector = d.take_any({"v2", "v4"});
    const Type type = d.take_type();
    d.expect_operands(3);
    const std::vector<Operand> values = d.sources(1, type);
    if (values.size() != (vector.empty() ? 1u : vector == "v2" ? 2u : 4u))
        d.invalid("the vector's length is not that of the instruction");
    std::vector<Operand> operands{d.address(0), d.address(2)};
    operands.insert(operands.end(), values.begin(), values.end());
    const bool sign = is_signed(type);
    Body body = nullptr;
    if (num_bits(type) == 32)
        body = sign ? write_remotely<int32_t> : write_remotely<uint32_t>;
    else if (num_bits(type) == 64)
        body = sign ? write_remotely<int64_t> : write_remotely<uint64_t>;
    else
        d.unsupported("this type");
    if (is_float(type) && reduction != Reduction::none) d.unsupported("a reduction of floats");
    d.emit(body, std::move(operands), uint64_t(space) | uint64_t(reduction) << 8);
}

// To global memory: PTX lets it happen later, here it happens at once.
void decode_store(Decoder& d) {
    if (d.has("global")) return decode_st(d);
    decode_remote(d, Reduction::none);
}

void decode_reduction(Decoder& d) {
    if (d.has("global")) return decode_red(d);
    decode_remote(d, take_reduction(d));
}

}  // namespace

InstructionTable remote_instructions() {
    return {
        {"st.async", decode_store,
         "store to the cluster's shared memory, counted by an mbarrier, or to global memory"},
        {"red.async", decode_reduction,
         "integer update of the cluster's shared memory, counted by an mbarrier, or of global "
         "memory"},
    };
}

}  // namespace deep_moe::emulator
