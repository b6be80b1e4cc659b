// The sink that a call gives the router for one request. It only posts each
// event to the call's strand. So the router's threads do no other work for
// the call.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "router/base/canonical.h"
#include "router/identity/quota.h"

namespace kvasir::router {

// `Call` must have the methods Post(step), HandleTokens, HandleFinish
// and HandleDone.
template <typename Call>
class EventRelay final : public RequestSink {
 public:
  // `place` is the request's place in the tenant's quota, or null if the tenant
  // has no quota. This sink frees the place when the request ends.
  EventRelay(std::shared_ptr<Call> call, uint64_t number,
             std::shared_ptr<RequestPlace> place)
      : call_(std::move(call)), number_(number), place_(std::move(place)) {}

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
    if (place_ != nullptr) place_->Leave();
    call_->Post([number = number_, status](Call& call) {
      call.HandleDone(number, status);
    });
  }

 private:
  const std::shared_ptr<Call> call_;
  const uint64_t number_;
  const std::shared_ptr<RequestPlace> place_;
};

}  // namespace kvasir::router
