#include "router/replicas/replica.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::router {
namespace {

constexpr absl::Duration kFirstBackoff = absl::Milliseconds(100);
constexpr absl::Duration kMaxBackoff = absl::Seconds(5);
constexpr double kBackoffGrowth = 1.6;

uint64_t NextIncarnation() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

absl::Status Mismatch(const std::string& target, absl::string_view field,
                      absl::string_view have, absl::string_view want,
                      absl::string_view whose) {
  return absl::FailedPreconditionError(
      absl::StrCat("worker ", target, " (--workers): ", field, " is '", have,
                   "', but ", whose, " '", want, "'"));
}

}  // namespace

const char* ReplicaStateName(ReplicaState state) {
  switch (state) {
    case ReplicaState::kConnecting:
      return "connecting";
    case ReplicaState::kReady:
      return "ready";
    case ReplicaState::kDraining:
      return "draining";
    case ReplicaState::kHung:
      return "hung";
    case ReplicaState::kLost:
      return "lost";
    case ReplicaState::kRefused:
      return "refused";
  }
  return "unknown";
}

absl::Status CheckWorker(const std::string& target,
                         const kvasir::v1::WorkerInfo& info,
                         const Expected& expected) {
  if (info.api_version() != kApiVersion) {
    return Mismatch(target, "api_version", info.api_version(), kApiVersion,
                    "this router speaks");
  }
  if (info.page_tokens() == 0 || info.max_model_len() == 0 ||
      info.max_num_seqs() == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "worker ", target, " (--workers) reports page_tokens ",
        info.page_tokens(), ", max_model_len ", info.max_model_len(),
        " and max_num_seqs ", info.max_num_seqs(), "; each must be above 0"));
  }
  if (!expected.tokenizer_hash.empty() &&
      info.tokenizer_hash() != expected.tokenizer_hash) {
    return Mismatch(target, "tokenizer_hash", info.tokenizer_hash(),
                    expected.tokenizer_hash, "this router's tokenizer has");
  }
  if (!expected.peer.has_value()) return absl::OkStatus();
  const kvasir::v1::WorkerInfo& peer = *expected.peer;
  for (const auto& [field, has, want] :
       {std::tuple("weights_id", &info.weights_id(), &peer.weights_id()),
        std::tuple("cache_id (codes and ranks, cache type, page size)",
                   &info.cache_id(), &peer.cache_id()),
        std::tuple("tokenizer_hash", &info.tokenizer_hash(),
                   &peer.tokenizer_hash())}) {
    if (*has != *want) {
      return Mismatch(target, field, *has, *want,
                      "other replicas of this model have");
    }
  }
  return absl::OkStatus();
}

void Replica::OnInfo(const kvasir::v1::WorkerInfo& info) {
  base::MutexLock lock(&mutex_);
  info_ = info;
  incarnation_ = NextIncarnation();
  liveness_.OnConnected();
  state_ = ReplicaState::kConnecting;
}

absl::Duration Replica::OnRefused(const absl::Status& why) {
  base::MutexLock lock(&mutex_);
  state_ = ReplicaState::kRefused;
  info_.reset();
  detail_ = std::string(why.message());
  return NextBackoff();
}

absl::Duration Replica::OnLost(const absl::Status& why) {
  base::MutexLock lock(&mutex_);
  if (info_.has_value()) state_ = ReplicaState::kLost;
  detail_ = why.ToString();
  return NextBackoff();
}

void Replica::OnReport(const kvasir::v1::LoadReport& report) {
  base::MutexLock lock(&mutex_);
  detail_.clear();
  report_ = report;
  liveness_.OnReport(report);
  state_ = StateOfReport();
  failures_ = 0;
  ++reports_;
  fresh_ = 0;
  fresh_tokens_ = 0;
}

void Replica::OnTick(absl::Duration elapsed) {
  base::MutexLock lock(&mutex_);
  liveness_.OnTick(elapsed, /*busy=*/in_flight_ > 0);
  if (state_ != ReplicaState::kReady && state_ != ReplicaState::kDraining) {
    return;
  }
  state_ = StateOfReport();
}

ReplicaState Replica::StateOfReport() {
  switch (liveness_.state()) {
    case Liveness::State::kAlive:
      return report_.draining() ? ReplicaState::kDraining
                                : ReplicaState::kReady;
    case Liveness::State::kSilent:
      detail_ = "no load report";
      break;
    case Liveness::State::kStuck:
      detail_ = absl::StrCat("no step finishes: ", report_.running(),
                             " requests run, ", report_.waiting(), " wait");
      break;
  }
  return ReplicaState::kHung;
}

Liveness::State Replica::liveness() const {
  base::MutexLock lock(&mutex_);
  return liveness_.state();
}

ReplicaState Replica::state() const {
  base::MutexLock lock(&mutex_);
  return state_;
}

uint64_t Replica::connection() const {
  base::MutexLock lock(&mutex_);
  return incarnation_;
}

bool Replica::in_use() const {
  base::MutexLock lock(&mutex_);
  return info_.has_value() && state_ != ReplicaState::kLost;
}

std::string Replica::detail() const {
  base::MutexLock lock(&mutex_);
  return detail_;
}

std::optional<kvasir::v1::WorkerInfo> Replica::info() const {
  base::MutexLock lock(&mutex_);
  return info_;
}

std::optional<std::string> Replica::model_name() const {
  base::MutexLock lock(&mutex_);
  if (!info_.has_value()) return std::nullopt;
  return info_->model_name();
}

ReplicaView Replica::view() const {
  base::MutexLock lock(&mutex_);
  ReplicaView view;
  view.eligible = state_ == ReplicaState::kReady;
  view.running = report_.running();
  view.waiting = report_.waiting();
  view.free_pages = report_.free_pages();
  view.total_pages = report_.total_pages();
  if (info_.has_value()) {
    view.page_tokens = info_->page_tokens();
    view.max_num_seqs = liveness_.OpenSeats(info_->max_num_seqs());
  }
  view.unreported_requests = unaccepted_ + fresh_;
  view.unreported_tokens = unaccepted_tokens_ + fresh_tokens_;
  view.name = name_;
  view.incarnation = incarnation_;
  return view;
}

uint32_t Replica::in_flight() const {
  base::MutexLock lock(&mutex_);
  return in_flight_;
}

void Replica::OnSent(uint64_t prompt_tokens) {
  base::MutexLock lock(&mutex_);
  ++in_flight_;
  ++unaccepted_;
  unaccepted_tokens_ += prompt_tokens;
}

uint64_t Replica::OnAccepted(uint64_t prompt_tokens) {
  base::MutexLock lock(&mutex_);
  --unaccepted_;
  unaccepted_tokens_ -= prompt_tokens;
  ++fresh_;
  fresh_tokens_ += prompt_tokens;
  return reports_;
}

void Replica::OnEnded(uint64_t prompt_tokens,
                      std::optional<uint64_t> accepted_after) {
  base::MutexLock lock(&mutex_);
  --in_flight_;
  if (!accepted_after.has_value()) {
    --unaccepted_;
    unaccepted_tokens_ -= prompt_tokens;
  } else if (*accepted_after == reports_) {
    --fresh_;
    fresh_tokens_ -= prompt_tokens;
  }
  // Otherwise the request counts in the worker's reports.
}

absl::Duration Replica::NextBackoff() {
  const absl::Duration backoff =
      kFirstBackoff * std::pow(kBackoffGrowth, std::min(failures_, 20));
  ++failures_;
  return std::min(backoff, kMaxBackoff);
}

}  // namespace kvasir::router
