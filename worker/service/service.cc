#include "worker/service/service.h"

#include <future>
#include <utility>

#include "base/clock.h"
#include "base/net/grpc_deadline.h"
#include "worker/engine/admission.h"
#include "worker/service/convert.h"
#include "worker/service/service_reactors.h"

namespace kvasir::worker {
namespace {

grpc::ServerUnaryReactor* FinishNow(grpc::CallbackServerContext* context) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace

WorkerService::WorkerService(WorkerServiceOptions options, ServedEngine* engine)
    : options_(std::move(options)),
      engine_(engine),
      pump_(std::make_shared<OutputPump>()),
      load_(std::make_shared<LoadPublisher>(options_.load_heartbeat)),
      drainer_(engine, options_.on_drain) {
  engine_->SubscribeLoad(load_);
}

WorkerService::~WorkerService() {
  load_->Stop();
  pump_->Stop();
}

kvasir::v1::DrainResponse WorkerService::DrainAndWait(absl::Time deadline) {
  std::promise<kvasir::v1::DrainResponse> drained;
  drainer_.Start(deadline, [&](const kvasir::v1::DrainResponse& response) {
    drained.set_value(response);
  });
  return drained.get_future().get();
}

grpc::ServerWriteReactor<kvasir::v1::GenerateEvent>* WorkerService::Generate(
    grpc::CallbackServerContext* context,
    const kvasir::v1::GenerateRequest* request) {
  const std::shared_ptr<GenerateReactor> reactor =
      GenerateReactor::Make({context, engine_, pump_, options_.max_queued_bytes,
                             request->request_id(), request->attempt()});
  if (const Refusal refusal = Admission::CheckWeights(
          request->weights_id(), options_.info.weights_id());
      !refusal.ok()) {
    reactor->OnSubmitted(refusal);
    return reactor.get();
  }
  absl::StatusOr<Request> converted =
      ToRequest(*request, base::FromGrpcDeadline(context->deadline()));
  reactor->OnSubmitted(converted.ok()
                           ? engine_->Submit(*std::move(converted), reactor)
                           : Refusal{converted.status(),
                                     kvasir::v1::Refusal::REFUSAL_UNSPECIFIED});
  return reactor.get();
}

grpc::ServerUnaryReactor* WorkerService::Abort(
    grpc::CallbackServerContext* context,
    const kvasir::v1::AbortRequest* request, kvasir::v1::AbortResponse*) {
  engine_->Abort(request->request_id(), std::nullopt);
  return FinishNow(context);
}

grpc::ServerUnaryReactor* WorkerService::GetInfo(
    grpc::CallbackServerContext* context, const kvasir::v1::GetInfoRequest*,
    kvasir::v1::WorkerInfo* response) {
  *response = options_.info;
  return FinishNow(context);
}

grpc::ServerWriteReactor<kvasir::v1::LoadReport>* WorkerService::WatchLoad(
    grpc::CallbackServerContext*, const kvasir::v1::WatchLoadRequest* request) {
  const std::shared_ptr<WatchLoadReactor> reactor = WatchLoadReactor::Make();
  load_->Watch(reactor, absl::Milliseconds(request->min_interval_ms()));
  return reactor.get();
}

grpc::ServerUnaryReactor* WorkerService::Drain(
    grpc::CallbackServerContext* context,
    const kvasir::v1::DrainRequest* request,
    kvasir::v1::DrainResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::Duration patience =
      request->deadline_ms() == 0 ? options_.drain_deadline
                                  : absl::Milliseconds(request->deadline_ms());
  // The call stays open until the drain ends. If the caller goes away earlier,
  // the drain still continues.
  drainer_.Start(base::Clock::Real().Now() + patience,
                 [reactor, response](const kvasir::v1::DrainResponse& drained) {
                   *response = drained;
                   reactor->Finish(grpc::Status::OK);
                 });
  return reactor;
}

}  // namespace kvasir::worker
