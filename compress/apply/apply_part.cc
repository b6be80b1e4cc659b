#include "compress/apply/apply_part.h"

#include <numeric>

#include "absl/strings/str_cat.h"

namespace kvasir::compress {

using kvasir::v1::Codec;

const at::Tensor& PartInput::weight(plan::Side side_wanted) const {
  return side_wanted == plan::Side::kKey ? request->weights.key
                                         : request->weights.value;
}

const at::Tensor& PartInput::bias(plan::Side side_wanted) const {
  return side_wanted == plan::Side::kKey ? request->weights.key_bias
                                         : request->weights.value_bias;
}

std::string PartInput::Place() const {
  return absl::StrCat("layer ", request->layer, " ",
                      shape->joint ? "joint" : plan::SideName(side), " part ",
                      shape->index, ": ");
}

at::Tensor ChoiceOfDims(int64_t head_dim, const std::vector<int64_t>& dims) {
  return at::eye(head_dim, at::kDouble)
      .index_select(1, at::tensor(dims, at::kLong));
}

at::Tensor RowsOfHeads(const at::Tensor& matrix, int64_t head_dim,
                       const std::vector<int64_t>& heads,
                       const std::vector<int64_t>& dims) {
  std::vector<int64_t> rows;
  rows.reserve(heads.size() * dims.size());
  for (const int64_t head : heads) {
    for (const int64_t dim : dims) rows.push_back(head * head_dim + dim);
  }
  return matrix.index_select(0, at::tensor(rows, at::kLong));
}

std::vector<int64_t> StoredIndices(const Codec& codec, int64_t width) {
  std::vector<int64_t> channels;
  const auto& schedule = codec.bits().schedule();
  if (schedule.size() <= 1 || codec.has_basis_sequence()) {
    // Without a schedule of bit widths, channels of 0 bits come last, so the
    // stored channels are the first ones.
    channels.resize(static_cast<size_t>(
        codec.bits().runs_size() == 0
            ? width
            : plan::ResolveCodec(codec, width).latents[0].channels));
    std::iota(channels.begin(), channels.end(), 0);
    return channels;
  }
  const int64_t run = width / schedule.size();
  for (int64_t channel = 0; channel < run * schedule.size(); ++channel) {
    if (schedule.Get(static_cast<int>(channel / run)) > 0) {
      channels.push_back(channel);
    }
  }
  return channels;
}

absl::Status ErrorOf(const PartInput& input, const absl::Status& error) {
  return absl::Status(error.code(),
                      absl::StrCat(input.Place(), error.message()));
}

absl::Status NeedCalibration(const PartInput& input, const std::string& what) {
  if (input.request->calibration != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      input.Place(), what, " needs a calibration, and there is none"));
}

}  // namespace kvasir::compress
