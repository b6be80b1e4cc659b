#include "router/core/request_router.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "router/base/refusal_reason.h"
#include "router/core/active_request.h"

namespace kvasir::router {
namespace {

std::string HexId(std::random_device* random) {
  const uint64_t bits = uint64_t{(*random)()} << 32 | (*random)();
  return absl::StrCat(absl::Hex(bits, absl::kZeroPad16));
}

// The key of a request in without_replica_.
std::pair<int32_t, Ticket> PlaceOf(const ActiveRequest& active) {
  return {active.request().priority, active.ticket()};
}

PickerOptions WithSeed(PickerOptions options) {
  std::random_device random;
  options.seed = uint64_t{random()} << 32 | random();
  return options;
}

// Returns 0 if the client has named no session.
uint64_t SessionOf(const CanonicalRequest& request) {
  if (request.session.empty()) return 0;
  return std::max<uint64_t>(
      1, MixBits(StableHash(request.cache_salt), StableHash(request.session)));
}

std::string NewIdPrefix() {
  std::random_device random;
  return HexId(&random);
}

}  // namespace

absl::StatusOr<MoveStreams> ParseMoveStreams(const std::string& text) {
  if (text == "off") return MoveStreams::kOff;
  if (text == "exact") return MoveStreams::kExact;
  if (text == "rounding") return MoveStreams::kRounding;
  return absl::InvalidArgumentError(absl::StrCat(
      "--move-streams '", text, "': it must be exact, rounding or off"));
}

RouterCore::RouterCore(RouterCoreOptions options, Parts parts)
    : options_(std::move(options)),
      parts_(parts),
      picker_(WithSeed(options_.picker)),
      random_(std::random_device()()),
      id_prefix_(NewIdPrefix()),
      admission_(options_.admission) {
  parts_.registry->SetListener([this, gate = gate_] {
    if (!gate->Enter()) return;
    RunSoon([this] {
      RetryWaiting();
      ReportMoves();
    });
    gate->Leave();
  });
  RunSoon([this] { ReportMoves(); });
  TickLater();
}

void RouterCore::ReportMoves() {
  std::map<MoveStreams, size_t> counts = {{MoveStreams::kOff, 0},
                                          {MoveStreams::kExact, 0},
                                          {MoveStreams::kRounding, 0}};
  const std::map<std::string, uint64_t> before =
      std::exchange(moves_logged_, {});
  for (const auto& replica : parts_.registry->replicas()) {
    const uint64_t connection = replica->connection();
    const auto info = replica->info();
    if (!replica->in_use() || !info.has_value()) continue;
    const MoveStreams moves = MovesFrom(options_.move_streams, *info);
    ++counts[moves];
    moves_logged_[replica->target()] = connection;
    const auto logged = before.find(replica->target());
    if (logged != before.end() && logged->second == connection) continue;
    base::Log(base::LogLevel::kInfo, "streams",
              {{"worker", replica->target()},
               {"move", MoveStreamsName(moves)},
               {"allowed", MoveStreamsName(options_.move_streams)},
               {"device", info->device()},
               {"lifts_prompts", info->lifts_prompts() ? "yes" : "no"}});
  }
  if (parts_.observer == nullptr) return;
  for (const auto& [moves, count] : counts) {
    parts_.observer->OnReplicasByMoves(moves, count);
  }
}

void RouterCore::TickLater() {
  const absl::Time now = base::Clock::Real().Now();
  parts_.timers->At(now + kLivenessTick, [this, gate = gate_] {
    if (!gate->Enter()) return;
    CheckWorkers(running_time_.Advance(base::Clock::Real().Now()));
    TickLater();
    gate->Leave();
  });
}

void RouterCore::CheckWorkers(absl::Duration elapsed) {
  if (!parts_.registry->Tick(elapsed)) return;
  std::map<std::string, CandidateList> candidates;
  for (const ModelStatus& model : parts_.registry->Models()) {
    candidates.emplace(model.name, parts_.registry->Candidates(model.name));
  }
  for (const ActivePtr& active : All()) {
    const auto found = candidates.find(active->request().model);
    if (found != candidates.end()) active->LeaveHungReplica(found->second);
  }
}

RouterCore::~RouterCore() {
  BeginDrain();
  CancelAll(CancelReason::kShutdown);
  WaitIdle(absl::InfiniteFuture());
  gate_->Close();
}

std::string RouterCore::KnownModels() const {
  std::vector<std::string> names;
  for (const ModelStatus& model : parts_.registry->Models()) {
    names.push_back(model.name);
  }
  return absl::StrJoin(names, ", ");
}

absl::StatusOr<ModelStatus> RouterCore::Model(const std::string& name) const {
  const std::vector<ModelStatus> models = Models();
  for (const ModelStatus& model : models) {
    if (model.name == name) return model;
  }
  if (models.empty()) {
    return absl::UnavailableError("no worker has been reached yet");
  }
  return absl::NotFoundError(
      absl::StrCat("model '", name, "' is unknown; served: ", KnownModels()));
}

std::vector<ModelStatus> RouterCore::Models() const {
  return parts_.registry->Models();
}

absl::StatusOr<std::vector<uint64_t>> RouterCore::Complete(
    CanonicalRequest* request) {
  KVASIR_ASSIGN_OR_RETURN(const ModelStatus model, Model(request->model));
  if (!model.info.has_value()) {
    return Admission::Unreached(request->model);
  }
  KVASIR_RETURN_IF_ERROR(Admission::CheckRequest(
      *request, *model.info, options_.max_n, base::Clock::Real().Now()));
  kvasir::v1::SamplingParams& sampling = request->sampling;
  if (sampling.max_tokens() == 0) {
    sampling.set_max_tokens(static_cast<uint32_t>(std::min<uint64_t>(
        options_.default_max_tokens,
        model.info->max_model_len() - request->prompt.size_tokens())));
  }
  if (!request->seed.has_value()) {
    base::MutexLock lock(&mutex_);
    request->seed = random_();
  }
  sampling.set_seed(*request->seed);
  return picker_.KeysOf(request->prompt, request->cache_salt,
                        model.info->cache_id(), model.info->page_tokens());
}

void RouterCore::LogRefused(CanonicalRequest request, const absl::Status& why) {
  const absl::Time now = base::Clock::Real().Now();
  // RequestFlow allocates memory for n samples. A refused request may have any
  // n, so replace it with 0.
  request.sampling.set_n(0);
  const RequestFlow flow(std::move(request), "", 0, now);
  AccessRecord record = flow.Record(why, now);
  record.finish_reason = "refused";
  record.reason = RefusalReasonOf(why);
  if (parts_.log != nullptr) parts_.log->Write(record);
  if (parts_.observer != nullptr) parts_.observer->OnRefused(why);
}

absl::Status RouterCore::Refuse(CanonicalRequest request, absl::Status why) {
  LogRefused(std::move(request), why);
  return why;
}

absl::StatusOr<Admission::Answer> RouterCore::Enter(const ActivePtr& active) {
  base::MutexLock lock(&mutex_);
  KVASIR_ASSIGN_OR_RETURN(
      const Admission::Answer answer,
      admission_.Enter(active->ticket(), active->request().priority));
  active_.emplace(active->ticket(), active);
  ReportInFlight();
  return answer;
}

absl::StatusOr<std::shared_ptr<RequestHandle>> RouterCore::Submit(
    CanonicalRequest request, std::shared_ptr<RequestSink> sink) {
  absl::StatusOr<std::vector<uint64_t>> pages = Complete(&request);
  if (!pages.ok()) return Refuse(std::move(request), pages.status());
  Ticket ticket;
  {
    base::MutexLock lock(&mutex_);
    ticket = next_ticket_++;
  }
  RequestFlow flow(std::move(request), absl::StrCat(id_prefix_, "-", ticket),
                   options_.max_attempts, base::Clock::Real().Now());
  const auto active = std::make_shared<ActiveRequest>(
      this, std::move(flow), ticket, *std::move(pages), std::move(sink),
      parts_.observer);
  const absl::StatusOr<Admission::Answer> answer = Enter(active);
  if (!answer.ok()) return Refuse(active->request(), answer.status());
  if (*answer == Admission::Answer::kWait) {
    WaitInQueue(active);
  } else if (const absl::Status status = Dispatch(active); !status.ok()) {
    active->Discard(status);
    const absl::Status refused = Refuse(active->request(), status);
    // Run Release later, because it may end another request, and Submit must
    // not call that request's sink.
    RunSoon([this, active] { Release(active, /*ran=*/true); });
    return refused;
  }
  return active;
}

void RouterCore::WaitInQueue(const ActivePtr& active) {
  const Admission::Patience patience = Admission::PatienceOf(
      active->request(), active->waiting(), options_.queue_timeout,
      Admission::WaitedTooLong(options_.queue_timeout));
  SetQueueTimer(active, patience);
}

void RouterCore::SetQueueTimer(const ActivePtr& active,
                               const Admission::Patience& patience) {
  const auto unused = active->SetQueueTimer(
      EndWaitingAt(patience.until, active, patience.then));
  if (unused.has_value()) parts_.timers->Cancel(*unused);
}

absl::Status RouterCore::WaitForReplica(const ActivePtr& active) {
  const CanonicalRequest& request = active->request();
  const absl::Status none =
      Admission::NoReplica(request.model, /*all_drain=*/false);
  const Admission::Waiting waiting = active->waiting();
  const Admission::Patience patience =
      Admission::PatienceOf(request, waiting, options_.queue_timeout, none);
  // As soon as the request is in without_replica_, another thread may end it.
  // Then the router may be destroyed, unless the gate is entered.
  const std::shared_ptr<CallbackGate> gate = gate_;
  if (!gate->Enter()) return none;
  SetQueueTimer(active, patience);
  bool draining = false;
  bool waits = false;
  std::vector<Ticket> admitted;
  {
    base::MutexLock lock(&mutex_);
    draining = admission_.draining();
    waits = waiting.begun || (!draining && without_replica_.size() <
                                               options_.admission.max_queue);
    if (waits) {
      without_replica_.emplace(PlaceOf(*active), active);
      // The request does not run while it waits, so another one, perhaps for
      // another model, may run in its place.
      admitted = admission_.Leave();
      ReportInFlight();
    }
  }
  if (waits) {
    if (!admitted.empty()) {
      RunSoon([this, admitted] {
        for (const Ticket ticket : admitted) DispatchAdmitted(Find(ticket));
      });
    }
    // The request may have been cancelled, or its timeout may have passed,
    // before it was in without_replica_.
    EndWaitingIfCancelled(active);
    if (base::Clock::Real().Now() >= patience.until) {
      EndWaitingAt(absl::InfinitePast(), active, patience.then);
    }
    if (CanDispatch(*active, parts_.registry->Candidates(request.model))) {
      RunSoon([this] { RetryWaiting(); });
    }
  }
  gate->Leave();
  if (waits) return absl::OkStatus();
  return active->NoReplica(draining ? Admission::ShuttingDown() : none);
}

bool RouterCore::CanDispatch(const ActiveRequest& active,
                             const CandidateList& candidates) {
  const auto ready = [&](const Candidate& candidate) {
    return candidate.view.eligible && active.MayRunOn(*candidate.replica);
  };
  const auto draining = [](const Candidate& candidate) {
    return candidate.replica->state() == ReplicaState::kDraining;
  };
  if (candidates.empty()) return false;
  return std::any_of(candidates.begin(), candidates.end(), ready) ||
         (!active.waiting().begun &&
          std::all_of(candidates.begin(), candidates.end(), draining));
}

void RouterCore::RetryWaiting() {
  std::vector<ActivePtr> waiting;
  bool draining = false;
  {
    base::MutexLock lock(&mutex_);
    draining = admission_.draining();
    for (const auto& [place, active] : without_replica_) {
      waiting.push_back(active);
    }
  }
  std::map<std::string, CandidateList> candidates;
  for (const ActivePtr& active : waiting) {
    const bool begun = active->waiting().begun;
    const bool refuse = draining && !begun;
    if (!refuse) {
      const std::string& model = active->request().model;
      auto found = candidates.find(model);
      if (found == candidates.end()) {
        found =
            candidates.emplace(model, parts_.registry->Candidates(model)).first;
      }
      if (!CanDispatch(*active, found->second)) continue;
    }
    Admission::Answer answer = Admission::Answer::kRun;
    {
      base::MutexLock lock(&mutex_);
      if (without_replica_.erase(PlaceOf(*active)) == 0) continue;
      if (begun) {
        admission_.Resume();
      } else if (!refuse) {
        answer = admission_.Return(active->ticket(), PlaceOf(*active).first);
      }
      ReportInFlight();
    }
    if (refuse) {
      active->Close(active->NoReplica(Admission::ShuttingDown()));
      Release(active, /*ran=*/false);
    } else if (answer == Admission::Answer::kRun) {
      DispatchAdmitted(active);
    } else {
      WaitInQueue(active);
    }
  }
}

void RouterCore::DispatchAdmitted(const ActivePtr& active) {
  if (const auto timer = active->TakeQueueTimer()) {
    parts_.timers->Cancel(*timer);
  }
  const absl::Status status = Dispatch(active);
  if (status.ok()) return;
  active->Close(status);
  Release(active, /*ran=*/true);
}

void RouterCore::EndWaitingIfCancelled(const ActivePtr& active) {
  if (const auto status = active->Cancelled()) {
    EndWaitingAt(absl::InfinitePast(), active, *status);
  }
}

RouterCore::ActivePtr RouterCore::Find(Ticket ticket) const {
  base::MutexLock lock(&mutex_);
  return active_.at(ticket);
}

void RouterCore::RunSoon(std::function<void()> task) {
  parts_.timers->At(absl::InfinitePast(),
                    [gate = gate_, task = std::move(task)] {
                      if (!gate->Enter()) return;
                      task();
                      gate->Leave();
                    });
}

absl::Status RouterCore::Dispatch(const ActivePtr& active) {
  const CanonicalRequest& request = active->request();
  CandidateList candidates = parts_.registry->Candidates(request.model);
  std::vector<ReplicaView> views;
  bool draining = !candidates.empty();
  for (Candidate& candidate : candidates) {
    draining &= candidate.replica->state() == ReplicaState::kDraining;
    candidate.view.eligible &= active->MayRunOn(*candidate.replica);
    views.push_back(candidate.view);
  }
  const std::optional<size_t> picked =
      picker_.Pick(views, {.prompt_tokens = request.prompt.size_tokens(),
                           .pages = active->pages(),
                           .session = SessionOf(request)});
  if (!picked.has_value()) {
    if (active->Waits() && (!draining || active->waiting().begun)) {
      return WaitForReplica(active);
    }
    return active->NoReplica(Admission::NoReplica(request.model, draining));
  }
  active->Open(candidates[*picked].replica);
  return absl::OkStatus();
}

TimerThread::TimerId RouterCore::EndWaitingAt(absl::Time when,
                                              const ActivePtr& active,
                                              const absl::Status& status) {
  return parts_.timers->At(when, [this, gate = gate_, active, status] {
    if (!gate->Enter()) return;
    EndWaiting(active, status);
    gate->Leave();
  });
}

void RouterCore::EndWaiting(const ActivePtr& active,
                            const absl::Status& status) {
  {
    base::MutexLock lock(&mutex_);
    if (without_replica_.erase(PlaceOf(*active)) == 0 &&
        !admission_.Withdraw(active->ticket())) {
      return;
    }
  }
  active->Close(active->NoReplica(status));
  Release(active, /*ran=*/false);
}

void RouterCore::LogEnd(const AccessRecord& record) {
  if (parts_.log != nullptr) parts_.log->Write(record);
  if (parts_.observer != nullptr) parts_.observer->OnRequestEnd(record);
}

void RouterCore::Release(ActivePtr active, bool ran) {
  // As soon as the last request is removed from the table, another thread may
  // destroy the router. So after that, use only local variables.
  std::deque<std::pair<ActivePtr, bool>> ended = {{std::move(active), ran}};
  while (!ended.empty()) {
    const auto [request, request_ran] = std::move(ended.front());
    ended.pop_front();
    if (const auto timer = request->TakeQueueTimer()) {
      parts_.timers->Cancel(*timer);
    }
    std::vector<ActivePtr> admitted;
    {
      base::MutexLock lock(&mutex_);
      active_.erase(request->ticket());
      ++ended_;
      if (request_ran) {
        for (const Ticket ticket : admission_.Leave()) {
          admitted.push_back(active_.at(ticket));
        }
      }
      ReportInFlight();
      changed_.SignalAll();
    }
    for (const ActivePtr& next : admitted) {
      if (const auto timer = next->TakeQueueTimer()) {
        parts_.timers->Cancel(*timer);
      }
      const absl::Status status = Dispatch(next);
      if (status.ok()) continue;
      next->Close(status);
      ended.emplace_back(next, true);
    }
  }
}

std::vector<RouterCore::ActivePtr> RouterCore::All() const {
  std::vector<ActivePtr> all;
  base::MutexLock lock(&mutex_);
  for (const auto& [ticket, active] : active_) all.push_back(active);
  return all;
}

void RouterCore::ReportInFlight() const {
  if (parts_.observer == nullptr) return;
  parts_.observer->OnInFlight(active_.size(),
                              admission_.waiting() + without_replica_.size());
}

RouterHealth RouterCore::Health() const {
  RouterHealth health;
  const std::vector<ModelStatus> models = Models();
  health.ready = !models.empty() && std::all_of(models.begin(), models.end(),
                                                [](const ModelStatus& model) {
                                                  return model.ready;
                                                });
  health.state = health.ready ? RouterState::kReady : RouterState::kStarting;
  health.detail = parts_.registry->Problems();
  base::MutexLock lock(&mutex_);
  if (drain_announced_ || admission_.draining()) {
    health.state = RouterState::kDraining;
    health.ready = false;
    health.detail = "the router is draining";
  }
  return health;
}

void RouterCore::AnnounceDrain() {
  base::MutexLock lock(&mutex_);
  drain_announced_ = true;
}

void RouterCore::BeginDrain() {
  {
    base::MutexLock lock(&mutex_);
    admission_.BeginDrain();
  }
  RunSoon([this] { RetryWaiting(); });
}

bool RouterCore::WaitIdle(absl::Time deadline) {
  base::MutexLock lock(&mutex_);
  while (!active_.empty()) {
    if (deadline == absl::InfiniteFuture()) {
      changed_.Wait(&mutex_);
      continue;
    }
    const absl::Duration left = deadline - base::Clock::Real().Now();
    if (left <= absl::ZeroDuration()) return false;
    changed_.WaitWithTimeout(&mutex_, left);
  }
  return true;
}

void RouterCore::CancelAll(CancelReason reason) {
  for (const ActivePtr& active : All()) active->Cancel(reason);
}

uint64_t RouterCore::ended() const {
  base::MutexLock lock(&mutex_);
  return ended_;
}

size_t RouterCore::in_flight() const {
  base::MutexLock lock(&mutex_);
  return active_.size();
}

}  // namespace kvasir::router
