// `kvasir-compress calibrate`: measures, for planners, how much each error in
// keys and values costs.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/cli/flags.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "compress/tool/calibration.h"
#include "compress/tool/commands.h"

namespace kvasir::cli {
namespace {

absl::Status RunCalibrate(const CalibrationFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(const model::Checkpoint checkpoint, OpenBase(flags));
  KVASIR_ASSIGN_OR_RETURN(
      const CalibrationInputs inputs,
      PrepareCalibration(flags, checkpoint,
                         {.statistics = true,
                          .parts = {.fisher = false, .information = true}}));
  const compress::Calibration& calibration = *inputs.calibration();
  absl::PrintF("calibration %s: %d sequences, %d tokens counted\n",
               calibration.id, calibration.num_sequences,
               calibration.num_tokens);
  for (const compress::DomainInformation& domain :
       calibration.layers[0].domains) {
    absl::PrintF("  %s: %d tokens\n", base::Printable(domain.name),
                 domain.tokens);
  }
  return absl::OkStatus();
}

}  // namespace

void AddCalibrateCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<CalibrationFlags>();
  CLI::App* command = app->add_subcommand(
      "calibrate",
      "Measures the information that plans need to weigh errors, and "
      "saves it in the cache");
  command->group("Commands");
  AddCalibrationFlags(command, *flags);
  command->callback(
      [flags, exit_code] { Report(RunCalibrate(*flags), exit_code); });
}

}  // namespace kvasir::cli
