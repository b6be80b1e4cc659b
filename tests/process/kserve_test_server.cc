// A KServe server without a model, for tests with real clients. Token ids are
// bytes. Each answer repeats the prompt, one token every --token-delay-ms.
//
//   kserve_test_server --ready-file PATH [--token-delay-ms MS]
#include <atomic>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/net/grpc_server.h"
#include "proto/refusal.h"
#include "router/base/canonical.h"
#include "router/facades/kserve/service.h"
#include "router/testing/kserve_testing.h"

namespace kvasir::tests {
namespace {

constexpr uint32_t kMaxModelLen = 1024;
constexpr uint32_t kDefaultMaxTokens = 16;
constexpr char kModel[] = "tiny";

// A router whose engine repeats the prompt. It owns the thread of this engine,
// which makes all calls of the requests' sinks.
class EchoRouter final : public router::RequestRouter {
 public:
  explicit EchoRouter(absl::Duration token_delay)
      : token_delay_(token_delay), engine_([this] { RunEngine(); }) {}
  ~EchoRouter() override {
    {
      base::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    engine_.join();
  }

  absl::StatusOr<std::shared_ptr<router::RequestHandle>> Submit(
      router::CanonicalRequest request,
      std::shared_ptr<router::RequestSink> sink) override {
    const size_t prompt = request.prompt.size_tokens();
    if (prompt >= kMaxModelLen) {
      return proto::RefusedError(
          kvasir::v1::Refusal::NEVER_FITS,
          absl::StrCat("the prompt has ", prompt,
                       " tokens; prompt and output together may have ",
                       kMaxModelLen));
    }
    auto handle = std::make_shared<Handle>();
    handle->id_ = absl::StrCat("k", next_id_++);
    handle->request_ = std::move(request);
    handle->sink_ = std::move(sink);
    base::MutexLock lock(&mutex_);
    requests_.push_back(handle);
    return std::shared_ptr<router::RequestHandle>(handle);
  }
  void LogRefused(router::CanonicalRequest, const absl::Status&) override {}
  std::vector<router::ModelStatus> Models() const override {
    return {*Model(kModel)};
  }
  absl::StatusOr<router::ModelStatus> Model(
      const std::string& name) const override {
    if (name != kModel) {
      return absl::NotFoundError(
          absl::StrCat("model '", name, "' is unknown; served: ", kModel));
    }
    router::ModelStatus model;
    model.name = kModel;
    model.ready = true;
    model.num_replicas = 1;
    model.num_ready_replicas = 1;
    model.info.emplace();
    model.info->set_max_model_len(kMaxModelLen);
    model.info->add_eos_token_ids(router::kByteEos);
    return model;
  }
  router::RouterHealth Health() const override {
    return {router::RouterState::kReady, true, ""};
  }

 private:
  struct Handle final : public router::RequestHandle {
    const std::string& id() const override { return id_; }
    void Cancel(router::CancelReason) override { cancelled_ = true; }

    std::string id_;
    router::CanonicalRequest request_;
    std::shared_ptr<router::RequestSink> sink_;
    std::atomic<bool> cancelled_{false};
    uint32_t num_tokens_ = 0;
  };

  // Generates one token of every sample. Returns false when the request
  // has ended.
  static bool Step(Handle& handle) {
    if (handle.cancelled_) {
      handle.sink_->OnDone(absl::CancelledError("cancelled"));
      return false;
    }
    const auto& sampling = handle.request_.sampling;
    const uint32_t max_tokens =
        sampling.max_tokens() > 0 ? sampling.max_tokens() : kDefaultMaxTokens;
    const router::TokenBytes& prompt = handle.request_.prompt;
    const int32_t id = prompt[handle.num_tokens_++ % prompt.size_tokens()];
    for (uint32_t index = 0; index < sampling.n(); ++index) {
      kvasir::v1::GenerateEvent::Tokens tokens;
      tokens.set_index(index);
      tokens.add_token_ids(id);
      if (sampling.has_logprobs()) tokens.add_logprobs()->set_logprob(-0.5f);
      handle.sink_->OnTokens(tokens);
      if (handle.num_tokens_ < max_tokens) continue;
      kvasir::v1::GenerateEvent::Finish finish;
      finish.set_index(index);
      finish.set_reason(kvasir::v1::FINISH_LENGTH);
      handle.sink_->OnFinish(finish);
    }
    if (handle.num_tokens_ < max_tokens) return true;
    handle.sink_->OnDone(absl::OkStatus());
    return false;
  }

  void RunEngine() {
    while (true) {
      std::vector<std::shared_ptr<Handle>> running;
      {
        base::MutexLock lock(&mutex_);
        if (stopping_) return;
        running = requests_;
      }
      for (const std::shared_ptr<Handle>& handle : running) {
        if (Step(*handle)) continue;
        handle->sink_.reset();
        base::MutexLock lock(&mutex_);
        std::erase(requests_, handle);
      }
      absl::SleepFor(token_delay_);
    }
  }

  const absl::Duration token_delay_;
  std::atomic<uint64_t> next_id_{0};
  base::Mutex mutex_;
  std::vector<std::shared_ptr<Handle>> requests_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread engine_;
};

int Main(int argc, char** argv) {
  CLI::App app("The KServe facade over a byte-echoing engine");
  std::string ready_file;
  int token_delay_ms = 1;
  app.add_option("--ready-file", ready_file)->required();
  app.add_option("--token-delay-ms", token_delay_ms)->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  // Block these signals in all threads, so that sigwait below receives them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  EchoRouter router(absl::Milliseconds(token_delay_ms));
  router::FacadeOptions options;
  options.codec = std::make_shared<router::ByteCodec>();
  options.server_version = "test";
  router::KserveService service(options, &router);
  auto server = base::GrpcServer::Start({}, {&service});
  if (!server.ok()) {
    std::fprintf(stderr, "%s\n", server.status().ToString().c_str());
    return 1;
  }
  (*server)->SetServing("", true);
  (*server)->SetServing(service.names().front(), true);
  std::ofstream(ready_file) << "{\"grpc\": \"" << (*server)->target()
                            << "\", \"model\": \"" << kModel << "\"}\n";
  int signal = 0;
  sigwait(&signals, &signal);
  (*server)->Shutdown(absl::Now());
  return 0;
}

}  // namespace
}  // namespace kvasir::tests

int main(int argc, char** argv) { return kvasir::tests::Main(argc, argv); }
