#include "fat_binary.h"

#include <dirent.h>
#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "abi.h"
#include "zstd.h"

namespace deep_moe::cuda {

namespace {

constexpr uint32_t wrapper_magic = 0x466243b1, container_magic = 0xba55ed50;
constexpr uint32_t flag_lz4 = 0x2000, flag_zstd = 0x8000;
constexpr uint16_t kind_ptx = 1, kind_elf = 2;

struct Wrapper {
    uint32_t magic, version;
    const void* container;
};

struct Container {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t num_bytes;
};

struct Entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t payload_bytes;
    uint32_t compressed_bytes, options_offset;
    uint16_t minor, major;
    uint32_t arch;
    uint64_t name;
    uint32_t flags, zero[3];
    uint64_t plain_bytes;
};

struct Target {
    int number = 0;    // 90
    char suffix = 0;   // 'a' or 'f'
    std::string text;  // "sm_90a"
};

Target target_of(std::string_view ptx) {
    Target target;
    const size_t at = ptx.find(".target");
    if (at == std::string_view::npos) return target;
    const size_t name = ptx.find("sm_", at);
    if (name == std::string_view::npos) return target;
    size_t end = name + 3;
    for (; end < ptx.size() && ptx[end] >= '0' && ptx[end] <= '9'; ++end)
        target.number = 10 * target.number + (ptx[end] - '0');
    if (end < ptx.size() && (ptx[end] == 'a' || ptx[end] == 'f')) target.suffix = ptx[end++];
    target.text = ptx.substr(name, end - name);
    return target;
}

// 0: it does not run there; else the larger the better.
int fitness(const Target& target, int capability) {
    if (target.suffix == 'a') return target.number == capability ? 1000000 : 0;
    if (target.suffix == 'f')
        return target.number / 10 == capability / 10 && target.number <= capability
                   ? 10000 + target.number
                   : 0;
    return target.number <= capability ? target.number : 0;
}

std::string wanted(int capability) {
    const std::string arch = "compute_" + std::to_string(capability) + "a";
    return "compile it with PTX inside: nvcc -gencode arch=" + arch + ",code=" + arch +
           " (NVRTC: --gpu-architecture=" + arch + ", and take the PTX)";
}

std::string payload(const Entry& entry) {
    const auto* data = reinterpret_cast<const uint8_t*>(&entry) + entry.header_bytes;
    std::string text;
    if (entry.flags & flag_zstd)
        text = decompress_zstd({data, entry.compressed_bytes}, entry.plain_bytes);
    else if (entry.flags & flag_lz4)
        text = decompress_lz4({data, entry.compressed_bytes}, entry.plain_bytes);
    else
        text.assign(reinterpret_cast<const char*>(data), entry.payload_bytes);
    return text;
}

// Nothing if there is no such file. Streams of C++ would need a newer glibc.
std::string read_file(const std::string& path) {
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
    std::string content;
    char part[1 << 16];
    while (const size_t count = file ? std::fread(part, 1, sizeof part, file.get()) : 0)
        content.append(part, count);
    return content;
}

size_t bytes_of_cubin(const void* image) {
    Elf64_Ehdr header;
    std::memcpy(&header, image, sizeof header);
    return std::max(header.e_shoff + uint64_t(header.e_shnum) * header.e_shentsize,
                    header.e_phoff + uint64_t(header.e_phnum) * header.e_phentsize);
}

// The PTX from which a cubin was made: compilers leave `x.cubin` beside `x.ptx` in the folder that
// the command gives them. It is the cubin's bytes that count, for names of files and kernels recur.
std::string kept_ptx(const void* image) {
    constexpr std::string_view ending = ".cubin";
    const char* report = std::getenv("WARPCHECK_REPORT");
    const std::string folder = std::string(report ? report : "") + "/kept";
    const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), &closedir);
    while (const dirent* entry = entries ? readdir(entries.get()) : nullptr) {
        std::string path = folder + "/" + entry->d_name;
        if (path.size() < ending.size() || path.substr(path.size() - ending.size()) != ending)
            continue;
        const std::string cubin = read_file(path);
        if (cubin.size() < sizeof(Elf64_Ehdr) || cubin.size() < bytes_of_cubin(cubin.data()) ||
            std::memcmp(cubin.data(), image, sizeof(Elf64_Ehdr)) != 0 ||
            std::memcmp(cubin.data(), image, bytes_of_cubin(image)) != 0)
            continue;
        std::string ptx = read_file(path.substr(0, path.size() - ending.size()) + ".ptx");
        if (!ptx.empty()) return ptx;
    }
    return {};
}

std::string best_ptx(const Container* container, int capability) {
    const char* at = reinterpret_cast<const char*>(container) + container->header_bytes;
    const char* end = at + container->num_bytes;
    std::string best, there;
    int best_fitness = 0;
    bool has_elf = false;
    while (at + sizeof(Entry) <= end) {
        const auto& entry = *reinterpret_cast<const Entry*>(at);
        std::string text;
        if (entry.kind == kind_elf) {
            has_elf = true;
            there += " cubin for sm_" + std::to_string(entry.arch) + ",";
            const std::string cubin = payload(entry);
            if (cubin.size() >= sizeof(Elf64_Ehdr) && cubin.size() >= bytes_of_cubin(cubin.data()))
                text = kept_ptx(cubin.data());
        } else if (entry.kind == kind_ptx) {
            text = payload(entry);
            text.resize(std::min(text.find('\0'), text.size()));
            there += " PTX for " + target_of(text).text + ",";
        }
        if (!text.empty()) {
            const Target target = target_of(text);
            const int fits = fitness(target, capability);
            if (fits > best_fitness) {
                best_fitness = fits;
                best = std::move(text);
            }
        }
        at += entry.header_bytes + entry.payload_bytes;
    }
    if (best_fitness) return best;
    if (there.empty())
        throw ImageError{invalid_image, "the fat binary holds neither PTX nor a cubin"};
    there.pop_back();
    throw ImageError{no_binary_for_gpu,
                     std::string("the fat binary has no PTX that the emulated GPU (sm_") +
                         std::to_string(capability) + ") takes, only" + there + ". " +
                         (has_elf ? "Machine code cannot be emulated; " : "") + wanted(capability)};
}

}  // namespace

std::string ptx_of_image(const void* image, size_t size, int major, int minor) {
    const int capability = 10 * major + minor;
    uint32_t magic;
    std::memcpy(&magic, image, 4);
    try {
        if (magic == wrapper_magic)
            return best_ptx(
                static_cast<const Container*>(static_cast<const Wrapper*>(image)->container),
                capability);
        if (magic == container_magic)
            return best_ptx(static_cast<const Container*>(image), capability);
    } catch (const std::runtime_error& error) {
        throw ImageError{invalid_image, error.what()};
    }
    std::string ptx;
    if (std::memcmp(image, "\177ELF", 4) == 0) {
        ptx = kept_ptx(image);
        if (ptx.empty())
            throw ImageError{
                no_binary_for_gpu,
                "it is a cubin, machine code, which cannot be emulated; " + wanted(capability)};
    } else {
        const auto* text = static_cast<const char*>(image);
        ptx.assign(text, size ? strnlen(text, size) : std::strlen(text));
    }
    if (ptx.find(".version") == std::string::npos || ptx.find(".target") == std::string::npos)
        throw ImageError{invalid_image,
                         "the image is neither PTX nor a fat binary; " + wanted(capability)};
    const Target target = target_of(ptx);
    if (!fitness(target, capability))
        throw ImageError{no_binary_for_gpu, "the PTX is for " + target.text +
                                                ", and the emulated GPU is sm_" +
                                                std::to_string(capability)};
    return ptx;
}

}  // namespace deep_moe::cuda
