// ldmatrix, stmatrix, movmatrix, mma.sync: matrices spread over one warp's registers.
#include <cmath>
#include <cstring>

#include "element_types.h"
#include "instruction_table.h"
#include "race_detector.h"
#include "warp_matrix.h"

namespace deep_moe::emulator {
namespace {

// aux of ldmatrix and stmatrix: space, transposed in bit 8, number of matrices above bit 16.
uint32_t num_matrices(const Op& op) {
    return uint32_t(op.aux >> 16);
}

// Checked pointers to the 16-byte rows that the lanes supply.
void resolve_rows(Warp& w, const Op& op, Access access, std::byte* rows[warp_size]) {
    for (uint32_t lane = 0; lane < 8 * num_matrices(op); ++lane) {
        const uint64_t address = w.address(op.operands[0], int(lane));
        if (address % 16) {
            throw Fault(FaultKind::misaligned,
                        format("matrix row address 0x%llx is not a multiple of 16",
                               static_cast<unsigned long long>(address)),
                        int(lane));
        }
        rows[lane] = w.resolve(Space(op.aux & 0xff), address, 16, access, int(lane));
        if (w.machine->races) {
            w.machine->races->access(w, Space(op.aux & 0xff), address, 16, access, int(lane));
        }
    }
}

// address, registers
Flow load_b16(Warp& w, const Op& op) {
    std::byte* rows[warp_size];
    resolve_rows(w, op, Access::read, rows);
    const bool transposed = op.aux >> 8 & 1;
    for (uint32_t j = 0; j < num_matrices(op); ++j) {
        for (uint32_t t = 0; t < warp_size; ++t) {
            uint16_t halves[2];
            for (uint32_t h = 0; h < 2; ++h) {
                const MatrixRow at = matrix_row_b16(t, j, h, transposed);
                std::memcpy(&halves[h], rows[at.row_lane] + at.byte, 2);
            }
            w.out<uint32_t>(op.operands[1 + j]).set(int(t), halves[0] | uint32_t(halves[1]) << 16);
        }
    }
    return Flow::next;
}

Flow store_b16(Warp& w, const Op& op) {
    std::byte* rows[warp_size];
    resolve_rows(w, op, Access::write, rows);
    const bool transposed = op.aux >> 8 & 1;
    for (uint32_t j = 0; j < num_matrices(op); ++j) {
        auto values = w.in<uint32_t>(op.operands[1 + j]);
        for (uint32_t t = 0; t < warp_size; ++t) {
            for (uint32_t h = 0; h < 2; ++h) {
                const MatrixRow at = matrix_row_b16(t, j, h, transposed);
                const uint16_t half = uint16_t(values[int(t)] >> 16 * h);
                std::memcpy(rows[at.row_lane] + at.byte, &half, 2);
            }
        }
    }
    w.machine->note_progress();
    return Flow::next;
}

Flow store_b8(Warp& w, const Op& op) {
    std::byte* rows[warp_size];
    resolve_rows(w, op, Access::write, rows);
    for (uint32_t j = 0; j < num_matrices(op); ++j) {
        auto values = w.in<uint32_t>(op.operands[1 + j]);
        for (uint32_t t = 0; t < warp_size; ++t) {
            for (uint32_t e = 0; e < 4; ++e) {
                const MatrixRow at = matrix_row_b8(t, j, e);
                rows[at.row_lane][at.byte] = std::byte(values[int(t)] >> 8 * e & 0xff);
            }
        }
    }
    w.machine->note_progress();
    return Flow::next;
}

uint32_t take_count(Decoder& d) {
    for (uint32_t count : {1u, 2u, 4u}) {
        if (d.take("x" + std::to_string(count))) return count;
    }
    d.invalid("the number of matrices (.x1, .x2, .x4) is missing");
}

void decode_matrix(Decoder& d, bool loads) {
    d.ignore({"sync", "aligned"});
    d.op.meeting = Meeting::whole_warp;
    const bool bytes = d.take("m16n8");
    if (!bytes && !d.take("m8n8"))
        d.unsupported("only .m8n8 and, for stmatrix, .m16n8 are supported");
    const uint32_t count = take_count(d);
    const bool transposed = d.take("trans");
    const Space space = d.take_space();
    const Type type = d.take_type({Type::b16, Type::b8});
    if (bytes != (type == Type::b8)) d.invalid(".m16n8 goes with .b8, .m8n8 with .b16");
    if (bytes && (loads || !transposed))
        d.invalid(".m16n8.b8 exists for stmatrix with .trans only");
    d.expect_operands(2);
    std::vector<Operand> operands{d.address(loads ? 1 : 0)};
    const std::vector<Operand> registers =
        loads ? d.destinations(0, Type::b32) : d.sources(1, Type::b32);
    if (registers.size() != count) d.invalid("the number of registers does not match");
    operands.insert(operands.end(), registers.begin(), registers.end());
    d.emit(loads   ? load_b16
           : bytes ? store_b8
                   : store_b16,
           std::move(operands),
           uint64_t(space) | uint64_t(transposed) << 8 | uint64_t(count) << 16);
}

void decode_ldmatrix(Decoder& d) {
    decode_matrix(d, true);
}
void decode_stmatrix(Decoder& d) {
    decode_matrix(d, false);
}

Flow move_matrix(Warp& w, const Op& op) {
    auto source = w.in<uint32_t>(op.operands[1]);
    uint16_t matrix[8][8];
    for (uint32_t t = 0; t < warp_size; ++t) {
        for (uint32_t h = 0; h < 2; ++h)
            matrix[t / 4][2 * (t % 4) + h] = uint16_t(source[int(t)] >> 16 * h);
    }
    auto target = w.out<uint32_t>(op.operands[0]);
    for (uint32_t t = 0; t < warp_size; ++t) {
        target.set(int(t), matrix[2 * (t % 4)][t / 4] | uint32_t(matrix[2 * (t % 4) + 1][t / 4])
                                                            << 16);
    }
    return Flow::next;
}

void decode_movmatrix(Decoder& d) {
    d.ignore({"sync", "aligned", "m8n8"});
    d.op.meeting = Meeting::whole_warp;
    if (!d.take("trans")) d.invalid(".trans is missing");
    d.take_type({Type::b16});
    d.expect_operands(2);
    d.emit(move_matrix, {d.destination(0, Type::b32), d.source(1, Type::b32)});
}

// aux: element types, result type, K; operands: d, a, b, c
Flow mma(Warp& w, const Op& op) {
    WarpMma unit;
    unit.a_type = Element(op.aux & 0xff);
    unit.b_type = Element(op.aux >> 8 & 0xff);
    unit.d_type = Accumulator(op.aux >> 16 & 0xff);
    unit.k = uint32_t(op.aux >> 24 & 0xff);
    const uint32_t num_d = unit.d_type == Accumulator::f16 ? 2 : 4;
    const Operand* next = op.operands;
    uint32_t result[4][warp_size];
    uint32_t* d[4];
    const uint32_t *a[8], *b[4], *c[4];
    const Operand* targets = next;
    next += num_d;
    auto take = [&](const uint32_t** rows, uint32_t count) {
        for (uint32_t i = 0; i < count; ++i)
            rows[i] = reinterpret_cast<const uint32_t*>(w.data(*next++));
    };
    take(a, unit.num_a_registers());
    take(b, unit.num_b_registers());
    take(c, num_d);
    for (uint32_t i = 0; i < num_d; ++i) d[i] = result[i];
    static thread_local Panels panels;
    std::memset(result, 0, sizeof result);
    unit.run(a, b, c, d, panels);
    for (uint32_t i = 0; i < num_d; ++i) {
        auto out = w.out<uint32_t>(targets[i]);
        for (int t = 0; t < warp_size; ++t) out.set(t, result[i][t]);
    }
    return Flow::next;
}

// m8n8k4 and m16n8kK of doubles. aux: rows, K; operands: d, a, b, c. One fused multiply-add after
// the other, in the order of K.
Flow mma_of_doubles(Warp& w, const Op& op) {
    const uint32_t m = uint32_t(op.aux & 0xff), k = uint32_t(op.aux >> 8);
    const uint32_t num_d = m / 4, num_a = m * k / warp_size, num_b = 8 * k / warp_size;
    const Operand *as = op.operands + num_d, *bs = as + num_a, *cs = bs + num_b;
    double a[16][16], b[16][8], sums[warp_size][4];
    for (uint32_t t = 0; t < warp_size; ++t) {
        for (uint32_t i = 0; i < num_a; ++i)
            a[t / 4 + (m == 16 ? i % 2 * 8 : 0)][t % 4 + (m == 16 ? i / 2 : i) * 4] =
                w.in<double>(as[i])[int(t)];
        for (uint32_t i = 0; i < num_b; ++i) b[t % 4 + 4 * i][t / 4] = w.in<double>(bs[i])[int(t)];
    }
    for (uint32_t t = 0; t < warp_size; ++t) {
        for (uint32_t i = 0; i < num_d; ++i) {
            double sum = w.in<double>(cs[i])[int(t)];
            for (uint32_t n = 0; n < k; ++n)
                sum = std::fma(a[t / 4 + i / 2 * 8][n], b[n][t % 4 * 2 + i % 2], sum);
            sums[t][i] = sum;
        }
    }
    for (uint32_t i = 0; i < num_d; ++i)
        for (uint32_t t = 0; t < warp_size; ++t)
            w.out<double>(op.operands[i]).set(int(t), sums[t][i]);
    return Flow::next;
}

void decode_mma_of_doubles(Decoder& d, uint32_t m, uint32_t k) {
    d.take("rn");
    for (int i = 0; i < 4; ++i) d.take_type({Type::f64});
    d.expect_operands(4);
    const size_t counts[] = {m / 4, m * k / warp_size, 8 * k / warp_size, m / 4};
    std::vector<Operand> operands = d.destinations(0, Type::f64);
    bool good = operands.size() == counts[0];
    for (size_t i = 1; i < 4; ++i) {
        const std::vector<Operand> part = d.sources(i, Type::f64);
        good &= part.size() == counts[i];
        operands.insert(operands.end(), part.begin(), part.end());
    }
    if (!good) d.invalid("the number of registers does not match the shape");
    d.emit(mma_of_doubles, std::move(operands), m | uint64_t(k) << 8);
}

void decode_mma(Decoder& d) {
    d.ignore({"sync", "aligned", "row", "col", "kind::f8f6f4"});
    d.op.meeting = Meeting::whole_warp;
    std::string text;
    uint32_t k = 0;
    if (d.has("f64")) {
        if (d.take("m8n8k4")) return decode_mma_of_doubles(d, 8, 4);
        for (uint32_t size : {4u, 8u, 16u})
            if (d.take("m16n8k" + std::to_string(size))) return decode_mma_of_doubles(d, 16, size);
    }
    if (!d.take_prefix("m16n8k", text)) d.unsupported("only m16n8kK is supported");
    k = uint32_t(std::stoul(text.substr(6)));
    const Type result = d.take_type({Type::f32, Type::f16, Type::s32});
    WarpMma unit;
    unit.a_type = take_element(d);
    unit.b_type = take_element(d);
    const Type addend = d.take_type();
    if (addend != result) d.unsupported("C and D of different types");
    unit.d_type = result == Type::f32   ? Accumulator::f32
                  : result == Type::f16 ? Accumulator::f16
                                        : Accumulator::s32;
    unit.k = k;
    const uint32_t row_bytes = k * container_bytes(unit.a_type);
    if (row_bytes != 16 && row_bytes != 32) d.invalid("K does not match the element type");
    d.expect_operands(4);
    const size_t num_d = unit.d_type == Accumulator::f16 ? 2 : 4;
    std::vector<Operand> operands = d.destinations(0, Type::b32);
    const std::vector<Operand> parts[3] = {d.sources(1, Type::b32), d.sources(2, Type::b32),
                                           d.sources(3, Type::b32)};
    if (operands.size() != num_d || parts[0].size() != unit.num_a_registers() ||
        parts[1].size() != unit.num_b_registers() || parts[2].size() != num_d) {
        d.invalid("the number of registers does not match the shape");
    }
    for (const auto& part : parts) operands.insert(operands.end(), part.begin(), part.end());
    d.emit(mma, std::move(operands),
           uint64_t(unit.a_type) | uint64_t(unit.b_type) << 8 | uint64_t(unit.d_type) << 16 |
               uint64_t(k) << 24);
}

}  // namespace

InstructionTable matrix_instructions() {
    return {
        {"ldmatrix", decode_ldmatrix, "m8n8 b16, x1 to x4, .trans"},
        {"stmatrix", decode_stmatrix, "m8n8 b16 and m16n8.trans b8, x1 to x4"},
        {"movmatrix", decode_movmatrix, "transposes an m8n8 b16 matrix"},
        {"mma", decode_mma,
         "mma.sync m16n8kK: f16, bf16, tf32, e4m3, e5m2, u8, s8, f64; m8n8k4: f64"},
    };
}

}  // namespace deep_moe::emulator
