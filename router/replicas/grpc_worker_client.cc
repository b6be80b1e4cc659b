#include "router/replicas/grpc_worker_client.h"

#include <grpc/compression.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>

#include <atomic>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "base/net/grpc_callbacks.h"
#include "base/net/grpc_deadline.h"
#include "base/net/grpc_status.h"
#include "google/protobuf/io/coded_stream.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "proto/refusal.h"

namespace kvasir::router {
namespace {

namespace v1 = kvasir::v1;
using GenerateStub =
    grpc::TemplatedGenericStub<grpc::ByteBuffer, v1::GenerateEvent>;

constexpr char kGenerateMethod[] = "/kvasir.v1.Worker/Generate";

// The client's open calls, which Close cancels.
// Threads: its methods may be called from any thread.
class OpenCalls {
 public:
  // Returns false if Close has been called.
  bool Add(grpc::ClientContext* context) {
    base::MutexLock lock(&mutex_);
    if (closed_) return false;
    contexts_.insert(context);
    return true;
  }
  void Remove(grpc::ClientContext* context) {
    base::MutexLock lock(&mutex_);
    contexts_.erase(context);
  }
  void Close() {
    // The lock can be held here, because TryCancel itself runs no callback.
    // Each context still exists, because it is removed from the set before it
    // is destroyed.
    base::MutexLock lock(&mutex_);
    closed_ = true;
    for (grpc::ClientContext* context : contexts_) context->TryCancel();
  }

 private:
  base::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_set<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mutex_);
};

// Returns the tag and length that precede a length-delimited field in
// protobuf's wire format.
grpc::Slice FieldHeader(int field, size_t bytes) {
  using google::protobuf::io::CodedOutputStream;
  constexpr uint32_t kLengthDelimited = 2;
  uint8_t header[20];
  uint8_t* end = CodedOutputStream::WriteVarint32ToArray(
      static_cast<uint32_t>(field) << 3 | kLengthDelimited, header);
  end = CodedOutputStream::WriteVarint64ToArray(bytes, end);
  return grpc::Slice(header, static_cast<size_t>(end - header));
}

// Returns a slice that points to `bytes`, which `owner` keeps alive.
grpc::Slice Borrow(absl::string_view bytes, std::shared_ptr<const void> owner) {
  auto* held = new std::shared_ptr<const void>(std::move(owner));
  return grpc::Slice(
      const_cast<char*>(bytes.data()), bytes.size(),
      [](void* user_data) {
        delete static_cast<std::shared_ptr<const void>*>(user_data);
      },
      held);
}

// Serializes the request without copying the prompt. The fields are not in the
// order of their numbers; protobuf allows any order.
grpc::ByteBuffer Serialize(const WorkerCall& call) {
  std::vector<grpc::Slice> slices;
  slices.emplace_back(call.head.SerializeAsString());
  if (!call.prompt.empty()) {
    slices.push_back(
        FieldHeader(v1::GenerateRequest::kPromptTokenIdsFieldNumber,
                    call.prompt.bytes().size()));
    slices.push_back(Borrow(call.prompt.bytes(), call.prompt.owner()));
  }
  if (!call.emitted.empty()) {
    slices.push_back(FieldHeader(
        v1::GenerateRequest::kEmittedTokenIdsFieldNumber, call.emitted.size()));
    slices.emplace_back(call.emitted);
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// Converts a call's status. If the worker has sent a refusal in the trailing
// metadata of `context`, adds it to the status.
absl::Status StatusOf(const grpc::Status& from,
                      const grpc::ClientContext& context) {
  absl::Status status = base::FromGrpcStatus(from);
  if (status.ok()) return status;
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find(proto::kRefusalMetadataKey);
  if (found == trailers.end()) return status;
  v1::Refusal refusal;
  if (refusal.ParseFromArray(found->second.data(),
                             static_cast<int>(found->second.size()))) {
    proto::SetRefusal(refusal, &status);
  }
  return status;
}

// One call of Worker.Generate. gRPC keeps this object alive until OnDone. The
// request also holds it, because it may cancel the call.
class GenerateAttempt final
    : public Attempt,
      public grpc::ClientBidiReactor<grpc::ByteBuffer, v1::GenerateEvent> {
 public:
  struct Parts {
    std::shared_ptr<GenerateStub> stub;
    std::shared_ptr<OpenCalls> open_calls;
    std::shared_ptr<AttemptSink> sink;
  };

  static std::shared_ptr<GenerateAttempt> Make(Parts parts,
                                               const WorkerCall& call) {
    std::shared_ptr<GenerateAttempt> attempt(
        new GenerateAttempt(std::move(parts), call));
    attempt->self_ = attempt;
    return attempt;
  }

  void Start() override {
    if (!parts_.open_calls->Add(&context_)) context_.TryCancel();
    parts_.stub->PrepareBidiStreamingCall(&context_, kGenerateMethod, {}, this);
    StartWriteLast(&request_, grpc::WriteOptions());
    StartRead(&event_);
    StartCall();
  }

  void Cancel() override { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    parts_.sink->OnEvent(event_);
    event_.Clear();
    StartRead(&event_);
  }

  void OnDone(const grpc::Status& status) override {
    parts_.open_calls->Remove(&context_);
    const std::shared_ptr<GenerateAttempt> self = std::move(self_);
    const std::shared_ptr<AttemptSink> sink = std::move(parts_.sink);
    sink->OnAttemptDone(StatusOf(status, context_));
  }

 private:
  GenerateAttempt(Parts parts, const WorkerCall& call)
      : parts_(std::move(parts)), request_(Serialize(call)) {
    if (call.deadline != absl::InfiniteFuture()) {
      context_.set_deadline(base::ToGrpcDeadline(call.deadline));
    }
    // If the worker cannot be reached, fail at once, so that another replica
    // is asked.
    context_.set_wait_for_ready(false);
  }

  Parts parts_;
  grpc::ClientContext context_;
  const grpc::ByteBuffer request_;
  v1::GenerateEvent event_;
  std::shared_ptr<GenerateAttempt> self_;
};

// One call of Worker.WatchLoad. Deletes itself in OnDone.
class LoadReader final : public grpc::ClientReadReactor<v1::LoadReport> {
 public:
  static void Start(v1::Worker::Stub* stub, absl::Duration min_interval,
                    std::shared_ptr<OpenCalls> open_calls,
                    std::shared_ptr<LoadSink> sink) {
    auto* reader = new LoadReader(std::move(open_calls), std::move(sink));
    v1::WatchLoadRequest& request = reader->request_;
    request.set_min_interval_ms(
        static_cast<uint32_t>(absl::ToInt64Milliseconds(min_interval)));
    if (!reader->open_calls_->Add(&reader->context_)) {
      reader->context_.TryCancel();
    }
    stub->async()->WatchLoad(&reader->context_, &request, reader);
    reader->StartRead(&reader->report_);
    reader->StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    sink_->OnReport(report_);
    StartRead(&report_);
  }

  void OnDone(const grpc::Status& status) override {
    open_calls_->Remove(&context_);
    sink_->OnWatchEnded(status.ok() ? absl::UnavailableError(
                                          "the worker ended its load reports")
                                    : base::FromGrpcStatus(status));
    delete this;
  }

 private:
  LoadReader(std::shared_ptr<OpenCalls> open_calls,
             std::shared_ptr<LoadSink> sink)
      : open_calls_(std::move(open_calls)), sink_(std::move(sink)) {}

  const std::shared_ptr<OpenCalls> open_calls_;
  const std::shared_ptr<LoadSink> sink_;
  grpc::ClientContext context_;
  v1::WatchLoadRequest request_;
  v1::LoadReport report_;
};

struct InfoCall {
  grpc::ClientContext context;
  v1::GetInfoRequest request;
  v1::WorkerInfo info;
};
using InfoDone = std::function<void(absl::StatusOr<v1::WorkerInfo>)>;

// The time limit for the second call of GetInfo, which finds out why a channel
// has no connection.
constexpr absl::Duration kTimeForCause = absl::Seconds(1);

// Calls Worker.GetInfo. If there is no connection, the call waits for one if
// `wait` is true, and otherwise fails at once with the reason.
void AskInfo(const std::shared_ptr<v1::Worker::Stub>& stub,
             const std::shared_ptr<OpenCalls>& open_calls,
             absl::Duration timeout, bool wait, InfoDone done) {
  auto call = std::make_shared<InfoCall>();
  call->context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  call->context.set_wait_for_ready(wait);
  if (!open_calls->Add(&call->context)) call->context.TryCancel();
  stub->async()->GetInfo(
      &call->context, &call->request, &call->info,
      [stub, call, open_calls, wait,
       done = std::move(done)](grpc::Status status) {
        open_calls->Remove(&call->context);
        if (status.ok()) {
          done(std::move(call->info));
        } else {
          done(wait ? base::StatusOfCall(status, call->context)
                    : base::FromGrpcStatus(status));
        }
      });
}

class GrpcWorkerClient final : public WorkerClient {
 public:
  GrpcWorkerClient(const WorkerAddress& worker,
                   const GrpcWorkerClientOptions& options) {
    for (int i = 0; i < options.num_connections; ++i) {
      std::shared_ptr<grpc::Channel> channel = NewChannel(worker, options, i);
      if (i == 0) control_ = v1::Worker::NewStub(channel);
      connections_.push_back(
          {channel, std::make_shared<GenerateStub>(channel)});
    }
  }
  ~GrpcWorkerClient() override { Close(); }

  std::shared_ptr<Attempt> NewAttempt(
      WorkerCall call, std::shared_ptr<AttemptSink> sink) override {
    return GenerateAttempt::Make({NextStub(), open_calls_, std::move(sink)},
                                 call);
  }

  void GetInfo(absl::Duration timeout, InfoDone done) override {
    // Wait for a connection. Even if the worker has just started, the channel
    // may pause before it tries again to connect.
    AskInfo(control_, open_calls_, timeout, /*wait=*/true,
            [stub = control_, open_calls = open_calls_,
             done = std::move(done)](absl::StatusOr<v1::WorkerInfo> info) {
              if (!absl::IsDeadlineExceeded(info.status())) {
                done(std::move(info));
                return;
              }
              // A call that waits for a connection fails with
              // DEADLINE_EXCEEDED, whatever prevents the connection. Ask again
              // without waiting, to learn the cause: for example, the port is
              // closed, or the certificate's name is not allowed.
              AskInfo(stub, open_calls, kTimeForCause, /*wait=*/false,
                      [timed_out = info.status(),
                       done](absl::StatusOr<v1::WorkerInfo> why) {
                        if (absl::IsDeadlineExceeded(why.status())) {
                          done(timed_out);
                        } else {
                          done(std::move(why));
                        }
                      });
            });
  }

  void WatchLoad(absl::Duration min_interval,
                 std::shared_ptr<LoadSink> sink) override {
    LoadReader::Start(control_.get(), min_interval, open_calls_,
                      std::move(sink));
  }

  void Close() override { open_calls_->Close(); }

 private:
  struct Connection {
    std::shared_ptr<grpc::Channel> channel;
    std::shared_ptr<GenerateStub> stub;
  };

  // The connections take turns. One that has just failed is passed over,
  // because calls on it fail until it has paused and connected again. A worker
  // that has come back is found by the first connection, perhaps earlier than
  // by the others.
  const std::shared_ptr<GenerateStub>& NextStub() {
    const size_t turn = next_.fetch_add(1, std::memory_order_relaxed);
    for (size_t i = 0; i < connections_.size(); ++i) {
      const Connection& each = connections_[(turn + i) % connections_.size()];
      if (each.channel->GetState(/*try_to_connect=*/true) !=
          GRPC_CHANNEL_TRANSIENT_FAILURE) {
        return each.stub;
      }
    }
    return connections_[turn % connections_.size()].stub;
  }

  static std::shared_ptr<grpc::Channel> NewChannel(
      const WorkerAddress& worker, const GrpcWorkerClientOptions& options,
      int index) {
    grpc::ChannelArguments arguments;
    const auto milliseconds = [](absl::Duration duration) {
      return static_cast<int>(absl::ToInt64Milliseconds(duration));
    };
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    // Workers never compress messages. Refuse compressed ones, because a small
    // message may unpack to a huge one.
    arguments.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
                     1 << GRPC_COMPRESS_NONE);
    arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
    if (options.keepalive_time < absl::InfiniteDuration()) {
      arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
                       milliseconds(options.keepalive_time));
      arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                       milliseconds(options.keepalive_timeout));
    }
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetMaxReceiveMessageSize(
        static_cast<int>(options.max_receive_message_bytes));
    // Give each channel its own connection. By default, channels to the same
    // address share one.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt("kvasir.connection", index);
    if (!worker.tls_name.empty()) {
      arguments.SetSslTargetNameOverride(worker.tls_name);
    }
    return grpc::CreateCustomChannel(worker.target,
                                     options.credentials == nullptr
                                         ? grpc::InsecureChannelCredentials()
                                         : options.credentials,
                                     arguments);
  }

  const std::shared_ptr<OpenCalls> open_calls_ = std::make_shared<OpenCalls>();
  // Shared, because calls may outlive the client.
  std::shared_ptr<v1::Worker::Stub> control_;
  std::vector<Connection> connections_;
  std::atomic<size_t> next_{0};
};

}  // namespace

std::unique_ptr<WorkerClient> NewGrpcWorkerClient(
    const WorkerAddress& worker, const GrpcWorkerClientOptions& options) {
  // Keep gRPC's callback threads: calls that are cancelled at the end of
  // the process may still run callbacks after clients and servers have
  // been destroyed.
  base::KeepGrpcCallbackThreads();
  return std::make_unique<GrpcWorkerClient>(worker, options);
}

}  // namespace kvasir::router
