// Instructions in which the lanes of a warp exchange values or wait for each other.
#include "float_types.h"
#include "lanes.h"
#include "race_detector.h"

namespace deep_moe::emulator {

namespace {

// The last operand of `operands` is the member mask.
void emit_collective(Decoder& d, Body body, std::vector<Operand> operands, uint64_t aux = 0) {
    d.op.meeting = Meeting::member_mask;
    d.op.mask_operand = uint8_t(operands.size() - 1);
    d.emit(body, std::move(operands), aux);
}

enum Shuffle : uint64_t { shuffle_up, shuffle_down, shuffle_butterfly, shuffle_index };

// operands: d, p, a, b, c, mask
Flow shfl(Warp& w, const Op& op) {
    auto a = w.in<uint32_t>(op.operands[2]), b = w.in<uint32_t>(op.operands[3]),
         c = w.in<uint32_t>(op.operands[4]);
    auto d = w.out<uint32_t>(op.operands[0]);
    uint32_t values[warp_size], in_range = 0;
    w.for_each_lane([&](int lane) {
        int amount = int(b[lane] & 31), clamp = int(c[lane] & 31),
            segment = int((c[lane] >> 8) & 31);
        int highest = (lane & segment) | (clamp & ~segment), lowest = lane & segment, from = lane;
        bool p = false;
        switch (op.aux) {
            case shuffle_up:
                from = lane - amount;
                p = from >= highest;
                break;
            case shuffle_down:
                from = lane + amount;
                p = from <= highest;
                break;
            case shuffle_butterfly:
                from = lane ^ amount;
                p = from <= highest;
                break;
            case shuffle_index:
                from = lowest | (amount & ~segment);
                p = from <= highest;
                break;
        }
        if (!p) from = lane;
        // What a lane outside the mask holds is undefined.
        values[lane] = (w.exec >> from) & 1 ? a[from] : 0xcbcbcbcb;
        in_range |= uint32_t(p) << lane;
    });
    w.for_each_lane([&](int lane) { d.set(lane, values[lane]); });
    w.set_predicate(op.operands[1], in_range);
    return Flow::next;
}

void decode_shfl(Decoder& d) {
    if (!d.take("sync")) d.unsupported("only shfl.sync");
    std::string_view mode = d.take_any({"up", "down", "bfly", "idx"});
    d.take_type({Type::b32});
    d.expect_operands(5);
    Shuffle aux = mode == "up"     ? shuffle_up
                  : mode == "down" ? shuffle_down
                  : mode == "bfly" ? shuffle_butterfly
                                   : shuffle_index;
    emit_collective(d, shfl,
                    {d.destination(0, Type::b32), d.second(0), d.source(1, Type::b32),
                     d.source(2, Type::b32), d.source(3, Type::b32), d.source(4, Type::b32)},
                    aux);
}

enum Vote : uint64_t { vote_all, vote_any, vote_uniform };

// operands: d, a, mask
Flow vote(Warp& w, const Op& op) {
    uint32_t p = w.predicate(op.operands[1]) & w.exec;
    bool result = op.aux == vote_all   ? p == w.exec
                  : op.aux == vote_any ? p != 0
                                       : p == 0 || p == w.exec;
    w.set_predicate(op.operands[0], result ? full_mask : 0);
    return Flow::next;
}

Flow ballot(Warp& w, const Op& op) {
    uint32_t p = w.predicate(op.operands[1]) & w.exec;
    auto d = w.out<uint32_t>(op.operands[0]);
    w.for_each_lane([&](int lane) { d.set(lane, p); });
    return Flow::next;
}

void decode_vote(Decoder& d) {
    if (!d.take("sync")) d.unsupported("only vote.sync");
    std::string_view mode = d.take_any({"all", "any", "uni", "ballot"});
    d.expect_operands(3);
    if (mode == "ballot") {
        d.take_type({Type::b32});
        emit_collective(
            d, ballot,
            {d.destination(0, Type::b32), d.source(1, Type::pred), d.source(2, Type::b32)});
    } else {
        d.take_type({Type::pred});
        emit_collective(
            d, vote,
            {d.destination(0, Type::pred), d.source(1, Type::pred), d.source(2, Type::b32)},
            mode == "all"   ? vote_all
            : mode == "any" ? vote_any
                            : vote_uniform);
    }
}

// operands: d, p, a, mask; aux 1: match.all
template <class T>
Flow match(Warp& w, const Op& op) {
    auto a = w.in<T>(op.operands[2]);
    auto d = w.out<uint32_t>(op.operands[0]);
    uint32_t same[warp_size], all = full_mask;
    w.for_each_lane([&](int lane) {
        same[lane] = 0;
        w.for_each_lane([&](int other) { same[lane] |= uint32_t(a[other] == a[lane]) << other; });
        if (same[lane] != w.exec) all = 0;
    });
    w.for_each_lane([&](int lane) { d.set(lane, op.aux ? w.exec & all : same[lane]); });
    w.set_predicate(op.operands[1], all);
    return Flow::next;
}

void decode_match(Decoder& d) {
    bool all = d.take_any({"any", "all"}) == "all";
    d.take("sync");
    Type type = d.take_type({Type::b32, Type::b64});
    d.expect_operands(3);
    emit_collective(
        d, type == Type::b64 ? match<uint64_t> : match<uint32_t>,
        {d.destination(0, Type::b32), d.second(0), d.source(1, type), d.source(2, Type::b32)}, all);
}

struct RAdd {
    template <class T>
    T operator()(T a, T b) const {
        return T(a + b);
    }
};
struct RMin {
    template <class T>
    T operator()(T a, T b) const {
        return b < a ? b : a;
    }
};
struct RMax {
    template <class T>
    T operator()(T a, T b) const {
        return b > a ? b : a;
    }
};
struct RAnd {
    template <class T>
    T operator()(T a, T b) const {
        return T(a & b);
    }
};
struct ROr {
    template <class T>
    T operator()(T a, T b) const {
        return T(a | b);
    }
};
struct RXor {
    template <class T>
    T operator()(T a, T b) const {
        return T(a ^ b);
    }
};

template <class T, class F>
Flow redux(Warp& w, const Op& op) {
    auto a = w.in<T>(op.operands[1]);
    auto d = w.out<T>(op.operands[0]);
    int first = w.first_lane();
    T result = a[first];
    w.for_each_lane([&](int lane) {
        if (lane != first) result = F{}(result, a[lane]);
    });
    w.for_each_lane([&](int lane) { d.set(lane, result); });
    return Flow::next;
}

// aux bit 0: max, bit 1: absolute values, bit 2: NaN wins
Flow redux_float(Warp& w, const Op& op) {
    auto a = w.in<float>(op.operands[1]);
    auto d = w.out<float>(op.operands[0]);
    float result = NAN;
    bool any_nan = false;
    w.for_each_lane([&](int lane) {
        float v = op.aux & 2 ? std::fabs(a[lane]) : a[lane];
        if (std::isnan(v))
            any_nan = true;
        else if (std::isnan(result) || (op.aux & 1 ? v > result : v < result))
            result = v;
    });
    if ((op.aux & 4) && any_nan) result = NAN;
    if (std::isnan(result)) result = std::bit_cast<float>(0x7fffffffu);
    w.for_each_lane([&](int lane) { d.set(lane, result); });
    return Flow::next;
}

void decode_redux(Decoder& d) {
    d.take("sync");
    std::string_view name = d.take_any({"add", "min", "max", "and", "or", "xor"});
    bool absolute = d.take("abs"), nan = d.take("NaN");
    Type type = d.take_type({Type::u32, Type::s32, Type::b32, Type::f32});
    d.expect_operands(3);
    std::vector<Operand> operands{d.destination(0, type), d.source(1, type),
                                  d.source(2, Type::b32)};
    if (type == Type::f32) {
        emit_collective(d, redux_float, operands,
                        uint64_t(name == "max") | uint64_t(absolute) << 1 | uint64_t(nan) << 2);
        return;
    }
    bool s = type == Type::s32;
    Body body = name == "add"   ? redux<uint32_t, RAdd>
                : name == "min" ? (s ? redux<int32_t, RMin> : redux<uint32_t, RMin>)
                : name == "max" ? (s ? redux<int32_t, RMax> : redux<uint32_t, RMax>)
                : name == "and" ? redux<uint32_t, RAnd>
                : name == "or"  ? redux<uint32_t, ROr>
                                : redux<uint32_t, RXor>;
    emit_collective(d, body, operands);
}

Flow activemask(Warp& w, const Op& op) {
    auto d = w.out<uint32_t>(op.operands[0]);
    w.for_each_lane([&](int lane) { d.set(lane, w.exec); });
    return Flow::next;
}

void decode_activemask(Decoder& d) {
    d.take_type({Type::b32});
    d.expect_operands(1);
    d.emit(activemask, {d.destination(0, Type::b32)});
}

// operands: d, p, mask. The leader is the lowest lane of the mask.
Flow elect(Warp& w, const Op& op) {
    auto d = w.out<uint32_t>(op.operands[0]);
    int leader = w.first_lane();
    w.for_each_lane([&](int lane) { d.set(lane, uint32_t(leader)); });
    w.set_predicate(op.operands[1], 1u << leader);
    return Flow::next;
}

void decode_elect(Decoder& d) {
    d.take("sync");
    d.expect_operands(2);
    emit_collective(d, elect, {d.destination(0, Type::b32), d.second(0), d.source(1, Type::b32)});
}

// Lanes that came to another bar.warp.sync with this mask do not run this, but are among them.
Flow warp_sync(Warp& w, const Op& op) {
    if (w.machine->races)
        w.machine->races->sync_lanes(w, w.uniform<uint32_t>(op.operands[op.mask_operand]));
    return Flow::next;
}

void decode_warp_sync(Decoder& d) {
    d.expect_operands(1);
    d.op.meets_anywhere = true;
    emit_collective(d, warp_sync, {d.source(0, Type::b32)});
}

}  // namespace

InstructionTable warp_instructions() {
    return {
        {"shfl", decode_shfl, "exchange of registers between lanes"},
        {"vote", decode_vote, "all, any, uni and ballot over the lanes of a mask"},
        {"match", decode_match, "lanes with equal values"},
        {"redux", decode_redux, "reduction over the lanes of a mask"},
        {"activemask", decode_activemask, "lanes that execute together"},
        {"elect", decode_elect, "one leader among the lanes of a mask"},
        {"bar.warp.sync", decode_warp_sync, "barrier of the lanes of a mask"},
    };
}

}  // namespace deep_moe::emulator
