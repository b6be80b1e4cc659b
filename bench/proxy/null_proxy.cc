#include "bench/proxy/null_proxy.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <utility>

#include "base/net/grpc_callbacks.h"
#include "base/status_macros.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "router/replicas/grpc_worker_client.h"

namespace kvasir::bench {
namespace {

namespace v1 = kvasir::v1;

using RawStub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;
using RawWorker =
    v1::Worker::WithRawCallbackMethod_Generate<v1::Worker::Service>;

base::GrpcServerOptions ServerOptions(const BareServerOptions& options) {
  base::GrpcServerOptions server;
  server.listen = options.listen;
  server.credentials = options.credentials;
  server.max_receive_message_bytes =
      base::MaxMessageBytesFor(options.max_model_len);
  return server;
}

// Forwards one call between the client and the worker, and deletes itself when
// both sides have ended. It reads a response only after it has written the
// previous one, so neither side can end between a read and the write of the
// same response.
class Bridge final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  Bridge(RawStub* stub, const grpc::ByteBuffer* request)
      : request_(*request), worker_side_(this) {
    stub->PrepareBidiStreamingCall(&context_, "/kvasir.v1.Worker/Generate", {},
                                   &worker_side_);
    // gRPC requires a hold for reads that are started outside the worker side's
    // own callbacks.
    worker_side_.AddHold();
    worker_side_.StartWriteLast(&request_, grpc::WriteOptions());
    worker_side_.StartRead(&response_);
    worker_side_.StartCall();
  }

  void OnWriteDone(bool ok) override {
    if (!ok) context_.TryCancel();
    worker_side_.StartRead(&response_);
  }
  void OnCancel() override { context_.TryCancel(); }
  void OnDone() override { EndOne(); }

 private:
  class WorkerSide final
      : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    explicit WorkerSide(Bridge* bridge) : bridge_(bridge) {}
    void OnReadDone(bool ok) override {
      if (ok) {
        bridge_->StartWrite(&bridge_->response_);
      } else {
        RemoveHold();
      }
    }
    void OnDone(const grpc::Status& status) override {
      bridge_->Finish(status);
      bridge_->EndOne();
    }

   private:
    Bridge* const bridge_;
  };

  void EndOne() {
    if (sides_.fetch_sub(1) == 1) delete this;
  }

  grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
  grpc::ClientContext context_;
  WorkerSide worker_side_;
  std::atomic<int> sides_{2};
};

class NullProxy final : public BareServer, public RawWorker {
 public:
  explicit NullProxy(const std::string& worker) {
    // The same settings as those of a router's connections to workers, as far
    // as they affect the time of calls.
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const router::GrpcWorkerClientOptions options;
    for (int i = 0; i < options.num_connections; ++i) {
      stubs_.push_back(std::make_unique<RawStub>(grpc::CreateCustomChannel(
          worker, grpc::InsecureChannelCredentials(), arguments)));
    }
  }
  ~NullProxy() override { server_->Shutdown(absl::InfinitePast()); }

  absl::Status Start(const BareServerOptions& options) {
    KVASIR_ASSIGN_OR_RETURN(
        server_, base::GrpcServer::Start(ServerOptions(options), {this}));
    return absl::OkStatus();
  }
  const std::string& target() const override { return server_->target(); }

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(
      grpc::CallbackServerContext*, const grpc::ByteBuffer* request) override {
    const size_t turn = next_.fetch_add(1, std::memory_order_relaxed);
    return new Bridge(stubs_[turn % stubs_.size()].get(), request);
  }

 private:
  std::vector<std::unique_ptr<RawStub>> stubs_;
  std::atomic<size_t> next_{0};
  std::unique_ptr<base::GrpcServer> server_;
};

// Sends the events of an answer: accepted, then each token, then finish.
class ScriptedAnswer final
    : public grpc::ServerWriteReactor<v1::GenerateEvent> {
 public:
  explicit ScriptedAnswer(const v1::GenerateRequest& request)
      : prompt_tokens_(
            static_cast<uint32_t>(request.prompt_token_ids().size() / 4)),
        max_tokens_(request.sampling().max_tokens()) {
    event_.mutable_accepted()->set_prompt_tokens(prompt_tokens_);
    StartWrite(&event_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok || finished_) {
      return Finish(ok ? grpc::Status::OK : grpc::Status::CANCELLED);
    }
    if (sent_ == max_tokens_) {
      finished_ = true;
      v1::GenerateEvent::Finish* const finish = event_.mutable_finish();
      finish->set_reason(v1::FINISH_LENGTH);
      finish->set_prompt_tokens(prompt_tokens_);
      finish->set_output_tokens(sent_);
    } else {
      v1::GenerateEvent::Tokens* const tokens = event_.mutable_tokens();
      tokens->clear_token_ids();
      tokens->add_token_ids(static_cast<int32_t>(sent_++));
    }
    StartWrite(&event_);
  }
  void OnDone() override { delete this; }

 private:
  const uint32_t prompt_tokens_;
  const uint32_t max_tokens_;
  uint32_t sent_ = 0;
  bool finished_ = false;
  v1::GenerateEvent event_;
};

// Sends one load report and keeps the call open until the client ends it.
class ScriptedLoad final : public grpc::ServerWriteReactor<v1::LoadReport> {
 public:
  explicit ScriptedLoad(uint64_t pages) {
    report_.set_step(1);
    report_.set_free_pages(pages);
    report_.set_total_pages(pages);
    StartWrite(&report_);
  }
  void OnCancel() override { Finish(grpc::Status::CANCELLED); }
  void OnDone() override { delete this; }

 private:
  v1::LoadReport report_;
};

class ScriptedWorker final : public BareServer,
                             public v1::Worker::CallbackService {
 public:
  ~ScriptedWorker() override { server_->Shutdown(absl::InfinitePast()); }

  absl::Status Start(const BareServerOptions& options) {
    info_.set_api_version("kvasir.v1");
    info_.set_build("bench");
    info_.set_weights_id("bench");
    info_.set_cache_id("bench");
    info_.set_numerics_id("bench");
    info_.set_page_tokens(64);
    info_.set_model_name("bench");
    info_.set_model_type("bench");
    info_.set_max_model_len(static_cast<uint32_t>(options.max_model_len));
    info_.set_max_num_seqs(4096);
    info_.set_max_batched_tokens(1 << 20);
    info_.set_vocab_size(1 << 17);
    info_.set_max_n(1);
    info_.set_total_pages(1 << 20);
    KVASIR_ASSIGN_OR_RETURN(
        server_, base::GrpcServer::Start(ServerOptions(options), {this}));
    return absl::OkStatus();
  }
  const std::string& target() const override { return server_->target(); }

  grpc::ServerWriteReactor<v1::GenerateEvent>* Generate(
      grpc::CallbackServerContext*,
      const v1::GenerateRequest* request) override {
    return new ScriptedAnswer(*request);
  }
  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context,
                                    const v1::GetInfoRequest*,
                                    v1::WorkerInfo* info) override {
    *info = info_;
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
  grpc::ServerWriteReactor<v1::LoadReport>* WatchLoad(
      grpc::CallbackServerContext*, const v1::WatchLoadRequest*) override {
    return new ScriptedLoad(info_.total_pages());
  }

 private:
  v1::WorkerInfo info_;
  std::unique_ptr<base::GrpcServer> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BareServer>> StartScriptedWorker(
    const BareServerOptions& options) {
  base::KeepGrpcCallbackThreads();
  auto worker = std::make_unique<ScriptedWorker>();
  KVASIR_RETURN_IF_ERROR(worker->Start(options));
  return worker;
}

absl::StatusOr<std::unique_ptr<BareServer>> StartNullProxy(
    const BareServerOptions& options, const std::string& worker) {
  base::KeepGrpcCallbackThreads();
  auto proxy = std::make_unique<NullProxy>(worker);
  KVASIR_RETURN_IF_ERROR(proxy->Start(options));
  return proxy;
}

}  // namespace kvasir::bench
