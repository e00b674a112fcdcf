// The driver's calls about streams and events.
#include <atomic>

#include "entry_points.h"

using namespace deep_moe::cuda;

DRIVER_CALL(cuStreamCreateWithPriority, (Stream * *stream, unsigned flags, int priority)) {
    return guarded("cuStreamCreate", [&](StandIn& s) {
        Context& c = s.current_context();
        auto* made = new Stream;
        made->context = &c;
        made->flags = flags;
        made->priority = priority;
        made->id = ++s.last_stream + 2;
        c.streams.insert(made);
        out(stream) = made;
    });
}

DRIVER_CALL(cuStreamCreate, (Stream * *stream, unsigned flags)) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

DRIVER_CALL(cuStreamDestroy_v2, (Stream * handle)) {
    return guarded("cuStreamDestroy", [&](StandIn& s) {
        Stream& stream = s.stream(handle);
        if (&stream != handle) throw Failure{invalid_handle, ""};
        s.run_all();  // what it holds still takes place
        stream.context->streams.erase(handle);
        delete handle;
    });
}

DRIVER_CALL(cuStreamSynchronize, (Stream * stream)) {
    return guarded("cuStreamSynchronize", [&](StandIn& s) { s.synchronize(s.stream(stream)); });
}

DRIVER_CALL(cuStreamQuery, (Stream * stream)) {
    return guarded("cuStreamQuery", [&](StandIn& s) {
        Stream& asked = s.stream(stream);
        s.run_all();
        if (asked.context->sticky) throw Failure{asked.context->sticky, ""};
        if (!s.is_done(asked)) throw Failure{not_ready, ""};
    });
}

DRIVER_CALL(cuStreamGetFlags, (Stream * stream, unsigned* flags)) {
    return guarded("cuStreamGetFlags", [&](StandIn& s) { out(flags) = s.stream(stream).flags; });
}

DRIVER_CALL(cuStreamGetPriority, (Stream * stream, int* priority)) {
    return guarded("cuStreamGetPriority",
                   [&](StandIn& s) { out(priority) = s.stream(stream).priority; });
}

DRIVER_CALL(cuStreamGetId, (Stream * stream, unsigned long long* id)) {
    return guarded("cuStreamGetId", [&](StandIn& s) { out(id) = s.stream(stream).id; });
}

DRIVER_CALL(cuStreamGetDevice, (Stream * stream, Device* device)) {
    return guarded("cuStreamGetDevice",
                   [&](StandIn& s) { out(device) = s.stream(stream).context->device; });
}

DRIVER_CALL(cuStreamGetCtx, (Stream * stream, Context** context)) {
    return guarded("cuStreamGetCtx", [&](StandIn& s) { out(context) = s.stream(stream).context; });
}

DRIVER_CALL(cuStreamGetCtx_v2, (Stream * stream, Context** context, void** green)) {
    if (green) *green = nullptr;
    return cuStreamGetCtx(stream, context);
}

DRIVER_CALL(cuStreamCopyAttributes, (Stream*, Stream*)) {
    return success;
}

DRIVER_CALL(cuStreamSetAttribute, (Stream*, int, const void*)) {
    return success;  // all are hints
}

DRIVER_CALL(cuStreamWaitEvent, (Stream * handle, Event* event, unsigned)) {
    return guarded("cuStreamWaitEvent", [&](StandIn& s) {
        Stream& stream = s.stream(handle);
        // The stream joins the capture in which the event was recorded.
        if (s.event(event).capture) {
            stream.capture = s.event(event).capture;
            return;
        }
        const std::shared_ptr<Completion> awaited = s.event(event).recorded;
        if (!awaited || awaited->is_done) return;
        s.enqueue(stream, [] {}).is_ready = [awaited] { return awaited->is_done; };
    });
}

DRIVER_CALL(cuLaunchHostFunc, (Stream * stream, void (*function)(void*), void* data)) {
    return guarded("cuLaunchHostFunc", [&](StandIn& s) {
        if (!function) throw Failure{invalid_value, ""};
        s.enqueue(s.stream(stream), [=] { function(data); });
    });
}

DRIVER_CALL(cuStreamAddCallback,
            (Stream * stream, void (*function)(Stream*, int, void*), void* data, unsigned)) {
    return guarded("cuStreamAddCallback", [&](StandIn& s) {
        if (!function) throw Failure{invalid_value, ""};
        s.enqueue(s.stream(stream), [=] { function(stream, success, data); });
    });
}

// ---- words in memory

namespace {

template <class T>
void wait_value(StandIn& s, Stream& stream, DevicePointer address, T value, unsigned flags) {
    s.check_range(address, sizeof(T), "a wait for a value");
    s.enqueue(stream, [] {}).is_ready = [=] {
        const T now = reinterpret_cast<std::atomic<T>*>(address)->load();
        switch (flags & 3) {
            case 0:
                return std::make_signed_t<T>(now - value) >= 0;
            case 1:
                return now == value;
            case 2:
                return (now & value) != 0;
            default:
                return T(~(now | value)) != 0;
        }
    };
}

template <class T>
void write_value(StandIn& s, Stream& stream, DevicePointer address, T value) {
    s.check_range(address, sizeof(T), "a write of a value");
    s.enqueue(stream, [=] { reinterpret_cast<std::atomic<T>*>(address)->store(value); });
}

}  // namespace

DRIVER_CALL(cuStreamWaitValue32_v2,
            (Stream * stream, DevicePointer address, uint32_t value, unsigned flags)) {
    return guarded("cuStreamWaitValue32", [&](StandIn& s) {
        wait_value<uint32_t>(s, s.stream(stream), address, value, flags);
    });
}

DRIVER_CALL(cuStreamWaitValue64_v2,
            (Stream * stream, DevicePointer address, uint64_t value, unsigned flags)) {
    return guarded("cuStreamWaitValue64", [&](StandIn& s) {
        wait_value<uint64_t>(s, s.stream(stream), address, value, flags);
    });
}

DRIVER_CALL(cuStreamWriteValue32_v2,
            (Stream * stream, DevicePointer address, uint32_t value, unsigned)) {
    return guarded("cuStreamWriteValue32",
                   [&](StandIn& s) { write_value<uint32_t>(s, s.stream(stream), address, value); });
}

DRIVER_CALL(cuStreamWriteValue64_v2,
            (Stream * stream, DevicePointer address, uint64_t value, unsigned)) {
    return guarded("cuStreamWriteValue64",
                   [&](StandIn& s) { write_value<uint64_t>(s, s.stream(stream), address, value); });
}

// ---- events

DRIVER_CALL(cuEventCreate, (Event * *event, unsigned flags)) {
    return guarded("cuEventCreate", [&](StandIn& s) {
        s.current_context();
        auto* made = new Event;
        made->flags = flags;
        s.events.insert(made);
        out(event) = made;
    });
}

DRIVER_CALL(cuEventDestroy_v2, (Event * event)) {
    return guarded("cuEventDestroy", [&](StandIn& s) {
        s.event(event);
        s.events.erase(event);
        delete event;
    });
}

DRIVER_CALL(cuEventRecord, (Event * event, Stream* stream)) {
    return guarded("cuEventRecord", [&](StandIn& s) {
        Event& e = s.event(event);
        e.capture = s.stream(stream).capture;
        if (e.capture) return;
        Operation& operation = s.enqueue(s.stream(stream), [] {});
        operation.completion = e.recorded = std::make_shared<Completion>();
    });
}

DRIVER_CALL(cuEventRecordWithFlags, (Event * event, Stream* stream, unsigned)) {
    return cuEventRecord(event, stream);
}

DRIVER_CALL(cuEventQuery, (Event * event)) {
    return guarded("cuEventQuery", [&](StandIn& s) {
        Event& e = s.event(event);
        s.run_all();
        if (e.recorded && !e.recorded->is_done) throw Failure{not_ready, ""};
    });
}

DRIVER_CALL(cuEventSynchronize, (Event * event)) {
    return guarded("cuEventSynchronize", [&](StandIn& s) {
        Event& e = s.event(event);
        s.run_all();
        if (!current_contexts.empty() && current_contexts.back() && s.current_context().sticky)
            throw Failure{s.current_context().sticky, ""};
        if (e.recorded && !e.recorded->is_done)
            throw Failure{launch_timeout, "the stream of the event waits for a value in memory"};
    });
}

// The host's time, for want of another: the emulator's own says nothing of a GPU.
DRIVER_CALL(cuEventElapsedTime, (float* milliseconds, Event* begin, Event* end)) {
    return guarded("cuEventElapsedTime", [&](StandIn& s) {
        const auto &from = s.event(begin).recorded, &to = s.event(end).recorded;
        if (!from || !to || s.event(begin).flags & 2 || s.event(end).flags & 2)
            throw Failure{invalid_handle, ""};
        if (!from->is_done || !to->is_done) throw Failure{not_ready, ""};
        out(milliseconds) = float((to->seconds - from->seconds) * 1e3);
    });
}

DRIVER_CALL(cuEventElapsedTime_v2, (float* milliseconds, Event* begin, Event* end)) {
    return cuEventElapsedTime(milliseconds, begin, end);
}
