// `kvasir convert`: writes a GGUF file as a Hugging Face folder.
#include <cstdio>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/cli/exit_code.h"
#include "base/cli/flags.h"
#include "base/log.h"
#include "model/checkpoint/gguf_folder.h"
#include "server/commands/commands.h"

namespace kvasir::cli {
namespace {

struct ConvertFlags {
  std::string gguf;
  std::string out;
};

}  // namespace

void AddConvertCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<ConvertFlags>();
  CLI::App* command = app->add_subcommand(
      "convert",
      "write a GGUF file as a Hugging Face folder, with the numbers that the "
      "server computes with: quantized weights become bf16");
  AddFlag(command, "--gguf", flags->gguf, "the file")
      ->required()
      ->type_name("FILE");
  AddFlag(command, "--out", flags->out, "the folder to create")
      ->required()
      ->type_name("DIR");
  command->callback([flags, exit_code] {
    base::InitLogging(base::LogFormat::kText, base::LogLevel::kWarning);
    const absl::Status status =
        model::WriteFolderOfGguf(flags->gguf, flags->out);
    if (status.ok()) {
      std::printf("%s\n", flags->out.c_str());
      return;
    }
    PrintError("kvasir convert", status.ToString());
    *exit_code = kExitFailed;
  });
}

}  // namespace kvasir::cli
