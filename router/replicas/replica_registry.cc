#include "router/replicas/replica_registry.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/log.h"

namespace kvasir::router {
namespace {

void AddLoad(const ReplicaView& view, ModelLoad* load) {
  load->running += view.running;
  load->waiting += uint64_t{view.waiting} + view.unreported_requests;
  load->max_num_seqs += view.max_num_seqs;
  // Limit the free pages, because a worker's report may contain
  // impossible numbers.
  const uint64_t free = std::min(view.free_pages, view.total_pages);
  load->used_tokens += (view.total_pages - free) * view.page_tokens;
  load->total_tokens += view.total_pages * view.page_tokens;
}

}  // namespace

// The first answers of the workers, for which Start waits.
struct ReplicaRegistry::FirstAnswers {
  base::Mutex mutex;
  base::CondVar changed;
  std::set<const Replica*> answered ABSL_GUARDED_BY(mutex);
  std::vector<absl::Status> refusals ABSL_GUARDED_BY(mutex);

  void Add(const Replica& replica, const absl::Status& refusal)
      ABSL_LOCKS_EXCLUDED(mutex) {
    base::MutexLock lock(&mutex);
    if (answered.insert(&replica).second && !refusal.ok()) {
      refusals.push_back(refusal);
    }
    changed.SignalAll();
  }
};

class ReplicaRegistry::Watch final : public LoadSink {
 public:
  Watch(ReplicaRegistry* registry, std::shared_ptr<Replica> replica)
      : registry_(registry), replica_(std::move(replica)) {}

  void OnReport(const kvasir::v1::LoadReport& report) override {
    const ReplicaState before = replica_->state();
    replica_->OnReport(report);
    if (replica_->state() == before) return;
    registry_->ReportState(*replica_, before);
    registry_->first_answers_->Add(*replica_, absl::OkStatus());
  }
  void OnWatchEnded(const absl::Status& status) override {
    registry_->OnWatchEnded(replica_, status);
  }

 private:
  ReplicaRegistry* const registry_;
  const std::shared_ptr<Replica> replica_;
};

ReplicaRegistry::ReplicaRegistry(ReplicaRegistryOptions options,
                                 const WorkerClientFactory& new_client,
                                 TimerThread* timers, ReplicaObserver* observer)
    : options_(std::move(options)),
      timers_(timers),
      observer_(observer),
      first_answers_(std::make_unique<FirstAnswers>()) {
  for (const std::string& target : options_.targets) {
    replicas_.push_back(std::make_shared<Replica>(target, new_client(target)));
  }
}

ReplicaRegistry::~ReplicaRegistry() { Stop(); }

absl::Status ReplicaRegistry::Start(absl::Duration patience) {
  if (replicas_.empty()) {
    return absl::InvalidArgumentError(
        "no workers: name at least one with --workers");
  }
  for (const auto& replica : replicas_) {
    NotifyObserver(*replica);
    Connect(replica);
  }
  absl::Time deadline = base::Clock::Real().Now() + patience;
  FirstAnswers& first = *first_answers_;
  base::MutexLock lock(&first.mutex);
  while (first.answered.size() < replicas_.size() && first.refusals.empty()) {
    const absl::Time now = base::Clock::Real().Now();
    // One worker suffices to begin. So after the first answer, wait only a
    // limited time for the others.
    if (!first.answered.empty()) {
      deadline = std::min(deadline, now + options_.others_patience);
    }
    if (now >= deadline) break;
    first.changed.WaitWithTimeout(&first.mutex, deadline - now);
  }
  return first.refusals.empty() ? absl::OkStatus() : first.refusals.front();
}

void ReplicaRegistry::Stop() {
  stopping_ = true;
  gate_->Shut();
  for (const auto& replica : replicas_) replica->client()->Close();
  gate_->Close();
}

void ReplicaRegistry::Tick(absl::Duration elapsed) {
  if (!gate_->Enter()) return;
  for (const auto& replica : replicas_) {
    const ReplicaState before = replica->state();
    replica->OnTick(elapsed);
    if (replica->state() != before) ReportState(*replica, before);
  }
  gate_->Leave();
}

void ReplicaRegistry::SetListener(std::function<void()> listener) {
  base::MutexLock lock(&listener_mutex_);
  listener_ = std::move(listener);
}

void ReplicaRegistry::Connect(const std::shared_ptr<Replica>& replica) {
  if (!gate_->Enter()) return;
  replica->client()->GetInfo(options_.info_timeout,
                             [this, gate = gate_, replica](
                                 absl::StatusOr<kvasir::v1::WorkerInfo> info) {
                               OnInfo(replica, std::move(info));
                               gate->Leave();
                             });
}

void ReplicaRegistry::OnInfo(const std::shared_ptr<Replica>& replica,
                             absl::StatusOr<kvasir::v1::WorkerInfo> info) {
  if (!info.ok()) {
    Retry(replica, replica->OnLost(info.status()));
    return;
  }
  const ReplicaState before = replica->state();
  const absl::Status compatible = Admit(replica.get(), *info);
  if (!compatible.ok()) {
    const absl::Duration after = replica->OnRefused(compatible);
    ReportState(*replica, before);
    first_answers_->Add(*replica, compatible);
    Retry(replica, after);
    return;
  }
  if (replica->state() != before) ReportState(*replica, before);
  if (!gate_->Enter()) return;
  replica->client()->WatchLoad(options_.load_interval,
                               std::make_shared<Watch>(this, replica));
}

void ReplicaRegistry::OnWatchEnded(const std::shared_ptr<Replica>& replica,
                                   const absl::Status& status) {
  const std::shared_ptr<CallbackGate> gate = gate_;
  const ReplicaState before = replica->state();
  const absl::Duration after = replica->OnLost(status);
  ReportState(*replica, before);
  Retry(replica, after);
  gate->Leave();
}

void ReplicaRegistry::Retry(const std::shared_ptr<Replica>& replica,
                            absl::Duration after) {
  // The timer thread may outlive the registry. So the task must enter the gate
  // before it uses the registry. If the registry is gone, Enter fails.
  timers_->At(base::Clock::Real().Now() + after, [this, gate = gate_, replica] {
    if (!gate->Enter()) return;
    Connect(replica);
    gate->Leave();
  });
}

void ReplicaRegistry::NotifyObserver(const Replica& replica) const {
  if (observer_ == nullptr) return;
  observer_->OnReplicaState(replica.target(), replica.state());
}

void ReplicaRegistry::ReportState(const Replica& replica,
                                  ReplicaState before) const {
  const ReplicaState state = replica.state();
  if (state != before && !stopping_) Log(replica, state);
  NotifyObserver(replica);
  if (options_.on_change) options_.on_change();
  std::function<void()> listener;
  {
    base::MutexLock lock(&listener_mutex_);
    listener = listener_;
  }
  if (listener) listener();
}

void ReplicaRegistry::Log(const Replica& replica, ReplicaState state) {
  const bool good =
      state == ReplicaState::kReady || state == ReplicaState::kConnecting;
  base::Log(good ? base::LogLevel::kInfo : base::LogLevel::kWarning, "replica",
            {{"worker", replica.target()},
             {"state", ReplicaStateName(state)},
             {"detail", replica.detail()}});
}

absl::Status ReplicaRegistry::Admit(Replica* replica,
                                    const kvasir::v1::WorkerInfo& info) {
  base::MutexLock lock(&admit_mutex_);
  Expected expected;
  expected.tokenizer_hash = options_.tokenizer_hash;
  for (const auto& other : replicas_) {
    if (other.get() == replica || !other->in_use()) continue;
    const std::optional<kvasir::v1::WorkerInfo> peer = other->info();
    if (!peer.has_value()) continue;
    if (peer->model_name() == info.model_name()) {
      expected.peer = peer;
    } else if (!options_.served_names.empty()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "worker ", replica->target(), " (--workers) serves model '",
          info.model_name(), "', but worker ", other->target(), " serves '",
          peer->model_name(),
          "': with --served-model-name all workers must serve the same model"));
    }
  }
  absl::Status compatible = CheckWorker(replica->target(), info, expected);
  if (compatible.ok()) replica->OnInfo(info);
  return compatible;
}

std::vector<std::string> ReplicaRegistry::NamesOf(
    const Replica& replica) const {
  if (!options_.served_names.empty()) return options_.served_names;
  std::optional<std::string> name = replica.model_name();
  if (!name.has_value()) return {};
  return {*std::move(name)};
}

std::vector<Candidate> ReplicaRegistry::Candidates(
    const std::string& model) const {
  std::vector<Candidate> candidates;
  for (const auto& replica : replicas_) {
    const std::vector<std::string> names = NamesOf(*replica);
    if (std::find(names.begin(), names.end(), model) == names.end()) continue;
    candidates.push_back({replica, replica->view()});
  }
  return candidates;
}

std::vector<ModelStatus> ReplicaRegistry::Models() const {
  std::map<std::string, ModelStatus> models;
  for (const std::string& name : options_.served_names)
    models[name].name = name;
  for (const auto& replica : replicas_) {
    const std::optional<kvasir::v1::WorkerInfo> info = replica->info();
    for (const std::string& name : NamesOf(*replica)) {
      ModelStatus& model = models[name];
      model.name = name;
      ++model.num_replicas;
      if (const ReplicaView view = replica->view(); view.eligible) {
        ++model.num_ready_replicas;
        AddLoad(view, &model.load);
      }
      model.ready = model.num_ready_replicas > 0;
      if (!info.has_value()) continue;
      if (!model.info.has_value()) {
        model.info = info;
        continue;
      }
      // Report the smallest value of each limit, which all replicas support.
      if (info->max_model_len() < model.info->max_model_len()) {
        model.info->set_max_model_len(info->max_model_len());
      }
      if (info->max_n() != 0) {
        model.info->set_max_n(LargestN(*model.info, info->max_n()));
      }
      if (info->lifts_prompts()) model.info->set_lifts_prompts(true);
    }
  }
  std::vector<ModelStatus> list;
  for (auto& [name, model] : models) list.push_back(std::move(model));
  return list;
}

std::string ReplicaRegistry::Problems() const {
  std::vector<std::string> problems;
  for (const auto& replica : replicas_) {
    const ReplicaState state = replica->state();
    if (state == ReplicaState::kReady) continue;
    const std::string detail = replica->detail();
    problems.push_back(absl::StrCat(replica->target(), " ",
                                    ReplicaStateName(state),
                                    detail.empty() ? "" : ": ", detail));
  }
  return absl::StrJoin(problems, "; ");
}

}  // namespace kvasir::router
