// Cluster launch control: a running cluster asks for the place of one that has not been launched.
//
// All clusters of a grid are launched, or will be, whatever the others do. So each request is
// answered with "there is none", which hardware may say at any time.
#include "async_units.h"
#include "instruction_table.h"

namespace deep_moe::emulator {

namespace {

constexpr uint32_t response_bytes = 16;

// Response, mbarrier; aux: to every CTA of the cluster
Flow try_cancel(Warp& w, const Op& op) {
    w.for_each_lane([&](int lane) {
        const uint64_t address = w.address(op.operands[0], lane);
        if (address % response_bytes) {
            throw Fault(FaultKind::misaligned,
                        format("the response's address 0x%llx is not a multiple of %u",
                               static_cast<unsigned long long>(address), response_bytes),
                        lane);
        }
        const uint32_t response = shared_place(w, Space::shared, address, lane).offset;
        const uint32_t barrier =
            shared_place(w, Space::shared, w.address(op.operands[1], lane), lane).offset;
        std::vector<Cta*> receivers{w.cta};
        if (op.aux) receivers = w.cta->cluster->ctas;
        std::vector<uint64_t> phases;
        for (Cta* cta : receivers) {
            if (cta->live_threads == 0)
                throw Fault(FaultKind::invalid_operation,
                            format("the answer goes to the CTA with cluster rank %u, which has "
                                   "exited",
                                   cta->cluster_rank),
                            lane);
            bulk_state(*cta).hold(cta->machine->here());
            phases.push_back(phase_of(*cta, barrier));
        }
        w.machine->enqueue_async(
            w, "answer to a launch request", w.machine->new_order_key(),
            [=, issue = issue_of(w, lane)] {
                for (size_t i = 0; i < receivers.size(); ++i) {
                    Cta* cta = receivers[i];
                    {
                        const auto accesses = accesses_by_barrier(issue, *cta, barrier);
                        CtaWindow window(*cta, "answer to a launch request");
                        std::memset(window.write(response, response_bytes), 0, response_bytes);
                    }
                    bulk_state(*cta).release(cta->machine->here());
                    complete_bytes_at(*cta, barrier, response_bytes, phases[i]);
                }
            });
    });
    return Flow::next;
}

void decode_try_cancel(Decoder& d) {
    if (!d.take("async") || !d.take("mbarrier::complete_tx::bytes"))
        d.invalid(".async.mbarrier::complete_tx::bytes is missing");
    d.ignore({"shared::cta", "b128"});
    const bool all = d.take("multicast::cluster::all");
    d.expect_operands(2);
    d.emit(try_cancel, {d.address(0), d.address(1)}, all);
}

// Predicate, low half of the response
Flow is_canceled(Warp& w, const Op& op) {
    const auto response = w.in<uint64_t>(op.operands[1]);
    uint32_t canceled = 0;
    w.for_each_lane([&](int lane) { canceled |= uint32_t(response[lane] & 1) << lane; });
    w.set_predicate(op.operands[0], canceled);
    return Flow::next;
}

void decode_is_canceled(Decoder& d) {
    if (!d.take("pred")) d.invalid(".pred is missing");
    d.ignore({"b128"});
    d.expect_operands(2);
    Operand response = d.source(1, Type::b128);
    response.bits = 64;
    d.emit(is_canceled, {d.destination(0, Type::pred), response});
}

Flow first_cta(Warp& w, const Op&) {
    throw Fault(FaultKind::invalid_operation,
                "the response names no CTA: the request was not granted", w.first_lane());
}

void decode_first_cta(Decoder& d) {
    d.ignore({"v4", "b32", "b128"});
    for (const char* coordinate : {"::x", "::y", "::z"}) d.take(coordinate);
    d.expect_operands(2);
    std::vector<Operand> operands = d.destinations(0, Type::b32);
    operands.push_back(d.source(1, Type::b128));
    d.emit(first_cta, operands);
}

}  // namespace

InstructionTable launch_control_instructions() {
    return {
        {"clusterlaunchcontrol.try_cancel", decode_try_cancel,
         "request for the place of a cluster that has not started; never granted"},
        {"clusterlaunchcontrol.query_cancel.is_canceled", decode_is_canceled,
         "whether the request was granted"},
        {"clusterlaunchcontrol.query_cancel.get_first_ctaid", decode_first_cta,
         "the granted cluster's first CTA; an error, since none is granted"},
    };
}

}  // namespace deep_moe::emulator
