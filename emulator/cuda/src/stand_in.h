// The state of the stand-in for CUDA's driver: GPUs, contexts, streams, memory, modules.
//
// Device memory is the host's, and one machine of the emulator executes all GPUs: each is a rank.
// What a program puts into streams waits there until something asks for it; then all streams run,
// and the kernels at their heads run together, so that kernels of several GPUs may wait for each
// other.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "abi.h"
#include "chip.h"
#include "emulator_api.h"

namespace deep_moe::cuda {

// From the variable WARPCHECK_OPTIONS, "name=value" divided by commas.
struct Options {
    const ChipFacts* chip = &chips[0];
    int num_devices = 1, num_sms = 0;
    uint64_t seed = 0;
    int schedule = 0;
    bool checks = true, stops_at_findings = false, strict_tcgen05 = false;
    std::string report;  // file that findings are appended to, as lines of JSON; "": none
};

struct Failure {  // of a call
    Result result;
    std::string text;  // what the program is told on stderr; "": nothing
};

// Whether something in a stream has come to pass.
struct Completion {
    bool is_done = false;
    double seconds = 0;
};

struct Launch {
    struct Function* function = nullptr;
    uint32_t grid[3], block[3], cluster[3];
    uint32_t shared_bytes = 0;
    std::vector<std::byte> arguments;
};

struct Operation {
    uint64_t number = 0;  // in the order of calls
    std::function<void()> act;
    std::unique_ptr<Launch> launch;  // instead of `act`
    std::function<bool()> is_ready;  // null: at once
    std::shared_ptr<Completion> completion;
};

// Captured work, in the order of the calls.
struct Graph {
    std::deque<Operation> operations;
};

struct Stream {
    Context* context = nullptr;
    unsigned flags = 0;  // 1: does not wait for the legacy stream
    int priority = 0;
    uint64_t id = 0;
    bool is_legacy = false;
    std::deque<Operation> operations;
    std::shared_ptr<Graph> capture;  // where what comes goes instead
};

struct Event {
    unsigned flags = 0;  // 2: without times
    std::shared_ptr<Completion> recorded;
    std::shared_ptr<Graph> capture;  // in which it was recorded
};

struct Context {
    Device device = 0;
    bool is_primary = false;
    int uses = 0;  // of a primary one
    unsigned flags = 0;
    Result sticky = success;  // what ended a kernel; no launch comes after it
    Stream legacy, per_thread;
    std::set<Stream*> streams;
    std::map<int, size_t> limits;

    Context(Device device, bool is_primary);
};

struct Pool {
    Device device = 0;
    uint64_t threshold = 0, used = 0, most_used = 0;
    std::map<int, int> attributes;
    std::set<Device> peers;  // that may access it
};

enum class Kind { device, pinned, managed, registered, variable };

struct Allocation {
    uint64_t address = 0, size = 0;
    Kind kind = Kind::device;
    Device device = 0;
    Context* context = nullptr;
    Pool* pool = nullptr;
    void* storage = nullptr;  // what `free` takes; null if it is not ours
    unsigned flags = 0;
    uint64_t number = 0;
    std::string name;
};

struct Image {  // PTX that the machine has loaded
    uint32_t module = 0;
    std::string name;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

// CUmodule and CUlibrary
struct Library {
    std::unique_ptr<Image> image;
};

// CUfunction and CUkernel
struct Function {
    static constexpr uint64_t mark = 0x6e6f6974636e7566ull;
    uint64_t magic = mark;
    Library* library = nullptr;
    std::string name;
    uint32_t parameter_bytes = 0, cluster[3] = {};
    struct Parameter {
        uint32_t offset, bytes;
    };
    std::vector<Parameter> parameters;
    KernelResources resources = {};
    std::map<int, int> attributes;  // that were set

    int shared_limit() const;
    int most_threads() const;
};

struct StandIn {
    Options options;
    Handle* machine = nullptr;
    std::vector<std::unique_ptr<Context>> primaries;
    std::set<std::pair<Device, Device>> peers;  // (who, whose memory)
    std::set<Context*> contexts;
    std::set<Event*> events;
    std::set<Graph*> graphs;
    std::set<Library*> libraries;
    std::vector<std::unique_ptr<Pool>> default_pools;
    std::vector<Pool*> current_pools;
    std::set<Pool*> pools;
    std::map<uint64_t, Allocation> allocations;
    uint64_t allocated_bytes = 0, memory_bytes = 0, last_allocation = 0, last_operation = 0,
             last_stream = 0, num_launches = 0;
    double kernel_seconds = 0;

    // ---- objects
    Context& current_context();
    Stream& stream(Stream* handle);
    Event& event(Event* handle);
    Function& function(Function* handle);
    Library& library(Library* handle);
    Pool& pool(Pool* handle);
    Context& context(Context* handle);
    void check_device(Device device) const;
    const ChipFacts& chip() const { return *options.chip; }
    int num_sms() const { return options.num_sms ? options.num_sms : chip().num_sms; }

    // ---- streams
    // Puts something at the end of a stream.
    Operation& enqueue(Stream& stream, std::function<void()> act);
    void end_capture(const std::shared_ptr<Graph>& capture);
    void run_all();                    // all that streams hold
    void synchronize(Stream& stream);  // throws what ended a kernel there
    void synchronize(Context& context);
    bool is_done(const Stream& stream) const { return stream.operations.empty(); }

    // ---- memory
    Allocation& allocate(uint64_t size, Kind kind, Context& context, Pool* pool = nullptr,
                         unsigned flags = 0);
    void adopt(uint64_t address, uint64_t size, Kind kind, Context& context, unsigned flags,
               const std::string& name);
    void release(uint64_t address);
    Allocation* find_allocation(uint64_t address);
    // That `size` bytes at a device's address are there. `what` words the error.
    void check_range(uint64_t address, uint64_t size, const char* what);
    void allow_peer(Device who, Device whose, bool allow);

    // ---- modules
    Library* load(const void* image, size_t size);
    void unload(Library* library);
    Function* find_function(Library& library, const char* name);
    bool find_variable(Library& library, Device device, const char* name, uint64_t& address,
                       uint64_t& bytes);

    // ---- findings
    void report_finding(const std::string& json, bool stops, const std::string& launch);
    // A call that cannot be: told on stderr, and in the report.
    void report_call(const char* call, const Failure& failure);
    void report_summary();

 private:
    bool is_held(const Stream& stream) const;
    bool run_one_round();
    void run_kernels(const std::vector<Stream*>& ready);
    void add_to_machine(const Allocation& allocation);
    void remove_from_machine(const Allocation& allocation);
    bool reaches(Device who, const Allocation& allocation) const;
    void append(const std::string& line);

    std::deque<Allocation> quarantine;  // freed, but not given back yet: late accesses find nothing
    size_t quarantined_bytes = 0;
    uint32_t reported_findings = 0;
    bool is_running = false;
    std::vector<Stream*> all_streams() const;
};

// The one of the process.
StandIn& stand_in();
extern std::recursive_mutex the_lock;
// Of this thread; a stack as the driver has it.
extern thread_local std::vector<Context*> current_contexts;

bool has_started();
void start();
double now_seconds();
std::string words(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string quoted(const std::string& text);  // as JSON
void tell(const std::string& text);           // on stderr

// Programs load NVRTC when they like; the driver's calls look for it (interpose.cpp). The lock is
// held.
void look_at_new_libraries();

// Runs a call of the driver: one at a time, failures become results.
template <class F>
Result guarded(const char* call, F f) {
    std::lock_guard lock(the_lock);
    try {
        if (!has_started()) return not_initialized;
        look_at_new_libraries();
        f(stand_in());
        return success;
    } catch (const Failure& failure) {
        if (!failure.text.empty()) stand_in().report_call(call, failure);
        return failure.result;
    } catch (const std::bad_alloc&) {
        return out_of_memory;
    } catch (const std::exception& error) {
        stand_in().report_call(call, {unknown_error, error.what()});
        return unknown_error;
    }
}

// What launches share (launches.cpp).
void enqueue_launch(StandIn& s, Function& function, Stream& stream, const Dim3& grid,
                    const Dim3& block, const Dim3& cluster, bool is_cooperative,
                    uint64_t shared_bytes, void** parameters, void** extra);
int resident_ctas(const StandIn& s, const Function& function, int block_threads,
                  uint64_t shared_bytes);
// Puts a launch with attributes into its stream, with the events that they name.
void enqueue_launch_with(StandIn& s, Function& function, const LaunchConfig& config,
                         void** parameters, void** extra);
Dim3 cluster_of(const LaunchConfig& config);

// What copies share (copies.cpp).
enum class Direction { any, to_device, to_host, on_device };
void copy(StandIn& s, uint64_t to, uint64_t from, size_t size, Direction direction, Stream* stream,
          bool waits);
void fill(StandIn& s, uint64_t to, size_t pitch, uint64_t value, size_t value_bytes, size_t width,
          size_t height, Stream* stream, bool waits);
void copy_box(StandIn& s, const Copy3D& box, Stream* stream, bool waits);

// A driver function by its name, as cuGetProcAddress finds it; null if there is none.
void* driver_function(const char* name, int version);
// A function of this library by its exported name.
void* exported_function(const char* name);

}  // namespace deep_moe::cuda
