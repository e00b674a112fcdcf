#include "stand_in.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fat_binary.h"

namespace deep_moe::cuda {

std::recursive_mutex the_lock;
thread_local std::vector<Context*> current_contexts;

namespace {

StandIn* the_stand_in = nullptr;
volatile sig_atomic_t was_interrupted = 0;

constexpr uint64_t gap_bytes = 256;            // between allocations, so that overruns show
constexpr size_t quarantine_bytes = 64 << 20;  // of freed memory that is not used again
constexpr uint64_t filled_bytes = 1ull << 30;  // larger allocations are zero at first
constexpr unsigned char fresh_byte = 0xcd;     // what new device memory holds

uint64_t host_bytes() {
    return uint64_t(sysconf(_SC_PAGESIZE)) * uint64_t(sysconf(_SC_PHYS_PAGES));
}

Options read_options() {
    Options o;
    const char* text = std::getenv("WARPCHECK_OPTIONS");
    std::string rest = text ? text : "";
    while (!rest.empty()) {
        const size_t end = std::min(rest.find(','), rest.size());
        const std::string item = rest.substr(0, end);
        rest.erase(0, end + 1);
        const size_t equals = item.find('=');
        const std::string name = item.substr(0, equals),
                          value = equals == std::string::npos ? "" : item.substr(equals + 1);
        const uint64_t number = std::strtoull(value.c_str(), nullptr, 10);
        if (name == "chip") {
            const auto* found = std::find_if(std::begin(chips), std::end(chips),
                                             [&](const ChipFacts& c) { return value == c.name; });
            if (found == std::end(chips))
                tell("WARPCHECK_OPTIONS: there is no chip " + value);
            else
                o.chip = found;
        } else if (name == "devices") {
            o.num_devices = int(std::clamp<uint64_t>(number, 1, 64));
        } else if (name == "sms") {
            o.num_sms = int(std::min<uint64_t>(number, 1024));
        } else if (name == "seed") {
            o.seed = number;
        } else if (name == "schedule") {
            o.schedule = int(std::min<uint64_t>(number, 5));
        } else if (name == "checks") {
            o.checks = number != 0;
        } else if (name == "stop") {
            o.stops_at_findings = number != 0;
        } else if (name == "strict_tcgen05") {
            o.strict_tcgen05 = number != 0;
        } else if (!name.empty()) {
            tell("WARPCHECK_OPTIONS: there is no option " + name);
        }
    }
    // A path may hold anything, so it has a variable of its own.
    if (const char* report = std::getenv("WARPCHECK_REPORT"))
        o.report = std::string(report) + "/" + std::to_string(getpid()) + ".jsonl";
    return o;
}

// The emulator asks now and then whether a run goes on, by functions that Python has; here they
// only look at a flag.
struct Watch {
    void* (*save_thread)() = [] { return static_cast<void*>(nullptr); };
    void (*restore_thread)(void*) = [](void*) {};
    int (*check_signals)() = [] { return int(was_interrupted); };
    void* (*call)(void*) = nullptr;
    void (*release)(void*) = nullptr;
};

// While kernels run, Ctrl-C ends the run and then does what it did before.
struct InterruptGuard {
    struct sigaction before;
    InterruptGuard() {
        was_interrupted = 0;
        struct sigaction mine = {};
        mine.sa_handler = [](int) { was_interrupted = 1; };
        sigaction(SIGINT, &mine, &before);
    }
    ~InterruptGuard() {
        sigaction(SIGINT, &before, nullptr);
        if (was_interrupted) raise(SIGINT);
    }
};

Result result_of(const std::string& finding) {
    const int kind = std::atoi(finding.c_str() + std::strlen("{\"kind\":"));
    switch (kind) {
        case 2:
            return not_supported;
        case 3:
            return illegal_address;
        case 4:
            return misaligned_address;
        case 7:
            return launch_timeout;
        case 8:
            return finding.find("assertion failed") != std::string::npos ? assertion
                                                                         : launch_failed;
        case 9:
            return illegal_instruction;
        case 10:
            return invalid_value;
        case 13:
            return out_of_memory;
        default:
            return launch_failed;
    }
}

}  // namespace

std::string words(const char* format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return text;
}

std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\')
            result += {'\\', c};
        else if (static_cast<unsigned char>(c) < 0x20)
            result += words("\\u%04x", c);
        else
            result += c;
    }
    return result + "\"";
}

void tell(const std::string& text) {
    std::fprintf(stderr, "warpcheck: %s\n", text.c_str());
}

double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

bool has_started() {
    return the_stand_in != nullptr;
}

StandIn& stand_in() {
    return *the_stand_in;
}

void start() {
    std::lock_guard lock(the_lock);
    if (the_stand_in) return;
    auto* s = new StandIn;  // never destroyed: programs call until their last moment
    s->options = read_options();
    const Options& o = s->options;
    s->machine = dm_create(o.seed, o.checks, 0);
    dm_set_memory_limit(s->machine, host_bytes() / 10 * 9);
    dm_set_schedule(s->machine, o.schedule);
    dm_set_strict_tcgen05(s->machine, o.strict_tcgen05);
    dm_set_collects_findings(s->machine, !o.stops_at_findings);
    s->memory_bytes = std::min(s->chip().memory_bytes, host_bytes() / 2);
    for (Device device = 0; device < o.num_devices; ++device) {
        s->primaries.push_back(std::make_unique<Context>(device, true));
        s->contexts.insert(s->primaries.back().get());
        s->default_pools.push_back(std::make_unique<Pool>());
        s->default_pools.back()->device = device;
        s->current_pools.push_back(s->default_pools.back().get());
        s->pools.insert(s->default_pools.back().get());
    }
    the_stand_in = s;
    std::atexit([] {
        std::lock_guard lock(the_lock);
        try {
            stand_in().run_all();
        } catch (...) {
        }
        stand_in().report_summary();
    });
}

// ---- objects

Context::Context(Device d, bool primary) : device(d), is_primary(primary) {
    legacy.context = per_thread.context = this;
    legacy.is_legacy = true;
    legacy.id = 1;
    per_thread.id = 2;
}

int Function::shared_limit() const {
    auto found = attributes.find(8);
    return found == attributes.end()
               ? std::max(0, default_shared_bytes - int(resources.static_shared_bytes))
               : found->second;
}

int Function::most_threads() const {
    const uint32_t* required = resources.required_threads;
    if (required[0]) return int(required[0] * required[1] * required[2]);
    return resources.max_threads ? int(resources.max_threads) : max_block_threads;
}

Context& StandIn::current_context() {
    if (current_contexts.empty() || !current_contexts.back()) throw Failure{invalid_context, ""};
    return context(current_contexts.back());
}

Context& StandIn::context(Context* handle) {
    if (!contexts.count(handle)) throw Failure{invalid_context, ""};
    return *handle;
}

Stream& StandIn::stream(Stream* handle) {
    if (!handle || handle == legacy_stream) return current_context().legacy;
    if (handle == per_thread_stream) return current_context().per_thread;
    for (Context* c : contexts)
        if (c->streams.count(handle)) return *handle;
    throw Failure{invalid_handle, "the stream does not exist (any more)"};
}

Event& StandIn::event(Event* handle) {
    if (!events.count(handle)) throw Failure{invalid_handle, "the event does not exist (any more)"};
    return *handle;
}

Function& StandIn::function(Function* handle) {
    if (!handle || handle->magic != Function::mark || !libraries.count(handle->library))
        throw Failure{invalid_handle, "the function does not exist (any more)"};
    return *handle;
}

Library& StandIn::library(Library* handle) {
    if (!libraries.count(handle)) throw Failure{invalid_handle, "the module does not exist"};
    return *handle;
}

Pool& StandIn::pool(Pool* handle) {
    if (!pools.count(handle)) throw Failure{invalid_value, "the memory pool does not exist"};
    return *handle;
}

void StandIn::check_device(Device device) const {
    if (device < 0 || device >= options.num_devices) throw Failure{invalid_device, ""};
}

// ---- streams

std::vector<Stream*> StandIn::all_streams() const {
    std::vector<Stream*> all;
    for (Context* c : contexts) {
        all.push_back(&c->legacy);
        all.push_back(&c->per_thread);
        all.insert(all.end(), c->streams.begin(), c->streams.end());
    }
    return all;
}

Operation& StandIn::enqueue(Stream& stream, std::function<void()> act) {
    if (stream.context->sticky) throw Failure{stream.context->sticky, ""};
    Operation operation;
    operation.number = ++last_operation;
    operation.act = std::move(act);
    auto& operations = stream.capture ? stream.capture->operations : stream.operations;
    operations.push_back(std::move(operation));
    return operations.back();
}

void StandIn::end_capture(const std::shared_ptr<Graph>& capture) {
    for (Stream* stream : all_streams())
        if (stream->capture == capture) stream->capture.reset();
}

// The legacy stream waits for what was put into blocking streams before, and they for it.
bool StandIn::is_held(const Stream& stream) const {
    const Operation& head = stream.operations.front();
    if (head.is_ready && !head.is_ready()) return true;
    auto comes_first = [&](const Stream& other) {
        return !other.operations.empty() && other.operations.front().number < head.number;
    };
    const Context& c = *stream.context;
    if (!stream.is_legacy) return !(stream.flags & 1) && comes_first(c.legacy);
    if (comes_first(c.per_thread)) return true;
    return std::any_of(c.streams.begin(), c.streams.end(),
                       [&](const Stream* s) { return !(s->flags & 1) && comes_first(*s); });
}

void StandIn::run_all() {
    if (is_running) return;  // a function of the program that was put into a stream
    is_running = true;
    struct End {
        bool& flag;
        ~End() { flag = false; }
    } end{is_running};
    while (run_one_round()) {
    }
}

bool StandIn::run_one_round() {
    bool has_progressed = false;
    std::vector<Stream*> ready;
    for (Stream* s : all_streams()) {
        while (!s->operations.empty() && !s->operations.front().launch && !is_held(*s)) {
            Operation operation = std::move(s->operations.front());
            s->operations.pop_front();
            try {
                if (!s->context->sticky) operation.act();
            } catch (const Failure& failure) {
                report_call("work in a stream", failure);
            }
            if (operation.completion) {
                operation.completion->is_done = true;
                operation.completion->seconds = now_seconds();
            }
            has_progressed = true;
        }
    }
    for (Stream* s : all_streams())
        if (!s->operations.empty() && s->operations.front().launch && !is_held(*s))
            ready.push_back(s);
    if (ready.empty()) return has_progressed;
    run_kernels(ready);
    return true;
}

void StandIn::run_kernels(const std::vector<Stream*>& ready) {
    std::string description;
    const double begin = now_seconds();
    bool has_any = false;
    for (Stream* s : ready) {
        Context& c = *s->context;
        const std::unique_ptr<Launch> launch = std::move(s->operations.front().launch);
        s->operations.pop_front();
        if (c.sticky) continue;
        const Function& f = *launch->function;
        ++num_launches;
        description +=
            words("%s%s<<<(%u, %u, %u), (%u, %u, %u)>>>", description.empty() ? "" : ", ",
                  f.name.substr(0, 200).c_str(), launch->grid[0], launch->grid[1], launch->grid[2],
                  launch->block[0], launch->block[1], launch->block[2]);
        const int failed =
            dm_launch(machine, f.library->image->module, f.name.c_str(), uint32_t(c.device),
                      launch->grid, launch->block, launch->cluster, launch->shared_bytes,
                      launch->arguments.data(), launch->arguments.size(), 0, 0);
        if (failed) {
            const std::string finding = dm_error_finding(machine);
            c.sticky = result_of(finding);
            report_finding(finding, true, description);
        } else {
            has_any = true;
        }
    }
    if (!has_any) return;
    int failed;
    {
        InterruptGuard guard;
        static const Watch watch;
        failed = dm_run(machine, &watch, nullptr);
    }
    kernel_seconds += now_seconds() - begin;
    for (; reported_findings < dm_num_findings(machine); ++reported_findings)
        report_finding(dm_finding(machine, reported_findings), false, description);
    if (!failed) return;
    const std::string finding = dm_error_finding(machine);
    for (Stream* s : ready) s->context->sticky = result_of(finding);
    report_finding(finding, true, description);
}

void StandIn::synchronize(Stream& stream) {
    if (stream.capture)
        throw Failure{capture_unsupported, "a call waits for a stream that is captured"};
    run_all();
    if (stream.context->sticky) throw Failure{stream.context->sticky, ""};
    if (!stream.operations.empty() && !is_running)
        throw Failure{launch_timeout,
                      "a stream waits for a value in memory that nothing in any stream writes; the "
                      "emulator runs kernels while the program waits, and not beside it"};
}

void StandIn::synchronize(Context& context) {
    run_all();
    if (context.sticky) throw Failure{context.sticky, ""};
    synchronize(context.legacy);
    for (Stream* s : context.streams) synchronize(*s);
}

// ---- memory

bool StandIn::reaches(Device who, const Allocation& a) const {
    if (a.device == who || a.kind == Kind::pinned || a.kind == Kind::managed ||
        a.kind == Kind::registered)
        return true;
    if (a.pool) return a.pool->peers.count(who) != 0;
    return peers.count({who, a.device}) != 0;
}

void StandIn::add_to_machine(const Allocation& a) {
    for (Device d = 0; d < options.num_devices; ++d) {
        if (a.kind == Kind::variable && d == a.device) continue;  // the machine has it
        if (reaches(d, a) &&
            dm_add_memory(machine, uint32_t(d), a.address, a.size, a.name.c_str(), 1))
            throw Failure{invalid_value, dm_error(machine)};
    }
}

void StandIn::remove_from_machine(const Allocation& a) {
    for (Device d = 0; d < options.num_devices; ++d)
        if (reaches(d, a) && !(a.kind == Kind::variable && d == a.device))
            dm_remove_memory(machine, uint32_t(d), a.address);
}

Allocation& StandIn::allocate(uint64_t size, Kind kind, Context& c, Pool* pool, unsigned flags) {
    if (!size) throw Failure{invalid_value, ""};
    if (kind == Kind::device && (size > memory_bytes || allocated_bytes + size > memory_bytes))
        throw Failure{out_of_memory, words("%llu bytes of device memory; %llu of %llu are free",
                                           (unsigned long long)size,
                                           (unsigned long long)(memory_bytes - allocated_bytes),
                                           (unsigned long long)memory_bytes)};
    constexpr size_t page = 4096, large = 1 << 20;
    Allocation a;
    if (posix_memalign(&a.storage, size >= large ? page : 512, size + gap_bytes)) {
        throw Failure{out_of_memory, ""};
    }
    if (size <= filled_bytes) std::memset(a.storage, fresh_byte, size);
    a.address = reinterpret_cast<uint64_t>(a.storage);
    a.size = size;
    a.kind = kind;
    a.device = c.device;
    a.context = &c;
    a.pool = pool;
    a.flags = flags;
    a.number = ++last_allocation;
    constexpr const char* what[] = {"device memory", "pinned host memory", "managed memory"};
    a.name = words("allocation %llu (%s, %llu bytes)", (unsigned long long)a.number,
                   what[int(kind)], (unsigned long long)size);
    add_to_machine(a);
    if (kind == Kind::device) allocated_bytes += size;
    if (pool) {
        pool->used += size;
        pool->most_used = std::max(pool->most_used, pool->used);
    }
    return allocations[a.address] = a;
}

void StandIn::adopt(uint64_t address, uint64_t size, Kind kind, Context& c, unsigned flags,
                    const std::string& name) {
    Allocation a;
    a.address = address;
    a.size = size;
    a.kind = kind;
    a.device = c.device;
    a.context = &c;
    a.flags = flags;
    a.name = name;
    add_to_machine(a);
    allocations[address] = a;
}

void StandIn::release(uint64_t address) {
    auto found = allocations.find(address);
    if (found == allocations.end())
        throw Failure{invalid_value, words("0x%llx is no allocation, or was freed already",
                                           (unsigned long long)address)};
    Allocation a = found->second;
    remove_from_machine(a);
    allocations.erase(found);
    if (a.kind == Kind::device) allocated_bytes -= a.size;
    if (a.pool) a.pool->used -= a.size;
    if (!a.storage) return;
    quarantined_bytes += a.size;
    quarantine.push_back(std::move(a));
    while (quarantined_bytes > quarantine_bytes && !quarantine.empty()) {
        quarantined_bytes -= quarantine.front().size;
        std::free(quarantine.front().storage);
        quarantine.pop_front();
    }
}

Allocation* StandIn::find_allocation(uint64_t address) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return nullptr;
    Allocation& a = std::prev(next)->second;
    return address - a.address < a.size ? &a : nullptr;
}

void StandIn::check_range(uint64_t address, uint64_t size, const char* what) {
    if (!size) return;
    const Allocation* a = find_allocation(address);
    if (a && size <= a->size - (address - a->address)) return;
    std::string text = words("%s of %llu bytes at 0x%llx ", what, (unsigned long long)size,
                             (unsigned long long)address);
    if (a) {
        text +=
            words("goes %llu bytes beyond the end of %s",
                  (unsigned long long)(size - (a->size - (address - a->address))), a->name.c_str());
    } else {
        text += "is not in device memory";
        for (const Allocation& freed : quarantine)
            if (address - freed.address < freed.size) text += ": " + freed.name + " was freed";
    }
    throw Failure{invalid_value, text};
}

void StandIn::allow_peer(Device who, Device whose, bool allow) {
    if (who == whose) throw Failure{invalid_device, ""};
    if (allow == (peers.count({who, whose}) != 0))
        throw Failure{allow ? peer_access_already_enabled : peer_access_not_enabled, ""};
    if (allow) peers.insert({who, whose});
    for (const auto& [address, a] : allocations) {
        const bool is_theirs =
            a.device == whose && !a.pool && (a.kind == Kind::device || a.kind == Kind::variable);
        if (!is_theirs) continue;
        if (!allow)
            dm_remove_memory(machine, uint32_t(who), address);
        else if (dm_add_memory(machine, uint32_t(who), address, a.size, a.name.c_str(), 1))
            throw Failure{invalid_value, dm_error(machine)};
    }
    if (!allow) peers.erase({who, whose});
}

// ---- modules

Library* StandIn::load(const void* image, size_t size) {
    if (!image) throw Failure{invalid_value, ""};
    auto library = std::make_unique<Library>();
    library->image = std::make_unique<Image>();
    Image& loaded = *library->image;
    try {
        const std::string ptx = ptx_of_image(image, size, chip().major, chip().minor);
        loaded.name = words("module %zu.ptx", libraries.size() + 1);
        if (const int failed =
                dm_load(machine, ptx.data(), ptx.size(), loaded.name.c_str(), &loaded.module)) {
            report_finding(dm_error_finding(machine), true, loaded.name);
            throw Failure{failed == 1 ? invalid_ptx : not_supported, ""};
        }
    } catch (const ImageError& error) {
        throw Failure{Result(error.result), error.text};
    }
    libraries.insert(library.get());
    const std::string listed = dm_kernels(machine, loaded.module);
    for (size_t at = 0; at < listed.size();) {
        const size_t tab = listed.find('\t', at), end = listed.find('\n', at);
        auto f = std::make_unique<Function>();
        f->library = library.get();
        f->name = listed.substr(at, tab - at);
        uint32_t count = 0;
        dm_kernel(machine, loaded.module, f->name.c_str(), &f->parameter_bytes, &count, f->cluster);
        for (uint32_t i = 0; i < count; ++i) {
            Function::Parameter p;
            int is_floating;
            dm_kernel_parameter(machine, loaded.module, f->name.c_str(), i, &p.offset, &p.bytes,
                                &is_floating);
            f->parameters.push_back(p);
        }
        dm_kernel_resources(machine, loaded.module, f->name.c_str(), &f->resources);
        loaded.functions[f->name] = std::move(f);
        at = end + 1;
    }
    return library.release();
}

void StandIn::unload(Library* handle) {
    Library& l = library(handle);
    run_all();
    dm_unload(machine, l.image->module);
    libraries.erase(handle);
    // The functions stay: programs hold pointers to them, and are told when they use one.
    for (auto& [name, function] : l.image->functions) {
        function->magic = 0;
        function.release();
    }
    delete handle;
}

Function* StandIn::find_function(Library& l, const char* name) {
    auto found = l.image->functions.find(name);
    return found == l.image->functions.end() ? nullptr : found->second.get();
}

bool StandIn::find_variable(Library& l, Device device, const char* name, uint64_t& address,
                            uint64_t& bytes) {
    if (dm_variable(machine, l.image->module, uint32_t(device), name, &address, &bytes))
        return false;
    if (bytes && !allocations.count(address)) {
        Context& c = *primaries[size_t(device)];
        adopt(address, bytes, Kind::variable, c, 0, words("variable %s", name));
    }
    return true;
}

// ---- findings

void StandIn::append(const std::string& line) {
    const int file = open(options.report.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    const std::string text = line + "\n";
    for (size_t done = 0; done < text.size();) {
        const ssize_t written = write(file, text.data() + done, text.size() - done);
        if (written <= 0) break;
        done += size_t(written);
    }
    close(file);
}

void StandIn::report_finding(const std::string& json, bool stops, const std::string& launch) {
    if (!options.report.empty()) {
        append("{\"finding\":" + json + (stops ? ",\"stops\":true" : ",\"stops\":false") +
               ",\"launch\":" + quoted(launch) + "}");
        return;
    }
    const size_t at = json.find("\"text\":\"");
    std::string text;
    for (size_t i = at + 8; at != std::string::npos && i < json.size() && json[i] != '"'; ++i) {
        if (json[i] != '\\') {
            text += json[i];
        } else if (json[i + 1] == 'u') {
            text += char(std::strtol(json.substr(i + 2, 4).c_str(), nullptr, 16));
            i += 5;
        } else {
            text += json[++i];
        }
    }
    tell("in " + launch + ": " + text);
}

void StandIn::report_call(const char* call, const Failure& failure) {
    const std::string text = std::string(call) + ": " + failure.text;
    if (options.report.empty())
        tell(text);
    else
        append("{\"call\":" + quoted(call) + words(",\"result\":%d", int(failure.result)) +
               ",\"text\":" + quoted(text) + "}");
}

void StandIn::report_summary() {
    uint64_t warp = 0, lane = 0, ns = 0;
    dm_statistics(machine, &warp, &lane, &ns);
    if (!options.report.empty())
        append(words("{\"launches\":%llu,\"warp_instructions\":%llu,\"seconds\":%.3f}",
                     (unsigned long long)num_launches, (unsigned long long)warp, kernel_seconds));
}

}  // namespace deep_moe::cuda
