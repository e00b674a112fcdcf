// Leads the calls of programs that hold NVIDIA's static CUDA runtime to the one of this library.
//
// nvcc links the runtime statically unless told otherwise. Its functions then are in the program,
// under their names in its symbol table. Before the program starts, each of them gets a jump to
// ours at its beginning; those that we do not have get one to a refusal. The program's file is left
// alone, and a stripped program cannot be helped: entry_points.cpp says so. Libraries that are
// loaded later are treated likewise.
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "jit_linker.h"
#include "runtime_state.h"

namespace deep_moe::cuda {

namespace {

#if defined(__x86_64__)
constexpr unsigned char jump_code[] = {0xff, 0x25, 0, 0, 0, 0};             // jmp [next]
constexpr unsigned char refusal_code[] = {0x48, 0x8b, 0x3d, 0x09, 0, 0, 0,  // mov rdi, [16]
                                          0xff, 0x25, 0x0b, 0,    0, 0,     // jmp [24]
                                          0x90, 0x90, 0x90};
#elif defined(__aarch64__)
constexpr uint32_t jump_code[] = {0x58000050, 0xd61f0200};  // ldr x16, [8]; br x16
constexpr uint32_t refusal_code[] = {0x58000080, 0x580000b0, 0xd61f0200, 0xd503201f};
#else
#error "the stand-in for CUDA's driver knows x86-64 and aarch64"
#endif
constexpr size_t jump_bytes = sizeof jump_code + 8;

int refuse(const char* name) {
    runtime::enter();
    return runtime::finish(guarded(name, [](StandIn&) {
        throw Failure{not_supported, "the emulator does not have this call"};
    }));
}

// Code that calls `refuse` with a name.
void* make_refusal(const char* name) {
    static unsigned char* next = nullptr;
    static size_t left = 0;
    constexpr size_t bytes = sizeof refusal_code + 16, chunk = 1 << 16;
    if (left < bytes) {
        void* page = mmap(nullptr, chunk, PROT_READ | PROT_WRITE | PROT_EXEC,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) return nullptr;
        next = static_cast<unsigned char*>(page);
        left = chunk;
    }
    unsigned char* code = next;
    auto* target = &refuse;
    std::memcpy(code, refusal_code, sizeof refusal_code);
    std::memcpy(code + sizeof refusal_code, &name, 8);
    std::memcpy(code + sizeof refusal_code + 8, &target, 8);
    next += bytes;
    left -= bytes;
    return code;
}

void write_jump(void* at, void* target) {
    const auto page = uintptr_t(sysconf(_SC_PAGESIZE)),
               first = reinterpret_cast<uintptr_t>(at) / page * page,
               end = reinterpret_cast<uintptr_t>(at) + jump_bytes;
    auto* begin = reinterpret_cast<void*>(first);
    if (mprotect(begin, end - first, PROT_READ | PROT_WRITE | PROT_EXEC)) return;
    std::memcpy(at, jump_code, sizeof jump_code);
    std::memcpy(static_cast<char*>(at) + sizeof jump_code, &target, 8);
    mprotect(begin, end - first, PROT_READ | PROT_EXEC);
    __builtin___clear_cache(static_cast<char*>(at), static_cast<char*>(at) + jump_bytes);
}

struct File {
    int handle;
    explicit File(const char* path) : handle(open(path, O_RDONLY | O_CLOEXEC)) {}
    ~File() {
        if (handle >= 0) close(handle);
    }
    bool read(void* to, size_t bytes, uint64_t at) const {
        return handle >= 0 && pread(handle, to, bytes, off_t(at)) == ssize_t(bytes);
    }
};

struct Named {
    std::string name;
    uintptr_t address;
    size_t bytes;
};

// The functions in a file's table of symbols, of this type, whose names begin with one of these.
std::vector<Named> functions_of(const char* path, uintptr_t base, uint32_t table,
                                std::initializer_list<std::string_view> beginnings) {
    std::vector<Named> found;
    const File file(path);
    Elf64_Ehdr header;
    if (!file.read(&header, sizeof header, 0) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) ||
        header.e_shentsize != sizeof(Elf64_Shdr))
        return found;
    std::vector<Elf64_Shdr> sections(header.e_shnum);
    if (!file.read(sections.data(), sections.size() * sizeof(Elf64_Shdr), header.e_shoff))
        return found;
    for (const Elf64_Shdr& section : sections) {
        if (section.sh_type != table || section.sh_link >= sections.size()) continue;
        const Elf64_Shdr& text = sections[section.sh_link];
        std::vector<Elf64_Sym> symbols(section.sh_size / sizeof(Elf64_Sym));
        std::string names(text.sh_size, '\0');
        if (!file.read(symbols.data(), symbols.size() * sizeof(Elf64_Sym), section.sh_offset) ||
            !file.read(names.data(), names.size(), text.sh_offset))
            continue;
        for (const Elf64_Sym& symbol : symbols) {
            if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || symbol.st_shndx == SHN_UNDEF ||
                symbol.st_name >= names.size())
                continue;
            const std::string_view name = names.c_str() + symbol.st_name;
            for (const std::string_view beginning : beginnings)
                if (name.substr(0, beginning.size()) == beginning)
                    found.push_back({std::string(name), base + symbol.st_value, symbol.st_size});
        }
    }
    return found;
}

// Whether the file holds a static runtime.
bool redirect_runtime(const char* path, uintptr_t base) {
    const std::vector<Named> functions = functions_of(path, base, SHT_SYMTAB, {"cuda", "__cuda"});
    // A program may have functions of its own with such names; the runtime's lie together.
    uintptr_t first = UINTPTR_MAX, last = 0;
    bool has_runtime = false;
    for (const Named& f : functions) {
        const void* ours = exported_function(f.name.c_str());
        if (reinterpret_cast<uintptr_t>(ours) == f.address) return false;  // this library itself
        has_runtime |= f.name == "__cudaRegisterFatBinary";
        if (!ours) continue;
        first = std::min(first, f.address);
        last = std::max(last, f.address);
    }
    if (!has_runtime) return false;
    for (const Named& f : functions) {
        if (f.bytes < jump_bytes) continue;
        void* ours = exported_function(f.name.c_str());
        if (!ours && f.address > first && f.address < last && f.name.find('.') == std::string::npos)
            ours = make_refusal(strdup(f.name.c_str()));
        if (ours) write_jump(reinterpret_cast<void*>(f.address), ours);
    }
    return true;
}

// NVRTC makes PTX on its way to machine code and keeps both. Who asks for the machine code gets the
// PTX, which is what the stand-in's driver loads.
void redirect_nvrtc(const char* path, uintptr_t base) {
    const char* slash = std::strrchr(path, '/');
    if (std::strncmp(slash ? slash + 1 : path, "libnvrtc.", 9) != 0) return;
    uintptr_t ptx = 0, ptx_size = 0, cubin = 0, cubin_size = 0;
    for (const Named& f : functions_of(path, base, SHT_DYNSYM, {"nvrtcGet"})) {
        if (f.name == "nvrtcGetPTX") ptx = f.address;
        if (f.name == "nvrtcGetPTXSize") ptx_size = f.address;
        if (f.name == "nvrtcGetCUBIN") cubin = f.address;
        if (f.name == "nvrtcGetCUBINSize") cubin_size = f.address;
    }
    if (!ptx || !ptx_size || !cubin || !cubin_size) return;
    write_jump(reinterpret_cast<void*>(cubin), reinterpret_cast<void*>(ptx));
    write_jump(reinterpret_cast<void*>(cubin_size), reinterpret_cast<void*>(ptx_size));
}

// What nvJitLink makes of PTX is machine code. The stand-in's linker keeps the PTX.
void redirect_jit_linker(const char* path, uintptr_t base) {
    const char* slash = std::strrchr(path, '/');
    if (std::strncmp(slash ? slash + 1 : path, "libnvJitLink.", 13) != 0) return;
    for (const Named& f : functions_of(path, base, SHT_DYNSYM, {"nvJitLink", "__nvJitLink"}))
        if (void* ours = jit_linker_function(f.name))
            write_jump(reinterpret_cast<void*>(f.address), ours);
}

#if defined(__x86_64__)
// The runtime library of CuTe DSL holds NVIDIA's without its symbols, but for `cudaMalloc` has an
// exported `_cudaMalloc`, and so on. Those that do nothing but jump there tell where it is. Those
// of the driver's calls look them up, and jump as well.
void redirect_cute_dsl(const char* path, uintptr_t base) {
    const char* slash = std::strrchr(path, '/');
    if (std::strcmp(slash ? slash + 1 : path, "libcute_dsl_runtime.so") != 0) return;
    constexpr unsigned char jump = 0xe9;  // to a distance of 32 bits
    for (const Named& f : functions_of(path, base, SHT_DYNSYM, {"_cu"})) {
        const char* name = f.name.c_str() + 1;
        // In C it has this name.
        if (!std::strcmp(name, "cudaLaunchKernelEx")) name = "cudaLaunchKernelExC";
        void* ours = exported_function(name);
        const auto* code = reinterpret_cast<const unsigned char*>(f.address);
        int32_t distance;
        std::memcpy(&distance, code + 1, sizeof distance);
        if (std::strncmp(name, "cuda", 4) != 0) {
            if (ours) write_jump(reinterpret_cast<void*>(f.address), ours);
        } else if (*code == jump) {
            if (!ours) ours = make_refusal(strdup(name));
            if (ours) write_jump(reinterpret_cast<void*>(f.address + 5 + distance), ours);
        }
    }
}
#else
void redirect_cute_dsl(const char*, uintptr_t) {}
#endif

struct Object {
    std::string path;
    uintptr_t base;
};

// Objects that were loaded since the last call.
std::vector<Object> new_objects() {
    static auto* known = new std::set<uintptr_t>;
    static unsigned long long num_loads = 0;
    std::vector<Object> found;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            if (info->dlpi_adds == num_loads) return 1;
            const bool is_program = !info->dlpi_name || !*info->dlpi_name;
            if (known->insert(info->dlpi_addr).second)
                static_cast<std::vector<Object>*>(data)->push_back(
                    {is_program ? "/proc/self/exe" : info->dlpi_name, info->dlpi_addr});
            return 0;
        },
        &found);
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void*) {
            num_loads = info->dlpi_adds;
            return 1;
        },
        nullptr);
    return found;
}

// An nvcc that a program starts for machine code writes the PTX to its file instead.
void ask_nvcc_for_ptx(int count, char** words, char** environment) {
    const std::vector<std::string_view> all(words, words + count);
    const auto has = [&](std::string_view word) {
        return std::find(all.begin(), all.end(), word) != all.end();
    };
    if (!count || all[0].substr(all[0].rfind('/') + 1) != "nvcc") return;
    if (!(has("--cubin") || has("-cubin")) || has("-ptx")) return;
    std::vector<char*> changed(words, words + count);
    char last[] = "-ptx";  // the last one counts
    changed.push_back(last);
    changed.push_back(nullptr);
    char path[4096] = "";
    if (readlink("/proc/self/exe", path, sizeof path - 1) > 0)
        execve(path, changed.data(), environment);
}

// Before any constructor of the program registers its kernels.
__attribute__((constructor)) void look_at_first_libraries(int count, char** words,
                                                          char** environment) {
    ask_nvcc_for_ptx(count, words, environment);
    for (const Object& object : new_objects()) {
        redirect_runtime(object.path.c_str(), object.base);
        redirect_nvrtc(object.path.c_str(), object.base);
        redirect_jit_linker(object.path.c_str(), object.base);
        redirect_cute_dsl(object.path.c_str(), object.base);
    }
}

}  // namespace

void look_at_new_libraries() {
    for (const Object& object : new_objects()) {
        redirect_nvrtc(object.path.c_str(), object.base);
        redirect_jit_linker(object.path.c_str(), object.base);
        redirect_cute_dsl(object.path.c_str(), object.base);
        if (!redirect_runtime(object.path.c_str(), object.base)) continue;
        // Its constructors have registered its kernels with the runtime inside; now with ours.
        for (const Named& f :
             functions_of(object.path.c_str(), object.base, SHT_SYMTAB,
                          {"_ZL24__sti____cudaRegisterAllv", "__sti____cudaRegisterAll"}))
            reinterpret_cast<void (*)()>(f.address)();
    }
}

}  // namespace deep_moe::cuda

using namespace deep_moe::cuda;

// By site_hook.py: a function that hands its arguments to NVIDIA's `name` hands them to ours.
EXPORT void warpcheck_redirect(const char* name, void* function) {
    void* ours = exported_function(name);
    if (!ours) ours = make_refusal(strdup(name));
    if (ours) write_jump(function, ours);
}

// Libraries that a program loads while it runs may hold a static runtime, too.
EXPORT void* dlopen(const char* path, int mode) {
    using Open = void* (*)(const char*, int);
    static const Open open_library = [] {
        Open found = nullptr;
        dl_iterate_phdr(
            [](dl_phdr_info* info, size_t, void* data) {
                const char* slash = std::strrchr(info->dlpi_name, '/');
                const std::string_view name = slash ? slash + 1 : info->dlpi_name;
                // In the C library since glibc 2.34, before that in a library of its own.
                if (name != "libc.so.6" && name != "libdl.so.2") return 0;
                for (const Named& f :
                     functions_of(info->dlpi_name, info->dlpi_addr, SHT_DYNSYM, {"dlopen"})) {
                    if (f.name != "dlopen") continue;
                    *static_cast<Open*>(data) = reinterpret_cast<Open>(f.address);
                    return 1;
                }
                return 0;
            },
            &found);
        return found;
    }();
    if (!open_library) return nullptr;
    void* opened = open_library(path, mode);
    if (opened) {
        std::lock_guard lock(the_lock);
        look_at_new_libraries();
    }
    return opened;
}
