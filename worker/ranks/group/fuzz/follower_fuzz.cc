// Fuzz test with a malicious leader: whatever it sends, the invariants of
// FollowerState must hold.
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "base/check.h"
#include "worker/ranks/group/follower_state.h"

namespace {

using kvasir::v1::LeaderMessage;
using kvasir::worker::FollowerState;
using Phase = FollowerState::Phase;

kvasir::v1::RankHello Hello() {
  kvasir::v1::RankHello hello;
  hello.mutable_identity()->set_tp_size(2);
  hello.mutable_identity()->set_heartbeat_timeout_ms(3000);
  return hello;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  absl::Time now = absl::UnixEpoch();
  FollowerState state(Hello(), absl::Seconds(20), now);
  uint64_t taken = 0;
  uint64_t done = 0;
  const auto take = [&]() -> uint8_t {
    if (size == 0) return 0;
    --size;
    return *data++;
  };
  while (size > 0) {
    LeaderMessage message;
    bool parsed = true;
    switch (take() % 12) {
      case 0:
        message.mutable_welcome();
        for (int i = take() % 4; i > 0; --i) {
          message.mutable_welcome()->add_collective_addresses("at");
        }
        break;
      case 1:
        message.mutable_start()->add_pages(take());
        break;
      case 2:
        message.mutable_step()->set_step_id(take() % 8);
        break;
      case 3:
        message.mutable_drain();
        break;
      case 4:
        message.mutable_abort()->set_code(take());
        break;
      case 5: {
        std::string bytes;
        for (int i = take(); i > 0 && size > 0; --i) {
          bytes.push_back(static_cast<char>(take()));
        }
        parsed = message.ParseFromString(bytes);
        if (!parsed) state.OnGarbage(bytes.size());
        break;
      }
      case 6:
        parsed = false;
        now += absl::Milliseconds(250);
        state.OnTime(now);
        break;
      case 7: {
        parsed = false;
        kvasir::v1::RankReady ready;
        ready.add_pages(10);
        (void)state.OnReady(ready);
        break;
      }
      case 8:
        parsed = false;
        if (const auto plan = state.TakeStep()) {
          // Steps are returned in order, and at most kMaxStepsInFlight are in
          // flight.
          KVASIR_CHECK(plan->step_id() == ++taken);
          KVASIR_CHECK(taken - done <= kvasir::worker::kMaxStepsInFlight);
        }
        break;
      case 9:
        parsed = false;
        if (state.OnStepDone(done + 1, 0).ok()) ++done;
        KVASIR_CHECK(done <= taken);
        break;
      case 10:
        parsed = false;
        state.OnLost(absl::UnavailableError("lost"));
        break;
      default:
        message.mutable_heartbeat();
    }
    if (parsed) state.OnMessage(&message, now);
    (void)state.TakeMessages();
    if (state.phase() == Phase::kEnded) {
      KVASIR_CHECK(!state.TakeStep().has_value());
    } else {
      KVASIR_CHECK(state.status().ok());
    }
    if (state.started()) KVASIR_CHECK(state.start().pages(0) <= 10);
  }
  for (int i = 0; i < 100; ++i) state.OnTime(now += absl::Milliseconds(250));
  KVASIR_CHECK(state.phase() == Phase::kEnded);
  return 0;
}
