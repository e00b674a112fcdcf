// Graphs that programs capture from streams, and their launches.
//
// A graph is the captured work in the order of the calls, which is one of those that it allows. A
// launch puts all of it into a stream.
#include "entry_points.h"

using namespace deep_moe::cuda;

namespace {

Graph& graph_of(StandIn& s, Graph* handle) {
    if (!s.graphs.count(handle))
        throw Failure{invalid_value, "the graph does not exist (any more)"};
    return *handle;
}

void append_copy(std::deque<Operation>& to, const Operation& from) {
    Operation copied;
    copied.act = from.act;
    copied.is_ready = from.is_ready;
    if (from.launch) copied.launch = std::make_unique<Launch>(*from.launch);
    to.push_back(std::move(copied));
}

Graph* copy_of(StandIn& s, const Graph& graph) {
    auto* made = new Graph;
    for (const Operation& operation : graph.operations) append_copy(made->operations, operation);
    s.graphs.insert(made);
    return made;
}

void forget(StandIn& s, Graph* graph) {
    graph_of(s, graph);
    s.graphs.erase(graph);
    delete graph;
}

}  // namespace

DRIVER_CALL(cuStreamBeginCapture_v2, (Stream * handle, int)) {
    return guarded("cuStreamBeginCapture", [&](StandIn& s) {
        Stream& stream = s.stream(handle);
        if (stream.is_legacy)
            throw Failure{capture_unsupported, "the legacy stream cannot be captured"};
        if (stream.capture) throw Failure{illegal_state, "the stream is captured already"};
        stream.capture = std::make_shared<Graph>();
    });
}

DRIVER_CALL(cuStreamBeginCapture, (Stream * stream)) {
    return cuStreamBeginCapture_v2(stream, 0);
}

DRIVER_CALL(cuStreamEndCapture, (Stream * handle, Graph** graph)) {
    return guarded("cuStreamEndCapture", [&](StandIn& s) {
        const std::shared_ptr<Graph> captured = s.stream(handle).capture;
        if (!captured) throw Failure{illegal_state, "the stream is not captured"};
        s.end_capture(captured);
        out(graph) = copy_of(s, *captured);
    });
}

DRIVER_CALL(cuStreamIsCapturing, (Stream * stream, int* status)) {
    return guarded("cuStreamIsCapturing",
                   [&](StandIn& s) { out(status) = s.stream(stream).capture ? 1 : 0; });
}

DRIVER_CALL(cuStreamGetCaptureInfo, (Stream * stream, int* status, uint64_t* id)) {
    return guarded("cuStreamGetCaptureInfo", [&](StandIn& s) {
        const auto& capture = s.stream(stream).capture;
        out(status) = capture ? 1 : 0;
        if (id) *id = reinterpret_cast<uint64_t>(capture.get());
    });
}

DRIVER_CALL(cuStreamGetCaptureInfo_v2, (Stream * stream, int* status, uint64_t* id, void** graph,
                                        const void** dependencies, size_t* count)) {
    if (graph) *graph = nullptr;
    if (dependencies) *dependencies = nullptr;
    if (count) *count = 0;
    return cuStreamGetCaptureInfo(stream, status, id);
}

DRIVER_CALL(cuStreamGetCaptureInfo_v3,
            (Stream * stream, int* status, uint64_t* id, void** graph, const void** dependencies,
             const void** edges, size_t* count)) {
    if (edges) *edges = nullptr;
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}

DRIVER_CALL(cuGraphInstantiateWithFlags, (Graph * *executable, Graph* graph, unsigned long long)) {
    return guarded("cuGraphInstantiate",
                   [&](StandIn& s) { out(executable) = copy_of(s, graph_of(s, graph)); });
}

DRIVER_CALL(cuGraphInstantiateWithParams, (Graph * *executable, Graph* graph, void*)) {
    return cuGraphInstantiateWithFlags(executable, graph, 0);
}

DRIVER_CALL(cuGraphExecUpdate_v2, (Graph * executable, Graph* graph, int* result)) {
    return guarded("cuGraphExecUpdate", [&](StandIn& s) {
        Graph& target = graph_of(s, executable);
        target.operations.clear();
        for (const Operation& operation : graph_of(s, graph).operations)
            append_copy(target.operations, operation);
        if (result) *result = 0;
    });
}

DRIVER_CALL(cuGraphUpload, (Graph * executable, Stream*)) {
    return guarded("cuGraphUpload", [&](StandIn& s) { graph_of(s, executable); });
}

DRIVER_CALL(cuGraphLaunch, (Graph * executable, Stream* handle)) {
    return guarded("cuGraphLaunch", [&](StandIn& s) {
        const Graph& graph = graph_of(s, executable);
        Stream& stream = s.stream(handle);
        for (const Operation& operation : graph.operations) {
            Operation& queued = s.enqueue(stream, operation.act);
            queued.is_ready = operation.is_ready;
            if (operation.launch) queued.launch = std::make_unique<Launch>(*operation.launch);
        }
    });
}

// Nodes have no handles: what programs ask for is how many there are.
DRIVER_CALL(cuGraphGetNodes, (Graph * graph, void** nodes, size_t* count)) {
    return guarded("cuGraphGetNodes", [&](StandIn& s) {
        if (nodes) throw Failure{not_supported, "the emulator has no handles of a graph's nodes"};
        out(count) = graph_of(s, graph).operations.size();
    });
}

DRIVER_CALL(cuGraphDestroy, (Graph * graph)) {
    return guarded("cuGraphDestroy", [&](StandIn& s) { forget(s, graph); });
}

DRIVER_CALL(cuGraphExecDestroy, (Graph * executable)) {
    return guarded("cuGraphExecDestroy", [&](StandIn& s) { forget(s, executable); });
}
