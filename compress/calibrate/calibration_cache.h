// Finished calibrations and the states of stopped ones, in a folder.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "compress/calibrate/calibrate.h"
#include "compress/calibrate/calibration_sums.h"

namespace kvasir::compress {

// Hash of all weights, which are read.
absl::StatusOr<std::string> WeightsId(const model::Checkpoint& checkpoint);
// Hash of what a calibration is made of.
std::string IdOf(const std::string& weights_id, const CalibrationSample& sample,
                 const CalibrationParts& parts);

std::filesystem::path CalibrationPath(const std::filesystem::path& cache,
                                      const std::string& id);
std::filesystem::path StatePath(const std::filesystem::path& cache,
                                const std::string& id);

// What is asked for, of a finished calibration with these parts or more. A
// damaged file is a message; one that cannot be read is an error.
absl::StatusOr<std::optional<Calibration>> FindCached(
    const std::string& weights_id, const CalibrationSample& sample,
    const CalibrateOptions& options, const CalibrateEvents& events);

CalibrationState StartState(const model::DecoderSpec& spec,
                            const CalibrationSample& sample,
                            const CalibrationParts& parts);
// The kept state of this id; where there is none, a new one.
absl::StatusOr<CalibrationState> FindState(const model::DecoderSpec& spec,
                                           const CalibrationSample& sample,
                                           const std::string& id,
                                           const CalibrateOptions& options,
                                           const CalibrateEvents& events);

}  // namespace kvasir::compress
