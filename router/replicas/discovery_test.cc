#include "router/replicas/discovery.h"

#include <atomic>
#include <utility>

#include "base/status_matchers.h"

namespace kvasir::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

template <typename Condition>
bool Eventually(Condition condition) {
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

// The state of a fake source, which may outlive it.
struct Script {
  base::Mutex mutex;
  base::CondVar changed;
  absl::StatusOr<std::vector<WorkerAddress>> answer ABSL_GUARDED_BY(mutex) =
      std::vector<WorkerAddress>();
  bool blocked ABSL_GUARDED_BY(mutex) = false;
  int looks ABSL_GUARDED_BY(mutex) = 0;

  void Set(absl::StatusOr<std::vector<WorkerAddress>> next) {
    base::MutexLock lock(&mutex);
    answer = std::move(next);
  }
  void Block(bool block) {
    base::MutexLock lock(&mutex);
    blocked = block;
    changed.SignalAll();
  }
  int num_looks() {
    base::MutexLock lock(&mutex);
    return looks;
  }
};

class FakeSource final : public WorkerSource {
 public:
  FakeSource(std::string name, std::shared_ptr<Script> script)
      : name_(std::move(name)), script_(std::move(script)) {}
  const std::string& name() const override { return name_; }
  MembershipRules rules() const override {
    return {.answers_to_remove = 2, .empty_keeps_live = true};
  }
  absl::StatusOr<std::vector<WorkerAddress>> Look() override {
    base::MutexLock lock(&script_->mutex);
    ++script_->looks;
    while (script_->blocked) script_->changed.Wait(&script_->mutex);
    return script_->answer;
  }

 private:
  const std::string name_;
  const std::shared_ptr<Script> script_;
};

class DiscoveryTest : public ::testing::Test {
 protected:
  void Start(absl::Duration patience = absl::Seconds(20)) {
    WorkerList list;
    list.fixed = {{"fixed:1"}};
    list.sources.push_back(std::make_unique<FakeSource>("one", one_));
    list.sources.push_back(std::make_unique<FakeSource>("two", two_));
    discovery_ = std::make_unique<Discovery>(
        std::move(list),
        Discovery::Options{.refresh = absl::Milliseconds(1),
                           .apply =
                               [this](const std::vector<WorkerAddress>& workers,
                                      const std::string& problems) {
                                 base::MutexLock lock(&mutex_);
                                 targets_.clear();
                                 for (const auto& each : workers) {
                                   targets_.push_back(each.target);
                                 }
                                 problems_ = problems;
                               },
                           .alive = [](const std::string&) { return false; }},
        &timers_);
    discovery_->Start(patience);
  }
  std::vector<std::string> targets() {
    base::MutexLock lock(&mutex_);
    return targets_;
  }
  std::string problems() {
    base::MutexLock lock(&mutex_);
    return problems_;
  }
  bool Become(const std::vector<std::string>& want) {
    return Eventually([&] { return targets() == want; });
  }
  void WaitForLooks(const std::shared_ptr<Script>& script, int more) {
    const int before = script->num_looks();
    EXPECT_TRUE(
        Eventually([&] { return script->num_looks() >= before + more; }));
  }

  const std::shared_ptr<Script> one_ = std::make_shared<Script>();
  const std::shared_ptr<Script> two_ = std::make_shared<Script>();
  base::Mutex mutex_;
  std::vector<std::string> targets_ ABSL_GUARDED_BY(mutex_);
  std::string problems_ ABSL_GUARDED_BY(mutex_);
  TimerThread timers_;
  std::unique_ptr<Discovery> discovery_;
};

TEST_F(DiscoveryTest, WorkersOfAllSourcesAreFoundBeforeStartReturns) {
  one_->Set({{{"a:1"}, {"b:1"}}});
  two_->Set({{{"c:1"}}});
  Start();
  EXPECT_THAT(targets(), ElementsAre("fixed:1", "a:1", "b:1", "c:1"));
  EXPECT_EQ(problems(), "");
}

TEST_F(DiscoveryTest, ChangesOfASourceAreFollowed) {
  Start();
  EXPECT_THAT(problems(), HasSubstr("one has no workers"));
  one_->Set({{{"a:1"}}});
  EXPECT_TRUE(Become({"fixed:1", "a:1"}));
  one_->Set({{{"b:1"}}});
  EXPECT_TRUE(Become({"fixed:1", "b:1"}));
  one_->Set(std::vector<WorkerAddress>());
  EXPECT_TRUE(Become({"fixed:1"}));
}

TEST_F(DiscoveryTest, FailedLookupsKeepTheLastListAndAreReported) {
  one_->Set({{{"a:1"}}});
  two_->Set({{{"b:1"}}});
  Start();
  one_->Set(absl::UnavailableError("no name server"));
  EXPECT_TRUE(Eventually([&] { return problems() == "one: no name server"; }));
  WaitForLooks(one_, 10);
  EXPECT_THAT(targets(), ElementsAre("fixed:1", "a:1", "b:1"));
  one_->Set({{{"a:1"}}});
  EXPECT_TRUE(Eventually([&] { return problems().empty(); }));
}

TEST_F(DiscoveryTest, ASourceThatDoesNotAnswerDelaysNeitherOthersNorTheEnd) {
  one_->Block(true);
  two_->Set({{{"b:1"}}});
  Start(absl::Milliseconds(50));
  EXPECT_TRUE(Become({"fixed:1", "b:1"}));
  two_->Set({{{"c:1"}}});
  EXPECT_TRUE(Become({"fixed:1", "c:1"}));
  EXPECT_EQ(one_->num_looks(), 1);
  discovery_.reset();
  one_->Set({{{"a:1"}}});
  one_->Block(false);
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_THAT(targets(), ElementsAre("fixed:1", "c:1"));
}

}  // namespace
}  // namespace kvasir::router
