#include "cli/eviction_flags.h"

#include "cli/flags.h"

namespace kvasir::cli {

void AddEvictionFlags(CLI::App* command, plan::EvictionSettings& settings) {
  const auto add = [&](const char* name, auto& value, const char* help) {
    return AddFlag(command, name, value, help)->group("Eviction");
  };
  add("--eviction-sinks", settings.sinks,
      "First tokens that always stay (default: 4, or the plan's exact sinks)");
  add("--eviction-recent", settings.recent,
      "Last tokens that always stay (default: 64, or a quarter of a budget in "
      "slots; the plan's exact window where that is more)");
  add("--eviction-every", settings.every_tokens,
      "Slots go at multiples of so many tokens, and at the prompt's end")
      ->check(Above(0));
  add("--eviction-lambda", settings.lambda,
      "Weight of attention received (q-hitter); the rest is friendliness to "
      "quantization")
      ->check(Between(0.0, 1.0));
  add("--eviction-decay", settings.decay,
      "What is left of attention received behind each eviction")
      ->check(Between(0.0, 1.0));
  add("--eviction-observation-window", settings.observation_window,
      "Last queries before an eviction that count in a prompt (0: all)");
  AddSwitch(command, "--eviction-half-friendliness", settings.half_friendliness,
            "Friendliness counts half, as in the code of Q-Hitter's authors")
      ->group("Eviction");
}

}  // namespace kvasir::cli
