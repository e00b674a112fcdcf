// ldmatrix, stmatrix, movmatrix, mma.sync: matrices spread over one warp's registers.
#include <cmath>
#include <cstring>

#include "element_types.h"
#include "instruction_table.h"
#include "race_detector.h"
#include "warp_matrix.h"

namespace deep_moe::emulator {
namespace {

// aux of ldmatrix and stmatrix: space, transposed in bit 8, bits of a packed element from bit 10
// on, number of 8-row matrices above bit 16.
uint32_t num_matrices(const Op& op) {
    return uint32_t(op.aux >> 16);
}
uint32_t packed_bits(const Op& op) {
    return uint32_t(op.aux >> 10 & 0xf);
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

// m16n16.trans.b8: a matrix has 16 rows and two registers.
Flow load_b8(Warp& w, const Op& op) {
    std::byte* rows[warp_size];
    resolve_rows(w, op, Access::read, rows);
    for (uint32_t j = 0; j < num_matrices(op); ++j) {
        for (uint32_t t = 0; t < warp_size; ++t) {
            uint32_t value = 0;
            for (uint32_t e = 0; e < 4; ++e) {
                const MatrixRow at = matrix_row_b8_square(t, j, e);
                value |= uint32_t(rows[at.row_lane][at.byte]) << 8 * e;
            }
            w.out<uint32_t>(op.operands[1 + j]).set(int(t), value);
        }
    }
    return Flow::next;
}

// m8n16 and m16n16.trans of 4 or 6 bits: a row is 16 elements, then padding up to 16 bytes. Each
// element becomes the low bits of a byte.
template <bool transposed>
Flow load_packed(Warp& w, const Op& op) {
    std::byte* rows[warp_size];
    resolve_rows(w, op, Access::read, rows);
    const uint32_t bits = packed_bits(op);
    const auto element = [&](MatrixRow at) {
        uint64_t words[2];
        std::memcpy(words, rows[at.row_lane], 16);
        const uint32_t first = at.byte * bits;
        uint64_t value = words[first / 64] >> first % 64;
        if (first % 64 + bits > 64) value |= words[1] << (64 - first % 64);
        return uint32_t(value & ((1u << bits) - 1));
    };
    for (uint32_t j = 0; j < num_matrices(op); ++j) {
        for (uint32_t t = 0; t < warp_size; ++t) {
            uint32_t value = 0;
            for (uint32_t e = 0; e < 4; ++e) {
                const MatrixRow at = transposed ? matrix_row_b8_square(t, j, e)
                                                : MatrixRow{8 * j + t / 4, 4 * (t % 4) + e};
                value |= element(at) << 8 * e;
            }
            w.out<uint32_t>(op.operands[1 + j]).set(int(t), value);
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
    const bool square = d.has("m16n16");
    if (!square && !d.has("m8n16")) return decode_matrix(d, true);
    d.ignore({"sync", "aligned", "m16n16", "m8n16"});
    d.op.meeting = Meeting::whole_warp;
    const uint32_t count = take_count(d);
    if (square && count == 4) d.invalid(".m16n16 has .x1 and .x2");
    if (square != d.take("trans")) d.invalid(".trans goes with .m16n16");
    const Space space = d.take_space();
    uint32_t bits = 8;
    if (d.take("b8x16"))
        bits = d.take("b6x16_p32") ? 6 : d.take("b4x16_p64") ? 4 : 0;
    else
        d.take_type({Type::b8});
    if (!bits) d.invalid("the source's format (.b6x16_p32, .b4x16_p64) is missing");
    if (bits == 8 && !square) d.invalid(".m8n16 needs .b8x16 and the source's format");
    d.expect_operands(2);
    std::vector<Operand> operands{d.address(1)};
    const std::vector<Operand> registers = d.destinations(0, Type::b32);
    const uint32_t num_registers = square ? 2 * count : count;
    if (registers.size() != num_registers) d.invalid("the number of registers does not match");
    operands.insert(operands.end(), registers.begin(), registers.end());
    d.emit(bits == 8 ? load_b8
           : square  ? load_packed<true>
                     : load_packed<false>,
           std::move(operands),
           uint64_t(space) | uint64_t(bits) << 10 | uint64_t(num_registers) << 16);
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

uint64_t pack(const WarpMma& unit) {
    return uint64_t(unit.a_type) | uint64_t(unit.b_type) << 8 | uint64_t(unit.d_type) << 16 |
           uint64_t(unit.m) << 24 | uint64_t(unit.is_sparse) << 32 |
           uint64_t(unit.saturates) << 33 | uint64_t(unit.counts_xor) << 34 |
           uint64_t(unit.sparse.in_pairs) << 35 | uint64_t(unit.k) << 48;
}
WarpMma unpack(uint64_t aux) {
    WarpMma unit;
    unit.a_type = Element(aux & 0xff);
    unit.b_type = Element(aux >> 8 & 0xff);
    unit.d_type = Accumulator(aux >> 16 & 0xff);
    unit.m = uint32_t(aux >> 24 & 0xff);
    unit.is_sparse = aux >> 32 & 1;
    unit.saturates = aux >> 33 & 1;
    unit.counts_xor = aux >> 34 & 1;
    unit.sparse.in_pairs = aux >> 35 & 1;
    unit.k = uint32_t(aux >> 48);
    return unit;
}
uint32_t num_results(const WarpMma& unit) {
    return unit.d_type == Accumulator::f16 ? 2 : unit.m / 4;
}

// operands: d, a, b, c, of sparse A metadata and selector
Flow mma(Warp& w, const Op& op) {
    WarpMma unit = unpack(op.aux);
    const uint32_t num_d = num_results(unit);
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
    if (unit.is_sparse) {
        take(&unit.sparse.words, 1);
        unit.sparse.selector = w.uniform<uint32_t>(*next);
    }
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

constexpr uint64_t scales_are_ue4m3_bit = uint64_t(1) << 40, packed_bit = uint64_t(1) << 41,
                   sparse_bit = uint64_t(1) << 42;

// aux: element types, K above bit 24, scales per row above bit 32. Behind the operands of mma:
// scales of A, byte and thread that hold them, the same of B.
Flow mma_scaled(Warp& w, const Op& op) {
    ScaledWarpMma unit;
    unit.is_packed = op.aux & packed_bit;
    unit.sparse.in_pairs = unit.is_packed;
    unit.a_type = Element(op.aux & 0xff);
    unit.b_type = Element(op.aux >> 8 & 0xff);
    unit.k = uint32_t(op.aux >> 24 & 0xff);
    unit.num_scales = uint32_t(op.aux >> 32 & 0xff);
    unit.scales_are_ue4m3 = op.aux & scales_are_ue4m3_bit;
    const Operand* next = op.operands + 4;
    const auto take = [&] { return reinterpret_cast<const uint32_t*>(w.data(*next++)); };
    const uint32_t *a[4], *b[4], *c[4];
    for (auto& row : a) row = take();
    for (uint32_t i = 0; i < unit.num_b_registers(); ++i) b[i] = take();
    for (auto& row : c) row = take();
    if (op.aux & sparse_bit) {
        unit.sparse.words = take();
        unit.sparse.selector = w.uniform<uint32_t>(*next++);
    }
    if (unit.num_scales) {
        for (ScaledWarpMma::Scales* scales : {&unit.a_scales, &unit.b_scales}) {
            scales->words = take();
            scales->byte = w.uniform<uint32_t>(*next++) & 0xffff;
            scales->thread = w.uniform<uint32_t>(*next++) & 0xffff;
        }
        const uint32_t step = unit.num_scales;
        for (const auto& [scales, num_threads] :
             {std::pair{unit.a_scales, 2u}, {unit.b_scales, 4u}}) {
            if (scales.byte + step > 4 || scales.byte % step || scales.thread >= num_threads)
                fail(FaultKind::invalid_operation,
                     "mma with %u scales a row: byte %u of thread %u does not exist", step,
                     scales.byte, scales.thread);
        }
    }
    static thread_local Panels panels;
    uint32_t result[4][warp_size];
    unit.run(a, b, c, result, panels);
    for (uint32_t i = 0; i < 4; ++i) {
        auto out = w.out<uint32_t>(op.operands[i]);
        for (int t = 0; t < warp_size; ++t) out.set(t, result[i][t]);
    }
    return Flow::next;
}

// Of a sparse A: operands 4 and 5, metadata and selector.
void append_metadata(Decoder& d, Element element, uint32_t k, bool in_pairs,
                     std::vector<Operand>& operands) {
    const uint32_t selector = d.immediate_u32(5);
    if (selector > SparseMetadata::last_selector(element, k, in_pairs))
        d.invalid("this sparsity selector does not exist for the shape");
    operands.push_back(d.source(4, Type::b32));
    operands.push_back(d.constant(selector));
}

Element take_small_element(Decoder& d) {
    switch (d.take_type({Type::e4m3, Type::e5m2, Type::e3m2, Type::e2m3, Type::e2m1})) {
        case Type::e4m3:
            return Element::e4m3;
        case Type::e5m2:
            return Element::e5m2;
        case Type::e3m2:
            return Element::e3m2;
        case Type::e2m3:
            return Element::e2m3;
        default:
            return Element::e2m1;
    }
}

// kind::f8f6f4 with elements of 4 or 6 bits, kind::mxf8f6f4, kind::mxf4, kind::mxf4nvf4.
void decode_mma_scaled(Decoder& d, std::string_view kind, bool is_sparse) {
    uint32_t scales = 0;
    const bool packed = kind.substr(0, 11) == "kind::mxf4n" || kind == "kind::mxf4";
    if (kind != "kind::f8f6f4") {
        if (!d.take("block_scale")) d.invalid("this kind needs .block_scale");
        std::string vector;
        if (d.take_prefix("scale_vec::", vector))
            scales = uint32_t(vector.at(11) - '0');
        else
            scales = kind == "kind::mxf8f6f4" ? 1 : kind == "kind::mxf4" ? 2 : 0;
        const bool fits = kind == "kind::mxf8f6f4" ? scales == 1
                          : kind == "kind::mxf4"   ? scales == 2
                                                   : scales == 2 || scales == 4;
        if (!fits) d.invalid("this scale vector size does not exist for this kind");
    }
    const uint32_t k = (packed ? 64 : 32) << is_sparse;
    if (!d.take("m16n8k" + std::to_string(k))) d.unsupported("this shape");
    d.take_type({Type::f32});
    const Element a_type = take_small_element(d), b_type = take_small_element(d);
    if (packed && (a_type != Element::e2m1 || b_type != Element::e2m1))
        d.invalid("this kind multiplies .e2m1");
    d.take_type({Type::f32});
    bool ue4m3 = false;
    if (scales) ue4m3 = d.take("ue4m3");
    if (scales && !ue4m3 && !d.take("ue8m0")) d.invalid("the scales' type is missing");
    if (ue4m3 && kind != "kind::mxf4nvf4") d.invalid("this kind has scales of .ue8m0");
    const size_t first_scale = is_sparse ? 6 : 4;
    d.expect_operands(first_scale + (scales ? 4 : 0));
    std::vector<Operand> operands = d.destinations(0, Type::b32);
    bool good = operands.size() == 4;
    const size_t counts[] = {4, 4, is_sparse ? 4u : 2u, 4};
    for (size_t i = 1; i < 4; ++i) {
        const std::vector<Operand> part = d.sources(i, Type::b32);
        good &= part.size() == counts[i];
        operands.insert(operands.end(), part.begin(), part.end());
    }
    if (is_sparse) append_metadata(d, a_type, k, packed, operands);
    for (size_t i = 0; scales && i < 4; ++i) {
        const std::vector<Operand> part = d.sources(first_scale + i, i % 2 ? Type::u16 : Type::b32);
        good &= part.size() == 1 + i % 2;
        operands.insert(operands.end(), part.begin(), part.end());
    }
    if (!good) d.invalid("the number of registers does not match the shape");
    d.emit(mma_scaled, std::move(operands),
           uint64_t(a_type) | uint64_t(b_type) << 8 | uint64_t(k) << 24 | uint64_t(scales) << 32 |
               (ue4m3 ? scales_are_ue4m3_bit : 0) | (packed ? packed_bit : 0) |
               (is_sparse ? sparse_bit : 0));
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

// m8n8k4 of halves: lanes 4q to 4q + 3 and those 16 above multiply matrices of their own. An H200
// adds the products one by one, each sum rounded to .f32, and C at last.
// aux: bit 0: A is column-major, bit 1: B is row-major, bit 2: D is .f32, bit 3: C is .f32.
// operands: d, a, b, c.
Flow mma_of_quads(Warp& w, const Op& op) {
    const bool a_by_columns = op.aux & 1, b_by_rows = op.aux & 2, d_is_f32 = op.aux & 4,
               c_is_f32 = op.aux & 8;
    const uint32_t num_d = d_is_f32 ? 8 : 4, num_c = c_is_f32 ? 8 : 4;
    const Operand *as = op.operands + num_d, *bs = as + 2, *cs = bs + 2;
    const auto half = [&](const Operand* registers, int lane, uint32_t i) {
        return f16_to_float(uint16_t(w.in<uint32_t>(registers[i / 2])[lane] >> 16 * (i % 2)));
    };
    // Row and column of a thread's element i of C or D.
    const auto place = [](bool is_f32, uint32_t t, uint32_t i) {
        const uint32_t low = t >= 16 ? 4 : 0;
        return is_f32 ? FragmentElement{(t & 1) + (i & 2) + low, (i & 4) + (t & 2) + (i & 1)}
                      : FragmentElement{t % 4 + low, i};
    };
    float results[warp_size][8];
    for (uint32_t quad = 0; quad < 4; ++quad) {
        float a[8][4], b[4][8], c[8][8];
        const auto for_each_thread = [&](auto f) {
            for (uint32_t i = 0; i < 8; ++i) f(4 * quad + i % 4 + 16 * (i / 4));
        };
        for_each_thread([&](uint32_t t) {
            const uint32_t far = t >= 16 ? 4 : 0;
            for (uint32_t i = 0; i < 4; ++i) {
                (a_by_columns ? a[i + far][t % 4] : a[t % 4 + far][i]) = half(as, int(t), i);
                (b_by_rows ? b[t % 4][i + far] : b[i][t % 4 + far]) = half(bs, int(t), i);
            }
            for (uint32_t i = 0; i < 8; ++i) {
                const FragmentElement at = place(c_is_f32, t, i);
                c[at.row][at.column] = c_is_f32 ? w.in<float>(cs[i])[int(t)] : half(cs, int(t), i);
            }
        });
        for_each_thread([&](uint32_t t) {
            for (uint32_t i = 0; i < 8; ++i) {
                const FragmentElement at = place(d_is_f32, t, i);
                float sum = 0;
                for (uint32_t n = 0; n < 4; ++n) sum = std::fma(a[at.row][n], b[n][at.column], sum);
                results[t][i] = sum + c[at.row][at.column];
            }
        });
    }
    for (uint32_t i = 0; i < num_d; ++i) {
        for (uint32_t t = 0; t < warp_size; ++t) {
            const float* values = results[t];
            const uint32_t word = d_is_f32 ? std::bit_cast<uint32_t>(values[i])
                                           : float_to_f16(values[2 * i]) |
                                                 uint32_t(float_to_f16(values[2 * i + 1])) << 16;
            w.out<uint32_t>(op.operands[i]).set(int(t), word);
        }
    }
    return Flow::next;
}

void decode_mma_of_quads(Decoder& d) {
    std::vector<std::string> orders;
    for (const std::string& modifier : d.modifiers)
        if (modifier == "row" || modifier == "col") orders.push_back(modifier);
    if (orders.size() != 2) d.invalid("the orders of A and B (.row, .col) are missing");
    while (d.take("row") || d.take("col")) {
    }
    const bool d_is_f32 = d.take_type({Type::f32, Type::f16}) == Type::f32;
    for (int i = 0; i < 2; ++i) d.take_type({Type::f16});
    const bool c_is_f32 = d.take_type({Type::f32, Type::f16}) == Type::f32;
    if (c_is_f32 && !d_is_f32) d.invalid("C of .f32 needs D of .f32");
    d.expect_operands(4);
    std::vector<Operand> operands = d.destinations(0, Type::b32);
    bool good = operands.size() == (d_is_f32 ? 8 : 4);
    const size_t counts[] = {0, 2, 2, c_is_f32 ? 8u : 4u};
    for (size_t i = 1; i < 4; ++i) {
        const std::vector<Operand> part = d.sources(i, Type::b32);
        good &= part.size() == counts[i];
        operands.insert(operands.end(), part.begin(), part.end());
    }
    if (!good) d.invalid("the number of registers does not match the shape");
    d.emit(mma_of_quads, std::move(operands),
           uint64_t(orders[0] == "col") | uint64_t(orders[1] == "row") << 1 |
               uint64_t(d_is_f32) << 2 | uint64_t(c_is_f32) << 3);
}

void decode_mma(Decoder& d, bool is_sparse) {
    d.ignore({"sync", "aligned"});
    if (!is_sparse && d.has("f16") && d.take("m8n8k4")) {
        d.op.meeting = Meeting::whole_warp;
        return decode_mma_of_quads(d);
    }
    d.ignore({"row", "col"});
    d.op.meeting = Meeting::whole_warp;
    std::string text;
    if (d.take_prefix("kind::", text)) {
        const bool small = d.has("e2m1") || d.has("e2m3") || d.has("e3m2");
        if (text != "kind::f8f6f4" || small) {
            if (text != "kind::f8f6f4" && text != "kind::mxf8f6f4" && text != "kind::mxf4" &&
                text != "kind::mxf4nvf4")
                d.unsupported("this kind");
            return decode_mma_scaled(d, text, is_sparse);
        }
    }
    uint32_t k = 0;
    if (d.has("f64")) {
        if (d.take("m8n8k4")) return decode_mma_of_doubles(d, 8, 4);
        for (uint32_t size : {4u, 8u, 16u})
            if (d.take("m16n8k" + std::to_string(size))) return decode_mma_of_doubles(d, 16, size);
    }
    WarpMma unit;
    if (!is_sparse && d.take_prefix("m8n8k", text))
        unit.m = 8;
    else if (!d.take_prefix("m16n8k", text))
        d.unsupported("only m16n8kK and m8n8kK are supported");
    k = uint32_t(std::stoul(text.substr(text.find('k') + 1)));
    const Type result = d.take_type({Type::f32, Type::f16, Type::s32});
    unit.a_type = take_element(d);
    unit.b_type = take_element(d);
    const Type addend = d.take_type();
    if (addend != result) d.unsupported("C and D of different types");
    unit.d_type = result == Type::f32   ? Accumulator::f32
                  : result == Type::f16 ? Accumulator::f16
                                        : Accumulator::s32;
    unit.k = k;
    unit.saturates = d.take("satfinite");
    if (unit.saturates && unit.d_type != Accumulator::s32) d.invalid(".satfinite is of integers");
    const uint32_t bits = element_bits(unit.a_type), row_bytes = k * bits / 8;
    unit.is_sparse = is_sparse;
    unit.sparse.in_pairs = bits == 4;
    const uint32_t smallest = is_sparse ? 32 : 16;
    if (row_bytes != smallest && (unit.m == 8 || row_bytes != 2 * smallest))
        d.invalid("K does not match the element type");
    if (unit.m == 8 && unit.d_type != Accumulator::s32) d.invalid("m8n8kK is of integers");
    if (bits != element_bits(unit.b_type)) d.invalid("A and B have elements of different sizes");
    if (bits == 1) {
        if (is_sparse) d.invalid("a sparse A has no .b1");
        unit.counts_xor = d.take("xor");
        if (!unit.counts_xor && !d.take("and")) d.invalid("the operation (.xor, .and) is missing");
        if (!d.take("popc")) d.invalid(".popc is missing");
    }
    d.expect_operands(is_sparse ? 6 : 4);
    const size_t num_d = num_results(unit);
    std::vector<Operand> operands = d.destinations(0, Type::b32);
    const std::vector<Operand> parts[3] = {d.sources(1, Type::b32), d.sources(2, Type::b32),
                                           d.sources(3, Type::b32)};
    if (operands.size() != num_d || parts[0].size() != unit.num_a_registers() ||
        parts[1].size() != unit.num_b_registers() || parts[2].size() != num_d) {
        d.invalid("the number of registers does not match the shape");
    }
    for (const auto& part : parts) operands.insert(operands.end(), part.begin(), part.end());
    if (is_sparse) append_metadata(d, unit.a_type, k, unit.sparse.in_pairs, operands);
    d.emit(mma, std::move(operands), pack(unit));
}

void decode_dense_mma(Decoder& d) {
    decode_mma(d, false);
}
void decode_sparse_mma(Decoder& d) {
    decode_mma(d, true);
}

}  // namespace

InstructionTable matrix_instructions() {
    return {
        {"ldmatrix", decode_ldmatrix,
         "m8n8 b16, .trans; of sm_100: m16n16.trans b8, b6x16_p32, b4x16_p64, m8n16 of the latter "
         "two"},
        {"stmatrix", decode_stmatrix, "m8n8 b16 and m16n8.trans b8, x1 to x4"},
        {"movmatrix", decode_movmatrix, "transposes an m8n8 b16 matrix"},
        {"mma.sp", decode_sparse_mma,
         "mma.sync m16n8kK with a sparse A: f16, bf16, tf32, e4m3, e5m2, u8, s8, u4, s4; the kinds "
         "of sm_120"},
        {"mma.sp::ordered_metadata", decode_sparse_mma, "the same"},
        {"mma", decode_dense_mma,
         "mma.sync m16n8kK: f16, bf16, tf32, e4m3, e5m2, u8, s8, u4, s4, b1, f64; m8n8kK: u8, s8, "
         "u4, s4, b1, f64, f16; of sm_120: e3m2, e2m3, e2m1, block-scaled mxf8f6f4, mxf4, "
         "mxf4nvf4"},
    };
}

}  // namespace deep_moe::emulator
