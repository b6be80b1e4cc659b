#include "compress/tool/method.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/cli/flags.h"
#include "base/status_macros.h"
#include "compress/methods/commuting.h"
#include "compress/methods/keep_search.h"
#include "compress/methods/lorc.h"
#include "compress/methods/low_rank_plan.h"
#include "compress/methods/palu.h"
#include "compress/methods/rap.h"
#include "compress/methods/svdq.h"
#include "compress/tensors/attention_loader.h"
#include "model/checkpoint/cache_type.h"
#include "model/files/file.h"
#include "model/shapes/attention_shape.h"

namespace kvasir::cli {
namespace {

using compress::PlanRequest;
using kvasir::v1::Codec;
using kvasir::v1::KvPlan;

constexpr char kMethodGroup[] = "Method";
constexpr std::array kScheduleEntries = {0U, 1U, 2U, 3U, 4U, 8U};

// The value of --key-bits or --value-bits: "auto", "32", "16", or widths of
// codes such as "3" or "8,4,4,4,2,2,0,0".
struct Bits {
  enum class Kind { kAuto, kFloat32, kHalf, kCodes } kind = Kind::kAuto;
  std::vector<uint32_t> schedule;
};

absl::StatusOr<Bits> ParseBits(const std::string& text) {
  if (text == "auto") return Bits{};
  if (text == "32") return Bits{Bits::Kind::kFloat32, {}};
  if (text == "16") return Bits{Bits::Kind::kHalf, {}};
  Bits bits{Bits::Kind::kCodes, {}};
  for (const std::string& field :
       std::vector<std::string>(absl::StrSplit(text, ','))) {
    uint32_t entry = 0;
    if (!absl::SimpleAtoi(field, &entry) ||
        std::find(kScheduleEntries.begin(), kScheduleEntries.end(), entry) ==
            kScheduleEntries.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", field,
                       "' is not a bit width: give 8, 4, 3, 2 or 1 for codes "
                       "(in a schedule also 0), or 16, 32 or auto for numbers "
                       "without codes"));
    }
    bits.schedule.push_back(entry);
  }
  if (bits.schedule.size() != 1 && bits.schedule.size() != 8) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a schedule must have 8 bit widths, or one for all channels, but has ",
        bits.schedule.size()));
  }
  if (bits.schedule.size() == 1 && bits.schedule[0] == 0) {
    return absl::InvalidArgumentError(
        "the bit width must not be 0, because nothing would be stored");
  }
  return bits;
}

absl::StatusOr<Codec> CodecOf(const std::string& text,
                              kvasir::v1::DataType weights) {
  KVASIR_ASSIGN_OR_RETURN(const Bits bits, ParseBits(text));
  Codec codec;
  switch (bits.kind) {
    case Bits::Kind::kAuto:
      codec.set_dtype(weights);
      return codec;
    case Bits::Kind::kFloat32:
      codec.set_dtype(kvasir::v1::F32);
      return codec;
    case Bits::Kind::kHalf:
      codec.set_dtype(weights == kvasir::v1::F16 ? kvasir::v1::F16
                                                 : kvasir::v1::BF16);
      return codec;
    case Bits::Kind::kCodes:
      break;
  }
  for (const uint32_t entry : bits.schedule) {
    codec.mutable_bits()->add_schedule(entry);
  }
  codec.mutable_per_token();
  codec.set_param_dtype(kvasir::v1::F16);
  return codec;
}

// Parses --group-heads. Returns 0 for "all".
absl::StatusOr<int64_t> GroupHeads(const std::string& text, int64_t automatic) {
  if (text == "auto") return automatic;
  if (text == "all") return 0;
  int64_t heads = 0;
  if (absl::SimpleAtoi(text, &heads) && heads >= 1) return heads;
  return absl::InvalidArgumentError(absl::StrCat(
      "'", text,
      "' is not valid: give a number of heads of at least 1, all or auto"));
}

bool UsesHadamard(const MethodFlags& flags) {
  if (flags.hadamard != "auto") return flags.hadamard == "on";
  // A Hadamard transform is used only with a single bit width, because it would
  // mix channels to which a schedule gives different bits.
  auto few = [](const std::string& text) {
    const absl::StatusOr<Bits> bits = ParseBits(text);
    return bits.ok() && bits->schedule.size() == 1;
  };
  auto mixes = [](const std::string& text) {
    const absl::StatusOr<Bits> bits = ParseBits(text);
    return !bits.ok() || bits->schedule.size() != 8;
  };
  return (few(flags.key_bits) || few(flags.value_bits)) &&
         mixes(flags.key_bits) && mixes(flags.value_bits);
}

absl::StatusOr<KvPlan> Palu(const MethodFlags& flags,
                            const PlanRequest& request) {
  compress::PaluOptions options;
  KVASIR_ASSIGN_OR_RETURN(
      options.group_heads,
      GroupHeads(flags.group_heads,
                 request.spec.num_kv_heads % (4 * request.tp) == 0 ? 4 : 0));
  const std::string search = !flags.search.empty()       ? flags.search
                             : flags.method == "uniform" ? "uniform"
                                                         : "fisher";
  KVASIR_ASSIGN_OR_RETURN(options.search, compress::ParseRankSearch(search));
  KVASIR_ASSIGN_OR_RETURN(options.score,
                          compress::ParseFisherScore(flags.fisher_score));
  KVASIR_ASSIGN_OR_RETURN(options.decomposition,
                          compress::ParseDecomposition(flags.decomposition));
  options.hadamard = UsesHadamard(flags);
  return compress::PlanPalu(request, options);
}

absl::StatusOr<KvPlan> Lorc(const MethodFlags& flags,
                            const PlanRequest& request) {
  compress::LorcOptions options;
  options.progressive = flags.ranks == "progressive";
  options.log_base = flags.log_base;
  options.threshold = flags.threshold;
  options.skip_layers = flags.skip_layers;
  options.only_layers = flags.only_layers;
  return compress::PlanLorc(request, options);
}

// Fills in the budget options, which RAP and commuting share.
absl::Status FillBudget(const MethodFlags& flags,
                        compress::BudgetOptions& budget) {
  if (!flags.search.empty()) {
    KVASIR_ASSIGN_OR_RETURN(budget.score,
                            compress::ParseBudgetScore(flags.search));
  }
  budget.key_keep = flags.key_keep;
  budget.keep_values = flags.keep_values;
  return absl::OkStatus();
}

absl::StatusOr<KvPlan> Rap(const MethodFlags& flags,
                           const PlanRequest& request) {
  compress::RapOptions options;
  KVASIR_ASSIGN_OR_RETURN(options.pair_score,
                          compress::ParsePairScore(flags.pair_score));
  KVASIR_ASSIGN_OR_RETURN(options.decomposition,
                          compress::ParseDecomposition(flags.decomposition));
  KVASIR_RETURN_IF_ERROR(FillBudget(flags, options.budget));
  return compress::PlanRap(request, options);
}

absl::StatusOr<KvPlan> Commuting(const MethodFlags& flags,
                                 const PlanRequest& request) {
  compress::CommutingOptions options;
  KVASIR_ASSIGN_OR_RETURN(options.group_heads,
                          GroupHeads(flags.group_heads, 0));
  options.weights = {.query_weights = flags.query_weights == "on",
                     .query_floor = flags.query_floor};
  KVASIR_ASSIGN_OR_RETURN(options.decomposition,
                          compress::ParseDecomposition(flags.decomposition));
  KVASIR_RETURN_IF_ERROR(FillBudget(flags, options.budget));
  return compress::PlanCommuting(request, options);
}

absl::StatusOr<KvPlan> Svdq(const MethodFlags& flags,
                            const PlanRequest& request) {
  compress::SvdqOptions options;
  KVASIR_ASSIGN_OR_RETURN(const Bits bits, ParseBits(flags.key_bits));
  if (bits.kind == Bits::Kind::kCodes) {
    options.schedule = bits.schedule;
  } else if (bits.kind != Bits::Kind::kAuto) {
    return absl::InvalidArgumentError(
        "--key-bits: SVDq needs a schedule of 8 bit widths for keys");
  }
  options.post_rope = flags.post_rope;
  return compress::PlanSvdq(request, options);
}

absl::StatusOr<KvPlan> Channel(const MethodFlags& flags,
                               const PlanRequest& request) {
  compress::ChannelCodesOptions options;
  KVASIR_ASSIGN_OR_RETURN(const Bits bits, ParseBits(flags.key_bits));
  if (bits.kind != Bits::Kind::kAuto) {
    return absl::InvalidArgumentError(
        "--key-bits cannot be used with channel codes: give --average-bits");
  }
  options.average_bits = flags.average_bits;
  options.post_rope = flags.post_rope;
  return compress::PlanChannelCodes(request, options);
}

// Makes a layer's plan that stores whole keys and values in these codecs.
kvasir::v1::LayerPlan WholeLayer(const PlanRequest& request, int64_t layer,
                                 const Codec& key, const Codec& value) {
  kvasir::v1::LayerPlan whole;
  *whole.mutable_key()->add_parts() =
      compress::FullPart(request.spec, layer, plan::Side::kKey, key);
  *whole.mutable_value()->add_parts() =
      compress::FullPart(request.spec, layer, plan::Side::kValue, value);
  return whole;
}

// Records the number of tensor-parallel ranks in a plan that was not made by a
// planner.
KvPlan PlannedFor(int64_t tp, KvPlan plan) {
  if (tp > 1) plan.mutable_target()->set_tp(static_cast<uint32_t>(tp));
  return plan;
}

// Makes the plan to which method q-hitter adds eviction: whole keys and values,
// or the plan in --evict-from.
absl::StatusOr<KvPlan> QHitter(const MethodFlags& flags,
                               const PlanRequest& request) {
  KVASIR_RETURN_IF_ERROR(compress::CheckPlanRequest(request));
  if (flags.evict_from.empty()) {
    KvPlan plan = plan::FullRankPlan(model::AttentionShapeOf(request.spec),
                                     kvasir::v1::BF16);
    for (int l = 0; l < plan.layers_size(); ++l) {
      *plan.mutable_layers(l) =
          WholeLayer(request, l, request.key_codec, request.value_codec);
    }
    std::vector<std::string> given;
    for (const auto& [flag, bits] :
         {std::pair("--key-bits", flags.key_bits),
          std::pair("--value-bits", flags.value_bits)}) {
      if (bits != "auto") given.push_back(absl::StrCat(flag, " ", bits));
    }
    plan.mutable_provenance()->set_options(absl::StrJoin(given, " "));
    return PlannedFor(request.tp, std::move(plan));
  }
  KVASIR_ASSIGN_OR_RETURN(
      const std::string text,
      model::ReadSmallFile(flags.evict_from, plan::kMaxPlanJsonBytes));
  KVASIR_ASSIGN_OR_RETURN(KvPlan plan,
                          plan::ParsePlanJson(text, flags.evict_from));
  return PlannedFor(request.tp, std::move(plan));
}

// Returns the layers that --only-layers does not list.
absl::StatusOr<std::vector<int>> OtherLayers(const MethodFlags& flags,
                                             const KvPlan& plan) {
  std::vector<int> others;
  if (flags.only_layers.empty()) return others;
  const std::set<int64_t> only(flags.only_layers.begin(),
                               flags.only_layers.end());
  if (*only.rbegin() >= plan.layers_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--only-layers: layers must be 0..", plan.layers_size() - 1,
        ", but layer ", *only.rbegin(), " is listed"));
  }
  for (int l = 0; l < plan.layers_size(); ++l) {
    if (!only.contains(l)) others.push_back(l);
  }
  return others;
}

// Gives whole keys and values to the layers that --only-layers does not list.
// LoRC's planner does this itself, because its --keep counts only the listed
// layers. A plan from a file keeps all its layers unchanged.
absl::Status KeepOtherLayers(const MethodFlags& flags,
                             const PlanRequest& request, KvPlan& plan) {
  if (flags.method == "lorc" || !flags.evict_from.empty()) {
    return absl::OkStatus();
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int> others,
                          OtherLayers(flags, plan));
  for (const int l : others) {
    *plan.mutable_layers(l) =
        WholeLayer(request, l, request.value_codec, request.value_codec);
  }
  return absl::OkStatus();
}

absl::Status AddExactTokens(const MethodFlags& flags, KvPlan& plan) {
  plan::ExactTokens exact;
  std::vector<std::string> given;
  for (const auto& [flag, tokens, setting] :
       {std::tuple("--exact-window", flags.exact_window, &exact.window),
        std::tuple("--exact-sinks", flags.exact_sinks.value_or(0),
                   &exact.sinks)}) {
    if (tokens == 0) continue;
    *setting = tokens;
    given.push_back(absl::StrCat(flag, " ", tokens));
  }
  if (given.empty()) return absl::OkStatus();
  if (!plan::SetExactTokens(exact, &plan)) {
    return absl::InvalidArgumentError(absl::StrCat(
        exact.window.has_value() ? "--exact-window" : "--exact-sinks",
        " keeps some tokens exact, but the plan has no codes: give --key-bits "
        "or --value-bits"));
  }
  auto* options = plan.mutable_provenance()->mutable_options();
  absl::StrAppend(options, options->empty() ? "" : " ",
                  absl::StrJoin(given, " "));
  return absl::OkStatus();
}

struct Method {
  const char* name;
  absl::StatusOr<KvPlan> (*plan)(const MethodFlags&, const PlanRequest&);
  // The default of --rank-multiple, as in docs/quality.md. Steps of 8 dims are
  // too coarse for RAP and commuting, which keep only a few RoPE pairs of each
  // head.
  int64_t rank_multiple;
  // The flags that set the size of the plan; empty if --keep sets it.
  const char* size_flags;
  // True if the method makes the codec of keys itself.
  bool codes_keys = false;

  bool has_keep() const { return size_flags[0] == '\0'; }
};
constexpr Method kMethods[] = {
    {"palu", Palu, 8, ""},
    {"uniform", Palu, 8, ""},
    {"lorc", Lorc, 8, ""},
    {"rap", Rap, 2, ""},
    {"commuting", Commuting, 2, ""},
    {"svdq", Svdq, 8,
     "--key-bits with eight widths (8,4,4,4,2,2,0,0) and --value-bits", true},
    {"channel", Channel, 8, "--average-bits and --value-bits", true},
    {kEvictionMethod, QHitter, 8, "--eviction-budget"},
};

const Method* FindMethod(const std::string& name) {
  for (const Method& method : kMethods) {
    if (name == method.name) return &method;
  }
  return nullptr;
}

// Help text, based on the measurements in docs/quality.md.
constexpr char kWhichMethod[] =
    "Which method when (bytes of a token, of 6144 in bf16, and nats added per\n"
    "token on the built-in model; docs/quality.md has all of them):\n"
    "  best loss at half of the numbers        palu --keep 0.5 --group-heads "
    "all\n"
    "                                          3072 bytes, 0.0009 nats\n"
    "  fewest bytes                            palu --keep 0.5 --key-bits 4\n"
    "                                            --value-bits 4\n"
    "                                          864 bytes, 0.0062 nats\n"
    "  a quarter of the bytes, next to no loss svdq --value-bits 4\n"
    "                                          1536 bytes, 0.0020 nats\n"
    "  no key is rebuilt while it is read      rap --keep 0.9\n"
    "                                          5504 bytes, 0.0033 nats\n"
    "  the same, keys to half or less          commuting --keep 0.75\n"
    "                                            --keep-values\n"
    "                                          4608 bytes, 0.0263 nats\n"
    "  no text to calibrate on                 lorc --keep 0.6 --ranks "
    "uniform\n"
    "                                            --skip-layers 2\n"
    "                                          3680 bytes, 0.0078 nats\n"
    "  controls                                uniform, channel";

CLI::Validator OneOf(std::vector<std::string> names) {
  return CLI::IsMember(std::move(names));
}

}  // namespace

void AddMethodFlags(CLI::App* command, MethodFlags& flags, bool required) {
  auto add = [&](const char* name, auto& value, const char* help) {
    return AddFlag(command, name, value, help)->group(kMethodGroup);
  };
  command->footer(kWhichMethod);
  std::vector<std::string> names;
  for (const Method& method : kMethods) names.push_back(method.name);
  names.push_back(kAutoMethod);
  add("--method", flags.method,
      "auto, which plans bits by predicted loss; palu, lorc, rap, "
      "commuting, svdq; q-hitter, which only evicts tokens; or the "
      "baselines uniform (Palu without a search) and channel (keys coded "
      "without a basis)")
      ->check(OneOf(names))
      ->required(required);
  add("--keep", flags.keep, "Kept share of the cached numbers")
      ->check(Between(0.0, 1.0));
  add("--kv-bytes-per-token", flags.kv_bytes_per_token,
      "Instead of --keep: the most bytes that a token may take, "
      "including scales and padding")
      ->check(Above(0));
  add("--key-keep", flags.key_keep,
      "Kept share of the keys (rap, commuting); values get the rest")
      ->check(Between(0.0, 1.0));
  const CLI::Validator bits =
      Checked([](const std::string& text) { return ParseBits(text).status(); });
  add("--key-bits", flags.key_bits,
      "Bits of the codes of keys: 8, 4, 3, 2 or 1, or eight widths by "
      "falling singular value (8,4,4,4,2,2,0,0); 16 or 32: numbers "
      "without codes; auto: numbers of the weights' type, or the "
      "method's schedule")
      ->check(bits);
  add("--value-bits", flags.value_bits, "Like --key-bits, for values")
      ->check(bits);
  add("--exact-window", flags.exact_window,
      "Number of latest tokens that are also stored in bf16, besides "
      "their codes, for keys and values that have codes; costs bytes per "
      "sequence, not per token");
  add("--exact-sinks", flags.exact_sinks,
      "Like --exact-window, for the first tokens of a sequence (default: "
      "0; method auto: 4)");
  add("--group-heads", flags.group_heads,
      "KV heads that share a latent (palu, uniform, commuting): a number, all, "
      "or auto")
      ->check(Checked([](const std::string& text) {
        return GroupHeads(text, 0).status();
      }));
  add("--hadamard", flags.hadamard,
      "Rotates latents by a Hadamard matrix before they are coded (palu, "
      "uniform): on, off, or auto, which means on if there are codes")
      ->check(OneOf({"on", "off", "auto"}));
  add("--decomposition", flags.decomposition,
      "How low-rank factors are found: svd, whitened or espace")
      ->check(OneOf({"svd", "whitened", "espace"}));
  add("--search", flags.search,
      "How ranks are distributed: fisher, module or uniform (palu); "
      "uniform, fisher, fisher-root (square roots of the Fisher scores; "
      "rap's default) or energy (rap, commuting)");
  add("--fisher-score", flags.fisher_score,
      "Score of a group of weights (palu): mean-root or sum")
      ->check(OneOf({"mean-root", "sum"}));
  add("--rank-multiple", flags.rank_multiple,
      "Ranks are multiples of this number (default: 2 for rap and "
      "commuting, otherwise 8)")
      ->check(Above(0));
  add("--tp", flags.tp,
      "Number of tensor-parallel ranks, each of which gets whole groups "
      "and an equal share; the plan can also be served on one rank")
      ->check(Above(0));
  add("--ranks", flags.ranks, "LoRC: progressive, or uniform for comparison")
      ->check(OneOf({"progressive", "uniform"}));
  add("--log-base", flags.log_base,
      "LoRC: base of the logarithm to which --threshold is compared")
      ->check(Above(1));
  add("--threshold", flags.threshold,
      "LoRC: layers whose cumulative condition number has a larger "
      "logarithm are not compressed");
  add("--skip-layers", flags.skip_layers,
      "LoRC, instead of --threshold: this number of the most sensitive "
      "layers is not compressed")
      ->check(AtLeast(0));
  add("--only-layers", flags.only_layers,
      "Compresses only these layers (lorc: all to one rank, and --keep "
      "counts only these layers)")
      ->delimiter(',')
      ->check(AtLeast(0));
  add("--pair-score", flags.pair_score, "RAP: fisher or magnitude")
      ->check(OneOf({"fisher", "magnitude"}));
  add("--query-weights", flags.query_weights,
      "Commuting: heads are weighted by the energy of their queries: on "
      "or off")
      ->check(OneOf({"on", "off"}));
  add("--query-floor", flags.query_floor,
      "Commuting: least energy of a head's queries, as a share of the "
      "layer's mean")
      ->check(Above(0));
  AddSwitch(command, "--keep-values", flags.keep_values,
            "Do not compress values (rap, commuting)")
      ->group(kMethodGroup);
  AddSwitch(command, "--post-rope", flags.post_rope,
            "Code keys after their rotation (svdq, channel)")
      ->group(kMethodGroup);
  AddAutoFlags(command, flags.automatic);
  AddEvictionFlags(command, flags.eviction, /*of_plan=*/false);
  AddFlag(command, "--evict-from", flags.evict_from,
          "File of the plan to which --method q-hitter adds eviction "
          "(default: a plan of whole keys and values)")
      ->group("Eviction");
  add("--average-bits", flags.average_bits,
      "Channel: bits of the codes of keys, on average over layers")
      ->check(Between(1.0, 8.0));
}

void CheckMethodFlags(const MethodFlags& flags) {
  const absl::Status used = CheckEvictionIsUsed(flags.eviction);
  if (!used.ok() && flags.method != kEvictionMethod) {
    throw CLI::ValidationError(std::string(used.message()));
  }
  if (!flags.evict_from.empty()) {
    if (flags.method != kEvictionMethod) {
      throw CLI::ValidationError(absl::StrCat(
          "--evict-from can only be used with --method ", kEvictionMethod));
    }
    if (flags.key_bits != "auto" || flags.value_bits != "auto") {
      throw CLI::ValidationError(
          "--key-bits and --value-bits cannot be used with --evict-from, whose "
          "plan has its own codes");
    }
  }
  if (flags.method == kAutoMethod) {
    if (!flags.only_layers.empty()) {
      throw CLI::ValidationError(
          "--only-layers cannot be used with --method auto, which plans all "
          "layers");
    }
    if (!flags.eviction.method.empty() && flags.kv_bytes_per_token) {
      throw CLI::ValidationError(absl::StrCat(
          "--method auto: --kv-bytes-per-token does not count what --eviction "
          "stores in a slot: plan without --eviction, and add it with "
          "--method ",
          kEvictionMethod, " --evict-from"));
    }
    if (flags.keep || (!flags.kv_bytes_per_token && !flags.automatic.max_kl)) {
      throw CLI::ValidationError(
          "--method auto: give --kv-bytes-per-token, --max-kl or both, but not "
          "--keep");
    }
    CheckAutoFlags(flags.automatic);
    return;
  }
  const Method* method = FindMethod(flags.method);
  if (method == nullptr) return;
  const int targets = (flags.keep ? 1 : 0) + (flags.kv_bytes_per_token ? 1 : 0);
  if (method->has_keep() && targets != 1) {
    throw CLI::ValidationError("give either --keep or --kv-bytes-per-token");
  }
  if (!method->has_keep() && targets > 0) {
    throw CLI::ValidationError(absl::StrCat(
        "--method ", flags.method,
        " is not controlled by a share of kept numbers: instead of ",
        flags.keep ? "--keep" : "--kv-bytes-per-token", " give ",
        method->size_flags));
  }
  const bool budget = flags.method == "rap" || flags.method == "commuting";
  if (!budget && (flags.key_keep || flags.keep_values)) {
    throw CLI::ValidationError(
        absl::StrCat("--key-keep and --keep-values belong to the methods rap "
                     "and commuting, not to ",
                     flags.method));
  }
}

absl::Status AddEviction(const MethodFlags& flags,
                         const model::Checkpoint& checkpoint, KvPlan& plan) {
  EvictionFlags eviction = flags.eviction;
  if (flags.method == kEvictionMethod && eviction.method.empty()) {
    eviction.method = kEvictionMethod;
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int> others,
                          OtherLayers(flags, plan));
  return PutEviction(eviction, model::AttentionShapeOf(checkpoint.spec()),
                     &plan, others);
}

CalibrationNeeds NeedsOfPlanner(const MethodFlags& flags) {
  CalibrationNeeds needs;
  const std::string& search = flags.search;
  if (flags.method == "palu") {
    needs.parts.fisher = search.empty() || search != "uniform";
    needs.statistics = needs.parts.fisher;
  } else if (flags.method == "rap") {
    needs.statistics = true;
    needs.parts.fisher = flags.pair_score == "fisher" || search.empty() ||
                         search == "fisher" || search == "fisher-root";
  } else if (flags.method == kAutoMethod) {
    needs.statistics = true;
    needs.parts.information = true;
  } else if (flags.method == "commuting") {
    needs.statistics = true;
    needs.parts.fisher = search == "fisher" || search == "fisher-root";
  }
  return needs;
}

absl::StatusOr<KvPlan> MakePlan(
    const MethodFlags& flags, const model::Checkpoint& checkpoint,
    const compress::Calibration* calibration,
    const std::function<absl::StatusOr<double>(const KvPlan&)>& bytes_of) {
  const Method* method = FindMethod(flags.method);
  PlanRequest request;
  request.spec = checkpoint.spec();
  request.calibration = calibration;
  request.weights = [&checkpoint](int64_t layer) {
    return compress::LoadAttention(checkpoint, layer);
  };
  request.tp = flags.tp;
  request.rank_multiple = flags.rank_multiple.value_or(method->rank_multiple);
  const kvasir::v1::DataType weights = OwnCacheType(checkpoint);
  KVASIR_ASSIGN_OR_RETURN(
      request.key_codec,
      CodecOf(method->codes_keys ? "auto" : flags.key_bits, weights));
  KVASIR_ASSIGN_OR_RETURN(request.value_codec,
                          CodecOf(flags.value_bits, weights));
  auto plan_for = [&](double keep) -> absl::StatusOr<KvPlan> {
    request.keep = keep;
    KVASIR_ASSIGN_OR_RETURN(KvPlan made, method->plan(flags, request));
    KVASIR_RETURN_IF_ERROR(KeepOtherLayers(flags, request, made));
    return made;
  };
  KvPlan plan;
  if (flags.kv_bytes_per_token) {
    KVASIR_ASSIGN_OR_RETURN(
        compress::FoundPlan found,
        compress::PlanForBytes({.want_bytes = *flags.kv_bytes_per_token,
                                .plan = plan_for,
                                .bytes = bytes_of}));
    plan = std::move(found.plan);
  } else {
    KVASIR_ASSIGN_OR_RETURN(plan, plan_for(flags.keep.value_or(1.0)));
  }
  if (!flags.only_layers.empty()) {
    KVASIR_ASSIGN_OR_RETURN(const double bytes, bytes_of(plan));
    plan.mutable_target()->set_kv_bytes_per_token(bytes);
  }
  KVASIR_RETURN_IF_ERROR(AddExactTokens(flags, plan));
  plan.set_base_model(checkpoint.name());
  return plan;
}

}  // namespace kvasir::cli
