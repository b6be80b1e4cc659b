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

void AddLoad(const ReplicaView& view, uint32_t max_num_seqs, ModelLoad* load) {
  load->running += view.running;
  load->waiting += uint64_t{view.waiting} + view.unreported_requests;
  // The view has fewer while the worker starts slowly.
  load->max_num_seqs += max_num_seqs;
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
  // True when Start has returned. Later answers are not kept.
  bool finished ABSL_GUARDED_BY(mutex) = false;
  std::set<std::string> answered ABSL_GUARDED_BY(mutex);
  std::vector<absl::Status> refusals ABSL_GUARDED_BY(mutex);

  void Add(const Replica& replica, const absl::Status& refusal)
      ABSL_LOCKS_EXCLUDED(mutex) {
    base::MutexLock lock(&mutex);
    if (finished) return;
    if (answered.insert(replica.target()).second && !refusal.ok()) {
      refusals.push_back(refusal);
    }
    changed.SignalAll();
  }
  bool HasAll(const ReplicaList& replicas)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    for (const auto& replica : replicas) {
      if (!answered.contains(replica->target())) return false;
    }
    return true;
  }
};

bool ReplicaList::Contains(const Replica& replica) const {
  return std::any_of(begin(), end(), [&replica](const auto& each) {
    return each.get() == &replica;
  });
}

// The watch does not keep its replica alive: a removed replica without requests
// is destroyed, and its client then ends the watch.
class ReplicaRegistry::Watch final : public LoadSink {
 public:
  Watch(ReplicaRegistry* registry, const std::shared_ptr<Replica>& replica)
      : registry_(registry), replica_(replica) {}

  void OnReport(const kvasir::v1::LoadReport& report) override {
    const std::shared_ptr<Replica> replica = replica_.lock();
    if (replica == nullptr) return;
    const ReplicaState before = replica->state();
    replica->OnReport(report);
    if (replica->state() == before) return;
    registry_->ReportState(*replica, before);
    registry_->first_answers_->Add(*replica, absl::OkStatus());
  }
  void OnWatchEnded(const absl::Status& status) override {
    registry_->OnWatchEnded(replica_.lock(), status);
  }

 private:
  ReplicaRegistry* const registry_;
  const std::weak_ptr<Replica> replica_;
};

ReplicaRegistry::ReplicaRegistry(ReplicaRegistryOptions options,
                                 WorkerClientFactory new_client,
                                 TimerThread* timers, ReplicaObserver* observer)
    : options_(std::move(options)),
      new_client_(std::move(new_client)),
      timers_(timers),
      observer_(observer),
      first_answers_(std::make_unique<FirstAnswers>()) {
  SetWorkers(options_.workers);
}

ReplicaRegistry::~ReplicaRegistry() { Stop(); }

absl::Status ReplicaRegistry::Start(absl::Duration patience) {
  ReplicaList known;
  {
    base::MutexLock lock(&change_mutex_);
    started_ = true;
    known = replicas();
  }
  for (const auto& replica : known) Connect(replica);
  absl::Time deadline = base::Clock::Real().Now() + patience;
  FirstAnswers& first = *first_answers_;
  base::MutexLock lock(&first.mutex);
  while ((first.answered.empty() || !first.HasAll(replicas())) &&
         first.refusals.empty()) {
    const absl::Time now = base::Clock::Real().Now();
    // One worker suffices to begin. So after the first answer, wait only a
    // limited time for the others.
    if (!first.answered.empty()) {
      deadline = std::min(deadline, now + options_.others_patience);
    }
    if (now >= deadline) break;
    first.changed.WaitWithTimeout(&first.mutex, deadline - now);
  }
  first.finished = true;
  return first.refusals.empty() ? absl::OkStatus() : first.refusals.front();
}

void ReplicaRegistry::SetWorkers(const std::vector<WorkerAddress>& workers,
                                 std::string problems) {
  {
    base::MutexLock lock(&list_mutex_);
    list_problems_ = std::move(problems);
  }
  ReplicaList::Replicas added;
  ReplicaList::Replicas removed;
  bool connect = false;
  {
    base::MutexLock lock(&change_mutex_);
    if (stopping_) return;
    std::map<std::string, const WorkerAddress*> wanted;
    for (const WorkerAddress& worker : workers) {
      wanted.emplace(worker.target, &worker);
    }
    ReplicaList::Replicas kept;
    for (const auto& replica : replicas()) {
      (wanted.erase(replica->target()) > 0 ? kept : removed).push_back(replica);
    }
    for (const WorkerAddress& worker : workers) {
      if (wanted.erase(worker.target) == 0) continue;
      added.push_back(
          std::make_shared<Replica>(worker.target, new_client_(worker)));
    }
    if (added.empty() && removed.empty()) return;
    Swap(std::move(kept), added, removed);
    connect = started_;
  }
  if (!connect) return;
  for (const auto& replica : added) {
    base::Log(base::LogLevel::kInfo, "worker added",
              {{"worker", replica->target()}});
    Connect(replica);
  }
  for (const auto& replica : removed) {
    base::Log(base::LogLevel::kInfo, "worker removed",
              {{"worker", replica->target()},
               {"state", ReplicaStateName(replica->state())},
               {"requests", replica->in_flight()}});
  }
  NotifyListeners();
}

void ReplicaRegistry::Swap(ReplicaList::Replicas kept,
                           const ReplicaList::Replicas& added,
                           const ReplicaList::Replicas& removed) {
  std::erase_if(leaving_,
                [](const auto& replica) { return replica.expired(); });
  leaving_.insert(leaving_.end(), removed.begin(), removed.end());
  kept.insert(kept.end(), added.begin(), added.end());
  ReplicaList list(std::move(kept));
  std::optional<kvasir::v1::WorkerInfo> last;
  for (const auto& replica : removed) {
    if (auto info = replica->info()) last = std::move(info);
  }
  base::MutexLock observer_lock(&observer_mutex_);
  {
    base::MutexLock lock(&list_mutex_);
    replicas_ = std::move(list);
    if (last.has_value()) last_info_ = std::move(last);
  }
  if (observer_ == nullptr) return;
  for (const auto& replica : removed) {
    observer_->OnReplicaRemoved(replica->target());
  }
  for (const auto& replica : added) {
    observer_->OnReplicaState(replica->target(), replica->state());
  }
}

void ReplicaRegistry::Stop() {
  stopping_ = true;
  gate_->Shut();
  std::vector<std::weak_ptr<Replica>> leaving;
  {
    base::MutexLock lock(&change_mutex_);
    leaving = leaving_;
  }
  for (const auto& replica : replicas()) replica->client()->Close();
  for (const auto& each : leaving) {
    if (const auto replica = each.lock()) replica->client()->Close();
  }
  gate_->Close();
}

bool ReplicaRegistry::Tick(absl::Duration elapsed) {
  if (!gate_->Enter()) return false;
  const ReplicaList list = replicas();
  ReplicaList::Replicas all(list.begin(), list.end());
  {
    // A removed worker may hang, too, while it still has requests.
    base::MutexLock lock(&change_mutex_);
    for (const auto& each : leaving_) {
      if (auto replica = each.lock()) all.push_back(std::move(replica));
    }
  }
  bool hung = false;
  for (const auto& replica : all) {
    const ReplicaState before = replica->state();
    replica->OnTick(elapsed);
    if (replica->state() != before) ReportState(*replica, before);
    hung |= replica->state() == ReplicaState::kHung;
  }
  gate_->Leave();
  return hung;
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
  if (!replicas().Contains(*replica)) return;
  if (!info.ok()) {
    Retry(replica, replica->OnLost(info.status()));
    return;
  }
  const ReplicaState before = replica->state();
  const absl::Status compatible = Admit(replica.get(), *info);
  if (!compatible.ok()) {
    const absl::Duration after = replica->OnRefused(compatible);
    ReportState(*replica, before);
    first_answers_->Add(
        *replica, options_.refusal_fails_start ? compatible : absl::OkStatus());
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
  if (replica != nullptr) {
    const ReplicaState before = replica->state();
    const absl::Duration after = replica->OnLost(status);
    ReportState(*replica, before);
    if (replicas().Contains(*replica)) Retry(replica, after);
  }
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
  base::MutexLock lock(&observer_mutex_);
  if (!replicas().Contains(replica)) return;
  observer_->OnReplicaState(replica.target(), replica.state());
}

void ReplicaRegistry::ReportState(const Replica& replica,
                                  ReplicaState before) const {
  const ReplicaState state = replica.state();
  if (state != before && !stopping_) Log(replica, state);
  NotifyObserver(replica);
  NotifyListeners();
}

void ReplicaRegistry::NotifyListeners() const {
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
  for (const auto& other : replicas()) {
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

bool ReplicaRegistry::Serves(const Replica& replica,
                             const std::string& model) const {
  const std::vector<std::string>& names = options_.served_names;
  if (names.empty()) return replica.model_name() == model;
  return std::find(names.begin(), names.end(), model) != names.end();
}

CandidateList ReplicaRegistry::Candidates(const std::string& model) const {
  const ReplicaList list = replicas();
  CandidateList candidates(list);
  for (const auto& replica : list) {
    if (Serves(*replica, model)) candidates.Add(replica);
  }
  return candidates;
}

std::vector<ModelStatus> ReplicaRegistry::Models() const {
  ReplicaList list;
  std::optional<kvasir::v1::WorkerInfo> last;
  {
    base::MutexLock lock(&list_mutex_);
    list = replicas_;
    last = last_info_;
  }
  std::map<std::string, ModelStatus> models;
  for (const std::string& name : options_.served_names)
    models[name].name = name;
  bool any_known = false;
  for (const auto& replica : list) {
    const std::optional<kvasir::v1::WorkerInfo> info = replica->info();
    any_known |= info.has_value();
    for (const std::string& name : NamesOf(*replica)) {
      ModelStatus& model = models[name];
      model.name = name;
      ++model.num_replicas;
      if (const ReplicaView view = replica->view(); view.eligible) {
        ++model.num_ready_replicas;
        AddLoad(view, info.has_value() ? info->max_num_seqs() : 0, &model.load);
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
  if (!any_known && last.has_value()) {
    if (models.empty()) models[last->model_name()].name = last->model_name();
    for (auto& [name, model] : models) model.info = last;
  }
  std::vector<ModelStatus> statuses;
  for (auto& [name, model] : models) statuses.push_back(std::move(model));
  return statuses;
}

bool ReplicaRegistry::IsConnected(const std::string& target) const {
  for (const auto& replica : replicas()) {
    if (replica->target() != target) continue;
    const ReplicaState state = replica->state();
    return state == ReplicaState::kReady || state == ReplicaState::kDraining;
  }
  return false;
}

std::string ReplicaRegistry::Problems() const {
  std::vector<std::string> problems;
  ReplicaList list;
  {
    base::MutexLock lock(&list_mutex_);
    list = replicas_;
    if (!list_problems_.empty()) problems.push_back(list_problems_);
  }
  for (const auto& replica : list) {
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
