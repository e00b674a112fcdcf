// The emulator's functional units as plain C functions, so that the tests can compare them with
// numpy and torch.
#include <cstring>
#include <string>

#include "mma_sm100.h"
#include "numeric.h"
#include "tensor_map.h"
#include "wgmma.h"

using namespace deep_moe::emulator;

namespace {

struct ArrayWindow final : SharedWindow {
    ArrayWindow(uint8_t* data, uint32_t size) : data(data), size(size) {}
    const uint8_t* read(uint32_t address, uint32_t num_bytes) override {
        return write(address, num_bytes);
    }
    uint8_t* write(uint32_t address, uint32_t num_bytes) override {
        if (address + num_bytes > size)
            fail(FaultKind::out_of_bounds, "shared address 0x%x", address);
        return data + address;
    }
    uint8_t* data;
    uint32_t size;
};

struct HostMemory final : GlobalMemory {
    const uint8_t* read(uint64_t address, uint64_t) override {
        return reinterpret_cast<const uint8_t*>(address);
    }
    uint8_t* write(uint64_t address, uint64_t) override {
        return reinterpret_cast<uint8_t*>(address);
    }
};

const FloatFormat formats[] = {e4m3_format, e5m2_format, e2m3_format, e3m2_format,
                               e2m1_format, f16_format,  bf16_format, tf32_format};

template <class F>
int guarded(char* error, F f) {
    try {
        f();
        return 0;
    } catch (const Fault& fault) {
        std::strncpy(error, fault.what(), 511);
        return int(fault.kind);
    }
}

}  // namespace

extern "C" {

void decode_codes(int format, const uint32_t* codes, double* values, int count) {
    for (int i = 0; i < count; ++i) values[i] = decode(formats[format], codes[i]);
}

void encode_values(int format, const double* values, uint32_t* codes, int count, int rounding,
                   int saturate) {
    for (int i = 0; i < count; ++i) {
        codes[i] = encode(formats[format], values[i], Rounding(rounding),
                          saturate ? Overflow::saturate : Overflow::to_infinity);
    }
}

void encode_ue8m0(const float* values, uint8_t* codes, int count, int round_up, int saturate) {
    for (int i = 0; i < count; ++i) {
        codes[i] = float_to_ue8m0(values[i], round_up ? Rounding::up : Rounding::toward_zero,
                                  saturate ? Overflow::saturate : Overflow::to_infinity);
    }
}

int instruction_descriptor(uint32_t bits, int kind, int cta_group, uint32_t* out, char* error) {
    return guarded(error, [&] {
        const InstructionDescriptor d =
            InstructionDescriptor::decode(bits, MmaKind(kind), cta_group);
        const uint32_t fields[] = {d.m,           d.n,      d.k,      uint32_t(d.a),
                                   uint32_t(d.b), d.sfa_id, d.sfb_id, uint32_t(d.d)};
        std::memcpy(out, fields, sizeof fields);
    });
}

int matrix_address(uint64_t bits, int sm, int mn_major, uint32_t row_or_k, uint32_t chunk,
                   uint32_t* address, char* error) {
    return guarded(error, [&] {
        const MatrixDescriptor d =
            sm == 90 ? MatrixDescriptor::sm90(bits) : MatrixDescriptor::sm100(bits);
        *address = mn_major ? d.mn_major_chunk(row_or_k, chunk) : d.k_major_chunk(row_or_k, chunk);
    });
}

// One MMA over whole tensor memories (128 x 512 words, everything allocated and written).
int run_mma(int kind, int cta_group, uint32_t idesc, uint64_t a, uint64_t b, uint8_t* const* shared,
            uint32_t shared_bytes, uint32_t* const* cells, uint32_t d, uint32_t sfa, uint32_t sfb,
            int num_scale_blocks, int accumulate, int repeat, char* error) {
    return guarded(error, [&] {
        Mma mma;
        mma.kind = MmaKind(kind);
        mma.cta_group = cta_group;
        mma.shape = InstructionDescriptor::decode(idesc, mma.kind, cta_group);
        mma.a = MatrixDescriptor::sm100(a);
        mma.b = MatrixDescriptor::sm100(b);
        mma.d_address = d;
        mma.sfa_address = sfa;
        mma.sfb_address = sfb;
        mma.num_scale_blocks = uint32_t(num_scale_blocks);
        mma.accumulate = accumulate;
        TensorMemory memories[2];
        ArrayWindow even(shared[0], shared_bytes), odd(shared[cta_group - 1], shared_bytes);
        const MmaCta sides[2] = {{&even, &memories[0]}, {&odd, &memories[1]}};
        for (int cta = 0; cta < cta_group; ++cta) {
            memories[cta].try_allocate(512);
            for (uint32_t lane = 0; lane < 128; ++lane) {
                std::memcpy(memories[cta].write(lane, 0, 512), cells[cta] + 512 * lane, 2048);
            }
        }
        Panels panels;
        for (int i = 0; i < repeat; ++i) mma.run(sides, true, panels);
        for (int cta = 0; cta < cta_group; ++cta) {
            std::memcpy(cells[cta], memories[cta].cells.get(), 128 * 512 * 4);
        }
    });
}

float sum_like_hopper(const double* a, const double* b, int k, double d) {
    UnpackedPanel right;
    TensorCoreSum sums(Element::e5m2, Element::e5m2, 13, a, b, 1, uint32_t(k), 1, right);
    double sum;
    sums.row(0, 1, &d, -126, &sum, [](uint32_t) { return true; });
    return std::bit_cast<float>(cut_to_f32(sum, 13));
}

int tensor_load(const uint8_t* image, const int32_t* coordinates, uint32_t destination,
                uint8_t* shared, uint32_t shared_bytes, uint32_t* transaction_bytes, char* error) {
    return guarded(error, [&] {
        const TensorMap map = TensorMap::decode(image);
        ArrayWindow window(shared, shared_bytes);
        HostMemory memory;
        map.load_tile(coordinates, destination, memory, window);
        *transaction_bytes = map.transaction_bytes();
    });
}

int tensor_store(const uint8_t* image, const int32_t* coordinates, uint32_t source, uint8_t* shared,
                 uint32_t shared_bytes, char* error) {
    return guarded(error, [&] {
        const TensorMap map = TensorMap::decode(image);
        ArrayWindow window(shared, shared_bytes);
        map.check_store(coordinates, source);
        map.read_tile_for_store(coordinates, source, window,
                                [](uint64_t address, const uint8_t* bytes, uint64_t count) {
                                    std::memcpy(reinterpret_cast<uint8_t*>(address), bytes, count);
                                });
    });
}

}  // extern "C"
