// Test fixture for one client call of a facade, without gRPC and without other
// threads. The test decides when posted tasks run and when writes finish.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "router/base/task_runner.h"
#include "router/facades/calls/response_pump.h"
#include "router/facades/calls/single_call.h"
#include "router/testing/byte_codec.h"
#include "router/testing/fake_router.h"

namespace kvasir::router {

class ManualRunner final : public TaskRunner {
 public:
  bool Post(Task task) override {
    if (tasks_.size() >= max_queued) return false;
    tasks_.push_back(std::move(task));
    return true;
  }
  bool RunOne() {
    if (tasks_.empty() || paused) return false;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    task();
    return true;
  }

  size_t max_queued = 1000;
  // If true, posted tasks wait and do not run.
  bool paused = false;

 private:
  std::deque<Task> tasks_;
};

template <typename Response, typename Writer = CallWriter<Response>>
class FakeWriter : public Writer {
 public:
  void Write(Response response) override {
    EXPECT_FALSE(writing) << "two writes at once";
    EXPECT_FALSE(end.has_value());
    writing = true;
    writes.push_back(std::move(response));
  }
  void Reset() override { was_reset = true; }
  void End(const absl::Status& status) override {
    EXPECT_FALSE(end.has_value()) << "ended twice";
    EXPECT_FALSE(writing) << "ended within a write";
    end = status;
  }

  bool writing = false;
  bool was_reset = false;
  std::vector<Response> writes;
  std::optional<absl::Status> end;
};

template <typename Answer>
class SingleCallTest : public ::testing::Test {
 protected:
  using Call = SingleCall<Answer>;

  void SetUp() override {
    backend_->router = &router_;
    backend_->codec = std::make_shared<ByteCodec>();
    backend_->facade = "vllm";
    backend_->tokenizer = tokenizer_;
  }
  // Ends a request that still runs. Otherwise it would never be destroyed,
  // because the fake router holds its sink and the sink holds the call.
  void TearDown() override {
    if (call_ == nullptr) return;
    call_->OnCancelled();
    RunWrites();
    EXPECT_TRUE(writer_.end.has_value());
  }
  void Run() {
    while (strand_->RunOne() || tokenizer_->RunOne()) {
    }
  }
  // Runs tasks and finishes writes until none is left.
  void RunWrites() {
    Run();
    while (writer_.writing) {
      writer_.writing = false;
      call_->OnWritten(true);
      Run();
    }
  }
  // Begins a call with `message`. `parse` turns the message into a request.
  // `prepare` gets this request on the tokenizer's runner.
  template <typename Message, typename Parse, typename Prepare>
  void Begin(const Message& message, Parse parse, Prepare prepare) {
    call_ = std::make_shared<Call>(
        typename Call::Parts{.backend = backend_,
                             .identity = identity_,
                             .message_bytes = message.ByteSizeLong(),
                             .strand = strand_,
                             .writer = &writer_});
    call_->Begin([this, message, parse, prepare] {
      auto request = parse(message);
      typename Call::Asked asked{.model = "tiny",
                                 .id = message.request_id(),
                                 .prepare = absl::UnknownError("not read")};
      if (!request.ok()) {
        asked.prepare = request.status();
        return asked;
      }
      asked.n = request->sampling.n();
      asked.prepare =
          typename Call::Prepare([this, prepare, request = *request]() mutable {
            return prepare(std::move(request), *router_.Model("tiny")->info,
                           backend_->codec, backend_->limits);
          });
      return asked;
    });
    Run();
  }
  FakeRouter::Request& Engine() { return *router_.WaitFor(0); }

  FakeRouter router_;
  CallIdentity identity_;
  std::shared_ptr<ManualRunner> strand_ = std::make_shared<ManualRunner>();
  std::shared_ptr<ManualRunner> tokenizer_ = std::make_shared<ManualRunner>();
  std::shared_ptr<FacadeBackend> backend_ = std::make_shared<FacadeBackend>();
  FakeWriter<typename Answer::Response> writer_;
  std::shared_ptr<Call> call_;
};

}  // namespace kvasir::router
