#include "model/checkpoint/weight_tiles.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/kvasir/v1/weight_tiles.pb.h"

namespace kvasir::model {
namespace {

using kvasir::v1::WeightTiles;

constexpr uint32_t kVersion = 1;
constexpr size_t kHashBytes = 16;

void AppendHash(const Fingerprint& hash, std::string* out) {
  for (const uint64_t half : {hash.high, hash.low}) {
    for (int byte = 0; byte < 8; ++byte) {
      out->push_back(static_cast<char>(half >> (8 * byte)));
    }
  }
}

Fingerprint HashAt(const std::string& hashes, size_t index) {
  uint64_t halves[2] = {0, 0};
  for (size_t i = 0; i < kHashBytes; ++i) {
    const auto byte = static_cast<uint8_t>(hashes[index * kHashBytes + i]);
    halves[i / 8] |= uint64_t{byte} << (8 * (i % 8));
  }
  return {halves[0], halves[1]};
}

std::string Describe(size_t rank, const std::string& tensor) {
  return absl::StrCat("rank ", rank, ": tensor ", tensor);
}

absl::StatusOr<WeightTiles> Parse(size_t rank, const std::string& text) {
  WeightTiles parsed;
  if (!parsed.ParseFromString(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, ": it sent ", text.size(),
                     " bytes that are not a WeightTiles message"));
  }
  if (parsed.version() != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", rank, ": its WeightTiles message has format version ",
        parsed.version(), ", but must have ", kVersion));
  }
  if (parsed.id().empty() == parsed.tensors().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank,
                     ": its WeightTiles message must have either tensors or "
                     "the id of the weights, but has ",
                     parsed.id().empty() ? "neither" : "both"));
  }
  return parsed;
}

// Checks the fields that must be equal on all ranks.
absl::Status CheckAlike(const WeightTiles& first, size_t rank,
                        const WeightTiles& other) {
  if (other.id() != first.id() || other.model() != first.model()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " has the weights of another model than rank 0: \"",
        other.id(), other.model(), "\" instead of \"", first.id(),
        first.model(), "\""));
  }
  const int common = std::min(first.tensors_size(), other.tensors_size());
  for (int i = 0; i < common; ++i) {
    const WeightTiles::Tensor& want = first.tensors(i);
    const WeightTiles::Tensor& have = other.tensors(i);
    if (have.name() != want.name()) {
      return absl::FailedPreconditionError(absl::StrCat(
          Describe(rank, have.name()),
          ": rank 0 has sent another tensor at this place of its list, ",
          want.name()));
    }
    if (have.type_and_shape() != want.type_and_shape() ||
        have.rows() != want.rows() || have.columns() != want.columns()) {
      return absl::FailedPreconditionError(absl::StrCat(
          Describe(rank, have.name()), " is ", have.type_and_shape(), " in ",
          have.rows(), " x ", have.columns(), " tiles, but on rank 0 ",
          want.type_and_shape(), " in ", want.rows(), " x ", want.columns()));
    }
  }
  if (other.tensors_size() == first.tensors_size()) return absl::OkStatus();
  const bool more = other.tensors_size() > common;
  return absl::FailedPreconditionError(absl::StrCat(
      Describe(rank, (more ? other : first).tensors(common).name()), " is ",
      more ? "not on rank 0" : "missing, but rank 0 has it"));
}

// Combines the tiles that all ranks have sent for one tensor.
class Combiner {
 public:
  explicit Combiner(const WeightTiles::Tensor& tensor) : tensor_(tensor) {}

  // `num_hashes` is the number of hashes that all ranks together have sent for
  // the tensor. Checks that they are enough for all its tiles. Memory is
  // allocated only after this check, so a tensor cannot claim more tiles than
  // were sent.
  absl::Status Begin(uint64_t num_hashes) {
    const uint64_t rows = tensor_.rows();
    const uint64_t columns = tensor_.columns();
    if (rows > 0 && columns > num_hashes / rows) return Missing("some");
    tiles_.type_and_shape = tensor_.type_and_shape();
    tiles_.rows = static_cast<int64_t>(rows);
    tiles_.columns = static_cast<int64_t>(columns);
    tiles_.hashes.resize(rows * columns);
    tiles_.known.resize(tiles_.hashes.size());
    from_.resize(tiles_.hashes.size());
    return absl::OkStatus();
  }

  absl::Status Add(size_t rank, const WeightTiles::Run& run) {
    const size_t count = run.hashes().size() / kHashBytes;
    const size_t all = tiles_.hashes.size();
    if (run.hashes().size() % kHashBytes != 0 || run.first() > all ||
        count > all - run.first()) {
      return absl::InvalidArgumentError(absl::StrCat(
          Describe(rank, tensor_.name()), ": the hashes that start at tile ",
          run.first(), " have ", run.hashes().size(),
          " bytes, which does not fit a tensor of ", all,
          " tiles with one hash of ", kHashBytes, " bytes each"));
    }
    for (size_t i = 0; i < count; ++i) {
      const size_t at = run.first() + i;
      const Fingerprint hash = HashAt(run.hashes(), i);
      if (tiles_.known[at] && tiles_.hashes[at] != hash) {
        return absl::FailedPreconditionError(
            absl::StrCat(Describe(rank, tensor_.name()), ", ", TileText(at),
                         ": it has read other bytes than rank ", from_[at]));
      }
      tiles_.hashes[at] = hash;
      tiles_.known[at] = true;
      from_[at] = static_cast<uint32_t>(rank);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<TensorTiles> Finish() && {
    const auto missing =
        std::find(tiles_.known.begin(), tiles_.known.end(), false);
    if (missing != tiles_.known.end()) {
      return Missing(
          TileText(static_cast<size_t>(missing - tiles_.known.begin())));
    }
    return std::move(tiles_);
  }

 private:
  std::string TileText(size_t at) const {
    return absl::StrCat("tile ", at / tensor_.columns(), ", ",
                        at % tensor_.columns());
  }
  absl::Status Missing(const std::string& which) const {
    return absl::FailedPreconditionError(absl::StrCat(
        "tensor ", tensor_.name(), ": no rank has read ", which, " of its ",
        tensor_.rows(), " x ", tensor_.columns(), " tiles"));
  }

  const WeightTiles::Tensor& tensor_;
  TensorTiles tiles_;
  std::vector<uint32_t> from_;  // the rank that sent each tile
};

}  // namespace

std::string WeightTilesText(const TilesByName& tensors,
                            const DecoderSpec& spec) {
  WeightTiles text;
  text.set_version(kVersion);
  text.set_model(OutputsText(spec));
  for (const auto& [name, tiles] : tensors) {
    WeightTiles::Tensor* const tensor = text.add_tensors();
    tensor->set_name(name);
    tensor->set_type_and_shape(tiles.type_and_shape);
    tensor->set_rows(static_cast<uint64_t>(tiles.rows));
    tensor->set_columns(static_cast<uint64_t>(tiles.columns));
    WeightTiles::Run* run = nullptr;
    for (size_t i = 0; i < tiles.hashes.size(); ++i) {
      if (!tiles.known[i]) {
        run = nullptr;
        continue;
      }
      if (run == nullptr) {
        run = tensor->add_runs();
        run->set_first(i);
      }
      AppendHash(tiles.hashes[i], run->mutable_hashes());
    }
  }
  return text.SerializeAsString();
}

std::string WeightTilesText(std::string_view id) {
  WeightTiles text;
  text.set_version(kVersion);
  text.set_id(std::string(id));
  return text.SerializeAsString();
}

absl::StatusOr<std::string> CombineWeightTiles(
    absl::Span<const std::string> ranks) {
  if (ranks.empty()) {
    return absl::InvalidArgumentError("no rank has sent a WeightTiles message");
  }
  std::vector<WeightTiles> parsed;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    KVASIR_ASSIGN_OR_RETURN(parsed.emplace_back(), Parse(rank, ranks[rank]));
    KVASIR_RETURN_IF_ERROR(CheckAlike(parsed[0], rank, parsed[rank]));
  }
  const WeightTiles& first = parsed[0];
  if (!first.id().empty()) return first.id();
  TilesByName tensors;
  for (int i = 0; i < first.tensors_size(); ++i) {
    Combiner combiner(first.tensors(i));
    uint64_t num_hashes = 0;
    for (const WeightTiles& rank : parsed) {
      for (const WeightTiles::Run& run : rank.tensors(i).runs()) {
        num_hashes += run.hashes().size() / kHashBytes;
      }
    }
    KVASIR_RETURN_IF_ERROR(combiner.Begin(num_hashes));
    for (size_t rank = 0; rank < parsed.size(); ++rank) {
      for (const WeightTiles::Run& run : parsed[rank].tensors(i).runs()) {
        KVASIR_RETURN_IF_ERROR(combiner.Add(rank, run));
      }
    }
    const std::string& name = first.tensors(i).name();
    KVASIR_ASSIGN_OR_RETURN(TensorTiles tiles, std::move(combiner).Finish());
    if (!tensors.emplace(name, std::move(tiles)).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(Describe(0, name), " is listed twice"));
    }
  }
  return WeightsIdOf(tensors, first.model());
}

}  // namespace kvasir::model
