// multimem.*: one address that stands for the same byte in the memory of several GPUs.
//
// PTX leaves the order of a reduction open. Here it is that of the members, each step rounded to
// the elements' type (of FP8 sums to .f16), or with .acc::f32 rounded once at the end.
#include "access_order.h"
#include "race_detector.h"
#include "reductions.h"

namespace deep_moe::emulator {
namespace {

// aux: access_order.h's bits; element type in bits 40.., reduction in bits 48.., elements of a
// register in bits 56.., bit 63: sums in .f32
constexpr int type_shift = 40, reduction_shift = 48, packed_shift = 56;
constexpr uint64_t wide_sum = uint64_t(1) << 63;

bool is_fp8(Type type) {
    return type == Type::e4m3 || type == Type::e5m2;
}

// Sums of FP8: in .f32, or step by step in .f16.
void add_fp8(Type type, bool is_wide, const std::vector<uint8_t*>& places, uint32_t bytes,
             uint8_t* result) {
    const FloatFormat& format = type == Type::e4m3 ? e4m3_format : e5m2_format;
    for (uint32_t i = 0; i < bytes; ++i) {
        float sum = 0;
        for (size_t m = 0; m < places.size(); ++m) {
            const auto value = float(decode(format, places[m][i]));
            sum = m ? reduce_float(Reduction::add, sum, value) : value;
            if (!is_wide) sum = f16_to_float(float_to_f16(sum));
        }
        result[i] = uint8_t(encode(format, sum, Rounding::nearest_even, Overflow::saturate));
    }
}

uint32_t bytes_of(Type type) {
    return uint32_t(num_bits(type)) / 8;
}

// Calls f(lane, its places in all members) for all lanes.
template <class F>
void for_each_lane(Warp& w, const Op& op, const Operand& address, uint32_t bytes, Access access,
                   F f) {
    const RegionTable& memory = w.grid->rank->memory;
    w.for_each_lane([&](int lane) {
        const uint64_t at = w.address(address, lane);
        if (at % bytes)
            throw Fault(FaultKind::misaligned,
                        format("multimem address 0x%llx is not aligned to %u bytes",
                               (unsigned long long)at, bytes),
                        lane);
        const RegionTable::Multicast* multicast = memory.find_multicast(at, bytes);
        if (!multicast)
            throw Fault(FaultKind::out_of_bounds,
                        format("%u bytes at 0x%llx are not in multicast memory", bytes,
                               (unsigned long long)at),
                        lane);
        std::vector<uint8_t*> places;
        for (const uint64_t member : multicast->members) {
            const uint64_t own = member + (at - multicast->address);
            std::byte* host = memory.resolve(own, bytes, access);
            if (w.machine->races)
                note_access(w, op, Space::global, own, bytes, host, access, lane,
                            op.aux & strong_bit);
            places.push_back(reinterpret_cast<uint8_t*>(host));
        }
        f(lane, places);
    });
}

// The values of a lane's registers, one behind the other.
template <class F>
void for_each_register(const Op& op, uint32_t first, uint32_t bytes, F f) {
    const uint32_t size = bytes / (op.num_operands - 1u);
    for (uint32_t i = 0; i + 1 < op.num_operands; ++i) f(op.operands[first + i], i * size, size);
}

void read_register(const Warp& w, const Operand& o, int lane, uint8_t* to, uint32_t size) {
    if (size == 8) {
        const uint64_t value = w.in<uint64_t>(o)[lane];
        std::memcpy(to, &value, size);
    } else {
        const uint32_t value = w.in<uint32_t>(o)[lane];
        std::memcpy(to, &value, size);
    }
}
void write_register(const Warp& w, const Operand& o, int lane, const uint8_t* from, uint32_t size) {
    if (o.sink) return;
    uint64_t value = 0;
    std::memcpy(&value, from, size);
    if (size == 8)
        w.out<uint64_t>(o).set(lane, value);
    else
        w.out<uint32_t>(o).set(lane, uint32_t(value));
}

uint32_t num_bytes(const Op& op) {
    return (op.num_operands - 1u) * bytes_of(Type(op.aux >> type_shift & 0xff)) *
           uint32_t(op.aux >> packed_shift & 0x7f);
}

// operands: registers, address
Flow load_and_reduce(Warp& w, const Op& op) {
    const Type type = Type(op.aux >> type_shift & 0xff);
    const auto reduction = Reduction(op.aux >> reduction_shift & 0xff);
    const uint32_t bytes = num_bytes(op);
    if (op.aux & strong_bit) ++w.polls;
    for_each_lane(w, op, op.operands[op.num_operands - 1], bytes, Access::read,
                  [&](int lane, const std::vector<uint8_t*>& places) {
                      uint8_t result[16];
                      if (is_fp8(type) && reduction == Reduction::add) {
                          add_fp8(type, op.aux & wide_sum, places, bytes, result);
                      } else if (op.aux & wide_sum) {
                          for (uint32_t i = 0; i < bytes; i += 2) {
                              float sum = 0;
                              for (size_t m = 0; m < places.size(); ++m) {
                                  uint16_t code;
                                  std::memcpy(&code, places[m] + i, 2);
                                  const float value =
                                      type == Type::f16 ? f16_to_float(code) : bf16_to_float(code);
                                  sum = m ? reduce_float(reduction, sum, value) : value;
                              }
                              const uint16_t code =
                                  type == Type::f16 ? float_to_f16(sum) : float_to_bf16(sum);
                              std::memcpy(result + i, &code, 2);
                          }
                      } else {
                          std::memcpy(result, places[0], bytes);
                          for (size_t m = 1; m < places.size(); ++m)
                              combine(reduction, type, result, places[m], bytes);
                      }
                      for_each_register(op, 0, bytes,
                                        [&](const Operand& o, uint32_t at, uint32_t size) {
                                            write_register(w, o, lane, result + at, size);
                                        });
                  });
    return op.aux & strong_bit ? Flow::yield : Flow::next;
}

// operands: address, registers
template <bool reduces>
Flow store(Warp& w, const Op& op) {
    const Type type = reduces ? Type(op.aux >> type_shift & 0xff) : Type::none;
    const auto reduction = Reduction(op.aux >> reduction_shift & 0xff);
    const uint32_t bytes = num_bytes(op);
    for_each_lane(w, op, op.operands[0], bytes, reduces ? Access::read_write : Access::write,
                  [&](int lane, const std::vector<uint8_t*>& places) {
                      uint8_t values[16];
                      for_each_register(op, 1, bytes,
                                        [&](const Operand& o, uint32_t at, uint32_t size) {
                                            read_register(w, o, lane, values + at, size);
                                        });
                      for (uint8_t* place : places) combine(reduction, type, place, values, bytes);
                  });
    w.machine->note_progress();
    return Flow::next;
}

enum class Kind : uint8_t { load, store, reduce };

void decode(Decoder& d, Kind kind) {
    const bool is_weak = d.take("weak");
    Strength strength = take_strength(d, Scope::gpu);
    if (is_weak && strength.is_strong) d.invalid(".weak goes with no other order");
    // Without an order a load or store is weak; an update is relaxed as those of red.
    if (kind == Kind::reduce) strength.is_strong = true;
    uint64_t aux = strength.aux | (strength.is_strong ? strong_bit : 0);
    d.take("global");
    Reduction reduction = Reduction::none;
    if (kind != Kind::store) {
        reduction = take_reduction(d);
        if (reduction == Reduction::inc || reduction == Reduction::dec)
            d.invalid("multimem has no .inc and .dec");
    }
    if (d.take("acc::f32")) aux |= wide_sum;
    const bool sums_halves = d.take("acc::f16");
    const std::string_view vector = d.take_any({"v2", "v4", "v8"});
    const uint32_t count = vector.empty() ? 1 : uint32_t(vector[1] - '0');
    const Type type = d.take_type();
    Type element = type;
    uint32_t packed = 1;
    if (type == Type::f16x2) element = Type::f16, packed = 2;
    if (type == Type::bf16x2) element = Type::bf16, packed = 2;
    if (type == Type::e4m3x4) element = Type::e4m3, packed = 4;
    if (type == Type::e5m2x4) element = Type::e5m2, packed = 4;
    const bool is_half = element == Type::f16 || element == Type::bf16;
    const bool is_integer = type == Type::u32 || type == Type::s32 || type == Type::b32 ||
                            type == Type::u64 || type == Type::s64 || type == Type::b64;
    const bool is_known =
        is_half || is_integer || is_fp8(element) || type == Type::f32 || type == Type::f64;
    if (!is_known) d.unsupported(std::string("type .") + name_of(type));
    const bool is_bitwise = reduction == Reduction::bit_and || reduction == Reduction::bit_or ||
                            reduction == Reduction::bit_xor;
    const bool is_b = type == Type::b32 || type == Type::b64;
    if (is_bitwise != is_b && kind != Kind::store)
        d.invalid("bitwise operations are those of .b32 and .b64");
    if (is_fp8(element) && packed == 1) d.invalid("FP8 comes in fours (.e4m3x4, .e5m2x4)");
    if (is_fp8(element) && kind == Kind::reduce) d.invalid("multimem.red has no FP8");
    if (sums_halves && (!is_fp8(element) || reduction != Reduction::add))
        d.invalid(".acc::f16 goes with sums of FP8");
    if (is_float(element) && !is_half && kind != Kind::store && reduction != Reduction::add)
        d.invalid("of .f32 and .f64 there is .add");
    if (aux & wide_sum && (!(is_half || is_fp8(element)) || kind != Kind::load))
        d.invalid(".acc::f32 goes with halves and FP8");
    const uint32_t bytes = count * packed * bytes_of(element);
    if (count > 1 && !is_fp8(element) && (!is_float(element) || type == Type::f64))
        d.invalid("vectors are of floats up to 32 bits");
    if (bytes != 4 && bytes != 8 && bytes != 16) d.invalid("an access has 32, 64 or 128 bits");
    d.expect_operands(2);
    std::vector<Operand> operands;
    const size_t address_at = kind == Kind::load ? 1 : 0;
    if (kind == Kind::load) operands = d.destinations(0, type);
    const Operand address = d.address(address_at);
    if (kind != Kind::load) operands = d.sources(1, type);
    if (operands.size() != count) d.invalid("the vector's length is not that of the instruction");
    operands.insert(kind == Kind::load ? operands.end() : operands.begin(), address);
    d.emit(kind == Kind::load    ? load_and_reduce
           : kind == Kind::store ? store<false>
                                 : store<true>,
           std::move(operands),
           aux | uint64_t(element) << type_shift | uint64_t(reduction) << reduction_shift |
               uint64_t(packed) << packed_shift);
}

template <Kind kind>
void decode_kind(Decoder& d) {
    decode(d, kind);
}

}  // namespace

InstructionTable multimem_instructions() {
    return {
        {"multimem.ld_reduce", decode_kind<Kind::load>,
         "what all members of multicast memory hold, reduced; integers, f16, bf16, f32, f64, "
         "e4m3, e5m2"},
        {"multimem.st", decode_kind<Kind::store>, "store to all members"},
        {"multimem.red", decode_kind<Kind::reduce>, "update of all members"},
    };
}

}  // namespace deep_moe::emulator
