#include "worker/ranks/group/rank_server.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <deque>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "base/net/grpc_status.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "proto/kvasir/v1/rank.grpc.pb.h"
#include "worker/ranks/group/rank_bytes.h"
#include "worker/ranks/group/rank_identity.h"

namespace kvasir::worker {
namespace {

using base::MutexLock;

// How many connections are accepted beyond kMaxTpSize. They are for callers
// that are refused and for followers that reconnect.
constexpr size_t kSpareConnections = 16;

// One Join call. Messages from the follower are handled one at a time. Messages
// to it wait in a queue, because only one write may be in progress.
//
// Held by shared_ptr, because it must live until gRPC (OnDone) and the leader
// (its link) are done with it.
//
// Threads: any thread may call any method.
class JoinReactor final
    : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
      public RankLink,
      public std::enable_shared_from_this<JoinReactor> {
 public:
  static JoinReactor* Start(grpc::CallbackServerContext* context,
                            RankLeader* leader, bool authenticated) {
    const std::shared_ptr<JoinReactor> reactor(
        new JoinReactor(context, leader));
    reactor->self_ = reactor;
    // The first read starts only after the leader has returned the link's id.
    reactor->link_ = leader->OnLink(reactor, authenticated, context->peer());
    reactor->Read();
    return reactor.get();
  }

  size_t Send(Bytes message) override {
    size_t waiting = 0;
    {
      MutexLock lock(&mutex_);
      if (!end_.has_value()) queue_.push_back(std::move(message));
      waiting = queue_.size();
    }
    Advance();
    return waiting;
  }
  void Close(const absl::Status& status) override { End(status); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Lost(
          context_->IsCancelled()
              ? absl::UnavailableError("the connection to the follower is gone")
              : absl::OkStatus());
      return;
    }
    leader_->OnBytes(link_, BytesOf(request_));
    request_.Clear();
    Read();
  }
  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(&mutex_);
      writing_ = false;
    }
    if (ok) {
      Advance();
    } else {
      Lost(absl::UnavailableError("the connection to the follower is gone"));
    }
  }
  void OnCancel() override {
    Lost(absl::UnavailableError("the connection to the follower is gone"));
  }
  void OnDone() override {
    const std::shared_ptr<JoinReactor> self = std::move(self_);
  }

 private:
  JoinReactor(grpc::CallbackServerContext* context, RankLeader* leader)
      : context_(context), leader_(leader) {}

  // Starts the next read, unless the call was refused or has ended.
  void Read() {
    {
      MutexLock lock(&mutex_);
      if (end_.has_value()) return;
    }
    StartRead(&request_);
  }
  void Lost(const absl::Status& why) {
    leader_->OnLost(link_, why);
    {
      MutexLock lock(&mutex_);
      queue_.clear();
    }
    End(why.ok() ? absl::CancelledError("the follower left") : why);
  }
  void End(const absl::Status& status) {
    {
      MutexLock lock(&mutex_);
      if (!end_.has_value()) end_ = status;
    }
    Advance();
  }
  // If no write is in progress, starts to write the next message. If no message
  // waits and the link was closed, finishes the call.
  void Advance() {
    const grpc::ByteBuffer* write = nullptr;
    absl::Status end;
    {
      MutexLock lock(&mutex_);
      if (writing_ || finished_) return;
      if (!queue_.empty()) {
        response_ = BufferOf(std::move(queue_.front()));
        queue_.pop_front();
        writing_ = true;
        write = &response_;
      } else if (end_.has_value()) {
        finished_ = true;
        end = *end_;
      } else {
        return;
      }
    }
    if (write != nullptr) {
      StartWrite(write);
    } else {
      Finish(base::ToGrpcStatus(end));
    }
  }

  grpc::CallbackServerContext* const context_;
  RankLeader* const leader_;
  RankLeader::LinkId link_ = 0;  // set before the first read
  grpc::ByteBuffer request_;     // buffer of the read in progress
  std::shared_ptr<JoinReactor> self_;

  base::Mutex mutex_;
  // The message that gRPC is sending.
  grpc::ByteBuffer response_ ABSL_GUARDED_BY(mutex_);
  std::deque<Bytes> queue_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

class RankServer::Service final
    : public kvasir::v1::Rank::WithRawCallbackMethod_Join<
          kvasir::v1::Rank::Service> {
 public:
  Service(const std::string& secret, RankLeader* leader)
      : want_(secret.empty() ? "" : base::Sha256Hex(RankAuthorization(secret))),
        leader_(leader) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Join(
      grpc::CallbackServerContext* context) override {
    return JoinReactor::Start(context, leader_, IsAuthenticated(*context));
  }

 private:
  bool IsAuthenticated(const grpc::CallbackServerContext& context) const {
    if (want_.empty()) {
      const auto peer = context.auth_context();
      return peer != nullptr && peer->IsPeerAuthenticated();
    }
    const auto found = context.client_metadata().find(kRankAuthorizationKey);
    if (found == context.client_metadata().end()) return false;
    // Compares hashes instead of the secrets, because all hashes have the same
    // length.
    return base::EqualInConstantTime(
        want_, base::Sha256Hex({found->second.data(), found->second.size()}));
  }

  // The hash of the secret that a call must send. Empty: a call needs a
  // certificate.
  const std::string want_;
  RankLeader* const leader_;
};

RankServer::RankServer() = default;

absl::StatusOr<std::unique_ptr<RankServer>> RankServer::Start(
    const RankServerOptions& options, RankLeader* leader) {
  std::unique_ptr<RankServer> server(new RankServer);
  server->service_ = std::make_unique<Service>(options.secret, leader);
  base::GrpcServerOptions listener;
  listener.listen = options.listen;
  listener.credentials = options.credentials;
  // gRPC has only one limit for all messages. RankGroupState::MaxMessageBytes
  // applies the smaller limits.
  listener.max_receive_message_bytes =
      kMaxFollowerMessageBytes + kMaxReadyBytes;
  listener.max_concurrent_streams = 1;
  listener.max_connections = kMaxTpSize + kSpareConnections;
  // No maximum age, because a follower's call lasts as long as the group.
  listener.max_connection_age = absl::InfiniteDuration();
  listener.health_service = false;
  KVASIR_ASSIGN_OR_RETURN(
      server->server_,
      base::GrpcServer::Start(listener, {server->service_.get()}));
  return server;
}

RankServer::~RankServer() {
  if (server_ != nullptr) server_->Shutdown(absl::Now() + kRankLastWords);
}

}  // namespace kvasir::worker
