// A folder of finished calibrations and of the states of stopped runs.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "compress/calibrate/calibrate.h"
#include "compress/calibrate/calibration_sums.h"

namespace kvasir::compress {

// Returns a hash of all weights. Reads the whole checkpoint.
absl::StatusOr<std::string> WeightsId(const model::Checkpoint& checkpoint);
// Returns a hash of everything that determines the result of a calibration.
std::string IdOf(const std::string& weights_id, const CalibrationSample& sample,
                 const CalibrationParts& parts);

std::filesystem::path CalibrationPath(const std::filesystem::path& cache,
                                      const std::string& id);
std::filesystem::path StatePath(const std::filesystem::path& cache,
                                const std::string& id);

// Looks for a finished calibration that has at least the requested parts, and
// returns these parts. A damaged file is reported as a message; a file that
// cannot be read is an error.
absl::StatusOr<std::optional<Calibration>> FindCached(
    const std::string& weights_id, const CalibrationSample& sample,
    const CalibrateOptions& options, const CalibrateEvents& events);

CalibrationState StartState(const model::DecoderSpec& spec,
                            const CalibrationSample& sample,
                            const CalibrationParts& parts);
// Returns the state that was saved under this id, or a new state if there is
// none or it is damaged.
absl::StatusOr<CalibrationState> FindState(const model::DecoderSpec& spec,
                                           const CalibrationSample& sample,
                                           const std::string& id,
                                           const CalibrateOptions& options,
                                           const CalibrateEvents& events);

}  // namespace kvasir::compress
