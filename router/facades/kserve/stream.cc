#include "router/facades/kserve/stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/refusal.h"
#include "router/base/refusal_reason.h"

namespace kvasir::router {
namespace {

using inference::ModelStreamInferResponse;

ModelStreamInferResponse Wrap(inference::ModelInferResponse response) {
  ModelStreamInferResponse wrapped;
  *wrapped.mutable_infer_response() = std::move(response);
  return wrapped;
}

// The limit of an error text, the same as for a call's status
// (base/net/grpc_status.h).
constexpr size_t kMaxErrorTextBytes = 1024;

// Returns whether the message is a stop request. Reads only the tensor `stop`.
bool SaysStop(const inference::ModelInferRequest& message) {
  for (int i = 0; i < message.inputs_size(); ++i) {
    const auto& input = message.inputs(i);
    if (input.name() != kKserveStopTensor) continue;
    if (i < message.raw_input_contents_size()) {
      const std::string& raw = message.raw_input_contents(i);
      return !raw.empty() && raw.front() != '\0';
    }
    const auto& values = input.contents().bool_contents();
    return !values.empty() && values.Get(0);
  }
  return false;
}

}  // namespace

KserveStream::KserveStream(std::shared_ptr<KserveBackend> backend,
                           KserveCall call, std::shared_ptr<TaskRunner> strand,
                           KserveStreamSink* sink)
    : backend_(std::move(backend)),
      call_(std::move(call)),
      strand_(std::move(strand)),
      sink_(sink),
      pump_(this, sink) {}

void KserveStream::Post(absl::AnyInvocable<void(KserveStream&)> step) {
  strand_->Post([self = shared_from_this(), step = std::move(step)]() mutable {
    if (!self->pump_.ended()) step(*self);
  });
}

void KserveStream::OnRead(
    std::shared_ptr<const inference::ModelInferRequest> request) {
  auto arrived = Arrive(*backend_, call_, request->ByteSizeLong());
  Post([request = std::move(request),
        arrived = std::move(arrived)](KserveStream& stream) mutable {
    stream.HandleRead(*request, std::move(arrived));
  });
}

void KserveStream::OnHalfClose() {
  Post([](KserveStream& stream) {
    stream.half_closed_ = true;
    stream.pump_.Pump();
  });
}

void KserveStream::OnWritten(bool ok) {
  Post([ok](KserveStream& stream) { stream.pump_.OnWritten(ok); });
}

void KserveStream::OnCancelled() {
  Post([](KserveStream& stream) {
    stream.pump_.EndCall(absl::CancelledError("cancelled by the client"),
                         CancelReason::kClient);
  });
}

void KserveStream::OnRefused(const absl::Status& status) {
  Post([status](KserveStream& stream) {
    stream.pump_.EndCall(status, CancelReason::kClient);
  });
}

void KserveStream::OnDrain() {
  Post([](KserveStream& stream) {
    stream.draining_ = true;
    stream.pump_.Pump();
  });
}

void KserveStream::OnStop(uint64_t number) {
  Post([number](KserveStream& stream) {
    stream.StopNumber(number);
    stream.pump_.Pump();
  });
}

void KserveStream::HandleRead(const inference::ModelInferRequest& message,
                              ArrivedMessage arrived) {
  if (pump_.ending()) return;
  const absl::Time start = backend_->clock->Now();
  if (const absl::Status status = Begin(message, arrived); !status.ok()) {
    CountRefused(message, arrived.caller, status, start);
    AnswerError(message.model_name(), message.id(), status);
  }
  if (!pump_.ending() && !call_.unary) sink_->Read();
}

void KserveStream::CountRefused(const inference::ModelInferRequest& message,
                                const Caller& caller,
                                const absl::Status& status, absl::Time start) {
  backend_->router->LogRefused(
      Describe(caller, message.model_name(), message.id()), status);
  // A refused caller or an exceeded quota (a refusal with a reason) does not
  // count as a failure of the model.
  if (!RefusalReasonOf(status).empty()) return;
  // Do not add an entry for an unknown model name to the statistics.
  if (!backend_->router->Model(message.model_name()).ok()) return;
  Request refused;
  refused.model = message.model_name();
  refused.start = start;
  Record(refused, false);
}

CanonicalRequest KserveStream::Describe(const Caller& caller,
                                        const std::string& model,
                                        const std::string& id) const {
  return DescribeRequest(call_, caller, backend_->facade, model, id);
}

// A stop request may end requests of the same tenant and IP address. The
// address by itself does not suffice, because several tenants may use one
// proxy. The port is left out, because it changes when a client reconnects.
std::string KserveStream::StopScope(const Caller& caller) const {
  return absl::StrCat(caller.tenant, " ",
                      call_.peer.substr(0, call_.peer.rfind(':')));
}

absl::Status KserveStream::Begin(const inference::ModelInferRequest& message,
                                 const ArrivedMessage& arrived) {
  KVASIR_RETURN_IF_ERROR(arrived.bytes.status());
  // The request's place in the tenant's quota, which is freed if the request is
  // refused below. A stop request needs no place, so a caller that has used up
  // its quota can still stop its requests.
  std::shared_ptr<RequestPlace> place;
  if (!SaysStop(message)) {
    KVASIR_ASSIGN_OR_RETURN(place, Enter(arrived.caller));
  }
  KVASIR_ASSIGN_OR_RETURN(KserveRequest request,
                          ParseKserveRequest(message, call_.unary));
  if (!request.model_version.empty() &&
      request.model_version != kKserveModelVersion) {
    return absl::NotFoundError(absl::StrCat(
        "model '", request.model_name, "' has version ", kKserveModelVersion,
        ", not '", request.model_version, "'"));
  }
  if (request.schema == KserveSchema::kStop) {
    StopById(request, arrived.caller);
    return absl::OkStatus();
  }
  return BeginGeneration(std::move(request), arrived, std::move(place));
}

absl::StatusOr<std::shared_ptr<RequestPlace>> KserveStream::Enter(
    const Caller& caller) const {
  if (draining_) {
    return proto::RefusedError(kvasir::v1::Refusal::DRAINING,
                               "the server is draining");
  }
  return EnterQuota(*backend_, caller);
}

absl::Status KserveStream::CheckId(const KserveRequest& request) const {
  if (requests_.size() >= backend_->limits.max_requests_per_stream) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "this stream runs ", requests_.size(), " requests, and the limit is ",
        backend_->limits.max_requests_per_stream));
  }
  if (numbers_by_id_.contains(request.id)) {
    return absl::AlreadyExistsError(absl::StrCat(
        "a request with id '", request.id, "' still runs on this stream"));
  }
  return absl::OkStatus();
}

absl::Status KserveStream::BeginGeneration(
    KserveRequest request, const ArrivedMessage& arrived,
    std::shared_ptr<RequestPlace> place) {
  KVASIR_RETURN_IF_ERROR(CheckId(request));
  KVASIR_ASSIGN_OR_RETURN(ModelStatus model,
                          backend_->router->Model(request.model_name));
  kvasir::v1::WorkerInfo info =
      std::move(model.info).value_or(kvasir::v1::WorkerInfo());
  KVASIR_RETURN_IF_ERROR(
      CheckNumSamples(request.sampling.n(), info, backend_->limits));
  KVASIR_RETURN_IF_ERROR(
      CountSamples(*backend_, place.get(), request.sampling.n()));
  KVASIR_RETURN_IF_ERROR(
      CheckResponseSize(request, backend_->limits.max_response_bytes,
                        MostTokens(request, backend_->limits.default_max_tokens,
                                   info.max_model_len())));
  const std::shared_ptr<const TextCodec> codec = backend_->codec;
  const bool needs_text = request.schema != KserveSchema::kTrtTokens;
  if (needs_text && codec == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("model '", request.model_name,
                     "' has no tokenizer.json and takes token ids, not text: "
                     "send them as the tensor 'input_ids'"));
  }
  const uint64_t number = backend_->running_ids->NextNumber();
  Request& entry = requests_[number];
  entry.id = request.id;
  entry.model = request.model_name;
  entry.start = backend_->clock->Now();
  entry.caller = arrived.caller;
  entry.bytes = *arrived.bytes;
  entry.place = std::move(place);
  if (!request.id.empty()) {
    numbers_by_id_[request.id] = number;
    backend_->running_ids->Add(StopScope(entry.caller), request.id,
                               weak_from_this(), number);
  }
  // Even if the request is cancelled, the tokenizer's task keeps the request's
  // bytes and its place in the quota until it has run.
  auto prepare = [self = shared_from_this(), number, codec,
                  bytes = *arrived.bytes, place = entry.place,
                  request = std::move(request), info = std::move(info),
                  in_stream = !call_.unary]() mutable {
    auto prepared =
        PrepareRequest(std::move(request), std::move(codec), info, in_stream);
    place.reset();
    self->Post(
        [number, prepared = std::move(prepared)](KserveStream& stream) mutable {
          stream.HandlePrepared(number, std::move(prepared));
        });
  };
  if (!backend_->tokenizer->PostInTurn(
          TokenizerTurn(*backend_, arrived.caller, call_.peer),
          std::move(prepare))) {
    Remove(requests_.find(number), CancelReason::kClient);
    return TokenizerIsFull(backend_->limits);
  }
  return absl::OkStatus();
}

void KserveStream::HandlePrepared(uint64_t number,
                                  absl::StatusOr<PreparedRequest> prepared) {
  const auto it = requests_.find(number);
  if (it == requests_.end()) return;  // stopped while the tokenizer worked
  if (!prepared.ok()) {
    backend_->router->LogRefused(
        Describe(it->second.caller, it->second.model, it->second.id),
        prepared.status());
    Fail(number, prepared.status());
    return;
  }
  const absl::Status status = Submit(number, *std::move(prepared));
  if (status.ok()) return;
  // Free the place now. Otherwise the relay would keep it until the router
  // drops the relay, a little later.
  LeavePlace(it->second);
  Fail(number, status);
}

absl::Status KserveStream::Submit(uint64_t number, PreparedRequest prepared) {
  Request& entry = requests_.at(number);
  entry.answer = std::move(prepared.answer);
  entry.num_samples = prepared.sampling.n();
  CanonicalRequest request = Describe(entry.caller, entry.model, entry.id);
  request.cache_salt = CacheSaltOf(entry.caller.cache_tenant());
  request.prompt = std::move(prepared.prompt);
  request.sampling = std::move(prepared.sampling);
  request.seed = prepared.seed;
  request.eviction_budget = prepared.eviction_budget;
  request.priority = prepared.priority;
  request.folded = !entry.answer->request().streaming;
  request.bytes = entry.bytes;
  if (request.bytes != nullptr) {
    request.bytes->Grow(request.prompt.bytes().size());
  }
  request.queue_timeout = prepared.queue_timeout;
  // Take the time before Submit, because the engine may begin before
  // Submit returns.
  entry.input = backend_->clock->Now() - entry.start;
  KVASIR_ASSIGN_OR_RETURN(
      entry.handle,
      backend_->router->Submit(std::move(request),
                               std::make_shared<EventRelay<KserveStream>>(
                                   shared_from_this(), number, entry.place)));
  return absl::OkStatus();
}

void KserveStream::HandleTokens(
    uint64_t number, const kvasir::v1::GenerateEvent::Tokens& tokens) {
  const auto it = requests_.find(number);
  if (it == requests_.end()) return;
  it->second.answer->OnTokens(tokens);
  // If stop strings have ended all samples, the answer needs no more tokens.
  if (it->second.answer->finished()) {
    it->second.handle->Cancel(CancelReason::kStopString);
    LeavePlace(it->second);
  }
  Changed(it);
}

void KserveStream::HandleFinish(
    uint64_t number, const kvasir::v1::GenerateEvent::Finish& finish) {
  const auto it = requests_.find(number);
  if (it == requests_.end()) return;
  it->second.queue = absl::Microseconds(finish.queue_us());
  it->second.compute =
      absl::Microseconds(finish.prefill_us() + finish.decode_us());
  ++it->second.num_engine_finishes;
  it->second.answer->OnFinish(finish);
  // Free the place now, because the client may send its next request as soon as
  // it has received the end of this one.
  if (it->second.answer->finished()) LeavePlace(it->second);
  Changed(it);
}

void KserveStream::HandleDone(uint64_t number, const absl::Status& status) {
  const auto it = requests_.find(number);
  if (it == requests_.end()) return;
  // If the answer is finished, its last responses only wait to be written.
  if (it->second.answer->finished()) return;
  Fail(number,
       !status.ok()
           ? status
           : absl::InternalError(
                 "the request ended before all its samples were finished"));
}

void KserveStream::StopById(const KserveRequest& request,
                            const Caller& caller) {
  const auto here = numbers_by_id_.find(request.id);
  if (here != numbers_by_id_.end()) {
    StopNumber(here->second);
  } else if (!request.id.empty()) {
    for (const auto& [weak, number] :
         backend_->running_ids->Find(StopScope(caller), request.id)) {
      if (const auto stream = weak.lock(); stream && stream.get() != this) {
        stream->OnStop(number);
      }
    }
  }
  direct_.push_back(Wrap(EmptyFinalResponse(request.model_name, request.id)));
  direct_bytes_ += direct_.back().ByteSizeLong();
  CheckWaitingBytes();
  pump_.Pump();
}

void KserveStream::StopNumber(uint64_t number) {
  const auto it = requests_.find(number);
  if (it == requests_.end()) return;
  Request& entry = it->second;
  // Queue the stopped request's last responses here, so that they come before
  // the answer to the stop request.
  if (entry.answer == nullptr) {
    direct_.push_back(Wrap(EmptyFinalResponse(entry.model, entry.id)));
    direct_bytes_ += direct_.back().ByteSizeLong();
  } else {
    entry.answer->Stop();
    while (entry.answer->HasResponse()) {
      direct_.push_back(Wrap(entry.answer->Take()));
      direct_bytes_ += direct_.back().ByteSizeLong();
    }
  }
  Record(entry, true);
  Remove(it, CancelReason::kClient);
}

void KserveStream::Fail(uint64_t number, const absl::Status& status) {
  const auto it = requests_.find(number);
  const std::string model = it->second.model;
  const std::string id = it->second.id;
  Record(it->second, false);
  Remove(it, CancelReason::kClient);
  AnswerError(model, id, status);
}

void KserveStream::AnswerError(const std::string& model, const std::string& id,
                               const absl::Status& status) {
  if (call_.unary || call_.errors_end_call) {
    pump_.EndCall(status, CancelReason::kClient);
    return;
  }
  ModelStreamInferResponse response = Wrap(EmptyFinalResponse(model, id));
  // The message has no field for the status code, so the text begins with it.
  response.set_error_message(
      absl::StrCat(absl::StatusCodeToString(status.code()), ": ",
                   status.message().substr(0, kMaxErrorTextBytes)));
  direct_bytes_ += response.ByteSizeLong();
  direct_.push_back(std::move(response));
  CheckWaitingBytes();
  pump_.Pump();
}

void KserveStream::Record(const Request& request, bool ok) {
  KserveStatistics::Outcome outcome;
  outcome.ok = ok;
  outcome.end = backend_->clock->Now();
  outcome.total = outcome.end - request.start;
  // If the request ended before it was submitted, all its time counts as input.
  outcome.input = request.handle == nullptr ? outcome.total : request.input;
  outcome.queue = request.queue;
  outcome.compute = request.compute;
  backend_->statistics.Record(request.model, outcome);
}

void KserveStream::LeavePlace(const Request& entry) {
  if (entry.place != nullptr) entry.place->Leave();
}

void KserveStream::Remove(Requests::iterator it, CancelReason reason) {
  Request& entry = it->second;
  const bool engine_works = entry.num_engine_finishes < entry.num_samples;
  if (entry.handle != nullptr && engine_works) entry.handle->Cancel(reason);
  if (!entry.id.empty()) {
    numbers_by_id_.erase(entry.id);
    backend_->running_ids->Remove(StopScope(entry.caller), entry.id, it->first);
  }
  answer_bytes_ -= entry.waiting_bytes;
  ready_.erase(it->first);
  requests_.erase(it);
}

void KserveStream::Changed(Requests::iterator it) {
  Request& entry = it->second;
  CountWaiting(&entry);
  const size_t waiting = entry.waiting_bytes;
  if (entry.answer->HasResponse()) {
    ready_.insert(it->first);
  } else {
    ready_.erase(it->first);
  }
  pump_.PumpSoon();
  // All waiting output of a streamed answer goes into one response, so the
  // limit of a response applies too.
  pump_.CheckWaiting(waiting, backend_->limits.max_response_bytes);
  CheckWaitingBytes();
}

void KserveStream::CountWaiting(Request* entry) {
  const KserveAnswer& answer = *entry->answer;
  const size_t waiting =
      answer.request().streaming ? answer.waiting_bytes() : 0;
  answer_bytes_ += waiting - entry->waiting_bytes;
  if (entry->bytes != nullptr) {
    entry->bytes->Grow(waiting);
    entry->bytes->Shrink(entry->waiting_bytes);
  }
  entry->waiting_bytes = waiting;
}

void KserveStream::CheckWaitingBytes() {
  pump_.CheckWaiting(direct_bytes_ + answer_bytes_,
                     backend_->limits.max_waiting_bytes_per_stream);
}

void KserveStream::GiveUp(CancelReason reason) {
  while (!requests_.empty()) {
    Record(requests_.begin()->second, false);
    Remove(requests_.begin(), reason);
  }
  direct_.clear();
  direct_bytes_ = 0;
}

void KserveStream::PostPumpTurn() {
  Post([](KserveStream& stream) { stream.pump_.OnPumpTurn(); });
}

std::optional<absl::Status> KserveStream::EndOfCall() {
  if (!requests_.empty()) return std::nullopt;
  if (half_closed_) return absl::OkStatus();
  if (draining_) return absl::UnavailableError("the server is draining");
  return std::nullopt;
}

std::optional<ModelStreamInferResponse> KserveStream::NextResponse() {
  if (!direct_.empty()) {
    ModelStreamInferResponse response = std::move(direct_.front());
    direct_.pop_front();
    direct_bytes_ =
        direct_.empty() ? 0 : direct_bytes_ - response.ByteSizeLong();
    return response;
  }
  if (ready_.empty()) return std::nullopt;
  auto next = ready_.upper_bound(last_served_);
  if (next == ready_.end()) next = ready_.begin();
  last_served_ = *next;
  const auto it = requests_.find(last_served_);
  Request& entry = it->second;
  ModelStreamInferResponse response = Wrap(entry.answer->Take());
  CountWaiting(&entry);
  if (!entry.answer->HasResponse()) ready_.erase(last_served_);
  if (entry.answer->complete()) {
    Record(entry, true);
    // If the engine still works on the request now, stop strings have ended
    // its samples.
    Remove(it, CancelReason::kStopString);
  }
  return response;
}

}  // namespace kvasir::router
