#include "worker/load/collective_group.h"

#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/ranks/gloo/gloo_group.h"
#include "worker/ranks/nccl/nccl_group.h"

namespace kvasir::cli {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

// `Group` is GlooGroup or NcclGroup.
template <typename Group>
class GroupOf final : public CollectiveGroup {
 public:
  explicit GroupOf(std::unique_ptr<Group> group) : group_(std::move(group)) {}
  const std::string& address() const override { return group_->address(); }
  absl::StatusOr<std::unique_ptr<worker::Collective>> Connect(
      absl::Span<const std::string> addresses) override {
    return std::move(*group_).Connect(addresses);
  }
  void Abort([[maybe_unused]] const absl::Status& reason) override {
    if constexpr (std::is_same_v<Group, worker::GlooGroup>) {
      group_->Abort(reason);
    }
  }

 private:
  const std::unique_ptr<Group> group_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CollectiveGroup>> CollectiveGroup::Begin(
    const CollectiveOptions& options) {
  if (options.kind == "nccl") {
    worker::NcclOptions nccl;
    nccl.shard = options.shard;
    nccl.interface = options.interface;
    if (!options.nccl_library.empty()) nccl.libraries = {options.nccl_library};
    nccl.deterministic = options.deterministic;
    nccl.use_device = options.use_device;
    nccl.connect_timeout = options.connect_timeout;
    nccl.call_timeout = options.call_timeout;
    nccl.on_failure = options.on_failure;
    KVASIR_ASSIGN_OR_RETURN(auto group, worker::NcclGroup::Begin(nccl));
    return std::make_unique<GroupOf<worker::NcclGroup>>(std::move(group));
  }
  worker::GlooOptions gloo;
  gloo.shard = options.shard;
  gloo.interface = options.interface.empty() ? kLoopback : options.interface;
  gloo.connect_timeout = options.connect_timeout;
  gloo.call_timeout = options.call_timeout;
  KVASIR_ASSIGN_OR_RETURN(auto group, worker::GlooGroup::Begin(gloo));
  return std::make_unique<GroupOf<worker::GlooGroup>>(std::move(group));
}

}  // namespace kvasir::cli
