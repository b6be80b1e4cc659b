#include "model/tokenizer/text_normalizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {
namespace {

constexpr std::string_view kNormalizers =
    "Sequence, Prepend, Replace, NFC, NFD, NFKC, NFKD, Lowercase, Strip, "
    "Precompiled";

std::string Lower(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Char c = FirstChar(text);
    AppendLower(c.value, &out);
    text.remove_prefix(c.size);
  }
  return out;
}

// Returns the number of bytes of the first `count` characters of `text`.
size_t BytesOfChars(std::string_view text, size_t count) {
  size_t at = 0;
  for (; count > 0 && at < text.size(); --count) {
    at += FirstChar(text.substr(at)).size;
  }
  return at;
}

std::optional<NormalForm> FormOf(const std::string& type) {
  if (type == "NFC") return NormalForm::kNfc;
  if (type == "NFD") return NormalForm::kNfd;
  if (type == "NFKC") return NormalForm::kNfkc;
  if (type == "NFKD") return NormalForm::kNfkd;
  return std::nullopt;
}

}  // namespace

absl::StatusOr<TextNormalizer::Step> TextNormalizer::ReadStep(
    const std::string& type, const JsonRef& ref) {
  Step step;
  if (type == "Prepend") {
    step.kind = Kind::kPrepend;
    KVASIR_ASSIGN_OR_RETURN(step.content, ref.GetString("prepend"));
  } else if (type == "Replace") {
    step.kind = Kind::kReplace;
    KVASIR_ASSIGN_OR_RETURN(step.content, ref.GetString("content"));
    KVASIR_ASSIGN_OR_RETURN(const JsonRef pattern, ref.Get("pattern"));
    KVASIR_ASSIGN_OR_RETURN(step.pattern, TextPattern::FromJson(pattern));
  } else if (const auto form = FormOf(type)) {
    step.kind = Kind::kForm;
    step.form = *form;
  } else if (type == "Lowercase") {
    step.kind = Kind::kLowercase;
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    KVASIR_ASSIGN_OR_RETURN(step.strip_left, ref.GetBool("strip_left", true));
    KVASIR_ASSIGN_OR_RETURN(step.strip_right, ref.GetBool("strip_right", true));
  } else if (type == "Precompiled") {
    step.kind = Kind::kPrecompiled;
    KVASIR_ASSIGN_OR_RETURN(const JsonRef map, ref.Get("precompiled_charsmap"));
    KVASIR_ASSIGN_OR_RETURN(const std::string text, map.String());
    std::string bytes;
    if (!absl::Base64Unescape(text, &bytes)) return map.Invalid("base64");
    auto rules = PrecompiledRules::FromBytes(bytes);
    if (!rules.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(map.path(), ": ", rules.status().message()));
    }
    step.rules = *std::move(rules);
  } else {
    KVASIR_ASSIGN_OR_RETURN(const JsonRef name, ref.Get("type"));
    return name.Unsupported(kNormalizers);
  }
  return step;
}

absl::StatusOr<TextNormalizer> TextNormalizer::FromJson(const JsonRef& ref) {
  TextNormalizer normalizer;
  KVASIR_RETURN_IF_ERROR(VisitComponents(
      ref, "normalizers",
      [&](const std::string& type, const JsonRef& item) -> absl::Status {
        KVASIR_ASSIGN_OR_RETURN(Step step, ReadStep(type, item));
        normalizer.steps_.push_back(std::move(step));
        return absl::OkStatus();
      }));
  return normalizer;
}

absl::Status TextNormalizer::ApplyStep(const Step& step, size_t max_bytes,
                                       NormalizedText* text) {
  const size_t front = text->front;
  switch (step.kind) {
    case Kind::kPrepend:
      if (text->text.empty()) return absl::OkStatus();
      text->text.insert(0, step.content);
      if (front > 0) text->front = front + step.content.size();
      return absl::OkStatus();
    case Kind::kReplace: {
      KVASIR_ASSIGN_OR_RETURN(
          text->text, ReplaceAll(*step.pattern, step.content, text->text,
                                 max_bytes, &text->front));
      return absl::OkStatus();
    }
    case Kind::kForm: {
      KVASIR_ASSIGN_OR_RETURN(
          const std::string first,
          Normalize(step.form, text->text.substr(0, front)));
      KVASIR_ASSIGN_OR_RETURN(text->text, Normalize(step.form, text->text));
      text->front = BytesOfChars(text->text, NumChars(first));
      return absl::OkStatus();
    }
    case Kind::kLowercase:
      text->front = Lower(text->text.substr(0, front)).size();
      text->text = Lower(text->text);
      return absl::OkStatus();
    case Kind::kStrip: {
      std::string_view rest = text->text;
      if (step.strip_right)
        rest = rest.substr(0, SpaceBegin(rest, rest.size(), 0));
      const size_t left = step.strip_left ? SpaceEnd(rest, 0) : 0;
      text->front = std::min(rest.size(), std::max(front, left)) - left;
      text->text = std::string(rest.substr(left));
      return absl::OkStatus();
    }
    case Kind::kPrecompiled: {
      KVASIR_ASSIGN_OR_RETURN(
          const std::string first,
          step.rules->Apply(text->text.substr(0, front), max_bytes));
      KVASIR_ASSIGN_OR_RETURN(text->text,
                              step.rules->Apply(text->text, max_bytes));
      // If the rules remove the first character, the next one counts as the
      // first, as in Hugging Face tokenizers.
      if (front > 0) {
        text->front =
            BytesOfChars(text->text, std::max<size_t>(NumChars(first), 1));
      }
      return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<NormalizedText> TextNormalizer::Apply(std::string_view text,
                                                     TextBudget* budget) const {
  NormalizedText result{.text = std::string(text),
                        .front = BytesOfChars(text, 1)};
  KVASIR_RETURN_IF_ERROR(budget->Spend(text.size()));
  for (const Step& step : steps_) {
    const size_t before = result.text.size();
    KVASIR_RETURN_IF_ERROR(ApplyStep(step, budget->left(), &result));
    KVASIR_RETURN_IF_ERROR(budget->Spend(result.text.size()));
    budget->Return(before);
  }
  return result;
}

}  // namespace kvasir::model
