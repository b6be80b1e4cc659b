// The "decoder" of a tokenizer file: turns tokens into text, as a stream.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/tokenizer/text_pattern.h"
#include "model/tokenizer/tokenizer_json.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {

// The state of one text that is being decoded.
struct DetokenizerState {
  struct Stage {
    int64_t num_tokens = 0;    // tokens that this stage has seen
    int64_t num_stripped = 0;  // characters removed at the front
    bool front_done = false;   // a character that is not stripped was seen
    // true if a character of the current run of byte tokens was passed on
    bool in_run = false;
    std::string pending;  // bytes or characters that are held back
  };
  std::vector<Stage> stages;
};

// A chain of decoding stages. Stages up to the first one that joins tokens
// (ByteLevel, Fuse) receive whole tokens; later stages receive fragments of
// one text. In a run of byte tokens such as <0x0A>, each byte that belongs
// to no complete character becomes U+FFFD. A character is returned as soon
// as it is complete.
// Threads: immutable; a DetokenizerState belongs to one thread.
class DetokenizerStages {
 public:
  // Joins tokens by spaces, for a file without a decoder.
  DetokenizerStages() = default;
  // UNIMPLEMENTED if a component, or the order of the components, is not
  // supported; the error names it.
  static absl::StatusOr<DetokenizerStages> FromJson(const JsonRef& ref);

  DetokenizerState NewState() const;
  // Adds `token`, and appends to `out` the text that can no longer change.
  void Push(std::string_view token, DetokenizerState* state,
            std::string* out) const;
  // Appends to `out` the text that was held back. The state must not be
  // used again.
  void Finish(DetokenizerState* state, std::string* out) const;

  // Returns the bytes that a token adds if it is in the middle of a text, so
  // that nothing is stripped.
  std::string BytesOf(std::string_view token) const;

 private:
  enum class Kind {
    kByteLevel,
    kMetaspace,
    kReplace,
    kByteFallback,
    kFuse,
    kStrip,       // strips each token
    kStripFused,  // strips the whole text
  };
  struct Step {
    Kind kind = Kind::kFuse;
    std::vector<TextPattern> pattern;  // only for kReplace; one element
    std::string content;               // one character, except for kReplace
    bool drop_first = false;           // only for kMetaspace
    // Only for kStrip and kStripFused: the largest numbers of characters that
    // are stripped at the start and at the end.
    int64_t start = 0;
    int64_t stop = 0;
  };

  static absl::StatusOr<Step> ReadStep(const std::string& type,
                                       const JsonRef& ref);
  absl::Status CheckOrder(const Step& step, const JsonRef& ref) const;

  // Passes `text` through stage `index` and all later ones. `continues` is true
  // if the text belongs to the same token as the previous one.
  void Feed(size_t index, std::string_view text, DetokenizerState* state,
            std::string* out, bool continues = false) const;
  // Passes characters of a run of byte tokens to the next stage when they can
  // no longer change. For later stages, the whole run is one token.
  void FeedRun(size_t index, std::string_view certain, DetokenizerState* state,
               std::string* out) const;
  void FeedStripFused(size_t index, std::string_view text,
                      DetokenizerState* state, std::string* out) const;
  static std::string StripToken(const Step& step, std::string_view token);
  static std::string ReplaceIn(const Step& step, std::string_view token);

  std::vector<Step> steps_;
  bool joined_by_spaces_ = true;
};

}  // namespace kvasir::model
