// The "normalizer" of a tokenizer file: changes the text before it is split.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/tokenizer/precompiled_rules.h"
#include "model/tokenizer/text_budget.h"
#include "model/tokenizer/text_pattern.h"
#include "model/tokenizer/tokenizer_json.h"
#include "model/tokenizer/unicode.h"

namespace kvasir::model {

struct NormalizedText {
  std::string text;
  // How many bytes at the start of `text` come from the first character of the
  // original text. 0 if the normalizer removed this character.
  size_t front = 0;
};

// Threads: immutable, so any thread may use it.
class TextNormalizer {
 public:
  // Leaves every text as it is, for a file without a normalizer.
  TextNormalizer() = default;
  // UNIMPLEMENTED if a component is not supported; the error names it.
  static absl::StatusOr<TextNormalizer> FromJson(const JsonRef& ref);

  bool empty() const { return steps_.empty(); }

  // Returns the normalized text and spends its bytes from the budget.
  // INVALID_ARGUMENT if the budget is too small for the result of a component,
  // or if the search for a pattern takes too many steps.
  absl::StatusOr<NormalizedText> Apply(std::string_view text,
                                       TextBudget* budget) const;

 private:
  enum class Kind {
    kPrepend,
    kReplace,
    kForm,
    kLowercase,
    kStrip,
    kPrecompiled
  };
  struct Step {
    Kind kind = Kind::kPrepend;
    std::string content;                    // only for kPrepend and kReplace
    std::optional<TextPattern> pattern;     // only for kReplace
    NormalForm form = NormalForm::kNfc;     // only for kForm
    std::optional<PrecompiledRules> rules;  // only for kPrecompiled
    bool strip_left = false;                // only for kStrip
    bool strip_right = false;
  };

  static absl::StatusOr<Step> ReadStep(const std::string& type,
                                       const JsonRef& ref);
  static absl::Status ApplyStep(const Step& step, size_t max_bytes,
                                NormalizedText* text);

  std::vector<Step> steps_;
};

}  // namespace kvasir::model
