// Methods of ModelExecutor that access pages between steps: reading and writing
// images (host-pool pages as bytes), measuring the speed of copies to the host
// pool, and reading the positions of slots.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "kernels/device/read_back.h"
#include "worker/executor/model_executor.h"

namespace kvasir::worker {
namespace {

std::vector<int32_t> IdsOf(const std::vector<cache::PagePin>& pages) {
  std::vector<int32_t> ids;
  for (const cache::PagePin& page : pages) ids.push_back(page.page().value());
  return ids;
}

}  // namespace

absl::StatusOr<std::vector<uint32_t>> ModelExecutor::ReadPositions(
    int64_t layer, absl::Span<const int32_t> pages, int64_t num_slots) const {
  if (in_flight_) {
    return absl::FailedPreconditionError(
        "the token positions of slots cannot be read while a step is in "
        "flight");
  }
  return arenas_.ReadPositions(*parts_.stream, layer, pages, num_slots);
}

absl::StatusOr<std::string> ModelExecutor::ReadImage(
    const cache::SequenceImage& image) const {
  if (in_flight_) {
    return absl::FailedPreconditionError(
        "a sequence's image cannot be read while a step is in flight");
  }
  std::string payload;
  for (size_t g = 0; g < image.pages.size(); ++g) {
    const auto group = static_cast<int64_t>(g);
    const std::vector<int32_t> ids = IdsOf(image.pages[g]);
    const size_t begin = payload.size();
    const size_t bytes =
        ids.size() * static_cast<size_t>(arenas_.page_bytes(group));
    payload.resize(begin + bytes);
    KVASIR_RETURN_IF_ERROR(
        arenas_.ReadHostPages(*parts_.stream, group, ids,
                              absl::MakeSpan(payload.data() + begin, bytes)));
  }
  return payload;
}

absl::Status ModelExecutor::WriteImage(const cache::SequenceImage& image,
                                       absl::string_view payload) {
  if (in_flight_) {
    return absl::FailedPreconditionError(
        "a sequence's image cannot be written while a step is in flight");
  }
  size_t want = 0;
  for (size_t g = 0; g < image.pages.size(); ++g) {
    want += image.pages[g].size() *
            static_cast<size_t>(arenas_.page_bytes(static_cast<int64_t>(g)));
  }
  if (payload.size() != want) {
    return absl::InvalidArgumentError(
        absl::StrCat("a sequence's image has ", payload.size(),
                     " bytes of pages, but must have ", want));
  }
  for (size_t g = 0; g < image.pages.size(); ++g) {
    const auto group = static_cast<int64_t>(g);
    const std::vector<int32_t> ids = IdsOf(image.pages[g]);
    const size_t bytes =
        ids.size() * static_cast<size_t>(arenas_.page_bytes(group));
    KVASIR_RETURN_IF_ERROR(
        arenas_.WriteHostPages(*parts_.stream, group, ids,
                               absl::MakeConstSpan(payload.data(), bytes)));
    payload.remove_prefix(bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<double> ModelExecutor::MeasureCopyBytesPerSecond() {
  constexpr int64_t kBytes = int64_t{16} << 20;
  if (last_step_id() != 0) {
    return absl::FailedPreconditionError(
        "executor: the speed of copies can be measured only before the first "
        "step");
  }
  const int64_t page_bytes = arenas_.page_bytes(0);
  const int64_t host_pages =
      parts_.host_pages.empty() ? 0 : parts_.host_pages[0];
  const int64_t count = std::min(
      {std::max(int64_t{1}, kBytes / page_bytes), parts_.pages[0], host_pages});
  if (count == 0) return 0.0;
  google::protobuf::RepeatedPtrField<kvasir::v1::PageCopy> copies;
  for (int32_t page = 0; page < count; ++page) {
    kvasir::v1::PageCopy* const copy = copies.Add();
    copy->set_from_page(page);
    copy->set_to_page(page);
    copy->set_to_host(true);
  }
  KvArenas::CopyList list;
  KVASIR_RETURN_IF_ERROR(arenas_.AddCopies(
      {copies.data(), static_cast<size_t>(copies.size())}, &list));
  const size_t pair_bytes = list.pairs.size() * sizeof(kernels::PagePair);
  KVASIR_ASSIGN_OR_RETURN(const kernels::DeviceBuffer pairs,
                          parts_.device->allocator().Allocate(
                              pair_bytes, kernels::MemoryTag::kOther));
  KVASIR_RETURN_IF_ERROR(kernels::Upload(*parts_.stream, pairs.data(),
                                         list.pairs.data(), pair_bytes));
  KVASIR_RETURN_IF_ERROR(parts_.stream->Synchronize());
  kernels::Workspace workspace = launcher_->workspace();
  const absl::Time start = base::Clock::Real().Now();
  KVASIR_RETURN_IF_ERROR(arenas_.Copy(*parts_.stream, list.batches.front(),
                                      pairs.as<const kernels::PagePair>(),
                                      workspace));
  KVASIR_RETURN_IF_ERROR(parts_.stream->Synchronize());
  const double seconds =
      absl::ToDoubleSeconds(base::Clock::Real().Now() - start);
  return static_cast<double>(count * page_bytes) / std::max(seconds, 1e-9);
}

}  // namespace kvasir::worker
