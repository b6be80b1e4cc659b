#include "cli/ranks/collective_group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/ranks/gloo_group.h"

namespace kvasir::cli {
namespace {

class Gloo final : public CollectiveGroup {
 public:
  explicit Gloo(std::unique_ptr<worker::GlooGroup> group)
      : group_(std::move(group)) {}
  const std::string& address() const override { return group_->address(); }
  absl::StatusOr<std::unique_ptr<worker::Collective>> Connect(
      absl::Span<const std::string> addresses) override {
    return std::move(*group_).Connect(addresses);
  }

 private:
  const std::unique_ptr<worker::GlooGroup> group_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CollectiveGroup>> CollectiveGroup::Begin(
    const CollectiveOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(
      auto group, worker::GlooGroup::Begin(
                      {.shard = options.shard,
                       .interface = options.interface,
                       .connect_timeout = options.connect_timeout}));
  return std::make_unique<Gloo>(std::move(group));
}

}  // namespace kvasir::cli
