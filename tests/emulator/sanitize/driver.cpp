// Loads and runs drawn PTX: texts of a corpus, most of them changed at random, as small kernels
// with arguments at random. Built with sanitizers, which end it where memory is not safe; and a
// case that takes too long ends it, too. What the emulator says of a text does not matter.
//
// driver CORPUS_FOLDER CASE_FILE SEED FIRST_CASE SECONDS [NUM_CASES]
// CASE_FILE gets the text of the case that runs. A case depends on SEED and its number only.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

struct Handle;
struct Python {
    void* (*save_thread)();
    void (*restore_thread)(void* state);
    int (*check_signals)();
    void* (*call)(void* callable);
    void (*release)(void* object);
};
extern "C" {
Handle* dm_create(uint64_t seed, int checks, int real_clock);
void dm_destroy(Handle*);
void dm_set_memory_limit(Handle*, uint64_t bytes);
void dm_set_strict_tcgen05(Handle*, int on);
void dm_set_schedule(Handle*, int schedule);
void dm_set_collects_findings(Handle*, int on);
int dm_add_memory(Handle*, uint32_t rank, uint64_t address, uint64_t bytes, const char* name,
                  int writable);
int dm_load(Handle*, const char* ptx, uint64_t bytes, const char* name, uint32_t* module);
const char* dm_kernels(Handle*, uint32_t module);
int dm_kernel(Handle*, uint32_t module, const char* kernel, uint32_t* parameter_bytes,
              uint32_t* num_parameters, uint32_t cluster[3]);
int dm_launch(Handle*, uint32_t module, const char* kernel, uint32_t rank, const uint32_t grid[3],
              const uint32_t block[3], const uint32_t cluster[3], uint32_t shared_bytes,
              const void* arguments, uint64_t argument_bytes, int in_order, uint32_t num_registers);
int dm_run(Handle*, const Python* python, void* progress);
const char* dm_error(Handle*);
uint32_t dm_num_findings(Handle*);
const char* dm_finding(Handle*, uint32_t index);
}

namespace {

using Clock = std::chrono::steady_clock;
using Random = std::mt19937_64;

constexpr auto run_limit = std::chrono::milliseconds(200);
// A text that takes longer to load, or an instruction that takes longer to run, is a fault, too.
constexpr auto case_limit = std::chrono::seconds(30);
constexpr size_t data_bytes = 4096, map_bytes = 128, max_text_bytes = 1 << 16;

Clock::time_point deadline;
// How far the cases came. Too few that run say that the changes are too wild.
uint64_t num_loaded = 0, num_launched = 0, num_finished = 0;

// What lets dm_run ask whether to go on.
const Python watch = {[] { return static_cast<void*>(nullptr); }, [](void*) {},
                      [] { return Clock::now() > deadline ? -1 : 0; },
                      [](void*) { return static_cast<void*>(nullptr); }, [](void*) {}};

template <class T>
const T& pick(Random& random, const std::vector<T>& from) {
    return from[random() % from.size()];
}

bool is_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_$%.:", c);
}

// Words, and everything else one character at a time.
std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
        size_t end = at + 1;
        if (text[at] && is_word(text[at]))
            while (end < text.size() && text[end] && is_word(text[end])) ++end;
        pieces.push_back(text.substr(at, end - at));
        at = end;
    }
    return pieces;
}

std::string any_number(Random& random) {
    static const std::vector<std::string> numbers = {"0",
                                                     "1",
                                                     "-1",
                                                     "2",
                                                     "3",
                                                     "7",
                                                     "8",
                                                     "16",
                                                     "31",
                                                     "32",
                                                     "33",
                                                     "63",
                                                     "64",
                                                     "127",
                                                     "128",
                                                     "255",
                                                     "256",
                                                     "512",
                                                     "1024",
                                                     "4095",
                                                     "4096",
                                                     "65535",
                                                     "65536",
                                                     "262143",
                                                     "16777215",
                                                     "2147483647",
                                                     "2147483648",
                                                     "-2147483648",
                                                     "4294967295",
                                                     "4294967296",
                                                     "9223372036854775807",
                                                     "9223372036854775808",
                                                     "18446744073709551615",
                                                     "18446744073709551616",
                                                     "0x7fffffffffffffff",
                                                     "0f7FC00000",
                                                     "0fFF800000",
                                                     "0d7FF0000000000000",
                                                     "1.5"};
    return pick(random, numbers);
}

std::string changed(Random& random, const std::string& text, const std::string& other) {
    std::vector<std::string> pieces = split(text), others = split(other);
    const auto any_word = [&](const std::vector<std::string>& from) {
        for (int i = 0; i < 100; ++i) {
            const std::string& piece = pick(random, from);
            if (is_word(piece[0])) return piece;
        }
        return std::string("ret");
    };
    const uint64_t num_changes = 1 + random() % 6;
    // Other numbers and words leave more texts that run.
    const uint64_t num_kinds = random() % 2 ? 6 : 12;
    for (uint64_t i = 0; i < num_changes && pieces.size() > 1; ++i) {
        const size_t at = random() % pieces.size();
        size_t word = at, number = at;
        while (word + 1 < pieces.size() && !is_word(pieces[word][0])) ++word;
        while (number + 1 < pieces.size() && !std::isdigit(pieces[number][0])) ++number;
        switch (random() % num_kinds) {
            case 0:
            case 1:
            case 2:
                pieces[number] = any_number(random);
                break;
            case 3:
            case 4:
                pieces[word] = any_word(pieces);
                break;
            case 5:
                pieces[word] = any_word(others);
                break;
            case 6:
                pieces.erase(pieces.begin() + std::ptrdiff_t(at));
                break;
            case 7:
                pieces.insert(pieces.begin() + std::ptrdiff_t(at), pick(random, pieces));
                break;
            case 8:
                std::swap(pieces[at], pieces[random() % pieces.size()]);
                break;
            case 9: {  // a modifier more, less or another one
                std::string& piece = pieces[word];
                const size_t dot = piece.find('.', 1);
                const std::string mnemonic = any_word(pieces);
                const size_t taken = mnemonic.find('.', 1);
                if (dot != std::string::npos && random() % 2) {
                    const size_t end = piece.find('.', dot + 1);
                    piece.erase(dot, end == std::string::npos ? end : end - dot);
                } else if (taken != std::string::npos) {
                    piece += mnemonic.substr(taken);
                }
                break;
            }
            case 10: {  // statements of another text
                const size_t from = random() % others.size();
                const size_t count = std::min<size_t>(random() % 40, others.size() - from);
                pieces.insert(pieces.begin() + std::ptrdiff_t(at), others.begin() + long(from),
                              others.begin() + long(from + count));
                break;
            }
            case 11:
                if (random() % 8 == 0)
                    pieces.resize(at + 1);
                else
                    pieces[at] = std::string(1, char(random() % 256));
                break;
        }
    }
    std::string result;
    for (const std::string& piece : pieces) result += piece;
    return result.substr(0, max_text_bytes);
}

// Memory that ends where the sanitizer looks.
struct Block {
    explicit Block(size_t bytes) : bytes(bytes) {
        at = static_cast<uint8_t*>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
        std::memset(at, 0, bytes);
    }
    ~Block() { std::free(at); }
    Block(const Block&) = delete;
    uint64_t address() const { return reinterpret_cast<uint64_t>(at); }
    uint8_t* at;
    size_t bytes;
};

// The image of a tensor map of `data`, as tensor_map.h reads it.
void fill_map(Random& random, uint8_t* image, const Block& data) {
    std::memset(image, 0, map_bytes);
    const uint8_t rank = uint8_t(1 + random() % 3);
    const auto put = [&](size_t offset, auto value) {
        std::memcpy(image + offset, &value, sizeof value);
    };
    put(0, uint64_t(0x313050414d544d44ull));
    put(8, uint8_t(random() % 2 ? 2 : random() % 16));
    put(9, rank);
    put(11, uint8_t(random() % 2 ? 0 : random() % 7));
    put(12, uint8_t(random() % 8 == 0));
    put(16, data.address());
    for (uint8_t i = 0; i < rank; ++i) {
        put(24 + 8u * i, uint64_t(i ? 4 : 64));
        if (i) put(64 + 8u * (i - 1), uint64_t(256));
        put(96 + 2u * i, uint16_t(i ? 1 + random() % 4 : 16 << random() % 5));
        put(106 + size_t(i), uint8_t(1));
    }
    if (random() % 4 == 0) image[8 + random() % (map_bytes - 8)] = uint8_t(random());
}

void run_case(Random& random, const std::string& text) {
    Block data(data_bytes), image(map_bytes);
    for (size_t i = 0; i < data_bytes; i += 8) {
        const uint64_t value = random() % 4 ? random() % 64 : random();
        std::memcpy(data.at + i, &value, 8);
    }
    fill_map(random, image.at, data);
    const bool checks = random() % 4 != 0;
    Handle* machine = dm_create(random(), checks, 0);
    dm_set_memory_limit(machine, 1ull << 30);
    dm_set_schedule(machine, int(random() % 6));
    dm_set_collects_findings(machine, random() % 4 != 0);
    dm_set_strict_tcgen05(machine, random() % 2);
    dm_add_memory(machine, 0, data.address(), data.bytes, "data", 1);
    dm_add_memory(machine, 0, image.address(), image.bytes, "map", 1);
    uint32_t module;
    if (dm_load(machine, text.data(), text.size(), "drawn.ptx", &module) == 0) {
        ++num_loaded;
        std::istringstream kernels(dm_kernels(machine, module));
        std::string line;
        for (int i = 0; i < 2 && std::getline(kernels, line); ++i) {
            const std::string name = line.substr(0, line.find('\t'));
            uint32_t num_bytes, count, declared[3];
            if (dm_kernel(machine, module, name.c_str(), &num_bytes, &count, declared)) continue;
            std::vector<uint8_t> arguments(num_bytes);
            for (size_t at = 0; at + 8 <= num_bytes; at += 8) {
                const uint64_t values[] = {data.address(), image.address(), random() % 64,
                                           random()};
                const uint64_t value = values[random() % 8 ? at / 8 % 2 : random() % 4];
                std::memcpy(arguments.data() + at, &value, 8);
            }
            if (num_bytes >= map_bytes) fill_map(random, arguments.data(), data);
            const std::vector<uint32_t> threads = {1, 32, 32, 33, 64, 128, 128, 160};
            const uint32_t ctas = uint32_t(1 + random() % 2);
            const uint32_t grid[3] = {ctas * std::max(declared[0], 1u), std::max(declared[1], 1u),
                                      std::max(declared[2], 1u)};
            const uint32_t block[3] = {pick(random, threads), 1, 1};
            const uint32_t cluster[3] = {declared[0] || random() % 2 ? 0 : ctas, 1, 1};
            num_launched +=
                0 == dm_launch(machine, module, name.c_str(), 0, grid, block, cluster,
                               pick(random, std::vector<uint32_t>{0, 0, 1024, 40000}),
                               arguments.data(), arguments.size(), 0, random() % 4 ? 0 : 40);
        }
        deadline = Clock::now() + run_limit;
        num_finished += dm_run(machine, &watch, nullptr) == 0;
    }
    (void)dm_error(machine);
    for (uint32_t i = 0; i < dm_num_findings(machine); ++i) (void)dm_finding(machine, i);
    dm_destroy(machine);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 6) return 2;
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(argv[1]))
        paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    std::vector<std::string> corpus;
    for (const auto& path : paths) {
        std::ifstream file(path);
        std::string text(std::istreambuf_iterator<char>(file), {});
        if (!text.empty()) corpus.push_back(std::move(text));
    }
    if (corpus.empty()) return 2;
    const uint64_t seed = std::strtoull(argv[3], nullptr, 10);
    uint64_t number = std::strtoull(argv[4], nullptr, 10), num_cases = 0;
    const uint64_t most = argc > 6 ? std::strtoull(argv[6], nullptr, 10) : UINT64_MAX;
    const auto end = Clock::now() + std::chrono::seconds(std::atoi(argv[5]));
    for (; num_cases < most && Clock::now() < end; ++number, ++num_cases) {
        Random random(seed * 0x9e3779b97f4a7c15ull + number);
        std::string text = pick(random, corpus);
        if (random() % 8) text = changed(random, text, pick(random, corpus));
        std::ofstream(argv[2]) << text;
        const auto begin = Clock::now();
        std::fprintf(stderr, "case %llu\r", static_cast<unsigned long long>(number));
        run_case(random, text);
        if (Clock::now() - begin > case_limit) {
            std::fprintf(stderr, "case %llu takes too long\n",
                         static_cast<unsigned long long>(number));
            return 3;
        }
    }
    std::printf("\n%llu cases, %llu loaded, %llu launched, %llu ran to their end\n",
                static_cast<unsigned long long>(num_cases),
                static_cast<unsigned long long>(num_loaded),
                static_cast<unsigned long long>(num_launched),
                static_cast<unsigned long long>(num_finished));
}
