#include "compress/calibrate/calibration_cache.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "compress/artifact/tensor_file.h"

namespace kvasir::compress {
namespace {

constexpr size_t kFingerprintBuffer = size_t{8} << 20;

// Returns whether the file is missing or damaged, so that it can be made again.
// Any other error ends the calibration, because the file may hold hours of
// work.
bool CanBeMadeAnew(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsDataLoss(status);
}

// Removes the parts that were not requested, so that the result does not depend
// on what the cache happens to hold.
Calibration WithParts(Calibration calibration, const CalibrationParts& parts,
                      const std::string& id) {
  calibration.id = id;
  for (LayerCalibration& layer : calibration.layers) {
    if (!parts.fisher) {
      layer.key_fisher = at::Tensor();
      layer.value_fisher = at::Tensor();
      layer.key_fisher_root = at::Tensor();
      layer.value_fisher_root = at::Tensor();
    }
    if (!parts.rotated_keys) {
      layer.rotated_key_gram = at::Tensor();
      layer.rotated_key_sum = at::Tensor();
    }
    if (!parts.information) {
      layer.key_information = at::Tensor();
      layer.value_information = at::Tensor();
      layer.domains.clear();
      layer.sample_rows = at::Tensor();
      layer.sample_positions = at::Tensor();
      layer.sample_domains = at::Tensor();
      layer.sample_held_out = at::Tensor();
    }
  }
  return calibration;
}

// Returns a text with the sample's domains, held-out sequences and sink tokens;
// empty if the sample has none of these.
std::string BesideTokens(const CalibrationSample& sample) {
  std::string text;
  if (!sample.domains.empty()) {
    absl::StrAppend(&text, " domains ", absl::StrJoin(sample.domains, ","),
                    " of ", absl::StrJoin(sample.sequence_domains, ","));
  }
  if (sample.held_out_sequences > 0) {
    absl::StrAppend(&text, " held out ", sample.held_out_sequences);
  }
  if (sample.sink_tokens > 0) {
    absl::StrAppend(&text, " sinks ", sample.sink_tokens);
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> WeightsId(const model::Checkpoint& checkpoint) {
  model::WeightsIdBuilder builder;
  std::vector<std::byte> buffer(kFingerprintBuffer);
  for (const auto& [name, entry] : checkpoint.tensors().entries()) {
    if (!model::IsWeightType(entry.info->type)) continue;
    buffer.resize(std::max<size_t>(buffer.size(), entry.info->row_bytes()));
    model::TensorStream stream(entry, buffer);
    while (true) {
      KVASIR_ASSIGN_OR_RETURN(const model::TensorStream::Block block,
                              stream.Next());
      if (block.num_rows == 0) break;
    }
    builder.Add(name, stream.info(), stream.tiles());
  }
  return builder.Finish(checkpoint.spec());
}

std::string IdOf(const std::string& weights_id, const CalibrationSample& sample,
                 const CalibrationParts& parts) {
  std::string tokens;
  for (const std::vector<int32_t>& sequence : sample.sequences) {
    tokens.append(reinterpret_cast<const char*>(sequence.data()),
                  sequence.size() * sizeof(int32_t));
  }
  // Increase this number when a change of the program gives other results for
  // the same inputs.
  constexpr int kVersion = 2;
  return TextHash(absl::StrCat(
      "calibration ", kVersion, " weights ", weights_id, " tokens ",
      TextHash(tokens), " ", sample.num_sequences(), " of ",
      sample.sequence_tokens, " fisher ", parts.fisher, " rotated keys ",
      parts.rotated_keys,
      parts.information
          ? absl::StrCat(" information ", parts.labels_per_position, " rows ",
                         parts.sample_rows)
          : "",
      BesideTokens(sample)));
}

std::filesystem::path CalibrationPath(const std::filesystem::path& cache,
                                      const std::string& id) {
  return cache / absl::StrCat("calibration-", id, ".safetensors");
}

std::filesystem::path StatePath(const std::filesystem::path& cache,
                                const std::string& id) {
  return cache / absl::StrCat("calibration-", id, ".state");
}

absl::StatusOr<std::optional<Calibration>> FindCached(
    const std::string& weights_id, const CalibrationSample& sample,
    const CalibrateOptions& options, const CalibrateEvents& events) {
  for (unsigned more = 0; more < 8; ++more) {
    CalibrationParts parts = options.parts;
    parts.fisher = (more & 1) != 0;
    parts.rotated_keys = (more & 2) != 0;
    parts.information = (more & 4) != 0;
    if (!parts.Includes(options.parts)) continue;
    const std::string id = IdOf(weights_id, sample, parts);
    const std::filesystem::path path = CalibrationPath(options.cache, id);
    const absl::StatusOr<TensorFile> file = ReadTensorFile(path);
    absl::Status status = file.status();
    if (file.ok()) {
      absl::StatusOr<Calibration> calibration =
          CalibrationFromFile(*file, id, sample, parts);
      if (calibration.ok()) {
        return WithParts(*std::move(calibration), options.parts,
                         IdOf(weights_id, sample, options.parts));
      }
      status = calibration.status();
    }
    if (!CanBeMadeAnew(status)) return status;
    if (!absl::IsNotFound(status)) {
      events.on_message(absl::StrCat("warning: ", status.message(),
                                     "; the calibration is computed again"));
    }
  }
  return std::nullopt;
}

CalibrationState StartState(const model::DecoderSpec& spec,
                            const CalibrationSample& sample,
                            const CalibrationParts& parts) {
  CalibrationState state;
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    state.layers.push_back(ZeroSums(spec, sample, parts));
  }
  return state;
}

absl::StatusOr<CalibrationState> FindState(const model::DecoderSpec& spec,
                                           const CalibrationSample& sample,
                                           const std::string& id,
                                           const CalibrateOptions& options,
                                           const CalibrateEvents& events) {
  const absl::StatusOr<TensorFile> file =
      ReadTensorFile(StatePath(options.cache, id));
  absl::Status status = file.status();
  if (file.ok()) {
    absl::StatusOr<CalibrationState> state =
        StateFromFile(*file, id, spec, sample, options.parts);
    if (state.ok()) {
      events.on_message("resuming where the last run stopped");
      return *std::move(state);
    }
    status = state.status();
  }
  if (!CanBeMadeAnew(status)) return status;
  if (!absl::IsNotFound(status)) {
    events.on_message(
        absl::StrCat("warning: ", status.message(),
                     "; the calibration starts from the beginning"));
  }
  return StartState(spec, sample, options.parts);
}

}  // namespace kvasir::compress
