#include "model/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "model/tokenizer/unicode.h"
#include "model/tokenizer/utf8.h"
#include "model/tokenizer/word_scanner.h"

namespace kvasir::model {
namespace {

constexpr std::string_view kPreTokenizers =
    "Sequence, ByteLevel, Split, Metaspace, Digits, Punctuation, Whitespace, "
    "WhitespaceSplit";

// Replaces the text of `piece`. The list owns the new text.
absl::Status Replace(std::string text, TextBudget* budget, PieceList* list,
                     TextPiece* piece) {
  KVASIR_RETURN_IF_ERROR(budget->Spend(sizeof(text) + text.size()));
  list->owned.push_back(std::move(text));
  piece->text = list->owned.back();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PreTokenizer::Behavior> PreTokenizer::ReadBehavior(
    const JsonRef& ref) {
  KVASIR_ASSIGN_OR_RETURN(const auto found, ref.Find("behavior"));
  if (!found) return Behavior::kIsolated;
  KVASIR_ASSIGN_OR_RETURN(const std::string name, found->String());
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  return found->Unsupported(
      "Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous");
}

absl::StatusOr<PreTokenizer::Step> PreTokenizer::ReadByteLevel(
    const JsonRef& ref) {
  Step step;
  step.map_bytes = true;
  KVASIR_ASSIGN_OR_RETURN(const bool prefix,
                          ref.GetBool("add_prefix_space", true));
  if (prefix) step.prefix = " ";
  KVASIR_ASSIGN_OR_RETURN(step.splits, ref.GetBool("use_regex", true));
  if (step.splits) {
    KVASIR_ASSIGN_OR_RETURN(step.pattern, TextPattern::OfRegex(kGpt2Pattern));
  }
  return step;
}

absl::StatusOr<PreTokenizer::Step> PreTokenizer::ReadMetaspace(
    const JsonRef& ref) {
  Step step;
  KVASIR_ASSIGN_OR_RETURN(const char32_t replacement,
                          ref.GetChar("replacement"));
  AppendUtf8(replacement, &step.replacement);
  step.chars = CharClass::kLiteral;
  step.literal = replacement;
  step.behavior = Behavior::kMergedWithNext;
  KVASIR_ASSIGN_OR_RETURN(step.splits, ref.GetBool("split", true));
  KVASIR_ASSIGN_OR_RETURN(const auto scheme, ref.Find("prepend_scheme"));
  std::string name;
  if (scheme) {
    KVASIR_ASSIGN_OR_RETURN(name, scheme->String());
  } else {
    // Older files have add_prefix_space (true or false) instead
    // of prepend_scheme.
    KVASIR_ASSIGN_OR_RETURN(const bool prefix,
                            ref.GetBool("add_prefix_space", true));
    name = prefix ? "always" : "never";
  }
  if (name == "always" || name == "first") {
    step.prefix = step.replacement;
    step.prefix_only_at_start = name == "first";
  } else if (name != "never") {
    return scheme->Unsupported("always, first, never");
  }
  return step;
}

absl::StatusOr<PreTokenizer::Step> PreTokenizer::ReadStep(
    const std::string& type, const JsonRef& ref) {
  if (type == "ByteLevel") return ReadByteLevel(ref);
  if (type == "Metaspace") return ReadMetaspace(ref);
  Step step;
  step.splits = true;
  if (type == "Split") {
    KVASIR_ASSIGN_OR_RETURN(const JsonRef pattern, ref.Get("pattern"));
    KVASIR_ASSIGN_OR_RETURN(step.pattern, TextPattern::FromJson(pattern));
    KVASIR_ASSIGN_OR_RETURN(step.behavior, ReadBehavior(ref));
    KVASIR_ASSIGN_OR_RETURN(step.invert, ref.GetBool("invert", false));
  } else if (type == "Punctuation") {
    step.chars = CharClass::kPunctuation;
    KVASIR_ASSIGN_OR_RETURN(step.behavior, ReadBehavior(ref));
  } else if (type == "Digits") {
    step.chars = CharClass::kNumeric;
    KVASIR_ASSIGN_OR_RETURN(const bool individual,
                            ref.GetBool("individual_digits", false));
    step.behavior = individual ? Behavior::kIsolated : Behavior::kContiguous;
  } else if (type == "Whitespace") {
    step.words = true;
    step.behavior = Behavior::kRemoved;
    step.invert = true;
  } else if (type == "WhitespaceSplit") {
    step.chars = CharClass::kWhiteSpace;
    step.behavior = Behavior::kRemoved;
  } else {
    KVASIR_ASSIGN_OR_RETURN(const JsonRef name, ref.Get("type"));
    return name.Unsupported(kPreTokenizers);
  }
  return step;
}

absl::StatusOr<PreTokenizer> PreTokenizer::FromJson(const JsonRef& ref) {
  PreTokenizer result;
  KVASIR_RETURN_IF_ERROR(VisitComponents(
      ref, "pretokenizers",
      [&](const std::string& type, const JsonRef& item) -> absl::Status {
        KVASIR_ASSIGN_OR_RETURN(Step step, ReadStep(type, item));
        result.steps_.push_back(std::move(step));
        return absl::OkStatus();
      }));
  // If the last step maps bytes to the byte-level alphabet, the BPE model does
  // this instead, because it first looks up whole words as raw bytes.
  if (!result.steps_.empty() && result.steps_.back().map_bytes) {
    result.steps_.back().map_bytes = false;
    result.byte_level_ = true;
  }
  return result;
}

absl::Status PreTokenizer::Rewrite(const Step& step, TextBudget* budget,
                                   PieceList* list) {
  for (TextPiece& piece : list->pieces) {
    if (piece.text.empty()) continue;
    const bool prefixed =
        !step.prefix.empty() && (piece.front > 0 || !step.prefix_only_at_start);
    const bool has_space = !step.replacement.empty() &&
                           piece.text.find(' ') != std::string_view::npos;
    if (!prefixed && !has_space) continue;
    std::string text;
    text.reserve(piece.text.size() + step.prefix.size() + 16);
    size_t front = 0;
    for (size_t i = 0; i < piece.text.size(); ++i) {
      if (piece.text[i] == ' ' && has_space) {
        text.append(step.replacement);
      } else {
        text.push_back(piece.text[i]);
      }
      if (i < piece.front) front = text.size();
    }
    if (prefixed && text.compare(0, step.prefix.size(), step.prefix) != 0) {
      text.insert(0, step.prefix);
      if (front > 0) front += step.prefix.size();
    }
    piece.front = front;
    KVASIR_RETURN_IF_ERROR(Replace(std::move(text), budget, list, &piece));
  }
  return absl::OkStatus();
}

absl::Status PreTokenizer::MapBytes(TextBudget* budget, PieceList* list) {
  for (TextPiece& piece : list->pieces) {
    std::string mapped;
    mapped.reserve(piece.text.size() + 16);
    AppendByteLevel(piece.text.substr(0, piece.front), &mapped);
    const size_t front = std::exchange(piece.front, mapped.size());
    AppendByteLevel(piece.text.substr(front), &mapped);
    KVASIR_RETURN_IF_ERROR(Replace(std::move(mapped), budget, list, &piece));
  }
  return absl::OkStatus();
}

void PreTokenizer::FindChars(const Step& step, std::string_view text,
                             std::vector<TextRange>* matches) {
  matches->clear();
  enum { kSpace, kWord, kOther } previous = kSpace;
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = FirstChar(text.substr(at));
    const TextRange range{at, at + c.size};
    at += c.size;
    if (step.words) {
      const auto kind = IsWordChar(c.value)     ? kWord
                        : IsWhiteSpace(c.value) ? kSpace
                                                : kOther;
      if (kind != kSpace) {
        if (kind == previous && !matches->empty()) {
          matches->back().end = range.end;
        } else {
          matches->push_back(range);
        }
      }
      previous = kind;
      continue;
    }
    bool hit = false;
    switch (step.chars) {
      case CharClass::kWhiteSpace:
        hit = IsWhiteSpace(c.value);
        break;
      case CharClass::kPunctuation:
        hit = IsPunctuation(c.value);
        break;
      case CharClass::kNumeric:
        hit = IsNumeric(c.value);
        break;
      case CharClass::kLiteral:
        hit = c.value == step.literal;
        break;
      case CharClass::kNone:
        break;
    }
    if (hit) matches->push_back(range);
  }
}

void PreTokenizer::Join(const Step& step, std::string_view text,
                        const std::vector<TextRange>& found,
                        std::vector<Match>* joined) {
  joined->clear();
  bool previous = false;
  const auto add = [&](size_t begin, size_t end, bool matched) {
    const bool is_match = matched != step.invert;
    const bool was_match = std::exchange(previous, is_match);
    if (!joined->empty()) {
      Match& last = joined->back();
      const bool merge =
          (step.behavior == Behavior::kMergedWithPrevious && is_match &&
           !was_match) ||
          (step.behavior == Behavior::kMergedWithNext && !is_match &&
           was_match) ||
          (step.behavior == Behavior::kContiguous && is_match == was_match);
      if (merge) {
        last.range.end = end;
        return;
      }
    }
    joined->push_back({{begin, end}, is_match});
  };
  size_t done = 0;
  for (const TextRange& match : found) {
    if (done < match.begin) add(done, match.begin, false);
    add(match.begin, match.end, true);
    done = match.end;
  }
  if (done < text.size()) add(done, text.size(), false);
}

absl::Status PreTokenizer::Split(const Step& step, TextBudget* budget,
                                 PieceList* list) {
  std::vector<TextPiece> pieces;
  pieces.reserve(list->pieces.size());
  // the number of pieces whose bytes are returned to the budget: the old pieces
  // and the removed matches
  size_t given_up = list->pieces.size();
  std::optional<PatternFinder> finder;
  if (step.pattern) finder.emplace(*step.pattern);
  std::vector<TextRange> found;
  std::vector<Match> joined;
  for (const TextPiece& piece : list->pieces) {
    if (finder) {
      KVASIR_RETURN_IF_ERROR(finder->FindAll(piece.text, &found));
    } else {
      FindChars(step, piece.text, &found);
    }
    Join(step, piece.text, found, &joined);
    KVASIR_RETURN_IF_ERROR(budget->Spend(joined.size() * sizeof(TextPiece)));
    given_up += joined.size();
    for (const Match& match : joined) {
      const TextRange range = match.range;
      if (range.begin == range.end) continue;
      if (step.behavior == Behavior::kRemoved && match.is_match) continue;
      pieces.push_back({piece.text.substr(range.begin, range.end - range.begin),
                        std::min(piece.front, range.end) -
                            std::min(piece.front, range.begin)});
    }
  }
  given_up -= pieces.size();
  list->pieces = std::move(pieces);
  budget->Return(given_up * sizeof(TextPiece));
  return absl::OkStatus();
}

absl::Status PreTokenizer::ApplyStep(const Step& step, TextBudget* budget,
                                     PieceList* list) {
  if (!step.prefix.empty() || !step.replacement.empty()) {
    KVASIR_RETURN_IF_ERROR(Rewrite(step, budget, list));
  }
  if (step.splits) KVASIR_RETURN_IF_ERROR(Split(step, budget, list));
  return step.map_bytes ? MapBytes(budget, list) : absl::OkStatus();
}

absl::Status PreTokenizer::Apply(std::string_view text, size_t front,
                                 TextBudget* budget, PieceList* list) const {
  list->pieces.clear();
  list->owned.clear();
  if (text.empty()) return absl::OkStatus();
  list->pieces.push_back({text, front});
  KVASIR_RETURN_IF_ERROR(budget->Spend(sizeof(TextPiece)));
  for (const Step& step : steps_) {
    KVASIR_RETURN_IF_ERROR(ApplyStep(step, budget, list));
  }
  // The list reuses the memory of its pieces for the next text, so their bytes
  // are returned to the budget. The bytes of rewritten texts are not.
  budget->Return(list->pieces.size() * sizeof(TextPiece));
  return absl::OkStatus();
}

bool PreTokenizer::removes_text() const {
  return std::any_of(steps_.begin(), steps_.end(), [](const Step& step) {
    return step.splits && step.behavior == Behavior::kRemoved;
  });
}

}  // namespace kvasir::model
