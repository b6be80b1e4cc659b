#include "plan/eviction_flags.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/status_macros.h"
#include "plan/plan.h"

namespace kvasir::cli {
namespace {

// Returns the eviction's settings, including the defaults, as flags for the
// plan's provenance.
std::string OptionsOf(const EvictionFlags& flags,
                      const plan::EvictionSettings& settings) {
  std::string options =
      absl::StrCat("--eviction ", flags.method, " --eviction-budget ",
                   flags.budget, " --eviction-every ", settings.every_tokens);
  if (settings.method == plan::EvictionMethod::kQHitter) {
    absl::StrAppend(&options, " --eviction-lambda ", settings.lambda);
  }
  if (settings.rolling) absl::StrAppend(&options, " --eviction-rolling");
  const auto given = [&](const char* flag, auto value) {
    absl::StrAppend(&options, " ", flag, " ", value);
  };
  if (settings.sinks) given("--eviction-sinks", *settings.sinks);
  if (settings.recent) given("--eviction-recent", *settings.recent);
  if (settings.decay != 1) given("--eviction-decay", settings.decay);
  if (settings.observation_window > 0) {
    given("--eviction-observation-window", settings.observation_window);
  }
  if (settings.half_friendliness) {
    absl::StrAppend(&options, " --eviction-half-friendliness");
  }
  return options;
}

}  // namespace

void AddEvictionFlags(CLI::App* command, EvictionFlags& flags, bool of_plan) {
  AddFlag(command, "--eviction", flags.method,
          of_plan
              ? "Evict tokens from the cache, with any plan: h2o keeps "
                "the tokens that received most attention, q-hitter also "
                "considers how accurate their codes are, streaming keeps "
                "the first and the latest. Use it for texts that are "
                "longer than the cache, or for more texts than it holds. "
                "The model no longer knows the evicted tokens, and prefixes "
                "are not reused (docs/guide.md describes the costs)"
              : "Evict tokens, in addition to any compression method: "
                "q-hitter, h2o or streaming")
      ->check(CLI::IsMember({"q-hitter", "h2o", "streaming"}))
      ->group("Eviction");
  AddFlag(command, "--eviction-budget", flags.budget,
          "The tokens that stay: a share of the prompt (0.2), or a "
          "number (256)")
      ->check(Checked([](const std::string& text) {
        return plan::ParseEvictionBudget(text).status();
      }))
      ->group("Eviction");
  AddEvictionSettings(command, flags.settings);
}

void AddEvictionSettings(CLI::App* command, plan::EvictionSettings& settings) {
  const auto add = [&](const char* name, auto& value, const char* help) {
    return AddFlag(command, name, value, help)->group("Eviction");
  };
  add("--eviction-sinks", settings.sinks,
      "The number of first tokens that always stay (default: 4, "
      "or the plan's exact sinks if these are more)");
  add("--eviction-recent", settings.recent,
      "The number of latest tokens that always stay (default: "
      "64, or a quarter of a budget that is a number; the "
      "plan's exact window if that is more)");
  add("--eviction-every", settings.every_tokens,
      "Evict whenever a sequence's length is a multiple of "
      "this, and at the prompt's end")
      ->check(Above(0));
  add("--eviction-lambda", settings.lambda,
      "Weight of the received attention in q-hitter's score; the accuracy of "
      "the codes has the rest (1: none, as h2o)")
      ->check(Between(0.0, 1.0));
  add("--eviction-decay", settings.decay,
      "The factor by which each eviction multiplies the "
      "attention received so far")
      ->check(Above(0))
      ->check(Between(0.0, 1.0));
  add("--eviction-observation-window", settings.observation_window,
      "An eviction inside a prompt counts the attention of only this "
      "many latest queries (0: of all)");
  AddSwitch(command, "--eviction-half-friendliness", settings.half_friendliness,
            "Give the codes' accuracy half weight, as the code of "
            "Q-Hitter's authors does")
      ->group("Eviction");
  AddSwitch(command, "--eviction-rolling", settings.rolling,
            "Use slot indices instead of token positions for RoPE, "
            "for texts longer than the model's own limit. Keys are "
            "rotated when they are read")
      ->group("Eviction");
}

absl::Status CheckEvictionIsUsed(const EvictionFlags& flags) {
  if (!flags.method.empty() || flags == EvictionFlags()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "--eviction-budget and the other --eviction-* flags have no effect "
      "without --eviction: give --eviction, too");
}

absl::Status PutEviction(const EvictionFlags& flags,
                         const plan::AttentionShape& shape,
                         kvasir::v1::KvPlan* plan,
                         const std::vector<int>& others) {
  if (flags.method.empty()) return absl::OkStatus();
  plan::EvictionSettings settings = flags.settings;
  KVASIR_ASSIGN_OR_RETURN(settings.method,
                          plan::ParseEvictionMethod(flags.method));
  KVASIR_ASSIGN_OR_RETURN(settings.budget,
                          plan::ParseEvictionBudget(flags.budget));
  const auto evicts = [](const kvasir::v1::KvPlan& of) {
    return std::any_of(of.layers().begin(), of.layers().end(),
                       [](const auto& layer) { return layer.has_eviction(); });
  };
  const kvasir::v1::KvPlan before = *plan;
  KVASIR_RETURN_IF_ERROR(plan::ApplyEviction(settings, shape, plan));
  for (const int l : others) *plan->mutable_layers(l) = before.layers(l);
  if (!evicts(*plan)) {
    return absl::InvalidArgumentError(
        "no layer can evict tokens: each of the chosen layers has a "
        "sliding window, which already drops the tokens outside it");
  }
  KVASIR_RETURN_IF_ERROR(plan::ValidatePlan(*plan, shape));
  // If the plan already had an eviction, replaces the part of the method name
  // that describes this eviction.
  const std::string of_tokens = plan->method().substr(
      0, evicts(before) ? plan->method().rfind('+') : std::string::npos);
  const bool only_eviction = of_tokens.empty() || of_tokens == "full" ||
                             plan::ParseEvictionMethod(of_tokens).ok();
  plan->set_method(only_eviction ? flags.method
                                 : absl::StrCat(of_tokens, "+", flags.method));
  auto* options = plan->mutable_provenance()->mutable_options();
  absl::StrAppend(options, options->empty() ? "" : " ",
                  OptionsOf(flags, settings));
  return absl::OkStatus();
}

}  // namespace kvasir::cli
