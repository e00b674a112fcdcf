#include "zstd.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace deep_moe::cuda {

namespace {

using Bytes = std::span<const uint8_t>;

[[noreturn]] void damaged(const char* what) {
    throw std::runtime_error(std::string("damaged compressed data: ") + what);
}

Bytes take(Bytes& data, size_t count) {
    if (count > data.size()) damaged("it ends too early");
    const Bytes head = data.first(count);
    data = data.subspan(count);
    return head;
}

uint64_t take_number(Bytes& data, size_t num_bytes) {
    uint64_t value = 0;
    const Bytes bytes = take(data, num_bytes);
    for (size_t i = 0; i < num_bytes; ++i) value |= uint64_t(bytes[i]) << (8 * i);
    return value;
}

int highest_bit(uint32_t value) {
    return 31 - __builtin_clz(value);
}

// Bits from the first byte's lowest one on.
struct ForwardBits {
    Bytes data;
    size_t position = 0;

    uint32_t peek(int count) const {
        uint32_t value = 0;
        for (int i = 0; i < count; ++i) {
            const size_t at = position + size_t(i);
            if (at / 8 < data.size()) value |= uint32_t(data[at / 8] >> (at % 8) & 1) << i;
        }
        return value;
    }
    uint32_t read(int count) {
        const uint32_t value = peek(count);
        position += size_t(count);
        return value;
    }
};

// Bits from the end: the highest set bit of the last byte is where they begin. Bits before the
// first byte read as zero.
struct BackwardBits {
    Bytes data;
    int64_t position = 0;  // bits left

    explicit BackwardBits(Bytes bytes) : data(bytes) {
        if (data.empty() || !data.back()) damaged("a bit stream has no end mark");
        position = int64_t(data.size() - 1) * 8 + highest_bit(data.back());
    }
    uint32_t read(int count) {
        uint32_t value = 0;
        position -= count;
        for (int i = 0; i < count; ++i) {
            const int64_t at = position + i;
            if (at >= 0) value |= uint32_t(data[size_t(at / 8)] >> (at % 8) & 1) << i;
        }
        return value;
    }
    bool is_at_end() const { return position == 0; }
    bool is_past_end() const { return position < 0; }
};

// A table of a finite state entropy code.
struct StateTable {
    struct Entry {
        uint8_t symbol = 0, num_bits = 0;
        uint16_t base = 0;
    };
    int log = 0;
    std::vector<Entry> entries;

    StateTable() = default;
    StateTable(const std::vector<int>& counts, int table_log) : log(table_log) {
        const uint32_t size = 1u << log;
        entries.resize(size);
        std::vector<uint32_t> next(counts.size());
        uint32_t high = size;
        for (size_t s = 0; s < counts.size(); ++s) {
            if (counts[s] == -1) {
                entries[--high].symbol = uint8_t(s);
                next[s] = 1;
            } else {
                next[s] = uint32_t(counts[s]);
            }
        }
        const uint32_t step = (size >> 1) + (size >> 3) + 3;
        uint32_t at = 0;
        for (size_t s = 0; s < counts.size(); ++s) {
            for (int i = 0; i < counts[s]; ++i) {
                entries[at].symbol = uint8_t(s);
                do at = (at + step) & (size - 1);
                while (at >= high);
            }
        }
        for (Entry& entry : entries) {
            const uint32_t state = next[entry.symbol]++;
            entry.num_bits = uint8_t(log - highest_bit(state));
            entry.base = uint16_t((state << entry.num_bits) - size);
        }
    }
    static StateTable of_one_symbol(uint8_t symbol) {
        StateTable table;
        table.entries.push_back({symbol, 0, 0});
        return table;
    }
};

StateTable read_state_table(Bytes& data, int max_log, size_t max_symbols) {
    ForwardBits bits{data};
    const int log = int(bits.read(4)) + 5;
    if (log > max_log) damaged("a table is too large");
    std::vector<int> counts;
    int remaining = 1 << log;
    while (remaining > 0) {
        if (counts.size() >= max_symbols || bits.position > 8 * data.size())
            damaged("a table has too many symbols");
        const uint32_t largest = uint32_t(remaining) + 1;
        const int num_bits = highest_bit(largest) + 1;
        uint32_t value = bits.peek(num_bits);
        const uint32_t short_mask = (1u << (num_bits - 1)) - 1;
        const uint32_t threshold = (1u << num_bits) - 1 - largest;
        if ((value & short_mask) < threshold) {
            value &= short_mask;
            bits.position += size_t(num_bits - 1);
        } else {
            if (value > short_mask) value -= threshold;
            bits.position += size_t(num_bits);
        }
        const int probability = int(value) - 1;
        counts.push_back(probability);
        remaining -= std::abs(probability);
        if (probability == 0) {
            uint32_t repeat;
            do {
                repeat = bits.read(2);
                counts.insert(counts.end(), repeat, 0);
            } while (repeat == 3 && counts.size() < max_symbols);
        }
    }
    if (remaining < 0 || counts.size() > max_symbols) damaged("a table does not add up");
    take(data, (bits.position + 7) / 8);
    return StateTable(counts, log);
}

struct State {
    const StateTable* table;
    uint32_t index;

    State(const StateTable& from, BackwardBits& bits) : table(&from), index(bits.read(from.log)) {}
    uint8_t symbol() const { return table->entries[index].symbol; }
    void advance(BackwardBits& bits) {
        const StateTable::Entry& entry = table->entries[index];
        index = entry.base + bits.read(entry.num_bits);
    }
};

struct HuffmanTable {
    struct Entry {
        uint8_t symbol, num_bits;
    };
    int max_bits = 0;
    std::vector<Entry> entries;

    HuffmanTable() = default;
    // weights: of all symbols but the last, whose weight fills what is left.
    explicit HuffmanTable(std::vector<uint8_t> weights) {
        uint32_t sum = 0;
        for (uint8_t w : weights) sum += w ? 1u << (w - 1) : 0;
        if (!sum) damaged("a Huffman tree is empty");
        max_bits = highest_bit(sum) + 1;
        const uint32_t left = (1u << max_bits) - sum;
        if (max_bits > 11 || (left & (left - 1))) damaged("a Huffman tree does not add up");
        weights.push_back(uint8_t(highest_bit(left) + 1));
        for (int weight = 1; weight <= max_bits; ++weight) {
            for (size_t s = 0; s < weights.size(); ++s) {
                if (weights[s] == weight)
                    entries.insert(entries.end(), size_t(1) << (weight - 1),
                                   {uint8_t(s), uint8_t(max_bits + 1 - weight)});
            }
        }
        if (entries.size() != size_t(1) << max_bits) damaged("a Huffman tree is too deep");
    }

    void decode(Bytes stream, size_t count, std::string& out) const {
        BackwardBits bits(stream);
        uint32_t state = bits.read(max_bits);
        const uint32_t mask = (1u << max_bits) - 1;
        for (size_t i = 0; i < count; ++i) {
            const Entry entry = entries[state];
            out.push_back(char(entry.symbol));
            state = ((state << entry.num_bits) & mask) | bits.read(entry.num_bits);
        }
        if (bits.position != -max_bits) damaged("literals do not end where they should");
    }
};

HuffmanTable read_huffman_table(Bytes& data) {
    const auto header = size_t(take_number(data, 1));
    std::vector<uint8_t> weights;
    if (header >= 128) {
        const size_t count = header - 127;
        const Bytes packed = take(data, (count + 1) / 2);
        for (size_t i = 0; i < count; ++i)
            weights.push_back(i % 2 ? packed[i / 2] & 15 : packed[i / 2] >> 4);
    } else {
        Bytes packed = take(data, header);
        const StateTable table = read_state_table(packed, 6, 13);
        BackwardBits bits(packed);
        State even(table, bits), odd(table, bits);
        State *now = &even, *other = &odd;
        while (weights.size() < 254) {
            weights.push_back(now->symbol());
            now->advance(bits);
            if (bits.is_past_end()) {
                weights.push_back(other->symbol());
                break;
            }
            std::swap(now, other);
        }
    }
    for (uint8_t w : weights)
        if (w > 11) damaged("a Huffman weight is too large");
    return HuffmanTable(std::move(weights));
}

// A code stands for a base and a number of extra bits.
struct LengthCode {
    uint32_t base;
    uint8_t bits;
};

template <size_t count>
constexpr std::array<LengthCode, count> length_codes(uint32_t first, uint32_t num_plain,
                                                     const uint8_t (&bits)[count]) {
    std::array<LengthCode, count> codes{};
    uint32_t base = first;
    for (uint32_t i = 0; i < count; ++i) {
        codes[i] = {base, bits[i]};
        base += i < num_plain ? 1 : 1u << bits[i];
    }
    return codes;
}

constexpr uint8_t literal_bits[36] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  1,  1,
                                      1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr uint8_t match_bits[53] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  0,  0, 0,
                                    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  1,  1,  1, 1,
                                    2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr auto literal_codes = length_codes(0, 16, literal_bits);
constexpr auto match_codes = length_codes(3, 32, match_bits);

const std::vector<int> usual_literal_counts = {4, 3, 2, 2, 2, 2, 2, 2, 2,  2,  2,  2,
                                               2, 1, 1, 1, 2, 2, 2, 2, 2,  2,  2,  2,
                                               2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
const std::vector<int> usual_match_counts = {
    1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};
const std::vector<int> usual_offset_counts = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1,  1,  1,  1,  1, 1,
                                              1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};

struct Frame {
    std::string out;
    size_t most;
    HuffmanTable huffman;
    StateTable literal_lengths, offsets, match_lengths;
    uint64_t recent[3] = {1, 4, 8};

    explicit Frame(size_t num_bytes) : most(num_bytes) { out.reserve(num_bytes); }

    void append(const char* data, size_t count) {
        if (count > most - out.size()) damaged("it is longer than it says");
        out.append(data, count);
    }

    std::string read_literals(Bytes& block) {
        const auto first = uint8_t(block.empty() ? 0 : block[0]);
        const int type = first & 3, format = first >> 2 & 3;
        std::string literals;
        if (type < 2) {  // plain, or one byte repeated
            const size_t header = format == 1 ? 2 : format == 3 ? 3 : 1;
            const uint64_t value = take_number(block, header);
            const auto size = size_t(value >> (header == 1 ? 3 : 4));
            if (size > 1 << 17) damaged("a block has too many literals");
            if (type == 0) {
                const Bytes bytes = take(block, size);
                literals.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
            } else {
                literals.assign(size, char(take_number(block, 1)));
            }
            return literals;
        }
        const size_t header = format < 2 ? 3 : size_t(format) + 2;
        const int size_bits = format < 2 ? 10 : format == 2 ? 14 : 18;
        const uint64_t value = take_number(block, header) >> 4, mask = (1ull << size_bits) - 1;
        const auto size = size_t(value & mask);
        Bytes data = take(block, size_t(value >> size_bits & mask));
        if (size > 1 << 17) damaged("a block has too many literals");
        if (type == 2) huffman = read_huffman_table(data);
        if (huffman.entries.empty()) damaged("a Huffman tree is missing");
        literals.reserve(size);
        if (format == 0) {
            huffman.decode(data, size, literals);
            return literals;
        }
        size_t sizes[3];
        for (size_t& each : sizes) each = size_t(take_number(data, 2));
        const size_t quarter = (size + 3) / 4;
        if (3 * quarter > size) damaged("four streams of too few literals");
        for (size_t each : sizes) huffman.decode(take(data, each), quarter, literals);
        huffman.decode(data, size - 3 * quarter, literals);
        return literals;
    }

    static void read_code(int mode, Bytes& block, StateTable& table, const std::vector<int>& usual,
                          int usual_log, int max_log, size_t max_symbols) {
        if (mode == 0) table = StateTable(usual, usual_log);
        if (mode == 1) table = StateTable::of_one_symbol(uint8_t(take_number(block, 1)));
        if (mode == 2) table = read_state_table(block, max_log, max_symbols);
        if (table.entries.empty()) damaged("a table is missing");
    }

    void add_match(uint64_t offset, uint64_t length) {
        if (!offset || offset > out.size()) damaged("a match lies before the beginning");
        if (length > most - out.size()) damaged("it is longer than it says");
        for (uint64_t i = 0; i < length; ++i) out.push_back(out[out.size() - offset]);
    }

    uint64_t resolve_offset(uint64_t value, bool has_literals) {
        uint64_t offset;
        if (value > 3) {
            offset = value - 3;
            recent[2] = recent[1];
            recent[1] = recent[0];
        } else {
            const uint64_t index = value - (has_literals ? 1 : 0);
            offset = index < 3 ? recent[index] : recent[0] - 1;
            if (index == 0) return offset;
            if (index != 1) recent[2] = recent[1];
            recent[1] = recent[0];
        }
        recent[0] = offset;
        return offset;
    }

    void add_block(Bytes block) {
        const std::string literals = read_literals(block);
        size_t num_sequences = size_t(take_number(block, 1));
        if (num_sequences >= 255)
            num_sequences = size_t(take_number(block, 2)) + 0x7f00;
        else if (num_sequences >= 128)
            num_sequences = ((num_sequences - 128) << 8) + size_t(take_number(block, 1));
        size_t used = 0;
        if (num_sequences) {
            const auto modes = uint8_t(take_number(block, 1));
            read_code(modes >> 6, block, literal_lengths, usual_literal_counts, 6, 9, 36);
            read_code(modes >> 4 & 3, block, offsets, usual_offset_counts, 5, 8, 32);
            read_code(modes >> 2 & 3, block, match_lengths, usual_match_counts, 6, 9, 53);
            BackwardBits bits(block);
            State literal(literal_lengths, bits), offset(offsets, bits), match(match_lengths, bits);
            for (size_t i = 0; i < num_sequences; ++i) {
                if (literal.symbol() > 35 || match.symbol() > 52 || offset.symbol() > 31)
                    damaged("a code does not exist");
                const uint64_t offset_value =
                    (1ull << offset.symbol()) + bits.read(offset.symbol());
                const LengthCode m = match_codes[match.symbol()],
                                 l = literal_codes[literal.symbol()];
                const uint64_t match_length = m.base + bits.read(m.bits),
                               literal_length = l.base + bits.read(l.bits);
                if (i + 1 < num_sequences) {
                    literal.advance(bits);
                    match.advance(bits);
                    offset.advance(bits);
                }
                if (bits.is_past_end() || literal_length > literals.size() - used)
                    damaged("sequences go beyond their data");
                append(literals.data() + used, size_t(literal_length));
                used += size_t(literal_length);
                add_match(resolve_offset(offset_value, literal_length != 0), match_length);
            }
            if (!bits.is_at_end()) damaged("sequences do not end where they should");
        }
        append(literals.data() + used, literals.size() - used);
    }
};

}  // namespace

std::string decompress_zstd(std::span<const uint8_t> data, size_t num_bytes) {
    if (take_number(data, 4) != 0xfd2fb528) damaged("it is no Zstandard frame");
    const auto descriptor = uint8_t(take_number(data, 1));
    const bool is_single_segment = descriptor >> 5 & 1;
    if (!is_single_segment) take(data, 1);
    constexpr size_t dictionary_bytes[] = {0, 1, 2, 4}, size_bytes[] = {0, 2, 4, 8};
    if (take_number(data, dictionary_bytes[descriptor & 3])) damaged("it needs a dictionary");
    const int size_format = descriptor >> 6;
    take(data, size_format || !is_single_segment ? size_bytes[size_format] : 1);
    Frame frame(num_bytes);
    for (bool is_last = false; !is_last;) {
        const uint64_t header = take_number(data, 3);
        is_last = header & 1;
        const auto size = size_t(header >> 3);
        switch (header >> 1 & 3) {
            case 0: {
                const Bytes plain = take(data, size);
                frame.append(reinterpret_cast<const char*>(plain.data()), size);
                break;
            }
            case 1:
                frame.append(std::string(size, char(take_number(data, 1))).data(), size);
                break;
            case 2:
                frame.add_block(take(data, size));
                break;
            default:
                damaged("a block of unknown type");
        }
    }
    return std::move(frame.out);
}

std::string decompress_lz4(std::span<const uint8_t> data, size_t num_bytes) {
    Frame frame(num_bytes);
    auto long_length = [&](size_t length) {
        if (length == 15) {
            uint64_t more;
            do length += size_t(more = take_number(data, 1));
            while (more == 255);
        }
        return length;
    };
    while (!data.empty()) {
        const auto token = uint8_t(take_number(data, 1));
        const Bytes literals = take(data, long_length(token >> 4));
        frame.append(reinterpret_cast<const char*>(literals.data()), literals.size());
        if (data.empty()) break;
        const uint64_t offset = take_number(data, 2);
        frame.add_match(offset, long_length(token & 15) + 4);
    }
    return std::move(frame.out);
}

}  // namespace deep_moe::cuda
