// Flags of eviction that all commands have who put it on top of a plan; method
// and budget are the command's own.
#pragma once

#include "plan/eviction.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

void AddEvictionFlags(CLI::App* command, plan::EvictionSettings& settings);

}  // namespace kvasir::cli
