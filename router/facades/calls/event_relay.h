// The router's view of one request of a call: copies what comes onto the call's
// strand and returns.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "router/canonical.h"

namespace kvasir::router {

// `Call` has Post(step), HandleTokens, HandleFinish and HandleDone.
template <typename Call>
class EventRelay final : public RequestSink {
 public:
  EventRelay(std::shared_ptr<Call> call, uint64_t number)
      : call_(std::move(call)), number_(number) {}

  void OnAccepted(uint32_t) override {}
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) override {
    call_->Post([number = number_, tokens](Call& call) {
      call.HandleTokens(number, tokens);
    });
  }
  void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish) override {
    call_->Post([number = number_, finish](Call& call) {
      call.HandleFinish(number, finish);
    });
  }
  void OnDone(const absl::Status& status) override {
    call_->Post([number = number_, status](Call& call) {
      call.HandleDone(number, status);
    });
  }

 private:
  const std::shared_ptr<Call> call_;
  const uint64_t number_;
};

}  // namespace kvasir::router
