// The "pre_tokenizer" of a tokenizer file: cuts a text into pieces that are
// tokenized independently.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/tokenizer/text_budget.h"
#include "model/tokenizer/text_pattern.h"
#include "model/tokenizer/tokenizer_json.h"

namespace kvasir::model {

struct TextPiece {
  std::string_view text;
  // How many bytes at the start of the piece come from the first character of
  // the whole encoded text. 0 if the piece begins after this character.
  size_t front = 0;
};

// The pieces of a text. Pieces are views into the input or, if they were
// rewritten, into the strings of `owned`.
struct PieceList {
  std::vector<TextPiece> pieces;
  std::deque<std::string> owned;
};

// Threads: immutable, so any thread may use it.
class PreTokenizer {
 public:
  // Leaves the text as one piece, for a file without a pre-tokenizer.
  PreTokenizer() = default;
  // UNIMPLEMENTED if a component is not supported; the error names it.
  static absl::StatusOr<PreTokenizer> FromJson(const JsonRef& ref);

  // True if pieces are raw bytes, which the model looks up in the
  // byte-level alphabet.
  bool byte_level() const { return byte_level_; }
  // Returns true if Apply may leave out parts of the text, such as spaces.
  bool removes_text() const;

  // Replaces `list` by the pieces of `text`, which must be valid UTF-8 and
  // outlive the list. Spends the bytes of the rewritten texts from `budget`.
  // INVALID_ARGUMENT if the budget is too small for these texts and the pieces,
  // or if the search for a pattern takes too many steps. The first `front`
  // bytes of `text` come from the first character of the whole encoded text.
  absl::Status Apply(std::string_view text, size_t front, TextBudget* budget,
                     PieceList* list) const;

 private:
  enum class Behavior {
    kIsolated,
    kRemoved,
    kMergedWithPrevious,
    kMergedWithNext,
    kContiguous,
  };
  // The characters at which a step without a pattern splits. Each of them is a
  // match of its own.
  enum class CharClass { kNone, kWhiteSpace, kPunctuation, kNumeric, kLiteral };

  struct Step {
    // If true, the text is split at the matches of `pattern`, or of the
    // characters in `chars`, or into words.
    bool splits = false;
    std::optional<TextPattern> pattern;
    CharClass chars = CharClass::kNone;
    char32_t literal = 0;  // only for kLiteral
    // The pieces are runs of \w, and runs of characters that are neither \w
    // nor spaces.
    bool words = false;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    // If not empty, each space is replaced by this before the text is split.
    std::string replacement;
    // Before a piece of the previous step is split, this prefix is added to it
    // if it does not start with the prefix yet.
    std::string prefix;
    bool prefix_only_at_start = false;
    // True: after the split, the bytes of each piece are written in the
    // byte-level alphabet.
    bool map_bytes = false;
  };
  struct Match {
    TextRange range;
    bool is_match = false;
  };

  static absl::StatusOr<Step> ReadStep(const std::string& type,
                                       const JsonRef& ref);
  static absl::StatusOr<Step> ReadByteLevel(const JsonRef& ref);
  static absl::StatusOr<Step> ReadMetaspace(const JsonRef& ref);
  static absl::StatusOr<Behavior> ReadBehavior(const JsonRef& ref);
  static absl::Status ApplyStep(const Step& step, TextBudget* budget,
                                PieceList* list);
  static absl::Status Rewrite(const Step& step, TextBudget* budget,
                              PieceList* list);
  static absl::Status MapBytes(TextBudget* budget, PieceList* list);
  static absl::Status Split(const Step& step, TextBudget* budget,
                            PieceList* list);
  static void FindChars(const Step& step, std::string_view text,
                        std::vector<TextRange>* matches);
  static void Join(const Step& step, std::string_view text,
                   const std::vector<TextRange>& found,
                   std::vector<Match>* joined);

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace kvasir::model
