#include "worker/ranks/group/rank_client.h"

#include <grpc/compression.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>

#include <deque>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/net/grpc_callbacks.h"
#include "base/net/grpc_status.h"
#include "proto/kvasir/v1/rank.grpc.pb.h"
#include "worker/ranks/group/rank_bytes.h"
#include "worker/ranks/group/rank_leader.h"

namespace kvasir::worker {
namespace {

using base::MutexLock;
using Stub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

constexpr char kJoinMethod[] = "/kvasir.v1.Rank/Join";

// How long to wait until the channel reports why it has no connection.
constexpr absl::Duration kReasonTimeout = absl::Seconds(1);

std::shared_ptr<grpc::Channel> NewChannel(const RankClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
                   1 << GRPC_COMPRESS_NONE);
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kMaxLeaderMessageBytes));
  return grpc::CreateCustomChannel(options.leader,
                                   options.credentials == nullptr
                                       ? grpc::InsecureChannelCredentials()
                                       : options.credentials,
                                   arguments);
}

// Returns why the channel cannot connect. WaitForConnected only reports a
// timeout, so this makes a call to get the cause.
std::string WhyNotConnected(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kReasonTimeout));
  const auto stub = kvasir::v1::Rank::NewStub(channel);
  const grpc::Status status = stub->Join(&context)->Finish();
  return status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED
             ? "nobody answers"
             : status.error_message();
}

}  // namespace

// The Join call. Held by shared_ptr, because it must live until gRPC (OnDone),
// the follower (its link) and the client are done with it.
//
// Threads: any thread may call any method.
class RankClient::Call final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
      public RankLink {
 public:
  Call(const std::shared_ptr<grpc::Channel>& channel, RankFollower* follower)
      : stub_(channel), follower_(follower) {}

  static void Start(const std::shared_ptr<Call>& call,
                    const std::string& secret) {
    call->self_ = call;
    if (!secret.empty()) {
      call->context_.AddMetadata(kRankAuthorizationKey,
                                 RankAuthorization(secret));
    }
    call->stub_.PrepareBidiStreamingCall(&call->context_, kJoinMethod, {},
                                         call.get());
    call->AddHold();  // allows writes from other threads
    call->StartRead(&call->response_);
    call->StartCall();
  }

  size_t Send(Bytes message) override {
    size_t waiting = 0;
    {
      MutexLock lock(&mutex_);
      if (!closing_) queue_.push_back(std::move(message));
      waiting = queue_.size();
    }
    Advance();
    return waiting;
  }
  void Close(const absl::Status&) override {
    {
      MutexLock lock(&mutex_);
      closing_ = true;
    }
    Advance();
  }

  void OnReadDone(bool ok) override {
    if (ok) {
      follower_->OnBytes(BytesOf(response_));
      response_.Clear();
      StartRead(&response_);
      return;
    }
    {
      MutexLock lock(&mutex_);
      queue_.clear();
      closing_ = true;
    }
    Advance();
  }
  void OnWriteDone(bool) override {
    {
      MutexLock lock(&mutex_);
      writing_ = false;
    }
    Advance();
  }
  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<Call> self = std::move(self_);
    follower_->OnLost(base::FromGrpcStatus(status));
    MutexLock lock(&mutex_);
    done_ = true;
    changed_.SignalAll();
  }

  // Ends the call. When it returns, the follower gets no more events.
  void End() {
    {
      MutexLock lock(&mutex_);
      const base::Clock& clock = base::Clock::Real();
      const absl::Time deadline = clock.Now() + kRankLastWords;
      while (closing_ && !done_ && clock.Now() < deadline) {
        changed_.WaitWithTimeout(&mutex_, deadline - clock.Now());
      }
    }
    context_.TryCancel();
    Close(absl::OkStatus());
    MutexLock lock(&mutex_);
    while (!done_) changed_.Wait(&mutex_);
  }

 private:
  // If no write is in progress, starts to write the next message. If no message
  // waits and the link was closed, ends the call's writes.
  void Advance() {
    const grpc::ByteBuffer* write = nullptr;
    {
      MutexLock lock(&mutex_);
      if (writing_ || released_) return;
      if (!queue_.empty()) {
        request_ = BufferOf(std::move(queue_.front()));
        queue_.pop_front();
        writing_ = true;
        write = &request_;
      } else if (closing_) {
        released_ = true;
      } else {
        return;
      }
    }
    if (write != nullptr) {
      StartWrite(write);
    } else {
      StartWritesDone();
      RemoveHold();
    }
  }

  Stub stub_;
  RankFollower* const follower_;
  grpc::ClientContext context_;
  grpc::ByteBuffer response_;  // buffer of the read in progress
  std::shared_ptr<Call> self_;

  base::Mutex mutex_;
  base::CondVar changed_;
  // The message that gRPC is sending.
  grpc::ByteBuffer request_ ABSL_GUARDED_BY(mutex_);
  std::deque<Bytes> queue_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

RankClient::RankClient(std::shared_ptr<grpc::Channel> channel,
                       std::string secret)
    : channel_(std::move(channel)), secret_(std::move(secret)) {}

RankClient::~RankClient() {
  if (call_ != nullptr) call_->End();
}

absl::StatusOr<std::unique_ptr<RankClient>> RankClient::Dial(
    const RankClientOptions& options) {
  // Keeps gRPC's threads, because a call that is cancelled at the end may
  // outlive its channel.
  base::KeepGrpcCallbackThreads();
  std::shared_ptr<grpc::Channel> channel = NewChannel(options);
  if (!channel->WaitForConnected(
          absl::ToChronoTime(absl::Now() + options.connect_timeout))) {
    return absl::UnavailableError(absl::StrCat(
        "the leader at ", options.leader, " was not reached within ",
        absl::FormatDuration(options.connect_timeout), ": ",
        WhyNotConnected(channel)));
  }
  return std::unique_ptr<RankClient>(
      new RankClient(std::move(channel), options.secret));
}

void RankClient::Join(RankFollower* follower) {
  call_ = std::make_shared<Call>(channel_, follower);
  Call::Start(call_, secret_);
  follower->OnLink(call_);
}

}  // namespace kvasir::worker
