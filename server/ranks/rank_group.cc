#include "server/ranks/rank_group.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/cli/process.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "worker/ranks/group/group_executor.h"

namespace kvasir::cli {
namespace {

// The time limit for the ranks to connect with each other, after all
// have joined.
constexpr absl::Duration kConnectTimeout = absl::Seconds(60);
// The time limit of a collective call if there is no watchdog (--watchdog 0).
constexpr absl::Duration kLongestCall = absl::Hours(24);
// How long the leader waits for this host's ranks after it has asked them to
// end. Usually they end at once.
constexpr absl::Duration kEndTimeout = absl::Seconds(10);
// The reason for Collective::Abort after the last use. Without Abort, NCCL's
// destructor would wait until all ranks destroy their collectives.
constexpr char kDone[] = "it is done";

kvasir::v1::RankIdentity IdentityOfGroup(const GroupTerms& terms,
                                         const RankGroupSettings& settings) {
  kvasir::v1::RankIdentity identity = terms.identity;
  identity.set_tp_size(static_cast<uint32_t>(settings.flags.tp));
  identity.set_collective(settings.collective);
  identity.set_heartbeat_timeout_ms(static_cast<uint32_t>(
      absl::ToInt64Milliseconds(settings.flags.heartbeat_timeout)));
  return identity;
}

absl::StatusOr<std::unique_ptr<CollectiveGroup>> BeginCollective(
    const RankGroupSettings& settings, plan::TpShard shard,
    const GroupTerms& terms,
    std::function<void(const absl::Status&)> on_failure) {
  return CollectiveGroup::Begin(
      {.shard = shard,
       .kind = settings.collective,
       .interface = settings.flags.interface,
       .nccl_library = settings.flags.nccl_library,
       .deterministic = settings.deterministic,
       .connect_timeout =
           std::min(settings.flags.join_timeout, kConnectTimeout),
       .call_timeout = std::min(settings.step_timeout, kLongestCall),
       .use_device = terms.use_device,
       .on_failure = std::move(on_failure)});
}

kvasir::v1::RankReady ReadyOf(const worker::RankOffer& offer) {
  kvasir::v1::RankReady ready;
  ready.set_weight_tiles(offer.weight_tiles);
  ready.set_weight_bytes(offer.weight_bytes);
  ready.mutable_pages()->Assign(offer.pages.begin(), offer.pages.end());
  ready.mutable_host_pages()->Assign(offer.host_pages.begin(),
                                     offer.host_pages.end());
  return ready;
}

worker::RankAgreement AgreementOf(const kvasir::v1::RankStart& start) {
  worker::RankAgreement agreement;
  agreement.pages.assign(start.pages().begin(), start.pages().end());
  agreement.host_pages.assign(start.host_pages().begin(),
                              start.host_pages().end());
  agreement.weights_id = start.weights_id();
  agreement.cache_id = start.cache_id();
  return agreement;
}

}  // namespace

LeaderGroup::~LeaderGroup() {
  ending_ = true;
  if (children_ != nullptr) children_->StopReporting();
  if (leader_ != nullptr) {
    leader_->Abort(absl::CancelledError("the leader ends"));
  }
  // Destroy the servers first, because they use leader_.
  servers_.clear();
  if (children_ != nullptr) children_->End();
  collective_.Abort(absl::CancelledError(kDone));
  collective_.Reset();
}

absl::Status LeaderGroup::Listen() {
  const RankFlags& flags = settings_.flags;
  if (!flags.listen.empty()) {
    worker::RankServerOptions options;
    KVASIR_ASSIGN_OR_RETURN(options.listen,
                            ParseListen(flags.listen, "--rank-listen"));
    KVASIR_ASSIGN_OR_RETURN(
        options.credentials,
        RankListenCredentials(flags, options.listen, settings_.insecure,
                              settings_.tls.get()));
    KVASIR_ASSIGN_OR_RETURN(options.secret, ReadSecret(flags.secret_file));
    KVASIR_ASSIGN_OR_RETURN(auto server,
                            worker::RankServer::Start(options, leader_.get()));
    base::LogInfo("waiting for ranks",
                  {{"listen", server->target()}, {"tp", flags.tp}});
    servers_.push_back(std::move(server));
  }
  if (children_ == nullptr) return absl::OkStatus();
  worker::RankServerOptions options;
  options.listen.port = 0;  // a free loopback port
  options.secret = NewSecret();
  KVASIR_ASSIGN_OR_RETURN(auto server,
                          worker::RankServer::Start(options, leader_.get()));
  const JoinInfo info{.leader = server->target(), .secret = options.secret};
  servers_.push_back(std::move(server));
  return children_->Send(
      info, [this](const absl::Status& why) { leader_->Abort(why); });
}

absl::StatusOr<worker::Collective*> LeaderGroup::Join(const GroupTerms& terms) {
  const RankFlags& flags = settings_.flags;
  KVASIR_ASSIGN_OR_RETURN(auto joining,
                          BeginCollective(settings_, shard(), terms,
                                          [this](const absl::Status& why) {
                                            leader_->Abort(why);
                                          }));
  worker::RankLeaderOptions options;
  options.group.identity = IdentityOfGroup(terms, settings_);
  options.group.collective_address = joining->address();
  collective_.Begin(std::move(joining));
  options.group.join_timeout = flags.join_timeout;
  options.group.step_timeout = settings_.step_timeout;
  options.group.combine = terms.combine;
  options.on_end = [this](const absl::Status& why) {
    collective_.Abort(why);
    if (!ending_ && settings_.on_fatal) settings_.on_fatal(why.ToString());
  };
  options.on_drain_asked = settings_.on_drain_asked;
  KVASIR_RETURN_IF_ERROR(worker::CheckRankGroupOptions(options.group));
  leader_ = std::make_unique<worker::RankLeader>(std::move(options));
  KVASIR_RETURN_IF_ERROR(Listen());
  KVASIR_ASSIGN_OR_RETURN(const std::vector<std::string> addresses,
                          leader_->WaitJoined());
  KVASIR_RETURN_IF_ERROR(collective_.Connect(addresses));
  return collective_.get();
}

absl::StatusOr<worker::RankAgreement> LeaderGroup::Agree(
    const worker::RankOffer& offer) {
  KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::RankStart start,
                          leader_->WaitStarted(ReadyOf(offer)));
  return AgreementOf(start);
}

std::unique_ptr<worker::Executor> LeaderGroup::MakeExecutor(
    worker::Executor* own) {
  return std::make_unique<worker::GroupExecutor>(leader_.get(), own);
}

void LeaderGroup::EndLocalRanksIfFailed() {
  if (children_ != nullptr && !leader_->status().ok()) children_->End();
}

absl::Status LeaderGroup::Drain() {
  // If the group has failed, do not wait for its ranks. They end by themselves
  // or are killed.
  KVASIR_RETURN_IF_ERROR(leader_->status());
  KVASIR_RETURN_IF_ERROR(leader_->Drain());
  KVASIR_RETURN_IF_ERROR(leader_->status());
  collective_.Abort(absl::CancelledError(kDone));
  if (children_ == nullptr) return absl::OkStatus();
  if (!children_->WaitEnded(kEndTimeout)) {
    return absl::DeadlineExceededError(absl::StrCat(
        "the rank processes that run on this host have not ended within ",
        absl::FormatDuration(kEndTimeout)));
  }
  return children_->failure();
}

FollowerGroup::~FollowerGroup() {
  ending_ = true;
  if (children_ != nullptr) children_->StopReporting();
  if (follower_ != nullptr) {
    follower_->Abort(absl::CancelledError("the rank ends"));
  }
  client_ = nullptr;
  if (children_ != nullptr) children_->End();
  collective_.Abort(absl::CancelledError(kDone));
  collective_.Reset();
}

absl::StatusOr<worker::Collective*> FollowerGroup::Join(
    const GroupTerms& terms) {
  const RankFlags& flags = settings_.flags;
  worker::RankClientOptions dial;
  dial.leader = info_.leader;
  dial.secret = info_.secret;
  dial.connect_timeout = flags.join_timeout;
  KVASIR_ASSIGN_OR_RETURN(
      dial.credentials,
      RankDialCredentials(flags, info_.leader, settings_.insecure,
                          settings_.tls.get()));
  KVASIR_ASSIGN_OR_RETURN(
      auto joining,
      BeginCollective(settings_, shard(), terms,
                      [this](const absl::Status& why) { Abort(why); }));
  // Log this only in ranks that a user started. Ranks that a command started
  // would all log the same line.
  if (!flags.leader.empty()) {
    base::LogInfo("joining the group",
                  {{"leader", info_.leader},
                   {"within", absl::FormatDuration(flags.join_timeout)}});
  }
  KVASIR_ASSIGN_OR_RETURN(client_, worker::RankClient::Dial(dial));

  worker::RankFollowerOptions options;
  kvasir::v1::RankHello& hello = options.hello;
  *hello.mutable_identity() = IdentityOfGroup(terms, settings_);
  hello.set_rank(static_cast<uint32_t>(flags.rank));
  hello.set_host(HostName());
  hello.set_pid(static_cast<uint32_t>(getpid()));
  hello.set_collective_address(joining->address());
  collective_.Begin(std::move(joining));
  hello.set_metrics_address(settings_.metrics);
  options.join_timeout = flags.join_timeout;
  options.on_end = [this](const absl::Status& why) {
    collective_.Abort(why);
    if (!ending_ && settings_.on_fatal) settings_.on_fatal(why.ToString());
  };
  follower_ = std::make_unique<worker::RankFollower>(std::move(options));
  if (children_ != nullptr) {
    KVASIR_RETURN_IF_ERROR(children_->Send(
        info_, [this](const absl::Status& why) { Abort(why); }));
  }
  client_->Join(follower_.get());
  KVASIR_ASSIGN_OR_RETURN(const std::vector<std::string> addresses,
                          follower_->WaitWelcome());
  KVASIR_RETURN_IF_ERROR(collective_.Connect(addresses));
  return collective_.get();
}

absl::StatusOr<worker::RankAgreement> FollowerGroup::Agree(
    const worker::RankOffer& offer) {
  KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::RankStart start,
                          follower_->WaitStarted(ReadyOf(offer)));
  return AgreementOf(start);
}

}  // namespace kvasir::cli
